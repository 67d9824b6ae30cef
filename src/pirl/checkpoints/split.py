"""Splits a TrainState into `params`, for OpenPI, and `train_state`, for resuming."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl.agents.agent import TrainState
from pirl.checkpoints.ocdbt import read_json
from pirl.names import TRAIN_STATE_ITEM


def keeps_policy(folder: Path) -> bool:
    """Whether the step stores the trained policy besides the acting weights, because they differ."""
    keys = read_json(folder / TRAIN_STATE_ITEM / "_METADATA").get("tree_metadata", {})
    return any(str(key).startswith("('groups', 'policy'") for key in keys)


def split_state(state: TrainState, *, keep_policy: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """(acting weights, everything else), disjoint unless `keep_policy`.

    As in OpenPI, the rest's `params` holds the raw weights if the acting weights are an average, else nothing.
    """
    averaged = "policy" in state.ema
    groups, ema, raw = dict(state.params), dict(state.ema), {}
    if not keep_policy:
        raw = groups.pop("policy")
        ema.pop("policy", None)
    rest = {
        "step": state.step,
        "params": raw if averaged else {},
        "groups": groups,
        "target": state.target,
        "ema": ema,
        "opt": state.opt,
        "scalars": state.scalars,
    }
    return state.policy, rest


def join_state(reference: TrainState, weights: dict[str, Any], rest: Mapping[str, Any]) -> TrainState:
    """Inverse of `split_state`; the reference defines which weights have an EMA and which are frozen."""
    params, ema = dict(rest["groups"]), dict(rest["ema"])
    averaged = "policy" in reference.ema
    if "policy" not in params:
        params = {"policy": rest["params"] if averaged else weights, **params}
        ema = {"policy": weights, **ema} if averaged else ema
    parts = {name: rest[name] for name in ("step", "target", "opt", "scalars")}
    return replace(reference, params=params, ema=ema, **parts)
