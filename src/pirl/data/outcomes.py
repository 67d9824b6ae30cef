"""Rewards and ends of recorded episodes: from the dataset, or as configured.

LeRobot's `next.done` means "the recording stopped here", for successes and time-outs alike. Treated as terminal it
would teach the critic that time-outs are worth nothing, so this module distinguishes the end of a task from the end of
its recording. Pure functions over one episode's columns.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Shaped

from pirl.data.config import Failure, Rule
from pirl.data.schema import parse_json
from pirl.errors import ConfigError, DataError
from pirl.names import NEXT_DONE, NEXT_REWARD, NEXT_SUCCESS, NEXT_TRUNCATED

_FORM = 'expected {"0": true, "1": false} or lines of {"episode_index": 0, "success": true}'
COLUMNS = (NEXT_REWARD, NEXT_SUCCESS, NEXT_DONE, NEXT_TRUNCATED)


@dataclass(frozen=True, kw_only=True)
class OutcomeRule:
    """How rewards and ends are derived."""

    rule: Rule = "auto"
    """auto, columns, sparse_success, or step_penalty."""
    success_file: str | None = None
    """JSON or JSON lines with each episode's success: {"0": true, ...} or {"episode_index": 0, "success": true}. For
    sparse_success (which `auto` then selects) and step_penalty. Without it, these use the labels of `pirl label`, then
    the column next.success; without either every episode counts as a success."""
    failure: Failure = "auto"
    """Meaning of a labelled failure without next.truncated."""
    failure_reward: float = 0.0
    """Added to the last reward of a terminal failure."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """Rewards and end of one episode."""

    rewards: Float32[np.ndarray, "T"]
    """Reward of action t."""
    terminated: Bool[np.ndarray, "T"]
    """The task ended with action t."""
    truncated: Bool[np.ndarray, "T"]
    """The recording ended with action t, but not the task."""
    success: bool | None
    """Whether the episode succeeded; None if unlabelled."""


def settle(rule: OutcomeRule, available: Collection[str], *, where: str) -> OutcomeRule:
    """Replace `auto` by the rule for a dataset with these columns; raises if the rule cannot apply."""
    found = [name for name in COLUMNS if name in available]
    usable = NEXT_REWARD in found or NEXT_SUCCESS in found
    if rule.success_file and rule.rule == "columns":
        raise ConfigError(
            "the outcome rule 'columns' uses recorded outcomes, which conflicts with a success file",
            hint="declare rule sparse_success (1 at success) or step_penalty (-1 per step, 0 at success)",
        )
    if rule.success_file and rule.rule == "auto":
        return replace(rule, rule="sparse_success")
    if rule.rule in ("auto", "columns") and not usable:
        raise DataError(
            f"{where}: no column {NEXT_REWARD} or {NEXT_SUCCESS}, so what its episodes achieved is unknown"
            + (f" ({', '.join(found)} alone does not tell success from time-out)" if found else ""),
            hint="declare an outcome rule: sparse_success if every episode is a successful demonstration, step_penalty "
            "for -1 per step; if some episodes failed, label them with `pirl label DATASET` or give a success_file",
        )
    return replace(rule, rule="columns") if rule.rule == "auto" else rule


def derive(
    columns: Mapping[str, Shaped[np.ndarray, "T ..."]],
    rule: OutcomeRule,
    *,
    length: int,
    label: bool | None = None,
    moment: int | None = None,
) -> EpisodeOutcome:
    """Rewards and end of one episode from its rows.

    `label` is its entry in the success file or its human label (None: no entry); `moment` the first frame of success
    (None: the last frame).
    """
    rule = settle(rule, columns, where="the episode")
    if rule.rule == "columns":
        return _from_columns(columns, rule, length)
    return _declared(columns, rule, length, label, moment)


def _from_columns(columns: Mapping[str, np.ndarray], rule: OutcomeRule, length: int) -> EpisodeOutcome:
    """The recorded outcome.

    A next.success that is never set labels a failure. Without that column, an end without reward counts as a time-out,
    because next.done is set there too.
    """
    reached, done, cut = (_flags(columns, name) for name in (NEXT_SUCCESS, NEXT_DONE, NEXT_TRUNCATED))
    if NEXT_REWARD in columns:
        rewards = columns[NEXT_REWARD].astype(np.float32)
    else:
        rewards = np.zeros(length, np.float32) if reached is None else reached.astype(np.float32)
    paid = rewards > 0
    if done is not None and cut is not None:
        terminated = (done & ~cut) | (False if reached is None else reached)
    elif reached is not None:
        terminated = reached
    else:
        terminated = (_last(length) if done is None else done) & paid
    if reached is not None:
        success: bool | None = bool(reached.any())
    elif (terminated & paid).any():
        success = True
    else:
        ended = any(flags is not None and flags[-1] for flags in (done, cut))
        success = False if ended else None
    # Done and truncated together already say how the episode ended.
    labelled = reached is not None and (done is None or cut is None or rule.failure == "always")
    return _outcome(rule, rewards, terminated, cut, success, labelled=labelled)


def _declared(
    columns: Mapping[str, np.ndarray], rule: OutcomeRule, length: int, label: bool | None, moment: int | None
) -> EpisodeOutcome:
    """The declared rewards, with success from the label, else from next.success, else assumed."""
    if rule.success_file is not None:
        success, reached = label, _from(length - 1 if moment is None else moment, length) & bool(label)
    elif (recorded := _flags(columns, NEXT_SUCCESS)) is not None:
        success, reached = bool(recorded.any()), recorded
    else:
        success, reached = True, _last(length)
    rewards = reached.astype(np.float32) - np.float32(rule.rule == "step_penalty")
    return _outcome(rule, rewards, reached, _flags(columns, NEXT_TRUNCATED), success, labelled=success is not None)


def _outcome(
    rule: OutcomeRule,
    rewards: Float32[np.ndarray, "T"],
    terminated: Bool[np.ndarray, "T"],
    cut: Bool[np.ndarray, "T"] | None,
    success: bool | None,
    *,
    labelled: bool,
) -> EpisodeOutcome:
    """Apply the failure rule and mark the last row terminated or truncated: every episode ends in exactly one way."""
    if labelled and success is False and _loses(rule, rewards, cut):
        terminated = terminated | _last(len(rewards))
    if success is False and terminated[-1]:
        rewards = rewards + np.float32(rule.failure_reward) * _last(len(rewards))
    truncated = _last(len(rewards)) if cut is None else cut | _last(len(rewards))
    return EpisodeOutcome(rewards=rewards, terminated=terminated, truncated=truncated & ~terminated, success=success)


def _loses(rule: OutcomeRule, rewards: Float32[np.ndarray, "T"], cut: Bool[np.ndarray, "T"] | None) -> bool:
    """Whether a labelled failure is terminal. A recorded truncation is not, unless the rule is `always`.

    If every step costs, failing at no cost would be the best a policy can do, so `auto` makes failures time-outs there.
    """
    if rule.failure == "always":
        return True
    if cut is not None and cut[-1]:
        return False
    if rule.failure == "auto":
        return rule.failure_reward < 0 or not (rewards < 0).any()
    return rule.failure == "terminal"


def _from(first: int, length: int) -> Bool[np.ndarray, "T"]:
    return np.arange(length) >= first


def _last(length: int) -> Bool[np.ndarray, "T"]:
    return np.arange(length) == length - 1


def _flags(columns: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    return columns[name].astype(bool) if name in columns else None


def read_success_file(path: Path, episodes: Collection[int]) -> dict[int, bool]:
    """Success by episode_index. Episodes missing from the file are unlabelled; unknown episodes are an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the success file cannot be read ({error})", hint="check success_file") from error
    labels: dict[int, bool] = {}
    for index, success in _entries(path, text):
        if index not in episodes:
            raise DataError(
                f"{path}: episode {index} is not in the dataset, which has {len(episodes)} episodes",
                hint="episodes are named by their episode_index; is this the file of another dataset?",
            )
        if labels.setdefault(index, success) != success:
            raise DataError(f"{path}: episode {index} is both a success and a failure", hint="remove one of the two")
    return labels


