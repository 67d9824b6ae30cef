"""An algorithm outside pirl is a full citizen: everything works with example 08, and with one made from scratch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl import trust
from pirl.agents.agent import Agent, Parts, TrainState
from pirl.agents.agent_config import AgentConfig
from pirl.agents.learner import Learner
from pirl.build import build_agent
from pirl.checkpoints.weights import load_openpi
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict, tag, to_dict
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig, get_preset
from pirl.models.params import flatten
from pirl.planning.flops import count_flops, update_flops
from pirl.planning.plan import plan
from pirl.recipes import get_config, load
from pirl.training.acting import open_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "08_own_agent"


@pytest.fixture(scope="module")
def recipe() -> Iterator[RLTrainConfig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv(trust.VARIABLE, "")
        yield load(f"{NAME}:RECIPE")


@pytest.fixture(scope="module")
def run(recipe: RLTrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps by the command line, then two more by --resume."""
    base = tmp_path_factory.mktemp("own")
    words = ["train", f"{NAME}:RECIPE", "--exp-name", "mine", "--checkpoint.base-dir", str(base)]
    words += ["--agent.smoothness", "2.5", "--batch-size", "4", "--log-interval", "1"]
    assert app.main([*words, "--max-steps", "2"]) == 0
    assert app.main([*words, "--max-steps", "4", "--resume"]) == 0
    return base / "smooth_bc" / "mine"


def test_it_trains_and_resumes_from_the_command_line(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "policy/loss" in line["values"]] == [1, 2, 3, 4]
    metadata = json.loads((run / "4" / "extra" / "metadata.json").read_text())
    assert metadata["config"]["agent"]["type"] == f"{NAME}:SmoothBCConfig"
    assert metadata["config"]["agent"]["smoothness"] == 2.5


def test_its_checkpoint_acts_and_exports(run: Path, tmp_path: Path) -> None:
    acting = open_checkpoint(run)
    assert type(build_agent(acting.found.config)).__name__ == "SmoothBC"
    assert acting.chunk({"state": np.zeros(2, np.float32)}).shape == (6, 2)
    assert app.main(["export", "openpi", str(run), "--out", str(tmp_path / "out")]) == 0
    ours, theirs = flatten(load_openpi(run)), flatten(load_openpi(tmp_path / "out"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_does_not_run_code_that_nobody_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(trust.sys.modules, NAME)
    monkeypatch.setenv(trust.VARIABLE, "")
    with pytest.raises(ConfigError, match=f"names code outside pirl: {NAME}") as refused:
        open_checkpoint(run)
    assert f"--trust {NAME}" in str(refused.value.hint)
    monkeypatch.setenv(trust.VARIABLE, NAME)
    assert open_checkpoint(run).found.step == 4


def test_its_settings_survive_a_file(recipe: RLTrainConfig) -> None:
    data = to_dict(recipe)
    assert data["agent"]["type"] == tag(type(recipe.agent)) == f"{NAME}:SmoothBCConfig"
    assert to_dict(from_dict(RLTrainConfig, data)) == data
    with pytest.raises(ConfigError, match="is not a AgentConfig"):
        from_dict(RLTrainConfig, data | {"agent": {"type": f"{NAME}:BASE"}})


def test_its_memory_is_planned(recipe: RLTrainConfig) -> None:
    base = get_config("debug_bc")
    config = replace(base, model=get_preset("pi0_tiny"), agent=recipe.agent)
    found = plan(config, device_gb=1)
    assert found.fits
    assert found.parts["params/policy"] == plan(base, device_gb=1).parts["params/policy"]


@dataclass(frozen=True, kw_only=True)
class NudgeConfig(AgentConfig):
    """No variation of another algorithm."""

    agent: ClassVar[str] = f"{__name__}:Nudge"


@dataclass(frozen=True, kw_only=True)
class Nudge(Agent):
    """Pulls the last bias to the mean action."""

    policy: Any
    config: NudgeConfig
    learner: Learner

    @classmethod
    def build(cls, config: NudgeConfig, parts: Parts) -> "Nudge":
        return cls(policy=parts.policy, config=config, learner=parts.policy_learner)

    def init(self, key: jax.Array, policy_params: Any = None) -> TrainState:
        params, opt = self.learner.init(self.policy.init(key) if policy_params is None else policy_params)
        return TrainState(step=jnp.zeros((), jnp.int32), params={"policy": params}, opt={"policy": opt})

    def update(self, state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss(params: Any) -> jax.Array:
            return optax.l2_loss(batch["observations"]["state"] @ params["dense_1"]["kernel"][:2, :2]).mean()

        value, grads = jax.value_and_grad(loss)(state.params["policy"])
        params, opt = self.learner.step(state.params["policy"], grads, state.opt["policy"])
        return replace(state, step=state.step + 1, params={"policy": params}, opt={"policy": opt}), {"loss": value}


def test_operations_of_one_made_from_scratch_are_counted() -> None:
    base = get_config("debug_bc")
    model = MLPFlowConfig(state_dim=2, action_dim=2, horizon=1, hidden=(4,))
    config = replace(base, model=model, agent=NudgeConfig(), data=replace(base.data, cameras=(), tokenizer="none"))
    agent = build_agent(config)
    assert isinstance(agent, Nudge)
    state = agent.init(jax.random.key(0))
    batch = {"observations": {"state": np.ones((8, 2), np.float32)}}
    assert update_flops(agent, state, batch) == count_flops(agent.update, state, batch, jax.random.key(0)) > 0
