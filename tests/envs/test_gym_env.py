"""Any gymnasium environment keeps the contract: its seeds, limits, outcomes, keys and pictures arrive unchanged."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pirl.envs import Context, GymConfig, GymEnv, make_batch, make_env
from pirl.errors import EnvError
from pirl.rollout.pool import Advanced, LocalPool, Started


class Walk(gymnasium.Env):
    """A point that is pushed along; nested observation, success at 1, and it may be left again."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, speed: float = 1.0) -> None:
        self.render_mode, self.speed = render_mode, speed
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({})
        self.place = np.zeros(2)

    def look(self) -> dict[str, Any]:
        picture = np.full((4, 6, 3), int(100 * abs(self.place[0])) % 256, np.uint8)
        return {"agent": {"pos": self.place}, "pixels": {"top": picture}, "clock": np.zeros(1)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place[:] = self.np_random.uniform(-0.1, 0.1, 2)
        return self.look(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float32
        self.place += self.speed * action
        info = {"stats": {"solved": np.bool_(self.place[0] > 1)}}
        return self.look(), float(self.place[0]), bool(self.place[1] > 5), False, info

    def render(self) -> Any:
        return None if self.render_mode is None else np.full((8, 8, 3), 7, np.uint8)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register(id="Walk-v0", entry_point=Walk, max_episode_steps=5)
    yield
    del gymnasium.registry["Walk-v0"]


KEYS = (("state", "agent/pos"), ("image", "pixels/top"))


def walk(**changes: Any) -> GymConfig:
    return GymConfig(
        **{"id": "Walk-v0", "robot": "synthetic", "observation_keys": KEYS, "success_key": "stats/solved", **changes}
    )


def test_keys_seed_and_prompt() -> None:
    env = make_env(walk(prompt="go right"))
    assert (env.tasks, env.num_inits, env.max_steps, env.action_dim) == (("go right",), None, 5, 2)
    env.begin(Context("go right", 3))
    first = env.observe()
    assert set(first) == {"state", "image", "prompt"}
    assert first["prompt"] == "go right"
    np.testing.assert_array_equal(first["state"], np.random.Generator(np.random.PCG64(3)).uniform(-0.1, 0.1, 2))
    env.act(np.ones(2, np.float32))
    assert abs(first["state"]).max() < 0.2, "an observation is a copy, whatever the environment hands out"
    assert set(env.observe(pictures=False)) == {"state", "prompt"}
    env.begin(Context("go right", 3))
    np.testing.assert_array_equal(env.observe()["state"], first["state"])


def test_all_keys_without_a_mapping() -> None:
    env = GymEnv(walk(observation_keys=()))
    observation, info = env.reset(seed=0)
    assert set(observation) == {"agent/pos", "pixels/top", "clock", "prompt"}
    assert observation["prompt"] == info["task"] == "Walk-v0"


def test_outcomes() -> None:
    """Reward passes through, success is sticky, time is truncation and an end is termination, never both."""
    env = GymEnv(walk())
    env.begin(Context("Walk-v0", 0))
    right, left, up = (np.array(x, np.float32) for x in ((1, 0), (-1, 0), (0, 1)))
    outcomes = [env.act(action) for action in (right, right, left, left, up)]
    assert [outcome.success for outcome in outcomes] == [outcomes[0].reward > 1, True, True, True, True]
    assert outcomes[1].reward == pytest.approx(2, abs=0.1)
    assert outcomes[-1].truncated
    assert not any(outcome.terminated for outcome in outcomes)
    env.begin(Context("Walk-v0", 0))
    assert not env.act(left).success, "a new episode has not succeeded"
    fast = GymEnv(walk(options=(("speed", 9.0),)))
    fast.begin(Context("Walk-v0", 0))
    assert fast.act(up)[1:3] == (True, False)


def test_time_limit_can_be_changed() -> None:
    for limit in (2, 8):
        env = GymEnv(walk(max_steps=limit))
        env.begin(Context("Walk-v0", 0))
        ends = [env.act(np.zeros(2, np.float32)).truncated for _ in range(limit)]
        assert ends == [False] * (limit - 1) + [True]


def test_given_environment_and_its_limit() -> None:
    with pytest.raises(EnvError, match="no time limit"):
        GymEnv(walk(), Walk())
    env = GymEnv(walk(max_steps=1), Walk(speed=2.0))
    env.begin(Context("Walk-v0", 0))
    outcome = env.act(np.array([1, 0], np.float32))
    assert outcome.truncated
    assert outcome.success


def test_rendered_picture() -> None:
    env = GymEnv(walk(observation_keys=KEYS[:1], render_key="image"))
    env.begin(Context("Walk-v0", 0))
    assert env.observe()["image"].shape == (8, 8, 3)
    assert "image" not in env.observe(pictures=False)
    silent = GymEnv(walk(render_key="image", max_steps=3), Walk())
    silent.begin(Context("Walk-v0", 0))
    with pytest.raises(EnvError, match="rgb_array"):
        silent.observe()


def test_missing_success_is_an_error_not_a_failure() -> None:
    env = GymEnv(walk(success_key="is_success", max_steps=2))
    env.begin(Context("Walk-v0", 0))
    assert not env.act(np.zeros(2, np.float32)).success
    with pytest.raises(EnvError, match=r"without 'is_success' in info; it has stats/solved"):
        env.act(np.zeros(2, np.float32))
    ends = GymEnv(walk(success_key=None, options=(("speed", 9.0),)))
    ends.begin(Context("Walk-v0", 0))
    assert ends.act(np.array([0, 1], np.float32)) == (pytest.approx(0, abs=0.1), True, False, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "Walk-v1"}, r"'Walk-v1'[\s\S]*similar are: Walk-v0"),
        ({"id": "no_such_module:Walk-v0"}, "no_such_module"),
        ({"options": (("colour", "red"),)}, "colour"),
        ({"id": "CartPole-v1"}, r"Discrete\(2\); expected a vector"),
    ],
)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        GymEnv(walk(**config))


