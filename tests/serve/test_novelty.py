"""Novelty: its distance against NumPy, what is refused and counted, whose weights it belongs to, one prefix pass."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acting_runs import save_run, walking
from pirl.agents.config import BCConfig
from pirl.cli.app import main
from pirl.data.writer import LeRobotWriter
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.serve import novelty
from pirl.serve.load import loader
from pirl.serve.novelty import Novelty, fit, load_novelty
from pirl.serve.planner import PlannedChunk, Planner
from pirl.serve.safety import NoveltyConfig, SafetyConfig, SafetyNet
from pirl.training.acting import open_checkpoint
from pirl.training.features import Features
from serving_runs import SEEN, SETTINGS, Client, running
from small_pi0 import SMALL

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [2], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
}
NEAR, FAR = np.array([0.3, -0.2], np.float32), np.array([4.0, 4.0], np.float32)


def walks(root: Path, episodes: int = 30) -> Path:
    """Points within [-1, 1]²."""
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=5, features=FEATURES) as writer:
        for _ in range(episodes):
            for state in rng.uniform(-1, 1, (12, 2)).astype(np.float32):
                writer.add_frame({"observation.state": state, "action": np.zeros(2, np.float32)})
            writer.save_episode(task="go right")
    return root


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a run with two checkpoints, the first of which knows its data; the data)."""
    folder = tmp_path_factory.mktemp("novelty")
    run, data = save_run(replace(walking(folder, BCConfig()), exp_name="knows"), {5: 0.5, 9: 0.7}), walks(folder / "d")
    assert main(["serve", str(run / "5"), "--fit-novelty", str(data)]) == 0
    return run, data


@pytest.fixture(scope="module")
def planner(fitted: tuple[Path, Path]) -> Planner:
    return loader(str(fitted[0] / "5"), replace(SETTINGS, max_batch=1, real_time=False), novelty=NoveltyConfig())(None)


