"""The memory pool: which episodes are resident when, which rows are drawn, and what happens in the background."""

import threading
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest

from pirl.data.pool import (
    MemoryPool,
    copy_frames,
    dataset_statistics,
    fingerprint,
    make_resident,
    row_generator,
)
from pirl.errors import ConfigError, DataError
from pirl.records import Episode, EpisodeSource

CAMERA = "base_0_rgb"


class FakeSource(EpisodeSource):
    """Episodes whose pictures say which episode and step they show."""

    cameras = (CAMERA,)
    lengths = weights = None

    def __init__(self, lengths, success=None, weights=None):
        self.lengths = np.array(lengths)
        self.success = [None] * len(lengths) if success is None else success
        self.decoded = []
        if weights is not None:
            self.weights = np.array(weights, float)

    def __len__(self):
        return len(self.lengths)

    def episode(self, index):
        steps = int(self.lengths[index])
        terminated = np.zeros(steps, bool)
        terminated[-1] = bool(self.success[index])
        where = np.stack([np.full(steps, index), np.arange(steps)], axis=1).astype(np.float32)
        return Episode(
            task=f"task {index % 2}",
            state=where,
            actions=where,
            rewards=terminated.astype(np.float32),
            terminated=terminated,
            truncated=np.arange(steps) == steps - 1,
            success=self.success[index],
        )

    def frames(self, index):
        self.decoded.append((index, threading.current_thread().name))
        pixels = np.zeros((int(self.lengths[index]), 2, 3, 3), np.uint8)
        pixels[..., 0] = index
        pixels[..., 1] = np.arange(len(pixels))[:, None, None]
        return {CAMERA: pixels}


@pytest.fixture
def pool_of():
    pools = []

    def build(source, **options):
        pools.append(MemoryPool(source, discount=0.9, **options))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def test_every_pass_has_each_episode_resident_once(pool_of):
    pool = pool_of(FakeSource([3] * 10), seed=5, episodes_per_memory_pool=4, steps_per_memory_pool=2)
    assert pool.pools_per_pass == 3
    passes = [[pool.resident(2 * (3 * n + part)).indices for part in range(3)] for n in range(2)]
    for parts in passes:
        assert sorted(np.concatenate(parts).tolist()) == list(range(10))
        assert max(map(len, parts)) <= 4
    assert [part.tolist() for part in passes[0]] != [part.tolist() for part in passes[1]]


def test_a_pool_depends_on_the_counters_alone(pool_of):
    options = dict(seed=5, episodes_per_memory_pool=4, steps_per_memory_pool=3)
    walked, jumped = (pool_of(FakeSource([3] * 10), **options) for _ in range(2))
    seen = [walked.resident(step).indices.tolist() for step in range(12)]
    assert seen[0] == seen[2] != seen[3] == seen[5]
    assert jumped.resident(11).indices.tolist() == seen[11]
    assert jumped.resident(4).indices.tolist() == seen[4]
    other = pool_of(FakeSource([3] * 10), **options | {"seed": 6})
    assert other.resident(0).indices.tolist() != seen[0]


def test_refreshing_shuffles_anew_and_repeatably(pool_of):
    pool = pool_of(FakeSource([3] * 30), episodes_per_memory_pool=4)
    first = pool.resident(0).indices.tolist()
    pool.refresh_memory_pool(1)
    second = pool.resident(0).indices.tolist()
    assert first != second
    pool.refresh_memory_pool(0)
    assert pool.resident(0).indices.tolist() == first


def test_the_next_pool_is_decoded_in_the_background(pool_of):
    source = FakeSource([3] * 8)
    pool = pool_of(source, episodes_per_memory_pool=4, steps_per_memory_pool=2)
    pool.resident(0)
    upcoming = set(pool.episodes(1).tolist())
    pool._pools[1].result(timeout=10)
    assert {index for index, _ in source.decoded} >= upcoming
    assert {thread.split("_")[0] for _, thread in source.decoded} == {"pirl-memory-pool"}
    before = len(source.decoded)
    resident = pool.resident(1)
    assert resident.frames(0)[CAMERA][0, 0, 0, 0] == resident.indices[0]
    assert len(source.decoded) == before  # decoded once, then held


def test_a_pool_of_everything_leaves_pictures_to_the_source(pool_of):
    source = FakeSource([3] * 8)
    pool = pool_of(source, episodes_per_memory_pool=None)
    assert pool.resident(0) is pool.resident(10**6)
    assert source.decoded == []
    assert pool.resident(0).indices.tolist() == list(range(8))


def test_an_error_while_decoding_reaches_the_caller(pool_of):
    source = FakeSource([3] * 8)
    source.frames = lambda index: (_ for _ in ()).throw(DataError(f"video of episode {index} is damaged"))
    with pytest.raises(DataError, match="is damaged"):
        pool_of(source, episodes_per_memory_pool=4).resident(0)


def test_closing_does_not_wait_for_a_whole_pool():
    source, started, release = FakeSource([3] * 8), threading.Event(), threading.Event()
    decode = source.frames

    def slow(index):
        started.set()
        assert release.wait(10)
        return decode(index)

    source.frames = slow
    pool = MemoryPool(source, discount=0.9, episodes_per_memory_pool=4)
    errors = []

    def wait_for_it():
        try:
            pool.resident(0)
        except (CancelledError, RuntimeError) as error:  # while decoding, or before asking for the next pool
            errors.append(error)

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert started.wait(10)
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert pool._stop.wait(10)
    release.set()
    for thread in (closing, waiting):
        thread.join(10)
        assert not thread.is_alive()
    assert len(source.decoded) == len(errors) == 1


