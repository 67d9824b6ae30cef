"""Normalisation statistics of a dataset from its low-dimensional columns, without opening videos."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from pirl.data.normalize import NormStats, RunningStats
from pirl.data.robots import Robot
from pirl.errors import DataError
from pirl.names import ACTIONS, STATE
from pirl.records import Array, EpisodeSource

OPENPI_BATCH = 32
"""OpenPI's batch size; quantiles depend on it slightly (see `RunningStats`)."""


def compute_norm_stats(
    source: EpisodeSource, robot: Robot, horizon: int, *, batch_size: int = OPENPI_BATCH
) -> dict[str, NormStats]:
    """Statistics of states and relative action chunks, in the model's units, over every step of every episode.

    With OpenPI's batch size they equal OpenPI's, except that OpenPI omits the last incomplete batch. Save them as
    assets/<config>/<repo_id>/norm_stats.json, where OpenPI writes its own.
    """
    state_stats, action_stats = RunningStats(), RunningStats()
    for state, actions in _batches(source, robot, horizon, batch_size):
        state_stats.update(state)
        action_stats.update(actions)
    return {STATE: state_stats.statistics(), ACTIONS: action_stats.statistics()}


def _batches(source: EpisodeSource, robot: Robot, horizon: int, size: int) -> Iterator[tuple[Array, Array]]:
    """Consecutive samples across episodes in batches of `size`; the last may be smaller."""
    state, actions = np.zeros((0, robot.state_dim)), np.zeros((0, horizon, robot.action_dim))
    for index in range(len(source)):
        more_state, more_actions = _samples(source, index, robot, horizon)
        state, actions = np.concatenate([state, more_state]), np.concatenate([actions, more_actions])
        whole = len(state) // size * size
        for start in range(0, whole, size):
            yield state[start : start + size], actions[start : start + size]
        state, actions = state[whole:], actions[whole:]
    if len(state):
        yield state, actions


def _samples(source: EpisodeSource, index: int, robot: Robot, horizon: int) -> tuple[Array, Array]:
    episode = source.episode(index)
    try:
        robot.check(episode.state, STATE, robot.state_dim)
        robot.check(episode.actions, ACTIONS, robot.action_dim)
    except DataError as error:
        raise DataError(f"episode {index}: {error.message}", hint=error.hint) from None
    state = robot.encode_state(episode.state)
    return state, robot.encode_actions(action_chunks(episode.actions, horizon), state)


def action_chunks(actions: Float[Array, "T A"], horizon: int) -> Float[Array, "T H A"]:
    """The chunk starting at every step; repeats the last action beyond the episode's end, as in LeRobot."""
    steps = np.arange(len(actions))[:, None] + np.arange(horizon)
    return actions[np.minimum(steps, len(actions) - 1)]
