"""`check` lets a sound environment pass and names each fault of an unsound one."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from pirl.data.robots import get_robot, make_robot
from pirl.envs import Context, GymConfig, GymEnv, Outcome, RobotEnv, check
from pirl.errors import EnvError
from pirl.rollout.check import check_env, expected_of

POINT = get_robot("synthetic")


class Point(RobotEnv):
    """A sound environment: two tasks, a state, a picture, ten steps."""

    robot, tasks, num_inits, max_steps, fps, action_dim = "synthetic", ("left", "right"), 4, 10, 10, 2

    def begin(self, context: Context) -> None:
        self.task, self.steps = context.task, 0
        self.place = np.random.default_rng(context.init).normal(size=2)

    def act(self, action: np.ndarray) -> Any:
        self.place += 0.1 * action
        self.steps += 1
        return Outcome(0.0, False, self.steps >= self.max_steps, False)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        seen = {"state": self.place.copy(), "prompt": self.task}
        return seen | ({"image": picture} if pictures else {})


class Looks(Point):
    """Changes what is seen."""

    change: Any

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        return type(self).change(self, super().observe(pictures=pictures), pictures)


def looks(change: Any) -> RobotEnv:
    return type("Looks", (Looks,), {"change": staticmethod(change)})()


def test_a_sound_environment_passes() -> None:
    report = check_env(Point(), POINT)
    assert report == check_env(Point())
    assert report.notes == ()
    assert report.steps == 20
    assert report.observation["image"] == "uint8 of shape (4, 4, 3)"
    assert "2 task(s)" in str(report)
    assert check(Point()) == report


def test_what_is_strange_is_noted() -> None:
    black = looks(lambda env, seen, pictures: seen | ({"image": np.zeros((4, 4, 3), np.uint8)} if pictures else {}))
    assert check(black).notes == ("picture 'image' has one colour throughout",)
    still = looks(lambda env, seen, pictures: seen | {"state": np.ones(2)})
    assert check(still).notes == ("initial states 0 and 1 look the same",)


def test_gymnasium_environments() -> None:
    config = GymConfig(id="Pendulum-v1", robot="pendulum", success_key=None, render_key=None)
    robot = make_robot(name="pendulum", state_dim=3, action_dim=1)
    assert check_env(GymEnv(config), robot).observation["state"] == "float32 of shape (3,)"
    with pytest.raises(EnvError, match=r"state state has shape \(3,\); robot 'other' needs \(4,\)"):
        check_env(GymEnv(config), make_robot(name="other", state_dim=4, action_dim=1))
    with pytest.raises(EnvError, match=r"PassiveEnvChecker|OrderEnforcing|TimeLimit"):
        check(gymnasium.make("Pendulum-v1"))


NAN = np.array([0.0, np.nan])
LOOK_FAULTS = {
    "flat": (lambda env, seen, pictures: seen["state"], "observe returns ndarray, expected a dict"),
    "no prompt": (lambda env, seen, pictures: seen | {"prompt": ""}, "'prompt' is str '', expected a text"),
    "list": (lambda env, seen, pictures: seen | {"state": [1.0, 2.0]}, r"'state' is list \[1.0, 2.0\]"),
    "text": (lambda env, seen, pictures: seen | {"name": np.array("x")}, r"'name' is <U1 of shape \(\)"),
    "nan": (lambda env, seen, pictures: seen | {"state": NAN}, r"'state' of shape \(2,\) is not finite, first at .*1"),
    "channels": (
        lambda env, seen, pictures: seen | {"image": np.zeros((3, 8, 8), np.uint8)},
        r"picture 'image' has shape \(3, 8, 8\), expected \[height, width, 3\][\s\S]*channels come last",
    ),
    "float": (
        lambda env, seen, pictures: seen | {"image": np.zeros((8, 8, 3))},
        "picture 'image' is float64, expected",
    ),
    "batch": (
        lambda env, seen, pictures: seen | {"image": np.zeros((1, 8, 8, 3), np.uint8)},
        r"\(1, 8, 8, 3\), expect",
    ),
    "renamed": (
        lambda env, seen, pictures: {("cam" if key == "image" else key): value for key, value in seen.items()},
        "no picture for camera base_0_rgb of robot 'synthetic': looked for image; found cam",
    ),
    "stateless": (
        lambda env, seen, pictures: {key: value for key, value in seen.items() if key != "state"},
        "no state for robot 'synthetic': looked for .* or state or .*; found image, prompt",
    ),
    "size": (
        lambda env, seen, pictures: seen | {"state": np.zeros(5)},
        r"state state has shape \(5,\); robot 'synthetic' needs \(2,\)",
    ),
    "always": (
        lambda env, seen, pictures: seen | {"image": np.zeros((4, 4, 3), np.uint8)},
        r"observe\(pictures=False\) still gives picture 'image'",
    ),
    "alias": (
        lambda env, seen, pictures: seen | {"state": env.place},
        "'state' changed after it was handed out by up to",
    ),
    "looking moves": (
        lambda env, seen, pictures: seen | {"state": np.array([0.0, next(COUNTER)])},
        r"'state' differs with observe\(pictures=False\) by up to 1",
    ),
}
COUNTER = iter(range(10**6))


@pytest.mark.parametrize("name", LOOK_FAULTS)
def test_faults_of_looking(name: str) -> None:
    global COUNTER  # noqa: PLW0603
    COUNTER = iter(range(10**6))
    change, message = LOOK_FAULTS[name]
    with pytest.raises(EnvError, match=message):
        check_env(looks(change), POINT)


def acts(**outcome: Any) -> RobotEnv:
    """An environment whose outcomes differ in one entry."""
    return type("Acts", (Point,), {"act": lambda self, action: Point.act(self, action)._replace(**outcome)})()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (acts(reward=np.nan), "reward of step 0 is nan"),
        (acts(terminated=1), "terminated of step 0 is 1, expected a bool"),
        (acts(success=None), "success of step 0 is None"),
        (acts(truncated=False), "no end after 10 steps"),
        (type("Tuple", (Point,), {"act": lambda self, action: (0.0, False)})(), "act returns tuple"),
        (type("Named", (Point,), {"tasks": ("a", "a")})(), "names that differ"),
        (type("Tasks", (Point,), {"tasks": ["a"]})(), r"tasks is \['a'\], expected a tuple"),
        (type("Limit", (Point,), {"max_steps": None})(), "max_steps is None, expected a whole number"),
        (type("Inits", (Point,), {"num_inits": 0})(), "num_inits is 0"),
        (
            type("Space", (Point,), {"action_space": gymnasium.spaces.Box(-1, 1, (3,))})(),
            r"shape \(3,\), action_dim is 2",
        ),
        (type("Empty", (Point,), {"action_space": gymnasium.spaces.Box(1, 1, (2,))})(), "empty range"),
        (type("Wide", (Point,), {"action_dim": 3})(), r"actions of shape \(3,\); robot 'synthetic' has \(2,\)"),
    ],
)
def test_faults_of_acting(env: RobotEnv, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        check_env(env, POINT)


def test_a_start_that_remembers_is_found() -> None:
    class Drifts(Point):
        def begin(self, context: Context) -> None:
            place = getattr(self, "place", np.zeros(2))
            super().begin(context)
            self.place = self.place + 1e-9 * place

    with pytest.raises(EnvError, match="differs between two episodes of the same context"):
        check(Drifts())


def test_expectations_are_the_robots() -> None:
    libero = expected_of(get_robot("libero"))
    assert (libero.state_dim, libero.action_dim) == (8, 7)
    assert "observation/image" in libero.cameras["base_0_rgb"]
    assert expected_of(get_robot("aloha")).optional_cameras == ("left_wrist_0_rgb", "right_wrist_0_rgb")
