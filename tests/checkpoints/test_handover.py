"""The TrainConfig that OpenPI is handed is Python that builds what the run was trained with."""

import ast
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pirl.checkpoints.handover import handover_text, openpi_config, problems, serve_command
from pirl.data.robots import get_robot, make_robot
from pirl.models.config import Pi0Config, get_preset


def recorder(name: str) -> Any:
    return lambda *given, **named: SimpleNamespace(of=name, given=given, **named)


@pytest.fixture
def openpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules named as OpenPI's that record what is made."""
    contents: dict[str, dict[str, Any]] = {
        "openpi": {},
        "openpi.models": {},
        "openpi.models.model": {"ModelType": SimpleNamespace(PI0="pi0", PI05="pi05")},
        "openpi.models.pi0_config": {"Pi0Config": recorder("Pi0Config")},
        "openpi.policies": {},
        "openpi.policies.droid_policy": {name: recorder(name) for name in ("DroidInputs", "DroidOutputs")},
        "openpi.transforms": {
            name: recorder(name) for name in ("Group", "DeltaActions", "AbsoluteActions", "make_bool_mask")
        },
        "openpi.training": {},
        "openpi.training.config": {
            f"{name}Config": recorder(f"{name}Config")
            for name in ("Assets", "Data", "LeRobotAlohaData", "LeRobotLiberoData", "SimpleData", "Train")
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def built(model: Pi0Config, robot: str, *, prompt: str | None = None) -> Any:
    source = handover_text(openpi_config("mine", model, get_robot(robot), "me/box", prompt), "serve")
    namespace: dict[str, Any] = {}
    exec(compile(ast.parse(source), "openpi_config.py", "exec"), namespace)
    return namespace["CONFIG"]


@pytest.mark.usefixtures("openpi")
def test_aloha() -> None:
    found = built(replace(get_preset("pi0"), horizon=20), "aloha", prompt="fold the box")
    assert found.name == "mine"
    assert vars(found.model) == {"of": "Pi0Config", "given": (), "action_horizon": 20}
    assert (found.data.of, found.data.assets.asset_id) == ("LeRobotAlohaDataConfig", "me/box")
    assert found.data.default_prompt == "fold the box"
    assert not hasattr(found.data, "use_delta_joint_actions")
    simulated = built(get_preset("pi0_lora"), "aloha_sim")
    assert (simulated.model.paligemma_variant, simulated.model.action_expert_variant) == (
        "gemma_2b_lora",
        "gemma_300m_lora",
    )
    assert simulated.data.use_delta_joint_actions is False
    assert simulated.data.default_prompt == "Transfer cube"


@pytest.mark.usefixtures("openpi")
def test_libero() -> None:
    model = replace(get_preset("pi05"), horizon=10, discrete_state_input=False)
    found = built(model, "libero")
    assert (found.model.pi05, found.model.discrete_state_input, found.model.action_horizon) == (True, False, 10)
    assert (found.data.of, found.data.extra_delta_transform) == ("LeRobotLiberoDataConfig", False)
    assert built(get_preset("pi0"), "libero_delta").data.extra_delta_transform is True


@pytest.mark.usefixtures("openpi")
def test_droid() -> None:
    found = built(replace(get_preset("pi05"), horizon=15), "droid").data.data_transforms(None)
    assert [one.of for one in (*found.inputs, *found.outputs)] == ["DroidInputs", "DroidOutputs"]
    assert found.inputs[0].model_type == "pi05"
    joints = built(get_preset("pi05"), "droid_joint_position").data.data_transforms(None)
    assert [one.of for one in joints.inputs] == ["DroidInputs", "DeltaActions"]
    assert [one.of for one in joints.outputs] == ["AbsoluteActions", "DroidOutputs"]
    assert joints.inputs[1].given[0].given == (7, -1)


def test_what_openpi_cannot_say_is_told() -> None:
    assert problems(get_preset("pi05_lora"), get_robot("droid")) == ()
    tiny = problems(get_preset("pi0_tiny"), get_robot("tabletop"))
    assert ["VLM" in tiny[0], "action expert" in tiny[1], "24x24" in tiny[2], "'tabletop'" in tiny[3]] == [True] * 4
    model = replace(get_preset("pi0"), vlm=get_preset("pi0").vlm.with_lora(8, alpha=16.0))
    (said,) = problems(model, get_robot("aloha"))
    assert "adapters of rank 8, alpha 16" in said
    assert "unless merged: pirl export pytorch" in said
    own = make_robot(name="aloha_mine", state_dim=7, action_dim=7)
    assert "OpenPI knows no robot 'aloha_mine'" in problems(get_preset("pi0"), own)[0]


def test_the_command_names_config_and_folder() -> None:
    expected = "uv run scripts/serve_policy.py policy:checkpoint --policy.config=box --policy.dir=/robot/box"
    assert serve_command("box", "/robot/box") == expected
