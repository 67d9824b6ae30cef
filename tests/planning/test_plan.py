"""The memory plan: measured peaks, real bytes, what each algorithm keeps, and advice that holds.

Tracing is all of the time, and configurations that are traced alike are traced once: tests share theirs.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pirl.agents.config import ACRLPDConfig, RIPTConfig
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict
from pirl.errors import ConfigError
from pirl.kernels import attention, gated
from pirl.models.config import PRESETS, Pi0Config
from pirl.planning.choices import with_choices
from pirl.planning.memory import GIB, gib
from pirl.planning.plan import BY_SPEED, batch_shapes, decide, plan
from pirl.recipes import aloha, droid, get_config, libero

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "measured_memory.json").read_text())
MEASURED = GOLDEN["rows"] + GOLDEN["compiled"]


def changed(recipe: str, **change: Any) -> RLTrainConfig:
    """A recipe with changes, as a YAML file makes them."""
    return from_dict(RLTrainConfig, change, base=get_config(recipe))


def small(recipe: str, **change: Any) -> RLTrainConfig:
    """Its algorithm, data and robot with a model for a CPU."""
    config = get_config(recipe)
    sizes = {"horizon": config.horizon, "cameras": PRESETS["pi0"].cameras, "action_dim": 32}
    model = replace(PRESETS["pi0_tiny"], **sizes, attention="plain", remat="full")
    base = replace(config, model=model, data=replace(config.data, tokenizer="byte"))
    return from_dict(RLTrainConfig, {"batch_size": 4, **change}, base=base)


BC: dict[str, Any] = {"model": {"horizon": 50, "remat": "full", "attention": "plain"}}
"""What was measured."""


@pytest.mark.parametrize("row", MEASURED, ids=[row["name"] for row in MEASURED])
def test_the_plan_agrees_with_peaks_measured_on_a_gpu(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cuda_capability", lambda: attention.HOPPER)
    monkeypatch.setattr(gated, "compiles", lambda: True)
    found = plan(changed(row["recipe"], **row["change"]), device_gb=139)
    assert found.peak / GIB == pytest.approx(row["gib"], rel=0.1)


SAID = [
    found for module in (aloha, droid, libero) for found in re.findall(r"(\w+_\w+) (\d+) GiB", module.__doc__ or "")
]


@pytest.mark.parametrize(("recipe", "said"), SAID, ids=[recipe for recipe, _ in SAID])
def test_recipes_say_what_is_planned(recipe: str, said: str) -> None:
    """With everything rematerialised; without adapters shared by 8 devices, but for one that is said to take one."""
    alone = recipe.endswith("_lora") or recipe == "bc_aloha_fold"
    config = changed(recipe, model={"remat": "full"}, mesh={"fsdp": 1 if alone else 8})
    assert round(plan(config, device_gb=139).peak / GIB) == int(said)


def test_there_are_recipes_that_say_so() -> None:
    assert len(SAID) == 7
    assert len(TABLE) == 11


TABLE = re.findall(
    r"^\| (`\w+`(?:, `\w+`)*) \| [^|]* \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$",
    (Path(__file__).parents[2] / "docs" / "which-algorithm.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
TRACED = {*(recipe for recipe, _ in SAID), "filtered_aloha_fold_lora", "qc_fql_aloha_fold", "dsrl_aloha_fold"}
"""One for each kind of what trains; others would cost minutes."""


@pytest.mark.parametrize("row", TABLE, ids=[row[0].split("`")[1] for row in TABLE])
def test_the_table_of_what_fits_is_planned(row: tuple[str, ...]) -> None:
    names, cells = re.findall(r"\w+", row[0]), row[1:]
    assert all(get_config(name).name == name for name in names)
    if names[0] not in TRACED:
        return
    for cell, devices, room in zip(cells, (1, 1, 8), (24, 80, 24), strict=True):
        found = plan(changed(names[0], model={"remat": "full"}, mesh={"fsdp": devices}), device_gb=room)
        parts = "" if found.accumulate == 1 else f" in {found.accumulate} parts"
        assert cell == ("no" if found.accumulate is None else f"{round(found.peak / GIB)}{parts}")


def test_what_is_largest_fits_and_one_more_does_not() -> None:
    config = small("bc_aloha_fold", agent={"ema_decay": None}, freeze="expert_only")
    room = 0.05
    found = plan(config, device_gb=room)
    assert found.accumulate == 1
    at_most, beyond, split = (
        plan(replace(config, batch_size=size), device_gb=room)
        for size in (found.largest_batch, found.largest_batch + 1, 6 * found.largest_batch)
    )
    assert at_most.accumulate == 1
    assert at_most.peak <= found.usable
    assert beyond.accumulate != 1
    assert split.accumulate is not None
    assert split.accumulate > 6, "the batch itself, and one more set of gradients"
    assert split.peak <= split.usable
    assert f"in {split.accumulate} parts" in str(split)
    whole, parts = found.parts["gradients, weights at work"], split.parts["gradients, weights at work"]
    assert parts >= whole + 4 * found.trainable


@pytest.mark.parametrize(
    "config",
    [
        small("bc_aloha_fold"),
        small("acrlpd_aloha_fold", agent={"actor": "distill"}, freeze="vlm_frozen"),
        small("ript_aloha_transfer", freeze="full"),
    ],
    ids=["bc", "distill", "ript"],
)
def test_the_state_is_that_of_the_algorithm(config: RLTrainConfig) -> None:
    state = jax.eval_shape(build_agent(config).init, jax.random.key(0))
    found = plan(config, device_gb=1)
    for field in ("params", "target", "ema", "opt"):
        for group, tree in getattr(state, field).items():
            own = jax.tree.leaves(tree)
            if field == "ema" or (field, group, config.has_critic) == ("target", "policy", True):
                # The average of what is frozen, or what it was, is what is frozen, and not in memory twice.
                now = jax.tree.leaves(state.params[group])
                own = [x for x, y in zip(own, now, strict=True) if y.dtype == jnp.float32]
            assert found.parts[f"{field}/{group}"] == sum(x.size * x.dtype.itemsize for x in own)
    names = {name for name in found.parts if "policy" in name}
    kept = {"distill": {"target/policy", "ema/policy"}, "ript": {"target/policy"}, "bc": {"ema/policy"}}
    algorithm = config.agent.actor if isinstance(config.agent, ACRLPDConfig) else type(config.agent).__name__
    algorithm = algorithm.removesuffix("Config").lower()
    assert names == {"params/policy", "opt/policy"} | kept[algorithm]
    pictures = len(config.cameras) * 24 * 24 * 3 * (2 if config.has_critic else 1)
    assert found.parts["batch"] > 4 * pictures


def test_what_an_algorithm_adds_is_seen() -> None:
    """Candidates, a second policy and demonstrations take memory of their own."""

    def activations(config: RLTrainConfig) -> int:
        return plan(replace(config, batch_size=64), device_gb=8).parts["activations"]

    few, many = (
        activations(small("acrlpd_aloha_fold", agent={"num_action_samples": n}, freeze="expert_only")) for n in (2, 64)
    )
    assert many > 4 * few
    bc = activations(small("bc_aloha_fold"))
    data = {"robot": "aloha", "cameras": None, "repo_ids": ["a/b"]}
    ript = small("ript_aloha_transfer", freeze="full", data=data)
    ript = replace(ript, agent=RIPTConfig(flow_draws=1))
    assert isinstance(ript.agent, RIPTConfig)
    assert activations(ript) > bc, "v_old has keys and values of its own"
    both = replace(ript, agent=replace(ript.agent, bc_weight=0.1))
    assert "demos" in batch_shapes(build_agent(both), replace(both.batch_sizes, batch=1))
    assert activations(both) > 1.3 * activations(ript)


def test_frozen_parts_keep_nothing() -> None:
    whole = changed("bc_aloha_fold", batch_size=32, **BC)
    assert whole.freeze_rule == "full"
    found = plan(replace(whole, freeze="vlm_frozen"), device_gb=139)
    assert found.peak < plan(whole, device_gb=139).peak / 2
    assert found.trainable < 4e8
    assert found.parts["params/policy"] < 7 * GIB, "frozen weights are bfloat16"


def test_sharding_divides_what_is_large_and_splits_the_batch() -> None:
    config = changed("bc_aloha_fold", batch_size=64, **BC)
    one = plan(config, device_gb=139)
    assert one.parameters == one.trainable == 3_238_048_528
    eight = plan(replace(config, mesh=replace(config.mesh, fsdp=8)), device_gb=24)
    assert eight.devices == 8
    for name in ("params/policy", "opt/policy", "ema/policy"):
        assert eight.parts[name] == pytest.approx(one.parts[name] / 8, rel=0.01)
        assert eight.parts[name] > one.parts[name] / 8, "small leaves are on every device"
    assert eight.accumulate == one.accumulate == 1
    assert eight.peak < one.peak / 4
    copies = plan(config, device_gb=139, devices=8)
    assert copies.parts["params/policy"] == one.parts["params/policy"]
    assert copies.largest_batch % 8 == 0


def test_where_nothing_fits_what_is_suggested_does() -> None:
    config = small("bc_aloha_fold", batch_size=8, agent={"ema_decay": None}, data={"cameras": ["base_0_rgb"]})
    whole, alone = (plan(replace(config, freeze=rule), device_gb=1) for rule in ("full", "vlm_frozen"))
    one_sample = plan(replace(config, batch_size=1), device_gb=1).peak
    assert alone.peak < one_sample < whole.peak
    room = (one_sample - 2**10) / GIB
    found = plan(config, device_gb=room, usable_fraction=1.0)
    assert found.accumulate is None
    assert found.largest_batch == 0
    assert "does not fit" in str(found)
    frozen = plan(replace(config, freeze="vlm_frozen"), device_gb=room, usable_fraction=1.0)
    parts = f" in {frozen.accumulate} parts" if frozen.accumulate != 1 else ""
    assert f"VLM frozen (expert and heads train): {gib(frozen.peak)} per device, fits{parts}" in found.suggestions
    assert all("fits" in line for line in found.suggestions)
    assert "larger or more devices" in plan(config, device_gb=1e-4).suggestions[0]


def test_the_least_rematerialisation_that_fits_is_chosen() -> None:
    config = small("bc_aloha_fold", batch_size=64, agent={"ema_decay": None}, data={"cameras": ["base_0_rgb"]})
    peaks = {
        remat: plan(replace(config, model=replace(config.model, remat=remat)), device_gb=1).peak for remat in BY_SPEED
    }
    assert peaks["none"] > peaks["names"] > peaks["full"]
    for remat in ("none", "names", "full"):
        room = 1.001 * peaks[remat] / GIB
        assert decided(config, room) == (remat, 1, 1, True)
        alike = replace(config, model=replace(config.model, remat=remat))
        assert plan(alike, device_gb=room, usable_fraction=1.0, choose=True).chosen == remat
    assert decided(config, 1e-4) == ("full", 1, 1, False), "where nothing fits, what needs least"
    assert decided(config, None) == ("none", 1, 1, True), "a CPU"


def test_what_does_not_fit_at_once_is_shared_and_then_split() -> None:
    """The state on one device and on two: with less room, more devices share it, and at last the batch is in parts."""
    config = small("bc_aloha_fold", batch_size=64, data={"cameras": ["base_0_rgb"]}, agent={"ema_decay": None})
    wide = replace(config.model.vlm, width=1024, mlp_dim=4096)  # type: ignore[union-attr]
    config = from_dict(RLTrainConfig, {"model": {"remat": "full"}}, base=config)
    config = replace(config, model=replace(config.model, vlm=wide))  # type: ignore[arg-type]
    set_to = {n: replace(config, mesh=replace(config.mesh, fsdp=n)) for n in (1, 2)}
    alone, two = (plan(one, device_gb=8, devices=2).peak for one in set_to.values())
    assert alone > 1.2 * two, "large enough to be shared"
    assert decided(config, 1.001 * alone / GIB, devices=2) == ("full", 1, 1, True)
    assert decided(config, 1.001 * two / GIB, devices=2) == ("full", 2, 1, True)
    assert plan(config, device_gb=1.001 * two / GIB, devices=2, usable_fraction=1.0).fsdp == 2, "`pirl plan` agrees"
    room, split = 0.999 * alone / GIB, replace(set_to[2], batch_size=1024)
    parts = plan(split, device_gb=room, devices=2, usable_fraction=1.0).accumulate
    assert parts is not None
    assert parts > 1
    assert decided(replace(config, batch_size=1024), room, devices=2) == ("full", 2, parts, True)
    kept = replace(split, agent=replace(split.agent, accumulate=2))
    assert decided(kept, room, devices=2)[2:] == (2, False), "what is set stays"


def decided(config: RLTrainConfig, room: float | None, devices: int = 1) -> tuple[str, Any, int, bool]:
    """(remat, fsdp, parts, whether that fits) of `auto`."""
    free = {"model": {"remat": "auto"}} if config.mesh.fsdp == "auto" and devices == 1 else {}
    found, fits = decide(
        from_dict(RLTrainConfig, free, base=config), device_gb=room, devices=devices, usable_fraction=1
    )
    assert isinstance(found.model, Pi0Config)
    return found.model.remat, found.mesh.fsdp, found.agent.parts, fits


class _Device:
    """What jax says of a device."""

    platform, compute_capability = "gpu", "9.0"

    def __init__(self, gib: float | None) -> None:
        self._stats = None if gib is None else {"bytes_limit": int(gib * GIB)}
        if gib is None:
            self.platform = "cpu"

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def remat_on(gib: float | None, remat: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of a setting where training begins, at batch 32."""
    monkeypatch.setattr(jax, "local_devices", lambda: [_Device(gib)])
    monkeypatch.setattr(gated, "compiles", lambda: True)
    attention = {"attention": "auto"} if remat == "auto" else {}
    config = changed("bc_aloha_fold", batch_size=32, model=BC["model"] | {"remat": remat} | attention)
    model = with_choices(config).model
    assert isinstance(model, Pi0Config)
    return model.remat


