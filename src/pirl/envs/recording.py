"""Records an episode in an environment: turns any scripted expert into a `Rollout`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.envs.env import Outcome, RobotEnv
from pirl.names import STATE
from pirl.records import Array, Context, Episode, Rollout


def act_out(
    env: RobotEnv,
    context: Context,
    choose: Callable[[int], Float[Array, "A"]],
    *,
    number: int = 0,
    pictures: bool = True,
    state_key: str = STATE,
) -> Rollout:
    """Run one episode from its context to its end; `choose` maps the step to an action and may inspect `env`."""
    env.begin(env.check_context(context))
    seen: list[dict[str, Any]] = []
    actions: list[Array] = []
    outcomes: list[Outcome] = []
    while not outcomes or not (outcomes[-1].terminated or outcomes[-1].truncated):
        seen.append(env.observe(pictures=pictures))
        actions.append(env.check_action(choose(len(outcomes))))
        outcomes.append(env.act(actions[-1]))
    episode = Episode(
        task=context.task,
        state=np.stack([row[state_key] for row in seen]),
        actions=np.stack(actions),
        rewards=np.array([outcome.reward for outcome in outcomes], np.float32),
        terminated=np.array([outcome.terminated for outcome in outcomes]),
        truncated=np.array([outcome.truncated for outcome in outcomes]),
        success=outcomes[-1].success,
    )
    return as_rollout(context, number, episode, seen)


def as_rollout(context: Context, number: int, episode: Episode, seen: list[dict[str, Any]]) -> Rollout:
    """A rollout of an expert, which decides at every step, with the observations of all steps."""
    keys = [key for key, value in seen[0].items() if np.ndim(value) == 3]
    steps = np.arange(len(episode))
    return Rollout(
        context=context,
        number=number,
        episode=episode,
        starts=steps,
        frames={key: np.stack([row[key] for row in seen]) for key in keys},
        frame_steps=steps if keys else steps[:0],
    )
