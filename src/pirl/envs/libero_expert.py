"""A scripted expert for LIBERO's pick-and-place tasks that reads the simulator's state, to record demonstrations.

It solves goals that put one object into or onto something: it grasps the object from above (a bowl by its rim), carries
it over all obstacles, and lets go. It cannot do drawers, knobs or pushing. Dials make demonstrations worse on purpose,
for algorithms that should improve on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from pirl.envs.config import LiberoConfig
from pirl.envs.libero import STATE_KEY, LiberoEnv, Simulator
from pirl.envs.recording import act_out
from pirl.errors import EnvError
from pirl.ranges import Bounds, Checked, NotNegative
from pirl.records import Array, Context, Rollout

_METRE = 1 / 0.05
"""Action units per metre: an action of 1 moves by 5 cm."""
_RADIAN = 1 / 0.5
"""Action units per radian: an action of 1 turns by half a radian."""
_OPEN, _CLOSED = -1.0, 1.0
_WIDEST = 0.078
"""Opening of the gripper, in metres."""


@dataclass(frozen=True, kw_only=True)
class LiberoDials(Checked):
    """How well the expert does."""

    speed: Annotated[float, Bounds(low=0, high=1, open_low=True)] = 1.0
    """Share of the robot's speed that it uses, above 0 and at most 1."""
    action_noise: NotNegative = 0.0
    """Standard deviation of what is added to every action but the gripper's; actions are in [-1, 1]."""
    grasp_error: NotNegative = 0.0
    """Standard deviation, in metres, of where it takes the object; half of the episodes fail at about 0.04."""


class Phase(NamedTuple):
    """One part of the motion: move to `target` until within `tolerance`, for `least` to `most` steps."""

    target: Callable[[], Array]
    gripper: float
    tolerance: float = np.inf
    least: int = 1
    most: int = 1


def demonstrate(
    config: LiberoConfig,
    contexts: Sequence[Context],
    *,
    dials: LiberoDials | None = None,
    seed: int = 0,
    pictures: bool = True,
) -> list[Rollout]:
    """Record one episode from each context, successful or not, with images of every step or none."""
    env = LiberoEnv(config)
    try:
        return [
            _demonstrate_one(
                env, context, number, dials or LiberoDials(), np.random.default_rng([seed, number]), pictures
            )
            for number, context in enumerate(contexts)
        ]
    finally:
        env.close()


def _demonstrate_one(
    env: LiberoEnv, context: Context, number: int, dials: LiberoDials, rng: np.random.Generator, pictures: bool
) -> Rollout:
    planned: list[Expert] = []

    def choose(step: int) -> Array:
        if not step:  # the episode has begun: now the world can be looked at
            planned.append(Expert(env.simulator, dials, rng))
        return planned[0].action()

    rollout = act_out(env, context, choose, number=number, pictures=pictures, state_key=STATE_KEY)
    return replace(rollout, episode=replace(rollout.episode, task=env.simulator.task.prompt))


class Expert:
    """The motion of one episode, planned at its start."""

    def __init__(self, simulator: Simulator, dials: LiberoDials, rng: np.random.Generator) -> None:
        self._world = World(simulator)
        goals = [goal for goal in simulator.inner.parsed_problem["goal_state"] if len(goal) == 3]
        if not goals or goals[-1][1] not in self._world.bodies:
            raise EnvError(
                f"the expert cannot do {simulator.task.prompt!r}",
                hint="it knows goals that put one object into or onto something",
            )
        self._relation, self._object, self._goal = goals[-1]
        self._dials, self._rng = dials, rng
        forward = self._world.hand_rotation()[:, 0] * [1, 1, 0]
        forward /= np.linalg.norm(forward)
        down = np.array([0.0, 0.0, -1.0])
        grasp, turn = plan_grasp(self._world, self._object, np.arctan2(forward[1], forward[0]))
        grasp[:2] += dials.grasp_error * rng.normal(size=2)
        self._rotation = _about_z(turn) @ np.stack([forward, np.cross(down, forward), down], 1)
        self._phases = self._plan(grasp)
        self._phase = self._steps = 0
        self._anchor = self._world.hand()
        self._held: Array | None = None

    def _plan(self, grasp: Float[Array, "3"]) -> list[Phase]:
        bottom = self._world.corners(self._object)[:, 2].min()
        around = [self._world.corners(name)[:, 2].max() for name in self._world.bodies if self._goal.startswith(name)]
        self._top = max([self._world.place(self._goal)[2], *around])
        high = max(grasp[2] + 0.12, self._top + 0.06 + grasp[2] - bottom)
        return [
            Phase(lambda: _at_height(grasp, max(grasp[2] + 0.10, bottom + 0.16)), _OPEN, 0.012, most=80),
            Phase(lambda: grasp, _OPEN, 0.006, most=50),
            Phase(lambda: grasp, _CLOSED, least=12, most=12),
            Phase(lambda: _at_height(self._anchor, high), _CLOSED, 0.03, most=50),
            Phase(lambda: _at_height(self._above_goal(), high), _CLOSED, 0.012, most=90),
            Phase(self._above_goal, _CLOSED, 0.01, most=50),
            Phase(lambda: self._anchor, _OPEN, least=8, most=8),
            Phase(lambda: _at_height(self._anchor, high), _OPEN, 0.02, most=60),
            Phase(lambda: self._anchor, _OPEN, least=60, most=60),
        ]

    def _above_goal(self) -> Float[Array, "3"]:
        """The hand's position that puts the held object in its place; how it is held is measured once."""
        world = self._world
        if self._held is None:
            corners = world.corners(self._object)
            self._held = np.array([*_middle(corners), corners[:, 2].min()]) - world.hand()
        place = world.place(self._goal) - self._held
        if self._relation == "on":
            return _at_height(place, place[2] + 0.012)
        # Lower it between the sides of a basket; drop it into anything else.
        return _at_height(place, self._top - self._held[2] - (0.06 if "basket" in self._goal else 0.0))

    def action(self) -> Float32[Array, "7"]:
        """The next action, in [-1, 1]."""
        phase = self._phases[self._phase]
        error = phase.target() - self._world.hand()
        turn = _rotation_vector(self._rotation @ self._world.hand_rotation().T)
        speed = self._dials.speed
        move = np.concatenate([1.6 * _METRE * error, 1.2 * _RADIAN * turn]).clip(-speed, speed)
        move += self._dials.action_noise * self._rng.normal(size=6)
        self._steps += 1
        near = np.linalg.norm(error) < phase.tolerance and np.abs(turn).max() < 0.15 and self._steps >= phase.least
        late = self._steps >= (phase.most if phase.least > 1 else phase.most / speed)
        if near or late:
            self._phase = min(self._phase + 1, len(self._phases) - 1)
            self._steps, self._anchor = 0, self._world.hand()
        return np.append(move, phase.gripper).clip(-1, 1).astype(np.float32)


