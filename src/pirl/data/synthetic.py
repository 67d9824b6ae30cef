"""A synthetic task: a point on a plane, a goal, and demonstrations that are good, slow or wrong.

It needs no files, so the `debug` recipes and the promise tests run anywhere. The point starts near the middle and must
reach the goal on the right within `LIMIT` steps. The demonstrator errs by choice, not by imprecision: it goes straight
(success), takes a detour over the top (success, but too late for a policy's limit), or walks into the trap on the left
(failure). Imitation copies the mixture, and imitating successes alone keeps the detours; only the discounted return
favours going straight.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, UInt8

from pirl.data.replay import MemorySource
from pirl.names import BASE_CAMERA
from pirl.records import Array, Episode

GOAL, TRAP, TOP = np.array([1.0, 0.0]), np.array([-1.0, 0.0]), np.array([0.0, 1.0])
STEP, RADIUS, LIMIT = 0.15, 0.2, 9
PICTURE = 24
TASK = "go to the goal"
DETOUR, WRONG = 0.3, 0.3
"""Probabilities of the detour and of the trap; otherwise the demonstrator goes straight."""


def reset(rng: np.random.Generator, count: int) -> Float[Array, "B 2"]:
    """Starting points."""
    return rng.uniform(-0.15, 0.15, (count, 2))


def advance(
    position: Float[Array, "B 2"], actions: Float[Array, "B 2"]
) -> tuple[Float[Array, "B 2"], Bool[Array, "B"], Bool[Array, "B"]]:
    """(new positions, success, trapped) after one action each; an action moves by at most STEP per axis."""
    position = np.clip(position + STEP * np.clip(actions, -1, 1), -1.2, 1.2)
    return position, _at(position, GOAL), _at(position, TRAP)


def _at(position: Float[Array, "B 2"], place: Float[Array, "2"]) -> Bool[Array, "B"]:
    return np.linalg.norm(position - place, axis=-1) < RADIUS


def demonstrate(rng: np.random.Generator) -> Episode:
    """One complete demonstration."""
    choice = rng.uniform()
    route = [TRAP] if choice < WRONG else [TOP, GOAL] if choice < WRONG + DETOUR else [GOAL]
    position = reset(rng, 1)
    states, actions, success = [], [], False
    while route:
        offset = route[0] - position[0]
        action = np.clip(offset / max(np.abs(offset).max(), STEP) + rng.normal(0, 0.05, 2), -1, 1)
        states.append(position[0])
        actions.append(action)
        position, arrived, trapped = advance(position, action[None])
        success = bool(arrived[0])
        if success or trapped[0]:
            break
        if len(route) > 1 and _at(position, route[0])[0]:
            route.pop(0)
    length = len(states)
    last = np.arange(length) == length - 1
    return Episode(
        task=TASK,
        state=np.asarray(states, np.float32),
        actions=np.asarray(actions, np.float32),
        rewards=(last & success).astype(np.float32),
        terminated=last,
        truncated=np.zeros(length, bool),
        success=success,
    )


def picture(position: Float[Array, "B 2"]) -> UInt8[Array, "B 24 24 3"]:
    """The camera's picture: the goal in green, the trap in red, the point in white."""
    image = np.zeros((len(position), PICTURE, PICTURE, 3), np.uint8)
    for places, colour in ((GOAL[None], (0, 200, 0)), (TRAP[None], (200, 0, 0)), (position, (255, 255, 255))):
        column, row = np.clip(((places * [1, -1] + 1.2) / 2.4 * PICTURE).astype(int), 1, PICTURE - 2).T
        for sample in range(len(position)):
            r, c = row[sample % len(row)], column[sample % len(column)]
            image[sample, r - 1 : r + 2, c - 1 : c + 2] = colour
    return image


def demonstrations(*, episodes: int = 200, seed: int = 0, pictures: bool = True) -> MemorySource:
    """Generate demonstrations, deterministically from the seed."""
    rng = np.random.default_rng(seed)
    made = [demonstrate(rng) for _ in range(episodes)]
    cameras = (BASE_CAMERA,) if pictures else ()
    return MemorySource(
        cameras=cameras, items=[(episode, {camera: picture(episode.state) for camera in cameras}) for episode in made]
    )


def success_rate(chunks: Callable[[Array], Array], *, episodes: int, seed: int) -> float:
    """Success rate of a policy that executes whole chunks, over new episodes with the time limit."""
    rng = np.random.default_rng(seed)
    position = reset(rng, episodes)
    success, over = np.zeros(episodes, bool), np.zeros(episodes, bool)
    step = 0
    while step < LIMIT:
        plan = np.asarray(chunks(position.astype(np.float32)))
        for t in range(plan.shape[1]):
            moved, arrived, trapped = advance(position, plan[:, t])
            position = np.where(over[:, None], position, moved)
            success |= arrived & ~over
            over |= arrived | trapped
            step += 1
            if step == LIMIT:
                break
    return float(success.mean())
