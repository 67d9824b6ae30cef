"""What a policy is shown when it acts is what it was shown in training; one program answers everybody alike."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.data.config import DataConfig
from pirl.data.create import create_acrlpd_data_loader, create_transform
from pirl.data.normalize import NormStats
from pirl.data.resize import pad
from pirl.data.robots import get_robot
from pirl.data.transforms import Transform
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.names import BASE_CAMERA, LEFT_WRIST_CAMERA
from pirl.records import Context, Episode, Rollout
from pirl.rollout.policy import ChunkPolicy, model_inputs, replay_frames
from pirl.rollout.pool import EnvInfo
from pirl.rollout.record import RolloutRecorder
from pirl.training.config import AdamW, ConstantSchedule

STEPS = 7


def stats_of(dim: int, seed: int) -> NormStats:
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=dim)
    low, high = mean - rng.uniform(1, 2, dim), mean + rng.uniform(1, 2, dim)
    return NormStats(mean=mean, std=rng.uniform(0.5, 2, dim), q01=low, q99=high)


def rollout_of(robot: str, cameras: Mapping[str, tuple[int, int]], number: int = 0) -> Rollout:
    """An episode of noise; every state is another one."""
    kind, rng = get_robot(robot), np.random.default_rng(number)
    last = np.arange(STEPS) == STEPS - 1
    return Rollout(
        context=Context("wipe the table", number),
        number=number,
        episode=Episode(
            task=f"wipe table {number}",
            state=rng.uniform(0.1, 0.9, (STEPS, kind.state_dim)).astype(np.float32),
            actions=rng.uniform(0.1, 0.9, (STEPS, kind.action_dim)).astype(np.float32),
            rewards=last.astype(np.float32),
            terminated=last,
            truncated=np.zeros(STEPS, bool),
            success=True,
        ),
        starts=np.arange(STEPS),
        frames={key: rng.integers(0, 256, (STEPS, *size, 3), np.uint8) for key, size in cameras.items()},
        frame_steps=np.arange(STEPS),
    )


def observation(rollout: Rollout, step: int) -> dict[str, Any]:
    """What the environment showed at a step, in nested keys, as ALOHA's does."""
    seen: dict[str, Any] = {"state": rollout.episode.state[step], "prompt": rollout.episode.task}
    for key, frames in rollout.frames.items():
        *parents, name = key.split("/")
        place = seen
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = frames[step]
    return seen


@pytest.mark.parametrize(
    ("robot", "cameras", "slots", "pi05", "suffixes"),
    [
        ("aloha", {"images/cam_high": (46, 60)}, (BASE_CAMERA,), True, ()),  # wrist cameras are optional, and absent
        ("tabletop", {"observation/image": (24, 24), "observation/wrist_image": (30, 18)}, None, False, ()),
        ("tabletop", {"observation/image": (24, 24), "observation/wrist_image": (30, 18)}, None, True, (", good", "!")),
    ],
)
def test_acting_shows_the_model_what_training_did(
    robot: str, cameras: dict, slots: tuple[str, ...] | None, pi05: bool, suffixes: tuple[str, ...], tmp_path: Path
) -> None:
    kind, horizon = get_robot(robot), 3
    rollouts = [rollout_of(robot, cameras, number) for number in range(2)]
    info = EnvInfo(robot=robot, tasks=("t",), num_inits=None, max_steps=9, fps=5, action_dim=kind.action_dim)
    with RolloutRecorder(tmp_path / "data", info=info) as recorder:
        for rollout in rollouts:
            recorder.add(rollout)
    config = DataConfig(
        repo_ids=(str(tmp_path / "data"),),
        robot=robot,
        tokenizer="byte",
        cache="ram",
        exact_resize=True,
        prefetch=0,
    )
    transform = create_transform(
        config,
        horizon=horizon,
        norm_stats={"state": stats_of(kind.state_dim, 1), "actions": stats_of(kind.action_dim, 2)},
        quantile=pi05,
        discrete_state=pi05,
        token_len=150,
        image_size=32,
        prompt_suffixes=suffixes,
    )
    sizes = dict(horizon=horizon, discount=0.9, batch_size=16)
    with create_acrlpd_data_loader(config, transform=transform, suffixes=bool(suffixes), **sizes) as loader:
        batch, used = loader.sample_batch(), loader.cameras
    assert used == (slots or tuple(kind.cameras))
    states = np.concatenate([rollout.episode.state for rollout in rollouts])
    shown = [observation(rollout, step) for rollout in rollouts for step in range(STEPS)]
    raw_states, inputs = model_inputs(transform, shown, used)
    np.testing.assert_array_equal(raw_states.astype(np.float32), states)
    # Which step each sample of the batch is follows from its state, which no two steps share.
    trained = batch["observations"]
    rows = [int(np.flatnonzero((inputs["state"] == state).all(axis=1)).item()) for state in trained["state"]]
    assert len(set(rows)) > 4
    assert set(trained) == set(inputs)
    if suffixes:  # Acting adds the first; training reads the bare instruction, and all of them.
        prompts, plain = batch["suffixed_prompts"], replace(transform, suffixes=())
        for number, words in enumerate(suffixes):
            other = [seen | {"prompt": seen["prompt"] + words} for seen in shown]
            for name, tokens in prompts.items():
                np.testing.assert_array_equal(tokens[:, number], model_inputs(plain, other, used)[1][name][rows])
        for name, tokens in prompts.items():
            np.testing.assert_array_equal(tokens[:, 0], inputs[name][rows])
        inputs = model_inputs(plain, shown, used)[1]
        np.testing.assert_array_equal(
            transform.train_sample(shown[0] | {"actions": np.zeros((horizon, kind.action_dim))})["tokenized_prompt"],
            inputs["tokenized_prompt"][0],
        )
    jax.tree.map(lambda left, right: np.testing.assert_array_equal(left, right[rows]), trained, inputs)
    # And it is what OpenPI's own input for one observation says, whose pictures have borders.
    for row, raw in enumerate(shown):
        single = transform.observation(raw)
        np.testing.assert_array_equal(single["state"], inputs["state"][row])
        if not suffixes:
            np.testing.assert_array_equal(single["tokenized_prompt"], inputs["tokenized_prompt"][row])
        for slot in used:
            np.testing.assert_array_equal(single["image"][slot], pad(inputs["image"][slot][row], (32, 32)))
        assert [slot for slot, real in single["image_mask"].items() if real] == list(used)
    # A replay buffer holds them alike.
    frames = replay_frames(transform, rollouts[0].frames, used, borders=False)
    for slot in used:
        np.testing.assert_array_equal(frames[slot], inputs["image"][slot][:STEPS])