@pytest.mark.parametrize(("gib", "remat"), [(None, "none"), (132, "names"), (76, "full"), (20, "full")])
def test_auto_is_the_least_recomputation_that_fits(
    gib: float | None, remat: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights: nothing recomputed is far too large, and where nothing fits what needs least is tried."""
    assert Pi0Config().remat == "auto", "it is the default"
    assert remat_on(gib, "auto", monkeypatch) == remat
    shown = capsys.readouterr().out
    assert f"model.remat auto: {remat}" in shown
    assert f"model.attention auto: {'plain' if gib is None else 'cudnn'}" in shown
    assert ("and a kernel for gated products" in shown) == (gib is not None and jax.device_count() == 1)


def test_a_setting_that_was_said_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert remat_on(132, "dots", monkeypatch) == "dots"
    assert not capsys.readouterr().out


def test_where_attention_is_chosen_later_the_larger_is_planned() -> None:
    config = small("bc_aloha_fold")
    plain, fused, either = (
        plan(replace(config, model=replace(config.model, attention=attention)), device_gb=8).peak
        for attention in ("plain", "xla", "auto")
    )
    assert fused != plain
    assert either == max(fused, plain)


def test_a_kernel_that_one_device_has_is_planned_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"attention": "cudnn", "remat": "names"}
    config = changed("acrlpd_aloha_fold", batch_size=256, freeze="vlm_frozen", model=model)
    found = {}
    for possible in (False, True):
        monkeypatch.setattr(gated, "possible", lambda model, possible=possible: possible)
        found[possible] = [plan(config, device_gb=139, devices=devices).parts["activations"] for devices in (1, 8)]
    (without, of_eight), (with_it, the_same) = found[False], found[True]
    assert with_it < 0.8 * without
    assert the_same == of_eight


def test_what_cannot_be_planned_is_refused() -> None:
    config = small("bc_aloha_fold", batch_size=24, mesh={"fsdp": 3})
    with pytest.raises(ConfigError, match="fsdp is 3 and there are 8 devices"):
        plan(config, device_gb=1, devices=8)
    with pytest.raises(ConfigError, match="a batch of 9 over 8 devices"):
        plan(small("bc_aloha_fold", batch_size=9), device_gb=1, devices=8)