def test_bad_use() -> None:
    env = GymEnv(walk(observation_keys=(("state", "agent/position"),)))
    with pytest.raises(EnvError, match="before the first episode"):
        env.act(np.zeros(2, np.float32))
    env.begin(Context("Walk-v0", 0))
    with pytest.raises(EnvError, match=r"no 'agent/position'; it has agent/pos, clock, pixels/top"):
        env.observe()
    with pytest.raises(EnvError, match="unknown task"):
        env.check_context(Context("fly", 0))


def test_pendulum_through_a_pool() -> None:
    """A vector observation is the state; the id may name its module; the pool steps it as any other."""
    config = GymConfig(id="gymnasium.envs:Pendulum-v1", robot="pendulum", prompt="swing up", max_steps=6)
    own = gymnasium.make("Pendulum-v1")
    start, _ = own.reset(seed=11)
    with LocalPool(GymConfig(**{**vars(config), "success_key": None}), 2) as pool:
        started = pool.start({0: Context("swing up", 11), 1: Context("swing up", 12)})
        assert isinstance(started[0], Started)
        np.testing.assert_array_equal(started[0].observation["state"], start)
        chunk = np.full((4, 1), 0.5, np.float32)
        first, second = (pool.advance({0: chunk}, every_picture=False)[0] for _ in range(2))
    assert isinstance(first, Advanced)
    assert isinstance(second, Advanced)
    rewards = [own.step(chunk[0])[1] for _ in range(6)]
    np.testing.assert_allclose(np.concatenate([first.rewards, second.rewards]), rewards, rtol=1e-6)
    assert (first.truncated, second.truncated, second.terminated, second.success) == (False, True, False, False)
    assert make_batch(config, 3).size == 3
