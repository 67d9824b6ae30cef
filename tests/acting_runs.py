"""Run folders whose checkpoints can act, without training: small policies with random weights, and an environment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np

from pirl.agents.agent import TrainState
from pirl.agents.agent_config import AgentConfig
from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.build import build_agent
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.run_metadata import run_metadata
from pirl.config import RLTrainConfig
from pirl.config_io import to_dict, write_yaml
from pirl.data.config import DataConfig
from pirl.data.normalize import NormStats
from pirl.envs.config import EnvConfig, GymConfig
from pirl.models.config import MLPFlowConfig
from pirl.recipes import get_config
from pirl.rollout.config import RolloutConfig

STATS = {
    "state": NormStats(mean=np.zeros(2), std=np.ones(2), q01=-np.ones(2), q99=np.ones(2)),
    "actions": NormStats(mean=np.array([0.15, 0.0]), std=np.full(2, 0.2), q01=-np.ones(2), q99=np.ones(2)),
}


class Walk(gymnasium.Env):
    """A point that moves right with some probability; the task ends beyond 1. Observations include an image."""

    observation_space = gymnasium.spaces.Dict(
        {
            "state": gymnasium.spaces.Box(-9, 9, (2,), np.float32),
            "image": gymnasium.spaces.Box(0, 255, (8, 12, 3), np.uint8),
        }
    )
    action_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.place = self.place + action
        there = bool(self.place[0] > 1)
        return self.seen(), float(there), there, False, {"is_success": there}

    def seen(self) -> dict[str, Any]:
        image = np.full((8, 12, 3), 40, np.uint8)
        image[:, int(np.clip(6 + 4 * self.place[0], 0, 11))] = 250
        return {"state": self.place, "image": image}


if "pirl/Walk-v0" not in gymnasium.registry:
    gymnasium.register("pirl/Walk-v0", entry_point=Walk)

ENV = GymConfig(id="acting_runs:pirl/Walk-v0", robot="synthetic", prompt="go right", max_steps=10, fps=5)


def walking(folder: Path, agent: AgentConfig, *, env: EnvConfig | None = ENV) -> RLTrainConfig:
    """A configuration with a one-layer policy on states."""
    recipe = get_config("debug")
    return replace(
        recipe,
        name={BCConfig: "walk_bc", ACRLPDConfig: "walk_q", RIPTConfig: "walk_ript"}.get(type(agent), "walk"),
        model=MLPFlowConfig(state_dim=2, action_dim=2, horizon=3, hidden=(16,)),
        agent=agent,
        critic=replace(recipe.critic, hidden=(16,)),
        data=DataConfig(
            repo_ids=("me/walks",), robot="synthetic", cameras=(), tokenizer="none", outcome="columns", critic_horizon=2
        ),
        env=env,
        rollout=RolloutConfig(num_envs=4, num_workers=1, flow_steps=3),
        checkpoint=replace(recipe.checkpoint, base_dir=str(folder / "checkpoints"), keep_last=9, keep_best=None),
    )


def fresh_state(config: RLTrainConfig, seed: int) -> TrainState:
    return build_agent(config).init(jax.random.key(seed))


def save_run(config: RLTrainConfig, rates: dict[int, float], *, stats: dict[str, NormStats] = STATS) -> Path:
    """Write a run folder with a checkpoint of random weights per step, saved with the given success rates."""
    metadata = run_metadata(to_dict(config))
    with Checkpoints(config.run_dir, config.checkpoint, run=metadata, norm_stats={"me/walks": stats}) as checkpoints:
        for step, rate in rates.items():
            state = fresh_state(config, step)
            weights = build_agent(config).served(state)
            checkpoints.save(step, state, metrics={"eval/success_rate": rate}, weights=weights)
    write_yaml(config.run_dir / "config.yaml", config)
    return config.run_dir
