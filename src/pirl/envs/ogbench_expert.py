"""OGBench's oracles as experts: demonstrations of cube tasks, and play (random goals, one after the other) of any.

OGBench's wheel has the oracles, but neither its datasets nor the script that recorded them. Data recorded here is made
the same way, but results on it are not comparable to those on the official datasets.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pirl.envs.config import OGBenchConfig
from pirl.envs.mujoco_render import load
from pirl.envs.ogbench import OGBenchEnv, family, make_simulator, sparse
from pirl.envs.recording import act_out
from pirl.errors import EnvError
from pirl.ranges import Checked, NotNegative
from pirl.records import Array, Context, Rollout

_PLAY_STEPS = 1000
"""Steps per episode of play, as in OGBench's datasets."""
_STACKING = {
    "cube-double": (0.0, 0.25),
    "cube-triple": (0.05, 0.35),
    "cube-quadruple": (0.1, 0.5),
    "cube-octuple": (0.0, 0.35),
}
"""Range from which an episode of play draws its probability of stacking cubes; 0.5 for other worlds."""


@dataclass(frozen=True, kw_only=True)
class OGBenchDials(Checked):
    """How the oracles act."""

    oracle: Literal["markov", "plan"] = "markov"
    """`markov` decides by the present state and corrects itself; `plan` follows a smooth way fixed beforehand."""
    plan_noise: NotNegative = 0.0
    """Of `plan`: noise of the way, correlated in time; OGBench's play has 0.1."""
    action_noise: NotNegative = 0.0
    """Standard deviation added to each move; three times as much in yaw, ten times in the gripper, as in OGBench."""


def demonstrate(
    config: OGBenchConfig,
    contexts: Sequence[Context],
    *,
    dials: OGBenchDials | None = None,
    seed: int = 0,
    pictures: bool = True,
) -> list[Rollout]:
    """Record one episode from each context of a cube task, successful or not, with images of every step or none."""
    if not family(config.task).startswith("cube"):
        raise EnvError(
            f"no expert for {config.task}: OGBench's oracles know how to press a button, not which one to press",
            hint="use a cube task, or record play with `play_data`",
        )
    dials = dials or OGBenchDials()
    env = OGBenchEnv(config)
    oracle = _oracles(env.simulator, dials)["cube"]

    def choose(step: int) -> Float[Array, "5"]:
        info = {**env.info, **_next_target(env.simulator)}
        if step == 0 or oracle.done:
            oracle.reset(None, info)
        return _noisy(oracle.select_action(None, info), dials.action_noise)

    rollouts = []
    try:
        for number, context in enumerate(contexts):
            with _global_seed(seed, number, context.init):
                rollouts.append(act_out(env, context, choose, number=number, pictures=pictures))
    finally:
        env.close()
    return rollouts


def play_data(
    config: OGBenchConfig,
    steps: int,
    seed: int,
    *,
    dials: OGBenchDials | None = None,
    pictures: bool = True,
) -> list[Rollout]:
    """Record `steps` steps of play for offline learning, in episodes of 1000 steps; the last may be shorter.

    Play has its own goals and never ends early. Rewards are those of the configured task, and `terminated` is set at
    every step whose state solves it, as in OGBench's datasets: nothing bootstraps there. A context of play starts at
    random, not where the task starts. (Unlike OGBench, episodes of `scene` in which the cube gets stuck are kept.)
    """
    env = _PlayEnv(config)
    player = _Player(env, dials or OGBenchDials(oracle="plan", plan_noise=0.1))
    rollouts: list[Rollout] = []
    try:
        for number, start in enumerate(range(0, steps, _PLAY_STEPS)):
            env.max_steps = min(_PLAY_STEPS, steps - start)
            context = Context(env.tasks[0], int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))
            with _global_seed(seed, number):
                rollout = act_out(env, context, player.choose, number=number, pictures=pictures)
            rollouts.append(env.judged(rollout, player.states))
    finally:
        env.close()
    return rollouts


