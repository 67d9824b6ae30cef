"""Normalisation statistics: OpenPI's file and numbers, and what happens to bad ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from golden_data import GOLDEN
from pirl.data.normalize import (
    NormStats,
    RunningStats,
    histograms,
    load_norm_stats,
    normalize,
    save_norm_stats,
    unnormalize,
)
from pirl.data.robots import aloha, make_robot
from pirl.data.stats import action_chunks, compute_norm_stats
from pirl.errors import DataError
from pirl.records import Episode, EpisodeSource

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/norm_stats_source.npz"))


def golden_file(family: str) -> Path:
    return next(GOLDEN.glob(f"{family}/ckpt/*/*/0/assets/*/norm_stats.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_running_statistics_are_openpis_to_the_last_bit(family: str) -> None:
    source = np.load(GOLDEN / family / "norm_stats_source.npz")
    wanted = load_norm_stats(golden_file(family))
    for key, name in (("state", "state_batches"), ("actions", "action_batches")):
        running = RunningStats()
        for batch in source[name]:
            running.update(batch)
        got = running.statistics()
        for field in ("mean", "std", "q01", "q99"):
            np.testing.assert_array_equal(getattr(got, field), getattr(wanted[key], field))


@pytest.mark.parametrize("family", FAMILIES)
def test_file_is_written_as_openpi_writes_it(family: str, tmp_path: Path) -> None:
    written = save_norm_stats(tmp_path / "robot", load_norm_stats(golden_file(family).parent))
    assert written == tmp_path / "robot" / "norm_stats.json"
    assert written.read_bytes() == golden_file(family).read_bytes()
    assert [path.name for path in written.parent.iterdir()] == ["norm_stats.json"]


def test_statistics_without_quantiles(tmp_path: Path) -> None:
    stats = NormStats(mean=np.zeros(2), std=np.ones(2))
    file = save_norm_stats(tmp_path, {"state": stats, "actions": stats})
    assert json.loads(file.read_text())["norm_stats"]["state"]["q01"] is None
    loaded = load_norm_stats(file)["state"]
    with pytest.raises(DataError, match="without q01 and q99"):
        normalize(np.zeros(2), loaded, quantile=True)


def test_nothing_is_overwritten_silently(tmp_path: Path) -> None:
    stats = {key: NormStats(mean=np.zeros(1), std=np.ones(1)) for key in ("state", "actions")}
    save_norm_stats(tmp_path, stats)
    with pytest.raises(DataError, match="exists"):
        save_norm_stats(tmp_path, stats)
    save_norm_stats(tmp_path, {**stats, "state": NormStats(mean=np.ones(1), std=np.ones(1))}, overwrite=True)
    assert load_norm_stats(tmp_path)["state"].mean == [1.0]


GOOD = {"mean": [0.0, 1.0], "std": [1.0, 1.0], "q01": [-1.0, 0.0], "q99": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no normalisation statistics at"),
        ("{", "not JSON"),
        ("[]", "no 'norm_stats'"),
        ({"state": GOOD}, "no statistics of 'actions'; it has \\['state'\\]"),
        ({"state": GOOD, "actions": [1]}, "actions is list"),
        ({"state": GOOD, "actions": {"mean": [0.0]}}, "actions has no 'std'"),
        ({"state": {**GOOD, "q99": [1.0]}, "actions": GOOD}, "state has statistics of different lengths.*'q99': 1"),
        (
            {"state": {**GOOD, "std": [1.0, float("nan")]}, "actions": GOOD},
            "state.std: nan in dimension 1: expected a finite",
        ),
        ({"state": {**GOOD, "mean": [1.0, "a"]}, "actions": GOOD}, "state.mean is not a list of numbers"),
        ({"state": {**GOOD, "mean": [1.0, "2"]}, "actions": GOOD}, "state.mean is not a list of numbers"),
        ({"state": {**GOOD, "mean": [1.0, True]}, "actions": GOOD}, "state.mean is not a list of numbers"),
        ({"state": {**GOOD, "std": [-1.0, 1.0]}, "actions": GOOD}, "state.std: -1.0 in dimension 0: .*never negative"),
        ({"state": {**GOOD, "std": [1.0, 1e39]}, "actions": GOOD}, "state.std: 1e.39 in dimension 1"),
        ({"state": GOOD, "actions": {**GOOD, "std": [1.0, float("inf")]}}, "actions.std: inf in dimension 1"),
        ({"state": GOOD, "actions": {**GOOD, "q01": [-1.0, 2.5]}}, r"q99: \(2.5, 2.0\) in dimension 1: q01 is above"),
        ("[" * 200_000, "nested too deeply"),
        ('{"norm_stats": {}, "norm_stats": {}}', "stands twice"),
        ({"state": {**GOOD, "mean": [[1.0, 2.0]]}, "actions": GOOD}, "state.mean is not a list of numbers"),
    ],
)
def test_bad_files_say_what_is_wrong_and_what_to_do(content: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "norm_stats.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps({"norm_stats": content}))
    with pytest.raises(DataError, match=message) as caught:
        load_norm_stats(tmp_path)
    assert str(file) in str(caught.value)
    assert "pirl norm-stats" in caught.value.hint


def test_arithmetic_is_openpis() -> None:
    """Values written out: eps beside the spread, statistics cut to the data, padding multiplied by 1 + eps."""
    stats = NormStats(
        mean=np.array([1.0, 2.0, 9.0]),
        std=np.array([2.0, 0.0, 9.0]),
        q01=np.array([-1.0, 5.0, 9.0]),
        q99=np.array([3.0, 5.0, 9.0]),
    )
    x = np.array([2.0, 2.5])
    np.testing.assert_array_equal(normalize(x, stats), [1.0 / (2.0 + 1e-6), 0.5 / 1e-6])
    np.testing.assert_array_equal(
        normalize(x, stats, quantile=True), [3.0 / (4.0 + 1e-6) * 2.0 - 1.0, -2.5 / 1e-6 * 2.0 - 1.0]
    )
    short = NormStats(mean=stats.mean[:1], std=stats.std[:1], q01=np.array([-1.0]), q99=np.array([3.0]))
    y = np.array([[0.5, 0.25]])
    np.testing.assert_array_equal(unnormalize(y, short), [[0.5 * (2.0 + 1e-6) + 1.0, 0.25 * (1.0 + 1e-6)]])
    np.testing.assert_array_equal(unnormalize(y, short, quantile=True), [[1.5 / 2.0 * (4.0 + 1e-6) - 1.0, 0.25]])
    np.testing.assert_array_equal(unnormalize(y, stats)[0], unnormalize(y[0], stats))
    with pytest.raises(DataError, match="statistics of 1 dimensions for data of 2"):
        normalize(x, short)


finite = st.floats(-100.0, 100.0)


@given(
    x=hnp.arrays(
        np.float64, hnp.array_shapes(min_dims=2, max_dims=4, max_side=4).map(lambda s: (*s[:-1], 3)), elements=finite
    ),
    mean=hnp.arrays(np.float64, 3, elements=finite),
    spread=hnp.arrays(np.float64, 3, elements=st.floats(0.0, 50.0)),
    quantile=st.booleans(),
)
def test_unnormalize_inverts_normalize(x: np.ndarray, mean: np.ndarray, spread: np.ndarray, quantile: bool) -> None:
    stats = NormStats(mean=mean, std=spread, q01=mean - spread, q99=mean + spread)
    back = unnormalize(normalize(x, stats, quantile=quantile), stats, quantile=quantile)
    np.testing.assert_allclose(back, x, rtol=1e-9, atol=1e-9)


def test_running_statistics_approximate_the_true_ones() -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(20000, 3)) * [1.0, 5.0, 0.1] + [0.0, 3.0, -2.0]
    running = RunningStats()
    for batch in np.array_split(data, 300):
        running.update(batch)
    got = running.statistics()
    np.testing.assert_allclose(got.mean, data.mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.std, data.std(axis=0), rtol=1e-12)
    assert got.q01 is not None
    assert got.q99 is not None
    spread = np.ptp(data, axis=0)
    assert (np.abs(got.q01 - np.quantile(data, 0.01, axis=0)) < 0.01 * spread).all()
    assert (np.abs(got.q99 - np.quantile(data, 0.99, axis=0)) < 0.01 * spread).all()
    with pytest.raises(ValueError, match="2 dimensions after batches of 3"):
        running.update(np.zeros((4, 2)))
    with pytest.raises(DataError, match="at least 2"):
        RunningStats().statistics()


def episode(steps: int, state_dim: int, action_dim: int, seed: int) -> Episode:
    rng = np.random.default_rng(seed)
    flags = np.zeros(steps, bool)
    return Episode(
        task="t",
        state=rng.uniform(0.1, 0.9, size=(steps, state_dim)).astype(np.float32),
        actions=rng.uniform(0.1, 0.9, size=(steps, action_dim)).astype(np.float32),
        rewards=np.zeros(steps, np.float32),
        terminated=flags,
        truncated=flags,
    )


class Source(EpisodeSource):
    """Episodes in a list."""

    cameras = ()

    def __init__(self, *episodes: Episode) -> None:
        self.episodes = episodes

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(e) for e in self.episodes])

    def __len__(self) -> int:
        return len(self.episodes)

    def episode(self, index: int) -> Episode:
        return self.episodes[index]

    def frames(self, index: int) -> dict:
        raise AssertionError("statistics must not decode pictures")


@example(np.array([[-1.0, 0.0, 0.5], [1.0, 1.0, 2.0]]), 1e-11, 1e4, 0.0)
@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-10, 10)),
    st.sampled_from([1e-12, 1e-11, 1e-6, 1.0, 1e5]),
    st.sampled_from([0.0, 1.0, 1e4]),
    st.sampled_from([0.0, 1e-10]),
)
def test_histograms_count_what_numpy_counts(x: np.ndarray, scale: float, offset: float, margin: float) -> None:
    """Also on the edges, with no width at all, and where edges are closer than numbers can be."""
    x = offset + scale * x
    edges = np.stack([np.linspace(a - margin, b + margin, 51) for a, b in zip(x.min(0), x.max(0), strict=True)])
    batch = np.concatenate([x, edges[:, ::7].T])
    expected = [np.histogram(batch[:, i], bins=edges[i])[0] for i in range(3)]
    np.testing.assert_array_equal(histograms(batch, edges), expected)


def test_chunks_repeat_the_last_action_at_the_end() -> None:
    chunks = action_chunks(np.arange(6.0).reshape(3, 2), 3)
    assert chunks[:, :, 0].tolist() == [[0, 2, 4], [2, 4, 4], [4, 4, 4]]


def test_dataset_statistics_are_openpis_loader_order() -> None:
    """Sample by sample in dataset order, ALOHA's units and relative joints, in batches of 32 across episodes."""
    robot, horizon = aloha(), 4
    source = Source(*(episode(steps, 14, 14, seed) for seed, steps in enumerate((50, 7, 39))))
    samples = []
    for item in source.episodes:
        for t in range(len(item)):
            state = robot.encode_state(item.state[t])
            chunk = np.stack([item.actions[min(t + h, len(item) - 1)] for h in range(horizon)])
            samples.append((state, robot.encode_actions(chunk, state)))
    assert len(samples) == 96
    running = {"state": RunningStats(), "actions": RunningStats()}
    for start in range(0, 96, 32):
        running["state"].update(np.stack([s for s, _ in samples[start : start + 32]]))
        running["actions"].update(np.stack([a for _, a in samples[start : start + 32]]))
    got = compute_norm_stats(source, robot, horizon)
    for key, stats in running.items():
        for field in ("mean", "std", "q01", "q99"):
            np.testing.assert_array_equal(getattr(got[key], field), getattr(stats.statistics(), field))
    relative = np.stack([a for _, a in samples])
    uneven = compute_norm_stats(source, robot, horizon, batch_size=40)  # the last batch is smaller, and counts
    np.testing.assert_allclose(uneven["actions"].mean, relative.mean(axis=(0, 1)), atol=1e-12)
    np.testing.assert_allclose(got["actions"].mean, relative.mean(axis=(0, 1)), atol=1e-12)


def test_dataset_statistics_name_the_bad_episode() -> None:
    robot = make_robot(name="arm", state_dim=3, action_dim=2)
    good, wrong = episode(5, 3, 2, 0), episode(5, 4, 2, 1)
    with pytest.raises(DataError, match=r"episode 1: robot 'arm': state has shape \(5, 4\), expected 3"):
        compute_norm_stats(Source(good, wrong), robot, 2)
    good.actions[3, 1] = np.nan
    with pytest.raises(DataError, match=r"episode 0: robot 'arm': actions .* not finite, first at index \(3, 1\)"):
        compute_norm_stats(Source(good), robot, 2)
    with pytest.raises(DataError, match="at least 2"):
        compute_norm_stats(Source(), robot, 2)
