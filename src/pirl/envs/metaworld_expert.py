"""Meta-World's scripted policies as experts: they read the simulator's state and solve all fifty tasks.

The dials make them worse by wrong choices, not by noise: an expert believes everything to be a hand's breadth to the
left or right of its true position and acts there, which fails every task of MT10. A detour starts this way and corrects
itself: a late success.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.envs.config import MetaWorldConfig
from pirl.envs.metaworld import MetaWorldEnv
from pirl.envs.mujoco_render import load
from pirl.envs.recording import act_out
from pirl.errors import ConfigError
from pirl.ranges import Checked, Natural, NotNegative, Share
from pirl.records import Array, Context, Rollout

_PLACES = (4, 11, 22, 29, 36)
"""Offsets of positions in Meta-World's observation: two objects, the same one step ago, the goal."""


@dataclass(frozen=True, kw_only=True)
class MetaWorldDials(Checked):
    """How often the expert errs, and in which way."""

    wrong: Share = 0.0
    """Share of episodes that act beside the right place to the end: nearly always a failure."""
    detour: Share = 0.0
    """Share that starts beside the right place and corrects itself: a late success."""
    beside: NotNegative = 0.12
    """Metres to the left or right that such an episode is off."""
    detour_steps: tuple[Natural, Natural] = (40, 80)
    """Least and most steps before a detour is corrected."""
    action_noise: NotNegative = 0.0
    """Standard deviation of the noise on each move of the hand; a move is at most 1. 0.3 is harmless except for the
    peg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wrong + self.detour > 1:
            raise ConfigError(f"wrong is {self.wrong} and detour {self.detour}", hint="together they are at most 1")
        if self.detour_steps[0] > self.detour_steps[1]:
            raise ConfigError(f"detour_steps is {self.detour_steps}", hint="least and most, such as [40, 80]")


def demonstrate(
    config: MetaWorldConfig,
    contexts: Sequence[Context],
    *,
    dials: MetaWorldDials | None = None,
    seed: int = 0,
    pictures: bool = True,
) -> list[Rollout]:
    """Record one episode from each context, successful or not, with images of every step or none."""
    env = MetaWorldEnv(config)
    policies = load("metaworld.policies", extra="metaworld", why="the Meta-World simulator").ENV_POLICY_MAP
    rollouts = []
    try:
        for number, context in enumerate(contexts):
            env.check_context(context)
            rng = np.random.default_rng([seed, number, context.init])
            expert = Expert(env, policies[env.names[context.task]](), dials or MetaWorldDials(), rng)
            rollouts.append(act_out(env, context, expert.action, number=number, pictures=pictures))
    finally:
        env.close()
    return rollouts


class Expert:
    """Acts in one episode. Errors are drawn at its start, from the same random numbers for all dials."""

    def __init__(self, env: MetaWorldEnv, policy: Any, dials: MetaWorldDials, rng: np.random.Generator) -> None:
        self._env, self._policy, self._noise, self._rng = env, policy, dials.action_noise, rng
        choice, side = rng.random(), rng.choice([-1.0, 1.0])
        corrected = int(rng.integers(*dials.detour_steps, endpoint=True))
        wrong, detour = choice < dials.wrong, choice < dials.wrong + dials.detour
        self._until = env.max_steps if wrong else corrected if detour else 0
        self._offset = np.array([side * dials.beside, 0.0, 0.0])

    def action(self, step: int) -> Float[Array, "4"]:
        """The next action, in [-1, 1]."""
        seen = self._env.simulator.seen.copy()
        if step < self._until:
            for first in _PLACES:
                if seen[first : first + 3].any():  # all zero: the second object of a task with one
                    seen[first : first + 3] += self._offset
        with warnings.catch_warnings():  # Meta-World warns that actions beyond 1 are clipped
            warnings.simplefilter("ignore")
            action = np.array(self._policy.get_action(seen), np.float64)
        action[:3] = np.clip(action[:3], -1, 1) + self._noise * self._rng.normal(size=3)
        return np.clip(action, -1, 1).astype(np.float32)
