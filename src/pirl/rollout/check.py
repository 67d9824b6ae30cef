"""Checks that an environment provides the keys and sizes that a robot's policy needs."""

from pirl.data.robots import Robot, get_robot
from pirl.envs.checker import Expected, Report, check
from pirl.envs.env import RobotEnv


def expected_of(robot: Robot) -> Expected:
    """The keys and shapes a robot reads, in a form that environments understand."""
    return Expected(
        robot=robot.name,
        state_keys=robot.state_keys,
        state_dim=robot.state_dim,
        action_dim=robot.action_dim,
        cameras=robot.cameras,
        optional_cameras=robot.optional_cameras,
    )


def check_env(env: RobotEnv, robot: Robot | None = None, *, steps: int = 20) -> Report:
    """Step an environment and compare its observations with what `robot` reads (None: the environment's robot)."""
    return check(env, expected_of(get_robot(env.robot) if robot is None else robot), steps=steps)
