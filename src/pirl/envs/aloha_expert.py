"""Scripted experts for both ALOHA tasks: gripper waypoints followed by inverse kinematics.

They know the objects' poses, which the policy does not. Dials make them worse on purpose, for diverse demonstrations
and room for reinforcement learning to improve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.spatial.transform import Rotation

from pirl.envs.aloha import AlohaEnv
from pirl.envs.config import AlohaConfig
from pirl.envs.recording import act_out
from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, NotNegative, Share
from pirl.records import Array, Context, Rollout


@dataclass(frozen=True, kw_only=True)
class AlohaDials(Checked):
    """How well, and how fast, the experts do it."""

    waypoint_noise: NotNegative = 0.0
    """Metres (standard deviation) by which the place where the arms meet varies."""
    grasp_error: NotNegative = 0.0
    """Metres (standard deviation) by which each arm reaches beside its object, along the table: at 0.02 about half
    of the transfers fail."""
    action_noise: NotNegative = 0.0
    """Radians (standard deviation) added to the target of every joint at every step."""
    time_scale: Annotated[float, Bounds(low=0.2, high=2)] = 1.0
    """Duration, as a share of the script's own. The transfer succeeds at 0.5 as well; the insertion less often below
    1."""
    miss: Share = 0.0
    """Share of the episodes in which the arms reach 5 cm beside their objects: a wrong choice, not imprecision."""
    let_go: Share = 0.0
    """Share of the episodes in which the right arm opens its gripper before the two meet."""
    retry: Share = 0.0
    """Share of the episodes in which the right arm first closes its gripper 5 cm beside the cube, and then starts over:
    a late success. Of the transfer only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.miss + self.retry > 1:
            raise ConfigError(f"miss is {self.miss} and retry {self.retry}", hint="together they are at most 1")


class AlohaExpert:
    """Plans a whole episode at its start, then replays the plan."""

    def __init__(self, env: AlohaEnv, dials: AlohaDials | None = None, *, seed: int = 0) -> None:
        """`seed` and the episode determine the noise."""
        self._env, self._dials, self._seed = env, dials or AlohaDials(), seed
        if self._dials.retry and env.config.task != "transfer":
            raise ConfigError(f"retry is {self._dials.retry} in {env.config.task}", hint="only the transfer knows it")
        self._arms = (_Arm(env.model, "left"), _Arm(env.model, "right"))
        self._plan: Float[Array, "T 14"] = np.zeros((0, 14))

    def plan(self, context: Context, number: int = 0) -> None:
        """Plan from the environment's state just after `context` began; `number` varies the noise."""
        dials, rng = self._dials, np.random.default_rng([self._seed, number, context.init])
        joints = self._env.observe(pictures=False)["state"].astype(np.float64)
        starts = (joints[:6], joints[7:13])
        places = self._env.objects[:, :3]
        places[:, :2] += rng.normal(0, dials.grasp_error, (len(places), 2))
        choices = np.random.default_rng([self._seed, number, context.init, 1])  # separate: does not shift the noise
        choice, opening = choices.random(2)
        angle = choices.uniform(0, 2 * np.pi)
        beside = _BESIDE * np.array([np.cos(angle), np.sin(angle), 0.0])
        misses, retries = choice < dials.miss, dials.miss <= choice < dials.miss + dials.retry
        if misses:
            places += beside
        meeting = rng.normal(0, dials.waypoint_noise, 3)
        home = [arm.pose(start) for arm, start in zip(self._arms, starts, strict=True)]
        script = _transfer if self._env.config.task == "transfer" else _insertion
        ways = script(home, places, meeting)
        if retries:
            ways = _second_attempt(ways, home[1], places + beside)
        times = np.arange(self._env.max_steps) / dials.time_scale
        plans = [arm.follow(start, way, times) for arm, start, way in zip(self._arms, starts, ways, strict=True)]
        self._plan = np.concatenate(plans, axis=1)
        noise = rng.normal(0, dials.action_noise, self._plan.shape)
        noise[:, [6, 13]] = 0
        self._plan += noise
        if opening < dials.let_go:
            self._plan[times >= _LET_GO[self._env.config.task] + retries * _ATTEMPT, 13] = 1.0

    def action(self, step: int) -> Float[Array, "14"]:
        """The plan's action at a step; the last action after its end."""
        return self._plan[min(step, len(self._plan) - 1)]