class World:
    """The expert's view of the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self._model, self._data = simulator.model, simulator.data
        self.bodies: dict[str, int] = simulator.inner.obj_body_id
        self._hand = self._model.site("gripper0_grip_site").id

    def hand(self) -> Float[Array, "3"]:
        """The point between the fingers."""
        return self._data.site_xpos[self._hand].copy()

    def hand_rotation(self) -> Float[Array, "3 3"]:
        """The hand's axes in columns; the fingers close along the first."""
        return self._data.site_xmat[self._hand].reshape(3, 3).copy()

    def place(self, name: str) -> Float[Array, "3"]:
        """Position of an object, or of a region of one."""
        if name in self.bodies:
            return self._data.xpos[self.bodies[name]].copy()
        return self._data.site(name).xpos.copy()

    def corners(self, name: str) -> Float[Array, "n 3"]:
        """Corners of the boxes around the touchable parts of an object."""
        model, data = self._model, self._data
        mine = model.body_rootid[model.geom_bodyid] == model.body_rootid[self.bodies[name]]
        solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        signs = np.stack(np.meshgrid(*[[-1, 1]] * 3), -1).reshape(8, 3)
        found = []
        for geom in np.flatnonzero(mine & solid):
            box = model.geom_aabb[geom, :3] + signs * model.geom_aabb[geom, 3:]
            found.append(box @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
        return np.concatenate(found)


def plan_grasp(world: World, name: str, yaw: float) -> tuple[Float[Array, "3"], float]:
    """(grasp position, turn of the hand, whose fingers close along the direction `yaw`)."""
    corners = world.corners(name)
    bottom, top = corners[:, 2].min(), corners[:, 2].max()
    if "bowl" in name:
        return _rim_grasp(world, name, yaw)

    def cost(turn: float) -> float:
        """Width to grasp, plus a little for turning and a penalty for what does not fit."""
        across = corners[:, :2] @ [np.cos(yaw + turn), np.sin(yaw + turn)]
        width = across.max() - across.min()
        return width + 0.004 * abs(turn) + (0.05 if width > _WIDEST else 0.0)

    height = top - bottom
    depth = (top + bottom) / 2 if height < 0.05 else top - max(0.028, 0.3 * height)
    turn = min(np.linspace(-np.pi / 2, np.pi / 2, 37), key=cost)
    return np.array([*_middle(corners), max(bottom + 0.012, depth)]), float(turn)


def _rim_grasp(world: World, name: str, yaw: float) -> tuple[Float[Array, "3"], float]:
    """A grasp of a bowl's rim, one finger inside; prefers room around the hand, little turning and short ways."""
    corners = world.corners(name)
    top = corners[:, 2].max()
    radius = np.ptp(corners[:, :2], axis=0).mean() / 2 - 0.004
    others = [world.corners(other) for other in world.bodies if other != name]
    tall = [(other[:, :2].min(0), other[:, :2].max(0)) for other in others if other[:, 2].max() > top + 0.02]

    def point(turn: float, side: int) -> Array:
        return _middle(corners) + side * radius * np.array([np.cos(yaw + turn), np.sin(yaw + turn)])

    def merit(choice: tuple[float, int]) -> float:
        rim = point(*choice)
        gaps = [float(np.linalg.norm(np.maximum(np.maximum(low - rim, rim - high), 0))) for low, high in tall]
        room = min([*gaps, 0.16])
        return 10 * room - 0.5 * abs(choice[0]) - 0.1 * float(np.linalg.norm(rim - world.hand()[:2]))

    turn, side = max(((turn, side) for turn in np.linspace(-0.9, 0.9, 13) for side in (1, -1)), key=merit)
    return np.array([*point(turn, side), top - 0.012]), float(turn)


def _middle(corners: Float[Array, "n 3"]) -> Float[Array, "2"]:
    return (corners[:, :2].max(0) + corners[:, :2].min(0)) / 2


def _at_height(place: Float[Array, "3"], height: float) -> Float[Array, "3"]:
    return np.array([place[0], place[1], height])


def _about_z(angle: float) -> Float[Array, "3 3"]:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def _rotation_vector(rotation: Float[Array, "3 3"]) -> Float[Array, "3"]:
    """Rotation matrix to axis times angle."""
    angle = np.arccos(np.clip((np.trace(rotation) - 1) / 2, -1, 1))
    if angle < 1e-6:
        return np.zeros(3)
    skew = rotation - rotation.T
    return angle / (2 * np.sin(angle) + 1e-9) * np.array([skew[2, 1], skew[0, 2], skew[1, 0]])
