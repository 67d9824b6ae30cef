"""Small runs that collect, for tests: a random walk that can be told to fail in various ways."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from pirl.agents.agent import Agent
from pirl.agents.config import ACRLPDConfig, BCConfig, FlowPPOConfig, RIPTConfig
from pirl.config import RLTrainConfig
from pirl.envs.config import GymConfig
from pirl.rollout.config import OnlineConfig, RolloutConfig
from pirl.training import loop
from small_runs import small_run

VARIABLE = "PIRL_TEST_TROUBLE"
GOAL = 1.6
"""Reached by about half of the walks of a fresh policy."""


class Walk(gymnasium.Env):
    """A point moved by actions; the task ends beyond `GOAL`. Observations include an image."""

    observation_space = gymnasium.spaces.Dict(
        {
            "state": gymnasium.spaces.Box(-99, 99, (2,), np.float32),
            "image": gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8),
        }
    )
    action_space = gymnasium.spaces.Box(-99, 99, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        self.trouble = next_trouble()
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.place = self.place + action
        if self.trouble:
            self.misbehave(self.trouble)
        there = bool(self.place[0] > GOAL)
        return self.seen(), float(there), there, False, {"is_success": there}

    def misbehave(self, kind: str) -> None:
        self.trouble = ""
        match kind:
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "fail":
                raise OSError("the cable was pulled")
            case "nan":
                self.place = np.full(2, np.nan, np.float32)

    def seen(self) -> dict[str, Any]:
        image = np.full((6, 8, 3), 40, np.uint8)
        image[:, int(np.clip(4 + 2 * np.nan_to_num(self.place[0]), 0, 7))] = 250
        return {"state": self.place, "image": image}


if "pirl/CollectingWalk-v0" not in gymnasium.registry:
    gymnasium.register("pirl/CollectingWalk-v0", entry_point=Walk)

ENV = GymConfig(id="collecting_runs:pirl/CollectingWalk-v0", robot="synthetic", prompt="go", max_steps=5, fps=5)


def next_trouble() -> str:
    """The failure planned for the episode that begins now; a file counts episodes over all processes."""
    told = os.environ.get(VARIABLE)
    if not told:
        return ""
    file, *plans = told.split("|")
    with open(file, "ab") as begun:
        begun.write(b".")
        begun.flush()
        number = os.fstat(begun.fileno()).st_size - 1
    wanted = (plan.split(":") for plan in plans)
    return next((kind for kind, first, last in wanted if int(first) <= number < int(last)), "")


def make_trouble(monkeypatch: pytest.MonkeyPatch, folder: Path, **plans: int | range) -> None:
    """Plan failures: kind=NUMBER or kind=RANGE of episodes, counted from now on."""
    spans = {kind: plan if isinstance(plan, range) else range(plan, plan + 1) for kind, plan in plans.items()}
    counter = folder / f"episodes-{len(list(folder.glob('episodes-*')))}"
    counter.touch()
    words = [f"{kind}:{span.start}:{span.stop}" for kind, span in spans.items()]
    monkeypatch.setenv(VARIABLE, "|".join([str(counter), *words]))


EVER = range(10**9)


RIPT = RIPTConfig(
    group_size=3, groups_per_iteration=2, max_attempts=2.0, drift_limit=None, bc_weight=0.2, flow_draws=2, ema_decay=0.8
)
ROLLOUT = RolloutConfig(num_envs=3, num_workers=2, worker_timeout=60.0, execute=2, flow_steps=2)


def ript_run(folder: Path, agent: RIPTConfig = RIPT, **changes: Any) -> RLTrainConfig:
    """A RIPT run with synthetic demonstrations; two to four groups of three walks per iteration."""
    own = dict(agent=agent, env=ENV, rollout=ROLLOUT, num_train_steps=4, log_interval=1)
    return replace(small_run(folder, BCConfig()), **(own | changes))


PPO = FlowPPOConfig(
    exploration="flow_noise", group_size=3, groups_per_iteration=3, epochs=2, kl_limit=None, discount=0.9, bc_weight=0.2
)


def ppo_run(folder: Path, **changes: Any) -> RLTrainConfig:
    """A FlowPPO run with synthetic demonstrations; nine walks per iteration."""
    own = dict(agent=PPO, env=ENV, rollout=ROLLOUT, num_train_steps=4, log_interval=1)
    return replace(small_run(folder, BCConfig()), **(own | changes))


ACRLPD = ACRLPDConfig(
    discount=0.9, num_action_samples=2, flow_steps=2, policy_ema_decay=0.9, critic_ema_decay=None, augment=False
)
ONLINE = OnlineConfig(start_step=2, episodes=9, updates_per_step=0.06)


def online_run(folder: Path, agent: ACRLPDConfig = ACRLPD, **changes: Any) -> RLTrainConfig:
    """An online run: two offline steps, then nine walks whenever 0.06 updates per environment step are done."""
    own = dict(env=ENV, rollout=ROLLOUT, online=ONLINE, num_train_steps=8, log_interval=1)
    return small_run(folder, agent, **(own | changes))


def saving(config: RLTrainConfig, **changes: Any) -> RLTrainConfig:
    """The run with other checkpoint settings."""
    return replace(config, checkpoint=replace(config.checkpoint, **changes))


_OF_AN_AGENT = ("model", "agent", "critic", "freeze", "data", "policy_optimizer", "policy_schedule")


@contextmanager
def traced_once() -> Iterator[None]:
    """Runs of one algorithm share its compiled update, because tracing dominates such small runs."""
    agents: dict[str, Agent] = {}
    updates: dict[int, loop.Step] = {}

    def shared_agent(config: RLTrainConfig) -> Agent:
        known = repr([getattr(config, name) for name in _OF_AN_AGENT] + [config.rollout.flow_steps])
        return agents[known] if known in agents else agents.setdefault(known, build_agent(config))

    def shared_update(agent: Agent, mesh: Any, shapes: Any) -> loop.Step:
        if id(agent) not in updates:
            updates[id(agent)] = step(agent, mesh, shapes)
        return updates[id(agent)]

    build_agent, step = loop.build_agent, loop.Step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_agent", shared_agent)
        patch.setattr(loop, "Step", shared_update)
        yield