def demonstrate(
    config: AlohaConfig,
    contexts: Sequence[Context],
    *,
    dials: AlohaDials | None = None,
    seed: int = 0,
    pictures: bool = True,
) -> list[Rollout]:
    """Record one episode from each context, successful or not, with images of every step or none."""
    env = AlohaEnv(config)
    expert = AlohaExpert(env, dials, seed=seed)

    def choose(step: int) -> Float[Array, "14"]:
        if step == 0:
            expert.plan(context, number)
        return expert.action(step)

    rollouts = []
    try:
        for number, context in enumerate(contexts):
            rollouts.append(act_out(env, context, choose, number=number, pictures=pictures))
    finally:
        env.close()
    return rollouts


class _Pose(NamedTuple):
    """Position of a gripper's fingertips, and its rotation."""

    place: Float[Array, "3"]
    turn: Rotation

    def shifted(self, x: float = 0.0, z: float = 0.0) -> "_Pose":
        """The pose moved by (x, 0, z)."""
        return _Pose(self.place + np.array([x, 0.0, z]), self.turn)


class _Point(NamedTuple):
    """A waypoint: pose and gripper opening at a step of the script."""

    step: float
    pose: _Pose
    gripper: float


_Way = list[_Point]

_DOWN = 60.0
"""Downward pitch of a gripper that grasps from the table, in degrees."""
_BESIDE = 0.05
"""Distance from its object at which a missing arm grasps, in metres; the cube is 4 cm wide."""
_LET_GO = {"transfer": 150, "insertion": 175}
"""Steps of the scripts at which the right arm has lifted its object and has not met the left one yet."""
_ATTEMPT = 80.0
"""Duration of an attempt at the wrong place in steps of the script, until the gripper is open above it again."""
_FOREARM_COST = 1e-3
"""Weight of the forearm's squared angle relative to the gripper's squared errors (metres and radians)."""
_CUBE_HEIGHT, _PEG_HEIGHT, _SOCKET_HEIGHT = 0.02, 0.01, 0.022
"""Heights of the resting objects' centres above the table, in metres; episodes start with the objects in the air."""


def _transfer(home: list[_Pose], places: Float[Array, "1 3"], noise: Float[Array, "3"]) -> tuple[_Way, _Way]:
    """The right arm lifts the cube to the middle, the left one takes it from the side."""
    level = Rotation.from_euler("x", 90, degrees=True)
    grasping = Rotation.from_euler("z", 180, degrees=True) * Rotation.from_euler("y", _DOWN, degrees=True)
    middle = np.array([0.0, 0.5, 0.25]) + noise
    grasp, meet = _Pose(np.array([*places[0, :2], _CUBE_HEIGHT]), grasping), _Pose(middle, grasping)
    beside = _Pose(middle, level).shifted(-0.005, -0.015)
    aside = _Pose(middle, level).shifted(-0.12, -0.015)
    left = [
        _Point(0, home[0], 0),
        _Point(80, aside, 1),
        _Point(165, aside, 1),
        _Point(195, beside, 1),
        _Point(215, beside, 0),
        _Point(230, beside, 0),
        _Point(260, aside, 0),
    ]
    right = [
        _Point(0, home[1], 0),
        _Point(60, grasp.shifted(z=0.08), 1),
        _Point(90, grasp, 1),
        _Point(115, grasp, 0),
        _Point(160, meet, 0),
        _Point(220, meet, 0),
        _Point(232, meet, 1),
        _Point(260, meet.shifted(0.12, 0.05), 1),
    ]
    return left, right


def _second_attempt(ways: tuple[_Way, _Way], home: _Pose, places: Float[Array, "1 3"]) -> tuple[_Way, _Way]:
    """The transfer after an attempt at another place: all that follows it comes later."""
    left, right = ways
    wrong = _Pose(np.array([*places[0, :2], 2.5 * _CUBE_HEIGHT]), right[1].pose.turn)  # higher, not to push the cube
    above = wrong.shifted(z=0.05)
    attempt = [
        _Point(0, home, 0),
        _Point(60, above, 1),
        _Point(90, wrong, 1),
        _Point(110, wrong, 0),
        _Point(125, above, 0),
        _Point(135, above, 1),
    ]
    later = [point._replace(step=point.step + _ATTEMPT) for point in right[1:]]
    waiting = [point._replace(step=point.step + _ATTEMPT) for point in left[2:]]
    return [*left[:2], *waiting], [*attempt, *later]