def _entries(path: Path, text: str) -> list[tuple[int, bool]]:
    """(episode_index, success) pairs of a JSON object, a JSON list of objects, or JSON lines."""
    try:
        try:
            parsed: Any = parse_json(text, where=str(path))
        except DataError:
            lines = [line for line in text.split("\n") if line.strip()]
            if len(lines) < 2:
                raise
            parsed = [parse_json(line, where=str(path)) for line in lines]
        pairs: list[tuple[Any, Any]] = []
        for entry in parsed if isinstance(parsed, list) else [parsed]:
            named = "success" in entry and "episode_index" in entry
            pairs += [(entry["episode_index"], entry["success"])] if named else list(entry.items())
        pairs = [(int(k) if isinstance(k, str) and k.isascii() and k.isdecimal() else k, v) for k, v in pairs]
        for index, success in pairs:
            if type(index) is not int or type(success) is not bool:
                raise ValueError(f"episode_index {index!r}, success {success!r}"[:200])
        if not pairs:
            raise ValueError("it names no episode")
    except DataError as error:
        raise DataError(f"not a success file: {error.message}", hint=_FORM) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a success file ({error})",
            hint=_FORM,
        ) from error
    return pairs


def describe(rule: OutcomeRule, outcomes: Sequence[EpisodeOutcome], available: Collection[str]) -> str:
    """The rule in effect and the outcomes it found, in one sentence."""
    if rule.rule == "columns":
        source = "the columns " + ", ".join(name for name in COLUMNS if name in available)
        if NEXT_REWARD not in available:
            source += " (reward 1 at success)"
    else:
        shape = "reward 1 at success, else 0" if rule.rule == "sparse_success" else "reward -1 per step, 0 at success"
        if rule.success_file:
            decided = f"success from {rule.success_file}"
        else:
            decided = (
                f"success from {NEXT_SUCCESS}" if NEXT_SUCCESS in available else "every episode taken for a success"
            )
        source = f"the rule {rule.rule} ({shape}; {decided})"
    counts = [sum(outcome.success is kind for outcome in outcomes) for kind in (True, False, None)]
    ends = sum(bool(outcome.terminated[-1]) for outcome in outcomes)
    lost = sum(bool(outcome.terminated[-1]) for outcome in outcomes if outcome.success is False)
    meaning = f"; {lost} of the failures are terminal, the others time-outs" if counts[1] else ""
    return (
        f"outcomes from {source}: {counts[0]} episodes succeed, {counts[1]} fail, {counts[2]} unlabelled; "
        f"{ends} end terminated, {len(outcomes) - ends} truncated{meaning}"
    )
