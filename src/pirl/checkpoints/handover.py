"""The handover to OpenPI: the `TrainConfig` for an exported folder, ready to paste, and the command to serve it.

OpenPI's server finds model, transforms and statistics by such a config. If one of them disagrees with the weights, the
server usually still starts and the robot moves wrongly. So the config is generated from the run's own settings.
"""

from dataclasses import replace
from pathlib import Path
from textwrap import indent

from pirl.data.robots import ROBOTS, Robot
from pirl.data.transforms import suffixed
from pirl.models.config import GEMMA_VARIANTS, GemmaConfig, Pi0Config, SigLIPConfig

_IMPORTS = """\
import openpi.models.model as _model
import openpi.models.pi0_config as pi0_config
import openpi.policies.droid_policy as droid_policy
import openpi.transforms as _transforms
from openpi.training.config import (
    AssetsConfig, DataConfig, LeRobotAlohaDataConfig, LeRobotLiberoDataConfig, SimpleDataConfig, TrainConfig,
)
"""

ONE_STEP = (
    "this policy needs one Euler step, but OpenPI's server takes ten, which gives wrong actions: add "
    'sample_kwargs={"num_steps": 1} to create_trained_policy(...) in scripts/serve_policy.py'
)


def openpi_config(name: str, model: Pi0Config, robot: Robot, asset_id: str, prompt: str | None) -> str:
    """OpenPI's `TrainConfig` for a policy, as Python source."""
    return (
        f"TrainConfig(\n    name={name!r},\n    model={_model(model)},\n"
        f"    data={indent(_data(model, robot, asset_id, prompt or robot.prompt), '    ').lstrip()},\n)"
    )


def handover_text(config: str, command: str, problems: tuple[str, ...] = ()) -> str:
    """The file next to the weights: paste the config into OpenPI's `_CONFIGS`, then serve."""
    warnings = "".join(f"# Warning: {problem}\n" for problem in problems)
    return (
        '"""Add this to _CONFIGS in src/openpi/training/config.py of OpenPI, then serve from its folder:\n\n'
        f'    {command}\n"""\n\n# ruff: noqa\n{warnings}\n{_IMPORTS}\nCONFIG = {config}\n'
    )


def serve_command(name: str, folder: str | Path) -> str:
    """The command to run in OpenPI's folder."""
    return f"uv run scripts/serve_policy.py policy:checkpoint --policy.config={name} --policy.dir={folder}"


BESIDE = (
    "this run's improvement is not in the policy's weights, which act as before training: serve the run's own "
    "checkpoint with `pirl serve`"
)
"""The problem of algorithms with `only_beside`."""


def suffix_problem(suffix: str, prompt: str | None) -> str:
    """The problem of policies that need a text after each instruction, which OpenPI does not add."""
    example = suffixed(prompt or "fold the box", suffix)
    return f"end every instruction with {suffix!r}, as in {example!r}: OpenPI does not add it"


def problems(model: Pi0Config, robot: Robot, *, beside: bool = False) -> tuple[str, ...]:
    """Properties of a policy that OpenPI cannot serve or its configs cannot express."""
    found = [BESIDE] if beside else []
    for who, gemma in (("VLM", model.vlm), ("action expert", model.expert)):
        if _variant(gemma) is None:
            adapters = gemma.attn_lora or gemma.ffn_lora
            found.append(
                f"OpenPI has no {who} like this one ({gemma.depth} layers of width {gemma.width}"
                + (f", adapters of rank {adapters.rank}, alpha {adapters.alpha:g}" if adapters else "")
                + "): it cannot serve it"
                + (", unless merged: pirl export pytorch" if adapters else "")
            )
    if model.image_size != 224 or model.vision != SigLIPConfig():
        found.append(
            f"OpenPI's pictures are 224x224 with its own SigLIP, this policy's {model.image_size}x"
            f"{model.image_size}: it cannot serve it"
        )
    if ROBOTS.get(robot.name) != robot or _family(robot) == "own":
        found.append(
            f"OpenPI knows no robot {robot.name!r}: write inputs and outputs for it as its droid_policy.py does"
        )
    return tuple(found)


def _family(robot: Robot) -> str:
    return next((name for name in ("aloha", "libero", "droid") if robot.name.startswith(name)), "own")


def _model(model: Pi0Config) -> str:
    settings: dict[str, object] = {}
    if model.pi05:
        settings["pi05"] = True
    if model.discrete_state_input is not None and model.discrete_state_input != model.pi05:
        settings["discrete_state_input"] = model.discrete_state_input
    settings["action_horizon"] = model.horizon
    if model.action_dim != 32:
        settings["action_dim"] = model.action_dim
    if model.max_token_len is not None:
        settings["max_token_len"] = model.max_token_len
    for field, gemma, usual in (
        ("paligemma_variant", model.vlm, "gemma_2b"),
        ("action_expert_variant", model.expert, "gemma_300m"),
    ):
        if (variant := _variant(gemma) or usual) != usual:
            settings[field] = variant
    return f"pi0_config.Pi0Config({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _variant(gemma: GemmaConfig) -> str | None:
    """OpenPI's name for a Gemma size, if it has one."""
    return next((name for name, known in GEMMA_VARIANTS.items() if known == gemma), None)


def _data(model: Pi0Config, robot: Robot, asset_id: str, prompt: str | None) -> str:
    assets = f"assets=AssetsConfig(asset_id={asset_id!r})"
    kind = _family(robot)
    if kind == "aloha":
        said = [f"repo_id={asset_id!r}", assets]
        said += [] if robot.adapt_to_pi else ["adapt_to_pi=False"]
        said += [] if any(robot.delta_mask) else ["use_delta_joint_actions=False"]
        return _call("LeRobotAlohaDataConfig", [*said, *([f"default_prompt={prompt!r}"] if prompt else [])])
    base = "base_config=DataConfig(prompt_from_task=True)"
    if kind == "libero":
        delta = f"extra_delta_transform={any(robot.delta_mask)}"
        return _call("LeRobotLiberoDataConfig", [f"repo_id={asset_id!r}", assets, base, delta])
    model_type = f"_model.ModelType.{'PI05' if model.pi05 else 'PI0'}"
    inputs, outputs = f"droid_policy.DroidInputs(model_type={model_type})", "droid_policy.DroidOutputs()"
    if any(robot.delta_mask):
        mask = "_transforms.make_bool_mask(7, -1)"
        inputs, outputs = (
            f"{inputs}, _transforms.DeltaActions({mask})",
            f"_transforms.AbsoluteActions({mask}), {outputs}",
        )
    group = f"data_transforms=lambda model: _transforms.Group(\n    inputs=[{inputs}],\n    outputs=[{outputs}],\n)"
    return _call("SimpleDataConfig", [assets, group, base])


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}(\n" + "".join(f"{indent(argument, '    ')},\n" for argument in arguments) + ")"


def without_adapters(model: Pi0Config) -> Pi0Config:
    """The model configuration after merging the adapters."""
    vlm, expert = (replace(gemma, attn_lora=None, ffn_lora=None) for gemma in (model.vlm, model.expert))
    return replace(model, vlm=vlm, expert=expert)