def test_the_score_is_the_distance_to_the_nearest_frame_in_limits_of_held_out_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the Mahalanobis distance by the inverse covariance, since all components are kept here."""
    monkeypatch.setattr(novelty, "FOLDS", 3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) @ rng.normal(size=(4, 4)) + 5
    x = np.column_stack([x, np.full(300, 7.0)]).astype(np.float32)  # a constant says nothing
    episode = np.repeat(np.arange(30), 10)
    found = fit(x, episode, weights="w")

    def distance(point: np.ndarray, known: np.ndarray) -> float:
        known = known[:, :4].astype(np.float64)
        d = known - point[:4]
        return float(np.sqrt(np.einsum("ni,ij,nj->n", d, np.linalg.inv(np.cov(known.T, bias=True)), d).min()))

    fold, largest = np.random.default_rng(0).permutation(30) % 3, []
    for number in range(30):
        others = x[np.isin(episode, np.flatnonzero(fold != fold[number]))]
        largest.append(max(distance(point, others) for point in x[episode == number]))
    limit = sorted(largest)[28]  # the first below which lie 95 % of 30
    for point in rng.normal(size=(5, 5)).astype(np.float32) * 3 + 5:
        assert found.of(point[None])[0] == pytest.approx(distance(point, x) / limit, rel=1e-3)
    assert found.rows.shape == (300, 4)
    assert found.limit == pytest.approx(limit, rel=1e-3)


def test_what_cannot_be_fitted_is_refused() -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    with pytest.raises(DataError, match="19 episodes"):
        fit(x[:57], np.repeat(np.arange(19), 3), weights="w")
    with pytest.raises(DataError, match="also in another episode"):
        fit(np.tile(x[:2], (30, 1)), np.repeat(np.arange(30), 2), weights="w")
    with pytest.raises(ConfigError, match="limit"):
        NoveltyConfig(limit=0.0)


def test_the_unseen_is_refused_and_counted_and_the_seen_is_not(planner: Planner) -> None:
    net = SafetyNet(SafetyConfig(rate=10.0, novelty=NoveltyConfig()), action_dim=2, state_dim=2)
    with running(planner, safety=net, max_batch=1, real_time=False) as server:
        with Client(server.port) as client:
            reply = client.ask(SEEN | {"observation/state": NEAR})
            assert type(reply["pirl/novelty"]) is float
            assert 0 <= reply["pirl/novelty"] <= 1
            with pytest.raises(RuntimeError, match="refused: novelty: "):
                client.ask(SEEN | {"observation/state": FAR})
        assert server.metrics.counted("limited", "novelty") == 1
        text = server.metrics.prometheus(open_connections=0, policy="p")
    assert 'pirl_novelty_bucket{le="1.0"} 1\n' in text
    assert 'pirl_novelty_bucket{le="+Inf"} 2\n' in text
    assert "pirl_novelty_count 2\n" in text


def test_a_warning_is_counted_and_answered(planner: Planner, caplog: pytest.LogCaptureFixture) -> None:
    net = SafetyNet(SafetyConfig(rate=10.0, novelty=NoveltyConfig(mode="warn")), action_dim=2, state_dim=2)
    with running(planner, safety=net, max_batch=1, real_time=False) as server, Client(server.port) as client:
        assert client.ask(SEEN | {"observation/state": FAR})["pirl/novelty"] > 1
        assert server.metrics.counted("limited", "novelty") == 1
    assert "novelty" in caplog.text


def test_other_limits_hold_beside_a_warning() -> None:
    chunk = np.array([[0.0, 0.0], [0.5, 0.0]], np.float32)
    for mode, passed in (("clip", True), ("refuse", False)):
        config = SafetyConfig(rate=1.0, mode=mode, high=(0.2, 0.2), novelty=NoveltyConfig(mode="warn", limit=2.0))  # type: ignore[arg-type]
        net = SafetyNet(config, action_dim=2, state_dim=2)
        found = net.check(chunk, state=NEAR, novelty=3.0)
        assert (found.chunk is not None) == passed
        assert found.rules == (("novelty", "limits") if passed else ("limits",))
        assert net.check(chunk[:1], state=NEAR, novelty=1.9).rules == ()
        assert net.check(chunk[:1], state=NEAR, novelty=float("nan")).rules == ("novelty",)


def test_it_belongs_to_its_weights(fitted: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = fitted
    file = run / "5" / novelty.FILE
    assert load_novelty(run / "5").weights == load_novelty(run / "5", file).weights
    with pytest.raises(CheckpointError, match="made with other weights"):
        load_novelty(run / "9", file)
    with pytest.raises(CheckpointError, match="there is no"):
        loader(str(run), SETTINGS, novelty=NoveltyConfig())(None)  # the latest step was not fitted
    broken = tmp_path / "novelty.npz"
    broken.write_bytes(file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_novelty(run / "5", broken)


def test_a_safety_file_asks_for_it(fitted: tuple[Path, Path], tmp_path: Path) -> None:
    """The command, in this process: the latest step has no such file."""
    limits = tmp_path / "limits.yaml"
    limits.write_text("rate: 5\nnovelty: {mode: warn, limit: 1.5}\n")
    assert main(["serve", str(fitted[0]), "--port", "0", "--safety", str(limits)]) == 1


def test_an_observation_is_encoded_once_and_the_features_are_those_that_were_fitted(tmp_path: Path) -> None:
    """π₀ with and without novelty: as many matrix products in the compiled program."""
    model = replace(SMALL, cameras=(), action_dim=2, horizon=4, vocab_size=512, max_token_len=16)
    config = walking(tmp_path, BCConfig())
    config = replace(config, model=model, data=replace(config.data, tokenizer="byte"), exp_name="prefix")
    acting = open_checkpoint(save_run(config, {5: 0.5}))
    seen = [SEEN | {"observation/state": NEAR * k} for k in (0.5, 1.0)]
    features = Features(acting).of(seen)
    known = Novelty(
        mean=0 * features[0], directions=np.eye(features.shape[1]), rows=features[:1], limit=1.0, weights=""
    )
    products, chunks = [], []
    for asked in (None, known):
        planner = Planner(acting, novelty=asked, real_time=True, batch_sizes=(2,)).compile()
        programs: Any = planner._programs.values()
        products.append([len(re.findall(r"\b(dot|convolution)\(", program.as_text())) for program in programs])
        plans = planner.plan([planner.row(one, number=(0, 0)) for one in seen])
        assert all(isinstance(plan, PlannedChunk) for plan in plans)
        chunks.append([plan.chunk for plan in plans])  # type: ignore[union-attr]
    assert products[0] == products[1]
    assert min(products[0]) > 10
    np.testing.assert_allclose(*chunks, rtol=0, atol=1e-5)
    scores = [plan.novelty for plan in plans]  # type: ignore[union-attr]
    np.testing.assert_allclose(scores, [0, np.linalg.norm(features[1] - features[0])], atol=1e-2)