def test_a_camera_the_environment_lacks_is_named() -> None:
    transform = Transform(robot=get_robot("tabletop"), norm_stats=None, tokenizer=None)
    raw = {"observation/state": np.zeros(4, np.float32), "observation/image": np.zeros((24, 24, 3), np.uint8)}
    with pytest.raises(ConfigError, match=r"looks through camera left_wrist_0_rgb.*its pictures: observation/image"):
        model_inputs(transform, [raw], (BASE_CAMERA, LEFT_WRIST_CAMERA))
    _, inputs = model_inputs(transform, [raw], ())
    assert inputs["image"] == {}


@pytest.fixture(scope="module")
def agent() -> BC:
    learner = Learner(tx=make_optimizer(AdamW(), make_schedule(ConstantSchedule())), ema_decay=None)
    policy = MLPFlow(MLPFlowConfig(state_dim=2, action_dim=2, horizon=4, hidden=(32, 32)))
    return BC(policy=policy, config=BCConfig(ema_decay=None), policy_learner=learner, real_action_dim=2, flow_steps=3)


def chunk_policy(agent: BC, counted: list[int], *, batch_size: int = 5) -> ChunkPolicy:
    def act(state: Any, observation: Any, keys: Any) -> Any:
        counted.append(1)  # runs when it is traced, not when it is called
        return agent.act(state, observation, keys)

    transform = Transform(
        robot=replace(get_robot("synthetic"), cameras={}),
        norm_stats={"state": stats_of(2, 3), "actions": stats_of(2, 4)},
        tokenizer=None,
        action_dim=2,
    )
    policy = ChunkPolicy(act, transform, batch_size=batch_size, execute=2, cameras=())
    return policy.use(agent.init(jax.random.key(1)), jax.random.key(7))


def test_a_plan_depends_on_its_own_row_alone_and_on_one_program(agent: BC) -> None:
    traces: list[int] = []
    policy = chunk_policy(agent, traces)
    states = {slot: {"state": np.random.default_rng(slot).normal(size=2)} for slot in range(5)}
    rows = {slot: (10 + slot, 2 * slot) for slot in range(5)}
    together = policy.plan(states, rows)
    assert {slot: plan.shape for slot, plan in together.items()} == dict.fromkeys(range(5), (4, 2))
    for slots in ([3], [4, 3], [3, 0, 1], [2, 1, 0, 4, 3]):
        some = policy.plan({slot: states[slot] for slot in slots}, rows)
        assert list(some) == slots
        for slot in slots:
            np.testing.assert_allclose(some[slot], together[slot], rtol=1e-5, atol=1e-6)
    assert len(traces) == 1
    # Another episode or step is other noise; the same numbers in another slot are the same noise.
    other = policy.plan({3: states[3]}, {3: (13, 7)})[3]
    assert np.abs(other - together[3]).max() > 0.05
    moved = policy.plan({0: states[3]}, {0: rows[3]})[0]
    np.testing.assert_allclose(moved, together[3], rtol=1e-5, atol=1e-6)
    policy.use(agent.init(jax.random.key(2)), jax.random.key(7))
    assert np.abs(policy.plan({3: states[3]}, rows)[3] - together[3]).max() > 0.01
    assert len(traces) == 1


def test_plans_are_in_the_robots_units(agent: BC) -> None:
    policy = chunk_policy(agent, [])
    state = np.array([0.3, -0.2])
    plan = policy.plan({0: {"state": state}}, {0: (0, 0)})[0]
    _, inputs = model_inputs(policy.transform, [{"state": state}] * 5, ())
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), 0)
    chunk = agent.act(agent.init(jax.random.key(1)), Observation.from_dict(inputs), jax.numpy.stack([key] * 5))[0]
    stats = stats_of(2, 4)
    np.testing.assert_allclose(plan, np.asarray(chunk) * (stats.std + 1e-6) + stats.mean, rtol=1e-4, atol=1e-5)


def test_limits(agent: BC) -> None:
    policy = chunk_policy(agent, [], batch_size=2)
    assert policy.plan({}, {}) == {}
    with pytest.raises(ConfigError, match="3 observations for a policy compiled for 2"):
        policy.plan({slot: {"state": np.zeros(2)} for slot in range(3)}, {slot: (slot, 0) for slot in range(3)})
    with pytest.raises(ConfigError, match="0 executed steps"):
        ChunkPolicy(agent.act, policy.transform, batch_size=2, execute=0, cameras=())
