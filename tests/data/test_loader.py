"""The loader: what a batch holds, and that it depends on seed, step and data alone."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from pirl.data.chunks import validate_qchunking_batch_format
from pirl.data.config import DataConfig
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.pool import FrameMemory
from pirl.data.replay import MemorySource, ReplayBuffer
from pirl.errors import ConfigError, DataError
from pirl.records import Episode

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
HORIZON, CRITIC, SIZE, DISCOUNT = 6, 4, 8, 0.9


def make_item(number, steps=9, success=True):
    """An episode whose actions, states and pictures say which episode and step they belong to."""
    step = np.arange(steps)
    where = np.stack([np.full(steps, number), step], axis=1).astype(np.float32)
    last = step == steps - 1
    episode = Episode(
        task=f"task {number}",
        state=where,
        actions=where * [1, 3],
        rewards=step.astype(np.float32),
        terminated=last & success,
        truncated=last & (not success),
        success=success,
    )
    pixels = np.zeros((steps, 4, 6, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = number, step[:, None, None]
    return episode, {camera: pixels + np.uint8(100 * slot) for slot, camera in enumerate(CAMERAS)}


def make_source(count=6, first=0):
    items = [make_item(first + n, steps=5 + n, success=n % 3 > 0) for n in range(count)]
    return MemorySource(cameras=CAMERAS, items=items)


class RelativeTransform:
    """Like a robot's: actions relative to the state, scaled, padded; the prompt as numbers."""

    def low_dim(self, state, actions, prompts):
        out = {
            "state": np.pad(state / 10, ((0, 0), (0, 1))).astype(np.float32),
            "tokenized_prompt": np.array([[int(prompt.split()[1]), 1] for prompt in prompts], np.int32),
            "tokenized_prompt_mask": np.ones((len(prompts), 2), bool),
        }
        if actions is not None:
            relative = (actions - state[:, None]) / 10
            out["actions"] = np.pad(relative, ((0, 0), (0, 0), (0, 1))).astype(np.float32)
        return out


@pytest.fixture
def loader_of():
    loaders = []

    def build(source=None, *, transform=None, replay=None, batch_size=SIZE, **options):
        names = ("next_observations", "sharding", "host_id", "host_count", "tasks")
        arguments = {name: options.pop(name) for name in names if name in options}
        loader = ACRLPDDataLoader(
            make_source() if source is None and replay is None else source,
            transform or RelativeTransform(),
            config=DataConfig(**{"critic_horizon": CRITIC, "prefetch": 0, "seed": 4} | options),
            batch_size=batch_size,
            horizon=HORIZON,
            discount=DISCOUNT,
            replay=replay,
            **arguments,
        )
        loaders.append(loader)
        return loader

    yield build
    for loader in loaders:
        loader.close()


def assert_same(left, right):
    assert sorted(left) == sorted(right)
    for key in left:
        if isinstance(left[key], dict):
            assert_same(left[key], right[key])
        else:
            np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def join(parts):
    """Batches of several hosts, one after the other."""
    return {
        key: join([part[key] for part in parts]) if isinstance(value, dict) else np.concatenate([p[key] for p in parts])
        for key, value in parts[0].items()
    }


def starts(batch, view="observations"):
    """(episode, step) of each sample, read off its pictures."""
    return [(int(p[0, 0, 0]), int(p[0, 0, 1])) for p in np.asarray(batch[view]["image"][CAMERAS[0]])]


@pytest.mark.parametrize(("boundary", "n_step"), [("pad", 1), ("drop", 1), ("pad", 2)])
def test_a_batch_holds_what_happened(loader_of, boundary, n_step):
    source = make_source()
    loader = loader_of(source, boundary=boundary, n_step=n_step, batch_size=64)
    for _ in range(3):
        batch = loader.sample_batch()
        validate_qchunking_batch_format(batch)
        later = starts(batch, "next_observations")
        assert batch["length"].max() == n_step * CRITIC
        for i, (number, t) in enumerate(starts(batch)):
            episode = source.episode(number)
            inside = min(HORIZON, len(episode) - t)
            assert batch["observations"]["state"][i].tolist() == pytest.approx([number / 10, t / 10, 0])
            assert batch["observations"]["tokenized_prompt"][i].tolist() == [number, 1]
            expected = (episode.actions[t : t + inside] - episode.state[t]) / 10
            np.testing.assert_allclose(batch["actions"][i, :inside, :2], expected, rtol=1e-6)
            known = min(CRITIC, inside)
            np.testing.assert_array_equal(batch["critic_actions"][i, :known], batch["actions"][i, :known])
            assert batch["valid"][i].sum() == inside
            length = batch["length"][i]
            assert batch["reward_sum"][i] == pytest.approx(
                sum(DISCOUNT**j * episode.rewards[t + j] for j in range(length)), rel=1e-5
            )
            assert later[i] == (number, min(t + length, len(episode) - 1))
            assert batch["next_observations"]["state"][i, 1] == pytest.approx(later[i][1] / 10)
            for slot, camera in enumerate(CAMERAS):
                pixel = batch["observations"]["image"][camera][i, 0, 0].tolist()
                assert pixel == [number + 100 * slot, t + 100 * slot, 100 * slot]
        assert all(mask.all() for mask in batch["observations"]["image_mask"].values())


