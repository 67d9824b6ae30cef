"""Logistic regression against gradient descent, thresholds against counting, labels that never outvote people."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acting_runs import save_run, walking
from pirl.agents.config import BCConfig
from pirl.cli.app import main
from pirl.data import labels
from pirl.data.inspection import inspect_dataset
from pirl.data.labels import Label
from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError
from pirl.label import classifier
from pirl.label.classify import BY, classify
from pirl.label.features import LAST
from pirl.models.critic import CriticInputs
from pirl.training.features import pooled


def episodes(count: int, dims: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.random(count) < 0.6
    return rng.normal(size=(count, dims)) + 1.5 * y[:, None] * (np.arange(dims) == 0), y


@pytest.mark.parametrize(("count", "dims"), [(40, 3), (12, 20)])
def test_the_fit_is_the_optimum_that_gradient_descent_finds(count: int, dims: int) -> None:
    x, y = episodes(count, dims)
    found = classifier.fit(x, y, 2.0)
    z = (x - x.mean(0)) / x.std(0)
    w, b, rate = np.zeros(dims), 0.0, 0.5 / count
    for _ in range(20_000):
        error = 1 / (1 + np.exp(-(z @ w + b))) - y
        w, b = w - rate * (z.T @ error + 2.0 * w), b - rate * error.sum()
    np.testing.assert_allclose(found.weight, w, atol=1e-4)
    np.testing.assert_allclose(found.bias, b, atol=1e-4)
    np.testing.assert_allclose(found.scores(x), 1 / (1 + np.exp(-(z @ w + b))), atol=1e-4)


def test_features_that_never_change_say_nothing() -> None:
    x, y = episodes(30, 2)
    wider = np.concatenate([x, np.full((30, 1), 7.0)], axis=1)
    found = classifier.fit(wider, y)
    np.testing.assert_allclose(found.scores(wider), classifier.fit(x, y).scores(x), atol=1e-8)
    np.testing.assert_allclose(found.scores(wider + np.array([0, 0, 9.0])), found.scores(wider))


def test_held_out_scores_come_from_models_that_have_not_seen_the_episode() -> None:
    x, y = episodes(23, 4)
    fold = classifier.folds(y, 5)
    assert all(np.ptp(np.bincount(fold[y == kind], minlength=5)) <= 1 for kind in (True, False))
    scores = classifier.held_out_scores(x, y)
    for number in range(5):
        rest = fold != number
        np.testing.assert_array_equal(scores[~rest], classifier.fit(x[rest], y[rest]).scores(x[~rest]))
    # A label that chance gave cannot be known: in its own fit it could.
    noise, coin = np.random.default_rng(1).normal(size=(60, 60)), np.random.default_rng(2).random(60) < 0.5
    assert classifier.auc(classifier.fit(noise, coin, 0.01).scores(noise), coin) > 0.99
    assert 0.3 < classifier.auc(classifier.held_out_scores(noise, coin, strength=0.01), coin) < 0.7


def test_one_kind_alone_is_refused() -> None:
    with pytest.raises(DataError, match="5 successes and 1 failures are known"):
        classifier.held_out_scores(np.zeros((6, 2)), np.arange(6) > 0)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), precision=st.floats(0.5, 1.0), grain=st.sampled_from([5, 1000]))
def test_thresholds_by_counting(seed: int, precision: float, grain: int) -> None:
    """No admissible score is lower; among the episodes that are called, enough are what they are called."""
    rng = np.random.default_rng(seed)
    scores, y = rng.integers(0, grain + 1, 40) / grain, rng.random(40) < 0.6
    found = classifier.thresholds(scores, y, precision)

    def admissible(over: np.ndarray, truth: np.ndarray) -> bool:
        return over.sum() >= classifier.LEAST and truth[over].sum() >= precision * over.sum()

    for limit, truth, over in (
        (found.success, y, lambda t: scores >= t),
        (found.failure, ~y, lambda t: scores <= t),
    ):
        side = scores[scores >= 0.5] if truth is y else scores[scores < 0.5]
        fine = [t for t in side if admissible(over(t), truth)]
        assert limit == (None if not fine else min(fine) if truth is y else max(fine))
    for score in scores:
        called = found.call(score)
        assert called is not True or score >= 0.5
        assert called is not False or score < 0.5


def test_auc_by_counting_pairs() -> None:
    scores, y = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    assert classifier.auc(scores, y) == (1 + 0.5 + 1 + 1) / 4


def test_features_are_pooled_over_real_tokens() -> None:
    rng = np.random.default_rng(0)
    features, state = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 2))
    mask = np.array([[True, True, False, True, False], [True, False, False, False, False]])
    found = pooled(CriticInputs(state=jnp.asarray(state), features=jnp.asarray(features), mask=jnp.asarray(mask)))
    for b in range(2):
        real = features[b][mask[b]]
        np.testing.assert_allclose(found[b], np.concatenate([real.mean(0), real.max(0), state[b]]), rtol=1e-5)
    np.testing.assert_array_equal(pooled(CriticInputs(state=jnp.asarray(state))), jnp.asarray(state))


FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [2], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
}
ACTED = {"policy": {"dtype": "string", "shape": [1], "names": None}}
DONE = {"next.success": {"dtype": "bool", "shape": [1], "names": None}}


def walk(root: Path, ends: list[float], *, told: bool, policy: bool = False) -> Path:
    """Episodes that end somewhere; beyond 0.5 is a success. The beginning tells nothing."""
    features = {**FEATURES, **(DONE if told else {}), **(ACTED if policy else {})}
    with LeRobotWriter(root, fps=5, features=features) as writer:
        for end in ends:
            for step in range(6):
                place = [end, 0.0] if step >= 6 - LAST else [5.0 * (-1) ** step, 0.0]
                frame = {"observation.state": np.array(place, np.float32), "action": np.zeros(2, np.float32)}
                frame |= {"policy": "walk/5"} if policy else {}
                writer.add_frame({**frame, **({"next.success": step == 5 and end > 0.5} if told else {})})
            writer.save_episode(task="go right")
    return root


def test_only_what_nobody_knows_is_labelled_and_people_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    run = save_run(replace(walking(tmp_path, BCConfig()), exp_name="seen"), {5: 0.5})
    demos = walk(tmp_path / "demos", list(rng.uniform(-0.5, 1.5, 40)), told=True)
    fresh = walk(tmp_path / "fresh", [1.4, -0.4, 1.3, -0.3, 0.5, 1.2], told=False)
    labels.append(fresh, Label(episode_index=2, by="ann", outcome="failure"))
    labels.append(fresh, Label(episode_index=5, by="ann", outcome="unsure"))
    words = ["label", str(fresh), "--classify", str(run), "--learn", str(demos)]
    assert main([*words, "--dry-run"]) == 0
    assert len((fresh / labels.LABELS_FILE).read_text().splitlines()) == 2
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "held-out AUC" in said
    assert "left 1 of 4 episodes to people" in said
    lines = [json.loads(line) for line in (fresh / labels.LABELS_FILE).read_text().splitlines()][2:]
    assert [(line["episode_index"], line["outcome"], line["by"]) for line in lines] == [
        (0, "success", BY),
        (1, "failure", BY),
        (3, "failure", BY),
    ]
    assert all(0 <= line["score"] <= 1 for line in lines)
    assert inspect_dataset(fresh).success == (True, False, False, False, None, None)

    # A person who looks later decides; the classifier has nothing to say of that episode any more.
    labels.append(fresh, Label(episode_index=0, by="bob", outcome="failure"))
    assert inspect_dataset(fresh).success[0] is False
    again = classify(str(fresh), str(run), learn=[str(demos)])
    assert set(again.said) == {1, 3, 4}
    assert inspect_dataset(fresh).success == (False, False, False, False, None, None)
    verdicts = labels.newest(labels.read(fresh, dict.fromkeys(range(6), 6)))
    assert not any(one.conflict for one in verdicts.values())


def test_precision_is_judged_on_episodes_that_were_made_alike(tmp_path: Path) -> None:
    """Demonstrations are easy to tell apart; what the policy does is not what they show."""
    rng = np.random.default_rng(0)
    run = str(save_run(replace(walking(tmp_path, BCConfig()), exp_name="seen"), {5: 0.5}))
    demos = str(walk(tmp_path / "demos", list(rng.uniform(-0.5, 1.5, 40)), told=True))
    fresh = walk(tmp_path / "fresh", list(rng.uniform(-0.5, 1.5, 30)), told=False, policy=True)
    found = classify(str(fresh), run, learn=[demos])
    assert "only 0 of them were made as those to label were" in str(found)
    assert not (fresh / labels.LABELS_FILE).exists()
    for index in range(22):  # a coin says how they went: no score can be trusted
        said = Label(episode_index=index, by="ann", outcome="success" if rng.random() < 0.5 else "failure")
        labels.append(fresh, said)
    coin = classify(str(fresh), run, learn=[demos])
    assert coin.alike.sum() == 22
    assert classifier.auc(coin.scores[~coin.alike], coin.known[~coin.alike]) > 0.9
    assert [success for _, success in coin.said.values()].count(None) >= 6
    own = classify(str(fresh), run, learn=[demos], write=False, precision=0.5)
    limit = own.limits.success
    assert limit == classifier.threshold(own.scores[own.alike], own.known[own.alike], 0.5, 0.5)


@pytest.mark.parametrize("score", [True, "0.5", 1.5, -0.1, float("nan")])
def test_a_score_is_a_probability(score: object) -> None:
    entry = {"episode_index": 0, "by": "classifier", "outcome": "success", "score": score}
    with pytest.raises(DataError, match="expected a probability"):
        labels.parse(entry, where="here", lengths={0: 5})