class _PlayEnv(OGBenchEnv):
    """The world of a task, with a new random goal whenever one is reached."""

    def __init__(self, config: OGBenchConfig) -> None:
        super().__init__(config)
        self._judge = self.simulator
        world = f"{'visual-' if self.visual else ''}{family(config.task)}-v0"
        self.simulator, _ = make_simulator(world, config, mode="data_collection", terminate_at_goal=False)

    def judged(self, rollout: Rollout, states: list[dict[str, Array]]) -> Rollout:
        """Relabel an episode of play with the task's rewards; `states` are the states before its actions."""
        relabelling = load("ogbench.relabel_utils", extra="ogbench", why="the OGBench simulator")
        labels: dict[str, Any] = {key: np.stack([state[key] for state in states]) for key in states[0]}
        relabelling.relabel_dataset(self.tasks[0], self._judge, labels)
        rewards, solved = labels["rewards"], labels["masks"] == 0
        episode = replace(
            rollout.episode,
            rewards=(sparse(rewards) if self.config.sparse else rewards).astype(np.float32),
            terminated=solved,
            truncated=rollout.episode.truncated & ~solved,
            success=None,
        )
        return replace(rollout, episode=episode)


class _Player:
    """Pursues one goal after the other with the matching oracle."""

    def __init__(self, env: _PlayEnv, dials: OGBenchDials) -> None:
        self._env, self._dials = env, dials
        self._oracles = _oracles(env.simulator, dials)
        self._oracle: Any = None
        self._stacking = 0.0
        self.states: list[dict[str, Array]] = []
        """The state that determines the task's reward, at every step of the episode."""

    def choose(self, step: int) -> Float[Array, "5"]:
        env = self._env
        if step == 0:
            self.states = []
            self._stacking = np.random.uniform(*_STACKING.get(family(env.config.task), (0.5, 0.5)))
        if step == 0 or self._oracle.done:
            if step > 0:
                env.info = env.simulator.set_new_target(p_stack=self._stacking)[1]
            self._oracle = self._oracles[env.info["privileged/target_task"]]
            self._oracle.reset(None, env.info)
        self.states.append({key: env.info[key] for key in ("qpos", "button_states") if key in env.info})
        return _noisy(self._oracle.select_action(None, env.info), self._dials.action_noise)


def _oracles(simulator: Any, dials: OGBenchDials) -> dict[str, Any]:
    """OGBench's oracles by object."""
    found = {}
    for thing in ("cube", "button", "drawer", "window"):
        module = load(
            f"ogbench.manipspace.oracles.{dials.oracle}.{thing}_{dials.oracle}",
            extra="ogbench",
            why="the OGBench simulator",
        )
        options: dict[str, Any] = {"noise": dials.plan_noise} if dials.oracle == "plan" else {}
        if thing == "button" and type(simulator).__name__ == "PuzzleEnv":
            options["gripper_always_closed"] = True  # there is nothing to grasp
        found[thing] = getattr(module, f"{thing.title()}{dials.oracle.title()}Oracle")(env=simulator, **options)
    return found


def _next_target(simulator: Any) -> dict[str, Any]:
    """The oracle's next target: of a task's goals, one per cube, the lowest unsolved one."""
    lie = load("ogbench.manipspace.lie", extra="ogbench", why="the OGBench simulator")
    data, goals = simulator.data, simulator._cube_target_mocap_ids
    solved = simulator._compute_successes()
    unsolved = [cube for cube in range(len(goals)) if not solved[cube]] or [0]
    cube = min(unsolved, key=lambda cube: data.mocap_pos[goals[cube]][2])
    yaw = lie.SO3(wxyz=data.mocap_quat[goals[cube]]).compute_yaw_radians()
    return {
        "privileged/target_block": cube,
        "privileged/target_block_pos": data.mocap_pos[goals[cube]].copy(),
        "privileged/target_block_yaw": np.array([yaw]),
    }


def _noisy(action: Float[Array, "5"], noise: float) -> Float[Array, "5"]:
    if noise > 0:
        action = action + np.random.normal(0, noise * np.array([1, 1, 1, 3, 10]))
    return np.clip(action, -1.0, 1.0)


@contextmanager
def _global_seed(*seeds: int) -> Iterator[None]:
    """Seed NumPy's global generator, which the oracles use, in the block and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(np.random.SeedSequence(seeds).generate_state(4))
    try:
        yield
    finally:
        np.random.set_state(before)