def test_borrowed_tails_are_relative_to_their_own_start(loader_of):
    """A tail is lent in the model's space: there it follows the chunk that borrows it, whatever the robot's numbers."""
    loader = loader_of(batch_size=64)
    for _ in range(3):
        batch = loader.sample_batch()
        borrowed = np.arange(CRITIC) >= batch["valid"].sum(axis=1, keepdims=True)
        assert borrowed.any()
        # From step t on, action j is 3 (t + j) against a state of t: the second coordinate is (2 t + 3 j) / 10.
        begun = np.array([t for _, t in starts(batch)])[:, None]
        lent = [2 * t + 3 * (CRITIC - 1) for number, t in starts(batch) if t + CRITIC <= 5 + number]
        expected = np.minimum(2 * begun + 3 * np.arange(CRITIC), max(lent)) / 10
        np.testing.assert_allclose(batch["critic_actions"][..., 1][borrowed], expected[borrowed], atol=0.05)
        np.testing.assert_allclose(batch["critic_actions"][..., 0][borrowed], 0, atol=1e-6)


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_the_batch_does_not_depend_on_the_number_of_hosts(loader_of, hosts):
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=9, max_bytes=10**9)
    for n in range(3):
        replay.append(*make_item(20 + n))
    alone = loader_of(make_source(), replay=replay)
    parts = [loader_of(make_source(), replay=replay, host_id=host, host_count=hosts) for host in range(hosts)]
    for _ in range(4):
        assert_same(alone.sample_batch(), join([part.sample_batch() for part in parts]))


def test_resuming_gives_the_batches_of_the_uninterrupted_run(loader_of):
    options = dict(cache="pool", episodes_per_memory_pool=2, steps_per_memory_pool=3)
    whole = loader_of(**options)
    batches = [whole.sample_batch() for _ in range(10)]
    half = loader_of(**options, prefetch=3)
    for expected in batches[:4]:
        assert_same(half.sample_batch(), expected)
    state = half.state()
    assert state["step"] == 4  # what was handed out, not what was prepared
    resumed = loader_of(**options, prefetch=1)
    resumed.sample_batch()
    resumed.restore(state)
    for expected in batches[4:]:
        assert_same(resumed.sample_batch(), expected)
    assert resumed.step == 10
    assert len({tuple(starts(batch)) for batch in batches}) == 10


def test_the_memory_pool_bounds_what_a_batch_is_drawn_from(loader_of):
    loader = loader_of(cache="pool", episodes_per_memory_pool=2, steps_per_memory_pool=3)
    pools = [{number for number, _ in starts(loader.sample_batch())} for _ in range(9)]
    thirds = [set.union(*pools[k : k + 3]) for k in (0, 3, 6)]
    assert [len(third) for third in thirds] == [2, 2, 2]
    assert set.union(*thirds) == set(range(6))


def test_refreshing_the_pool_is_part_of_the_state(loader_of):
    options = dict(cache="pool", episodes_per_memory_pool=2, prefetch=2)
    loader = loader_of(make_source(12), **options)
    first = starts(loader.sample_batch())
    loader.refresh_memory_pool(7)
    state = loader.state()
    second = loader.sample_batch()
    assert {number for number, _ in first} != {number for number, _ in starts(second)}
    other = loader_of(make_source(12), **options)
    other.restore(state)
    assert_same(other.sample_batch(), second)


def test_other_data_seeds_and_replays_are_not_resumed(loader_of):
    state = loader_of().state()
    with pytest.raises(DataError, match=r"saved with seed 4, here it is 5"):
        loader_of(seed=5).restore(state)
    with pytest.raises(DataError, match="saved with fingerprint"):
        loader_of(make_source(7)).restore(state)
    with pytest.raises(DataError, match="saved with replay 2, here it is 0"):
        loader_of().restore(state | {"replay": 2})