def _insertion(home: list[_Pose], places: Float[Array, "2 3"], noise: Float[Array, "3"]) -> tuple[_Way, _Way]:
    """Both arms lift their objects to the middle and push them together."""
    middle = np.array([0.0, 0.5, 0.145]) + noise
    down = Rotation.from_euler("y", _DOWN, degrees=True)

    # The peg hangs lower in its gripper than the socket's hole does, by 16 to 26 mm, and the hole leaves 8 mm of play.
    def way(start: _Pose, place: Array, height: float, turn: Rotation, side: float, lift: float) -> _Way:
        thing = _Pose(np.array([*place[:2], height]), turn)
        grasp = thing.shifted(z=-0.005)
        apart, together = (_Pose(middle, turn).shifted(side * gap, lift) for gap in (0.12, 0.03))
        return [
            _Point(0, start, 0),
            _Point(68, thing.shifted(z=0.08), 1),
            _Point(102, grasp, 1),
            _Point(132, grasp, 0),
            _Point(183, apart, 0),
            _Point(204, apart, 0),
            _Point(255, together, 0),
        ]

    peg, socket = places
    left = way(home[0], socket, _SOCKET_HEIGHT, down, -1.0, 0.0)
    right = way(home[1], peg, _PEG_HEIGHT, Rotation.from_euler("z", 180, degrees=True) * down, 1.0, 0.021)
    return left, right


def _interpolate(way: _Way, time: float) -> tuple[_Pose, float]:
    """Pose and gripper at a time: linear between waypoints (rotations at constant rate), constant after the last."""
    for before, after in pairwise(way):
        if time <= after.step:
            share = (time - before.step) / (after.step - before.step)
            place = before.pose.place + share * (after.pose.place - before.pose.place)
            turn = before.pose.turn * Rotation.from_rotvec(
                share * (before.pose.turn.inv() * after.pose.turn).as_rotvec()
            )
            return _Pose(place, turn), before.gripper + share * (after.gripper - before.gripper)
    return way[-1].pose, float(way[-1].gripper)


class _Arm:
    """One arm's kinematics, on its own MjData so that planning does not move the simulation."""

    _FINGERTIPS = np.array([0.135, 0.0, 0.0])
    """Offset from the gripper's link to the point between its fingertips."""

    def __init__(self, model: Any, side: str) -> None:
        import mujoco

        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        self._body = model.body(f"vx300s_{side}/gripper_link").id
        self._joints = np.arange(6) + (0 if side == "left" else 8)
        self._low, self._high = model.jnt_range[self._joints].T
        self._jacobian = np.zeros((6, model.nv))

    def pose(self, joints: Float[Array, "6"]) -> _Pose:
        """Pose of the fingertips with these joints."""
        self._data.qpos[self._joints] = joints
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_comPos(self._model, self._data)
        matrix = self._data.xmat[self._body].reshape(3, 3)
        return _Pose(self._data.xpos[self._body] + matrix @ self._FINGERTIPS, Rotation.from_matrix(matrix))

    def towards(self, joints: Float[Array, "6"], goal: _Pose, *, iterations: int = 3) -> Float[Array, "6"]:
        """Joints closer to a pose, by damped least squares, which stay stable for poses out of reach.

        Turning the forearm has a cost. Without it, a wrist that passes its singular straight pose flips by half a turn
        to a random side, and a policy cannot imitate both.
        """
        rest = _FOREARM_COST * np.diag([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        for _ in range(iterations):
            pose = self.pose(joints)
            error = np.concatenate([goal.place - pose.place, (goal.turn * pose.turn.inv()).as_rotvec()])
            self._mujoco.mj_jac(self._model, self._data, self._jacobian[:3], self._jacobian[3:], pose.place, self._body)
            J = self._jacobian[:, self._joints]
            step = np.linalg.solve(J.T @ J + 1e-4 * np.eye(6) + rest, J.T @ error - rest @ joints)
            joints = np.clip(joints + np.clip(step, -0.15, 0.15), self._low, self._high)
        return joints

    def follow(self, joints: Float[Array, "6"], way: _Way, times: Float[Array, "T"]) -> Float[Array, "T 7"]:
        """Joint targets and gripper at `times` along the waypoints."""
        rows = []
        for time in times:
            goal, gripper = _interpolate(way, time)
            joints = self.towards(joints, goal)
            rows.append([*joints, gripper])
        return np.array(rows)