def draws(source, *, balance=False, count=40_000):
    indices = np.arange(len(source))
    weights = getattr(source, "weights", None)
    resident = make_resident(source, indices, frames=source.frames, discount=0.9, weights=weights, balance=balance)
    return resident, resident.draw(row_generator(3, 0), count)


def test_draws_are_uniform_over_transitions():
    resident, rows = draws(FakeSource([1, 7, 2]))
    counts = np.bincount(rows, minlength=10)
    assert len(counts) == len(resident.table) == 10
    assert abs(counts - 4000).max() < 5 * 60  # five standard deviations


def test_weights_are_the_episodes_shares():
    _, rows = draws(FakeSource([2, 4, 2, 3], weights=[2.0, 0.0, 1.0, 0.0]))
    counts = np.bincount(rows, minlength=11) / len(rows)
    np.testing.assert_allclose(counts, [1 / 3] * 2 + [0] * 4 + [1 / 6] * 2 + [0] * 3, atol=0.01)
    with pytest.raises(DataError, match="weight 0"):
        draws(FakeSource([2], weights=[0.0]))
    for bad in ([1.0], [1.0, -1.0]):
        with pytest.raises(DataError, match="weights"):
            fingerprint(FakeSource([2, 2], weights=bad))


def test_balance_gives_successes_and_failures_the_same_share():
    source = FakeSource([6, 3, 1, 2], success=[False, False, True, None])
    resident, rows = draws(source, balance=True)
    share = np.bincount(resident.table.episode[rows]) / len(rows)
    # The labelled episodes keep their 10 of 12 transitions, half of it each; unlabelled ones keep theirs.
    np.testing.assert_allclose(share, [5 / 12 * 6 / 9, 5 / 12 * 3 / 9, 5 / 12, 2 / 12], atol=0.01)
    _, alike = draws(FakeSource([6, 3], success=[False, False]), balance=True)
    np.testing.assert_array_equal(alike, draws(FakeSource([6, 3]))[1])


def test_batches_are_drawn_by_counter():
    resident, _ = draws(FakeSource([50, 50]))
    drawn = [resident.draw(row_generator(0, step), 8).tolist() for step in range(3)]
    assert drawn[2] == resident.draw(row_generator(0, 2), 8).tolist()
    assert len({tuple(rows) for rows in drawn}) == 3
    assert drawn[0] != resident.draw(row_generator(1, 0), 8).tolist()


def test_pictures_are_those_of_the_rows():
    source = FakeSource([4, 5, 6])
    resident, _ = draws(source)
    rows = [np.array([14, 0, 8, 2, 4]), np.array([14, 3, 8, 3, 5])]
    images = [{}, {}]
    copy_frames(
        resident,
        np.array([0, 1, 3, 4]),
        rows,
        images,
        cameras=(CAMERA,),
        allocate=lambda shape: np.full(shape, 255, np.uint8),
    )
    episode, step = (np.stack([image[CAMERA][:, 0, 0, channel] for image in images]) for channel in (0, 1))
    assert episode.tolist() == [[2, 0, 255, 0, 1]] * 2  # sample 2 was not asked for
    assert step.tolist() == [[5, 0, 255, 2, 0], [5, 3, 255, 3, 1]]
    assert Counter(index for index, _ in source.decoded) == {0: 1, 1: 1, 2: 1}


def test_pictures_of_another_size_are_refused():
    source = FakeSource([4, 5])
    right = source.frames
    source.frames = lambda index: {CAMERA: right(index)[CAMERA][:, : 2 - index]}
    resident, _ = draws(source)
    with pytest.raises(
        DataError, match=r"episode 1 .*base_0_rgb has pictures uint8\[5, 1, 3, 3\].*uint8\[5, 2, 3, 3\]"
    ):
        copy_frames(
            resident,
            np.arange(2),
            [np.array([0, 4])],
            [{}],
            cameras=(CAMERA,),
            allocate=lambda shape: np.empty(shape, np.uint8),
        )


def test_statistics_count_the_whole_source():
    found = dataset_statistics(FakeSource([2, 5, 3], success=[True, False, None]))
    assert (found.episodes, found.transitions, found.shortest, found.longest) == (3, 10, 2, 5)
    assert (found.successes, found.failures, found.terminated, found.truncated) == (1, 1, 1, 2)
    assert found.mean_return == pytest.approx(1 / 3)
    assert found.tasks == {"task 0": 2, "task 1": 1}


def test_the_fingerprint_follows_the_data():
    same = fingerprint(FakeSource([2, 5]))
    assert same == fingerprint(FakeSource([2, 5]))
    others = [FakeSource([5, 2]), FakeSource([2, 5], success=[True, None]), FakeSource([2, 5], weights=[1, 2])]
    assert len({same, *map(fingerprint, others)}) == 4
    recorded = FakeSource([2, 5])
    episode = recorded.episode
    recorded.episode = lambda index: replace(episode(index), observed=np.arange(len(episode(index))) == 0)
    assert fingerprint(recorded) != same


def test_empty_sources_and_pools_are_refused():
    with pytest.raises(DataError, match="no episodes"):
        MemoryPool(FakeSource([]), discount=0.9)
    with pytest.raises(ConfigError, match="pool of 0 episodes"):
        MemoryPool(FakeSource([3]), discount=0.9, episodes_per_memory_pool=0)