@pytest.mark.parametrize("prefetch", [0, 3])
def test_offline_and_online_are_mixed_as_told(loader_of, prefetch):
    """Preparing ahead does not change what is drawn, although the buffer grows in between."""
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    loader = loader_of(make_source(), replay=replay, online_fraction=0.25, prefetch=prefetch)
    drawn = [starts(loader.sample_batch()), starts(loader.sample_batch())]
    for n in range(4):
        replay.append(*make_item(20 + n))
        time.sleep(0.01)  # lets a thread prepare batches of the older buffer
        drawn += [starts(loader.sample_batch()), starts(loader.sample_batch())]
    online = [[number for number, _ in batch if number >= 20] for batch in drawn]
    assert [len(batch) for batch in online] == [0, 0] + [2] * 8
    for n, batch in enumerate(online[2:]):
        assert set(batch) <= {20 + n // 2, 19 + n // 2}
    reference = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    again = loader_of(make_source(), replay=reference, online_fraction=0.25, prefetch=0)
    for step, batch in enumerate(drawn):
        if step >= 2 and step % 2 == 0:
            reference.append(*make_item(19 + step // 2))
        assert starts(again.sample_batch()) == batch


@pytest.mark.parametrize(("rule", "imitates"), [("successes", False), ("plans", True), ("all", True)])
def test_an_actor_leaves_its_own_failures_alone(loader_of, rule, imitates):
    """Half of a batch is of an episode that failed. All of it trains the critic."""
    episode, frames = make_item(20, success=False)
    plans = np.repeat(episode.actions[:, None], HORIZON, axis=1)
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    replay.append(replace(episode, intended=plans), frames)
    batch = loader_of(make_source(), replay=replay, online_imitated=rule).sample_batch()
    own = np.array([number for number, _ in starts(batch)]) == 20
    assert own.sum() == SIZE // 2
    assert batch["valid"][~own].any(1).all()
    assert (batch["valid"][own].any(1) == imitates).all()
    assert batch["sequence_mask"][own].any()


def planned(number, success=True):
    """An episode of nine steps whose policy planned at steps 0 and 6."""
    episode, frames = make_item(number, success=success)
    plans = np.repeat(episode.actions[:, None], HORIZON, axis=1)
    for step in range(9):
        plans[step, HORIZON - step % HORIZON :] = np.nan
    return replace(episode, intended=plans), frames


def test_rows_for_the_actor_are_drawn_apart(loader_of):
    """Half of the batch: plans of successes, which the critic leaves alone. The rest is mixed as ever."""
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=3, max_bytes=10**9)
    for number, success in ((20, False), (21, True), (22, False)):
        replay.append(*planned(number, success))
    size = 64
    loader = loader_of(make_source(), replay=replay, batch_size=size, online_fraction=0.75, online_actor_share=0.5)
    batch = loader.sample_batch()
    where, critic = np.array(starts(batch)), batch["sequence_mask"] > 0
    apart, own = where[:, 0] == 21, where[:, 0] >= 20
    plans = apart & np.isin(where[:, 1], [0, 6])
    assert (~critic & batch["valid"].any(1)).sum() >= size // 2
    assert set(map(tuple, where[~critic & plans].tolist())) == {(21, 0), (21, 6)}
    assert own.sum() == size // 2 + round(0.75 * size / 2)  # of the other half, three in four are from the buffer
    assert (batch["valid"].any(1) == ~own | plans).all()
    lost = (where[:, 0] == 20) | (where[:, 0] == 22)
    assert lost.sum() > 10
    assert (critic[lost] | (where[lost, 1] == 8)).all()  # a cut recording's last row has no target


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_for_the_actor_depend_on_seed_and_step_alone(loader_of, prefetch):
    def replayed():
        replay = ReplayBuffer(cameras=CAMERAS, max_episodes=3, max_bytes=10**9)
        for number in (20, 21):
            replay.append(*planned(number, success=number == 21))
        return replay

    options = dict(online_fraction=0.5, online_actor_share=0.25, prefetch=prefetch)
    first = loader_of(make_source(), replay=replayed(), **options)
    batches = [first.sample_batch() for _ in range(3)]
    state = first.state()
    later = loader_of(make_source(), replay=replayed(), **options)
    later.restore(state)
    assert_same(later.sample_batch(), first.sample_batch())
    parts = [loader_of(make_source(), replay=replayed(), host_id=n, host_count=2, **options) for n in range(2)]
    assert_same(join([part.sample_batch() for part in parts]), batches[0])


def test_without_a_row_to_imitate_none_is_drawn_apart(loader_of):
    """Nothing has succeeded yet, or nothing was collected: the batch is what it would be without the setting."""
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=3, max_bytes=10**9)
    loaders = [loader_of(make_source(), replay=replay, online_actor_share=share) for share in (0.0, 0.5)]
    assert_same(*(loader.sample_batch() for loader in loaders))
    replay.append(*planned(20, success=False))
    assert_same(*(loader.sample_batch() for loader in loaders))
    replay.append(*planned(21, success=True))
    batches = [loader.sample_batch() for loader in loaders]
    assert [int((batch["sequence_mask"] == 0).sum()) >= SIZE // 2 for batch in batches] == [False, True]


def test_a_replay_buffer_alone_is_enough(loader_of):
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    loader = loader_of(replay=replay, prefetch=2)
    with pytest.raises(DataError, match="replay buffer is empty"):
        loader.sample_batch()
    replay.append(*make_item(20))
    assert {number for number, _ in starts(loader.sample_batch())} == {20}
    assert loader.get_dataset_statistics()["online"].transitions == 9


def test_statistics_are_those_of_dataset_and_replay(loader_of):
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    replay.append(*make_item(20))
    found = loader_of(make_source(), replay=replay, cache="pool", episodes_per_memory_pool=1).get_dataset_statistics()
    assert {name: (part.episodes, part.transitions) for name, part in found.items()} == {
        "offline": (6, sum(range(5, 11))),  # all of it, not what is in the pool
        "online": (1, 9),
    }


def test_a_replay_of_another_robot_is_told(loader_of):
    episode, frames = make_item(20)
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=2, max_bytes=10**9)
    replay.append(replace(episode, state=episode.state[:, :1]), frames)
    with pytest.raises(DataError, match=r"state has shape \(2,\) in the dataset, \(1,\) in the replay"):
        loader_of(make_source(), replay=replay).sample_batch()


def test_behaviour_cloning_reads_no_next_observation(loader_of):
    batch = loader_of(next_observations=False).sample_batch()
    assert "next_observations" not in batch
    validate_qchunking_batch_format(batch, next_observations=False)
    assert_same(batch["observations"], loader_of().sample_batch()["observations"])


def test_sources_without_cameras_give_states_alone(loader_of):
    source = MemorySource(cameras=(), items=[(episode, {}) for episode, _ in make_source().items])
    batch = loader_of(source).sample_batch()
    assert batch["observations"]["image"] == batch["next_observations"]["image"] == {}
    validate_qchunking_batch_format(batch)


class Failing(RelativeTransform):
    """Fails at its third batch (two calls a batch)."""

    calls = 0

    def low_dim(self, state, actions, prompts):
        self.calls += 1
        if self.calls == 5:
            raise ZeroDivisionError("cannot normalise")
        return super().low_dim(state, actions, prompts)


def test_errors_of_the_thread_reach_the_caller_with_their_traceback(loader_of):
    loader = loader_of(transform=Failing(), prefetch=2)
    loader.sample_batch()
    loader.sample_batch()
    with pytest.raises(ZeroDivisionError, match="cannot normalise") as caught:
        loader.sample_batch()
    assert "low_dim" in [entry.name for entry in caught.traceback]
    assert loader.step == 2
    loader.sample_batch()  # the failure has passed: the same batch is prepared again
    assert loader.step == 3


def test_leaving_the_context_ends_all_threads():
    before = set(threading.enumerate())
    config = DataConfig(prefetch=2, cache="pool", episodes_per_memory_pool=2, steps_per_memory_pool=1)
    with ACRLPDDataLoader(
        make_source(), RelativeTransform(), config=config, batch_size=4, horizon=2, discount=DISCOUNT
    ) as loader:
        for _, _batch in zip(range(5), loader, strict=False):
            pass
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(RelativeTransform):
    """Takes three seconds a batch."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def low_dim(self, state, actions, prompts):
        self.clock.now += 3 if actions is not None else 0
        return super().low_dim(state, actions, prompts)


def test_the_stall_fraction_tells_how_long_a_step_waits(loader_of, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("pirl.data.loader.time", clock)
    loader = loader_of(transform=Slow(clock), prefetch=0)
    assert loader.stall_fraction == 0
    for _ in range(4):
        loader.sample_batch()
        clock.now += 1
    assert loader.stall_fraction == 3 / 4
    loader.reset_stall()
    assert loader.stall_fraction == 0
    clock.now += 9
    loader.sample_batch()
    assert loader.stall_fraction == 3 / 12


def test_batches_are_prepared_before_they_are_asked_for(loader_of):
    clock = Clock()
    loader = loader_of(transform=Slow(clock), prefetch=2)
    loader.sample_batch()
    end = time.monotonic() + 30
    while clock.now < 3 * 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert clock.now >= 3 * 3, "two more, in a thread"


def test_batches_on_devices_are_the_same_and_stay_so(loader_of):
    """Device arrays may share the host's memory: it must not be used again while they live."""
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    host, device = loader_of(batch_size=16), loader_of(batch_size=16, sharding=sharding, prefetch=2)
    pairs = [(host.sample_batch(), device.sample_batch()) for _ in range(6)]
    for expected, batch in pairs:
        validate_qchunking_batch_format(batch)
        assert batch["actions"].sharding == sharding
        assert_same(expected, jax.device_get(batch))


def test_picture_memory_is_used_again_only_when_nobody_has_it():
    memory = FrameMemory()
    first = memory.take((2, 3, 3, 3))
    address = first.ctypes.data
    view = first[1:]
    del first
    second = memory.take((2, 3, 3, 3))
    assert second.ctypes.data != address
    del view
    assert memory.take((2, 3, 3, 3)).ctypes.data == address


def test_wrong_arguments_are_refused(loader_of):
    wrist = ReplayBuffer(cameras=CAMERAS[1:], max_episodes=2, max_bytes=100)
    with pytest.raises(ConfigError, match="same cameras"):
        loader_of(make_source(), replay=wrist)
    with pytest.raises(ConfigError, match="critic_horizon is 7, horizon is 6"):
        loader_of(critic_horizon=7)
    with pytest.raises(ConfigError, match="multiple of the number of hosts"):
        loader_of(host_count=3)
    with pytest.raises(ConfigError, match="neither a dataset nor a replay"):
        ACRLPDDataLoader(None, RelativeTransform(), config=DataConfig(), horizon=2, discount=DISCOUNT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": (1.0,)}, "1 weights for 0 datasets"),
        ({"repo_ids": ("a", "b"), "weights": (0.0, 0.0)}, "weights are"),
        ({"critic_horizon": 0}, "critic_horizon is 0"),
        ({"cache": "pool", "episodes_per_memory_pool": None}, "without episodes_per_memory_pool"),
        ({"episodes_per_memory_pool": 0}, "episodes_per_memory_pool is 0"),
        ({"steps_per_memory_pool": 0}, "steps_per_memory_pool is 0"),
        ({"online_fraction": 1.5}, "online_fraction is 1.5"),
        ({"n_step": 2, "boundary": "drop"}, "n_step is 2 and boundary is 'drop'"),
        ({"online_actor_share": 1.0}, "online_actor_share is 1.0"),
        ({"replay_gb": 0.0}, "replay_gb is 0.0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_configurations_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_gigabytes_are_those_of_disks():
    assert DataConfig(replay_gb=1.5).replay_bytes == 1_500_000_000


@pytest.mark.parametrize("host", [0, 1])
def test_batches_number_their_tasks(loader_of, host):
    items = [make_item(number, steps=5 + 3 * number) for number in (2, 0, 1)] + [make_item(2, steps=6)]
    source, known = MemorySource(cameras=CAMERAS, items=items), {"tasks": True, "host_id": host, "host_count": 2}
    plain, batch = loader_of(source).sample_batch(), loader_of(source, **known).sample_batch()
    assert not {"task", "task_steps"} & set(plain)
    episode = batch["observations"]["tokenized_prompt"][:, 0]  # the number in the instruction, here also its rank
    np.testing.assert_array_equal(batch["task"], episode)
    np.testing.assert_array_equal(batch["task_steps"], np.array([5, 8, 11])[episode])
    assert len(set(episode.tolist())) > 1
    replay = ReplayBuffer(cameras=CAMERAS, max_episodes=9, max_bytes=10**9)
    replay.append(*make_item(7, steps=30))
    found = loader_of(source, replay=replay, online_fraction=0.5, tasks=True).sample_batch()
    new = found["observations"]["tokenized_prompt"][:, 0] == 7
    assert set(found["task"][new]) == {3}
    assert set(found["task_steps"][new]) == {11}
