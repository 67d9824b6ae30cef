"""Every formula against slow Python that shares no code with it, and the promises its docstring makes."""

import itertools
import math
from statistics import fmean

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pirl.agents import objectives
from pirl.agents.objectives import HLGauss
from pirl.errors import ConfigError

FEW = settings(max_examples=40, deadline=None)
# One shape each, so that everything is compiled once.
B, E, N, K, BINS = 5, 3, 4, 4, 21
SUPPORT = HLGauss(-10.0, 2.0, BINS)

td_target = jax.jit(objectives.td_target)
fit_beta = jax.jit(objectives.fit_beta, static_argnums=2)
project, value, loss = jax.jit(SUPPORT.project), jax.jit(SUPPORT.value), jax.jit(SUPPORT.loss)
agreement = jax.jit(objectives.agreement)
calql = jax.jit(objectives.calql_penalty, static_argnames="temperature")


def floats(shape: int | tuple[int, ...], bound: float = 10.0) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, shape, elements=st.floats(-bound, bound, width=32, allow_subnormal=False))


def masks(shape: int | tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.bool_, shape)


def close(found: object, expected: object, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rtol, atol=atol)


# Targets


@FEW
@given(
    rewards=floats((B, 6), 2.0),
    lengths=hnp.arrays(np.int32, B, elements=st.integers(1, 6)),
    mask=masks(B),
    values=floats(B),
    discount=st.floats(0.5, 1.0),
    bounds=st.sampled_from([(-math.inf, math.inf), (-3.0, 3.0), (-100.0, 0.0)]),
)
def test_td_target(
    rewards: np.ndarray, lengths: np.ndarray, mask: np.ndarray, values: np.ndarray, discount: float, bounds: tuple
) -> None:
    sums, expected = [], []
    for row, length, allowed, value in zip(rewards, lengths, mask, values, strict=True):
        # Backwards, as the definition of a return goes: G_l = r_l + γ G_{l+1}.
        tail, total = (float(value) if allowed else 0.0), 0.0
        for reward in reversed(row[:length].tolist()):
            tail, total = reward + discount * tail, reward + discount * total
        sums.append(total)
        expected.append(min(max(tail, bounds[0]), bounds[1]))
    batch = jnp.float32(sums), discount, jnp.asarray(lengths), jnp.float32(mask), jnp.asarray(values)
    close(td_target(*batch, *bounds), expected, atol=1e-4)


def test_targets_carry_no_gradient() -> None:
    ones = jnp.ones(B)
    gradient = jax.grad(lambda v: td_target(ones, 0.9, jnp.ones(B, int), ones, v, -math.inf, math.inf).sum())(ones)
    assert not gradient.any()


@FEW
@given(ends=floats(2, 5.0), discount=st.floats(0.0, 1.0), limit=st.integers(1, 30))
def test_value_range_is_what_episodes_can_return(ends: np.ndarray, discount: float, limit: int) -> None:
    worst, best = sorted(ends.tolist())
    if best - worst < 1e-3:
        return
    low, high = objectives.value_range(worst, best, discount, limit)
    returns = [
        sum(reward * discount**step for step in range(length))
        for length in range(1, limit + 1)
        for reward in (worst, best)
    ]
    close([low, high], [min(returns), max(returns)])


def test_value_range_of_the_usual_rewards() -> None:
    close(objectives.value_range(-1.0, 0.0, 0.99), (-100, 0))
    close(objectives.value_range(-1.0, 0.0, 0.99, 200), (-(1 - 0.99**200) / 0.01, 0))
    assert objectives.value_range(0.0, 1.0, 0.99, once=True) == (0, 1)
    assert objectives.value_range(-1.0, 0.0, 1.0, 50) == (-50, 0)


@pytest.mark.parametrize(
    "bad", [(1.0, 0.0, 0.9), (0.0, 1.0, 1.1), (0.0, 1.0, 0.9, 0), (0.0, 0.0, 0.9), (-1.0, 0.0, 1.0)]
)
def test_value_range_refuses(bad: tuple) -> None:
    with pytest.raises(ConfigError):
        objectives.value_range(*bad)


@FEW
@given(q=floats((4, B)), seed=st.integers(0, 99))
def test_aggregate(q: np.ndarray, seed: int) -> None:
    rows = q.tolist()
    columns = list(zip(*rows, strict=True))
    close(objectives.aggregate(jnp.asarray(q)), [fmean(column) for column in columns])
    close(objectives.aggregate(jnp.asarray(q), "min"), [min(column) for column in columns])
    found = np.asarray(objectives.aggregate(jnp.asarray(q), "random_pair", jax.random.key(seed))).tolist()
    assert found in [[min(pair) for pair in zip(a, b, strict=True)] for a, b in itertools.combinations(rows, 2)]


def test_random_pairs_are_all_pairs() -> None:
    q = jnp.asarray([[0.0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]])
    drawn = {tuple(objectives.aggregate(q, "random_pair", jax.random.key(i)).tolist()) for i in range(60)}
    assert len(drawn) == 6
    assert all(sum(row) == 2 for row in drawn)
    with pytest.raises(ConfigError, match="no key"):
        objectives.aggregate(q, "random_pair")
    with pytest.raises(ConfigError, match="1 critic"):
        objectives.aggregate(q[:1], "random_pair", jax.random.key(0))


# Losses of the critic

MARGIN, WIDTH = 3, 12 / 15
EDGES = [-10 + WIDTH * (i - MARGIN) for i in range(BINS + 1)]


def histogram(y: float) -> list[float]:
    y = min(max(y, -10.0), 2.0)
    below = [0.5 * (1 + math.erf((edge - y) / (0.75 * WIDTH * math.sqrt(2)))) for edge in EDGES]
    mass = [b - a for a, b in itertools.pairwise(below)]
    return [m / sum(mass) for m in mass]


@FEW
@given(y=floats(B, 15.0), logits=floats((B, BINS), 5.0))
def test_hl_gauss(y: np.ndarray, logits: np.ndarray) -> None:
    probabilities = [histogram(v) for v in y.tolist()]
    close(project(y), probabilities)
    values, losses = [], []
    for row, p in zip(logits.tolist(), probabilities, strict=True):
        total = sum(math.exp(x) for x in row)
        predicted = [math.exp(x) / total for x in row]
        values.append(sum(q * (a + b) / 2 for q, (a, b) in zip(predicted, itertools.pairwise(EDGES), strict=True)))
        losses.append(-sum(a * math.log(b) for a, b in zip(p, predicted, strict=True)))
    close(value(logits), values)
    close(loss(logits, y), losses)


def test_the_mean_of_a_projection_is_the_target_even_at_the_ends() -> None:
    for support in (HLGauss(-100.0, 0.0), HLGauss(0.0, 1.0, 201, 2.0), HLGauss(-1e4, -9e3, 51)):
        y = jnp.linspace(support.low, support.high, 101)
        probabilities = support.project(y)
        close(probabilities.sum(-1), np.ones(101))
        assert (probabilities >= 0).all()
        error = support.value(jnp.log(probabilities + 1e-30)) - y
        assert jnp.abs(error).max() < 1e-3 * support.width


def test_hl_gauss_is_least_at_its_own_projection() -> None:
    logits = jnp.log(project(jnp.linspace(-10, 2, B)) + 1e-30)
    gradient = jax.grad(lambda x: SUPPORT.loss(x, jnp.linspace(-10, 2, B)).sum())(logits)
    close(gradient, np.zeros((B, BINS)), atol=1e-6)
    assert jnp.abs(loss(logits, jnp.linspace(-10, 2, B)) - 1.2).max() < 1e-2


@pytest.mark.parametrize("bad", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0, 6), (0.0, 1.0, 101, 0.0)])
def test_hl_gauss_refuses(bad: tuple) -> None:
    with pytest.raises(ConfigError):
        HLGauss(*bad)


@FEW
@given(pred=floats((E, B)), y=floats(B), delta=st.floats(0.125, 4.0))
def test_regression_losses(pred: np.ndarray, y: np.ndarray, delta: float) -> None:
    squared = [[(p - t) ** 2 for p, t in zip(row, y.tolist(), strict=True)] for row in pred.tolist()]
    robust = [[0.5 * s if s <= delta**2 else delta * (math.sqrt(s) - delta / 2) for s in row] for row in squared]
    close(objectives.critic_loss("mse", jnp.asarray(pred), jnp.asarray(y)), squared, atol=1e-4)
    close(objectives.critic_loss("huber", jnp.asarray(pred), jnp.asarray(y), delta=delta), robust, atol=1e-4)
    close(objectives.critic_value("mse", jnp.asarray(pred)), pred)


def test_critic_loss_of_histograms() -> None:
    logits = jax.random.normal(jax.random.key(0), (E, B, BINS))
    y = jnp.linspace(-12.0, 3.0, B)
    found = objectives.critic_loss("hl_gauss", logits, y, support=SUPPORT)
    close(found, [[float(loss(logits[e], y)[b]) for b in range(B)] for e in range(E)])
    assert objectives.critic_value("hl_gauss", logits, SUPPORT).shape == (E, B)
    with pytest.raises(ConfigError, match="support"):
        objectives.critic_loss("hl_gauss", logits, y)


@FEW
@given(
    q=floats((E, B, N)), data=floats((E, B)), returns=floats(B), known=masks(B), temperature=st.sampled_from([0.5, 2.0])
)
def test_calql(q: np.ndarray, data: np.ndarray, returns: np.ndarray, known: np.ndarray, temperature: float) -> None:
    expected = np.zeros((E, B))
    for e, b in itertools.product(range(E), range(B)):
        pushed = [max(x, float(returns[b])) if known[b] else x for x in q[e, b].tolist()]
        mean = fmean(math.exp(x / temperature) for x in pushed)
        expected[e, b] = temperature * math.log(mean) - float(data[e, b])
    mc_return = jnp.asarray(np.where(known, returns, np.float32("nan")))
    close(calql(jnp.asarray(q), jnp.asarray(data), mc_return, temperature=temperature), expected, atol=1e-4)


def test_calql_pushes_nothing_below_the_return() -> None:
    q = jnp.asarray([[[-1.0, 3.0], [-1.0, 3.0]]])
    gradient = jax.grad(lambda x: calql(x, jnp.zeros((1, 2)), jnp.asarray([0.0, jnp.nan])).sum())(q)
    assert gradient[0, 0, 0] == 0
    assert gradient[0, 0, 1] > 0
    assert (gradient[0, 1] > 0).all(), "an unknown return is no floor"


# Best of N


@FEW
@given(values=floats((B, N), 2.0))
def test_best_of_n(values: np.ndarray) -> None:
    candidates = np.arange(B * N * 2 * 3, dtype=np.float32).reshape(B, N, 2, 3)
    index = objectives.select_best(jnp.asarray(values))
    best = [row.index(max(row)) for row in values.tolist()]
    assert index.tolist() == best
    chosen = objectives.take_candidate(jnp.asarray(candidates), index)
    assert chosen.tolist() == [candidates[b, n].tolist() for b, n in enumerate(best)]


# Weights of the actor's loss


def sample_size(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@FEW
@given(advantage=floats(B, 5.0), beta=st.floats(0.125, 4.0), mask=masks(B))
def test_awr_weights_and_their_sample_size(advantage: np.ndarray, beta: float, mask: np.ndarray) -> None:
    expected = [min(math.exp(a / beta), 20.0) for a in advantage.tolist()]
    weights = objectives.awr_weights(jnp.asarray(advantage), beta, 20.0)
    close(weights, expected, rtol=1e-4)
    close(objectives.effective_sample_size(weights), sample_size(expected), rtol=1e-4)
    kept = [w for w, keep in zip(expected, mask.tolist(), strict=True) if keep]
    size = objectives.effective_sample_size(weights, jnp.asarray(mask))
    close(size, sample_size(kept) if kept else 0.0, rtol=1e-4)


def test_weights_at_the_edge_of_float32() -> None:
    close(objectives.awr_weights(jnp.asarray([1e6, -1e6, 0.0]), 1e-3, 20.0), [20.0, 0.0, 1.0])
    close(objectives.effective_sample_size(jnp.full(8, 1e-30)), 1.0)
    assert objectives.effective_sample_size(jnp.zeros(8)) == 0
    close(objectives.effective_sample_size(jnp.asarray([0.0, 0.0, 0.0, 1e30])), 0.25)


ADVANTAGES = floats(16, 8.0)


@FEW
@given(advantage=ADVANTAGES, target=st.floats(0.1, 0.95), offset=st.sampled_from([0.0, -3.0, 1.0]))
def test_fit_beta_is_the_largest_that_reaches_the_target(advantage: np.ndarray, target: float, offset: float) -> None:
    advantage = advantage + np.float32(offset)
    scale, best = max(np.abs(advantage).max(), 1e-6), advantage.max()
    found = float(fit_beta(jnp.asarray(advantage), target, 20.0))

    def sizes(betas: np.ndarray) -> np.ndarray:
        logs = np.minimum(advantage.astype(np.float64) / betas[:, None], math.log(20.0))
        weights = np.exp(logs - logs.max(1, keepdims=True))
        return weights.sum(1) ** 2 / (weights**2).sum(1) / len(advantage)

    betas = np.geomspace(max(1e-4 * scale, -best / 30), 1e4 * scale, 2000)
    dense, (here,) = sizes(betas), sizes(np.array([found]))
    # A dip between two points of the grid may be overlooked; it is not deep.
    assert dense[betas > found * 1.001].min(initial=1.0) > target - 0.02, "a larger β would have reached it"
    if dense.min() < target - 0.02:
        assert here == pytest.approx(target, abs=1e-3)
    elif here > target + 1e-3:
        assert here < dense.min() + 0.02, "none reaches it, but some come nearer"


@FEW
@given(advantage=ADVANTAGES, targets=st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0)))
def test_beta_grows_with_the_target(advantage: np.ndarray, targets: tuple[float, float]) -> None:
    low, high = (float(fit_beta(jnp.asarray(advantage), t, 20.0)) for t in sorted(targets))
    assert low <= high


@pytest.mark.parametrize("level", [0.0, -0.3, 7.0, -1e-4])
def test_equal_advantages_get_equal_weights(level: float) -> None:
    advantage = jnp.full(16, level)
    weights = objectives.awr_weights(advantage, fit_beta(advantage, 0.4, 20.0), 20.0)
    close(weights, np.ones(16), rtol=1e-3)


def test_fit_beta_ignores_what_is_masked() -> None:
    advantage = jax.random.normal(jax.random.key(0), (16,))
    half = jnp.arange(16) < 8
    with_noise = jnp.where(half, advantage, 1e3)
    repeated = jnp.concatenate([advantage[:8], advantage[:8]])
    masked = fit_beta(with_noise, 0.4, 20.0, half)
    close(masked, fit_beta(repeated, 0.4, 20.0), rtol=1e-4)
    assert jnp.isfinite(fit_beta(with_noise, 0.4, 20.0, jnp.zeros(16, bool)))


@FEW
@given(weights=hnp.arrays(np.float32, B, elements=st.floats(0.125, 20, width=32)), floor=st.floats(0, 1))
def test_floored(weights: np.ndarray, floor: float) -> None:
    mean = fmean(weights.tolist())
    found = objectives.floored(jnp.asarray(weights), mean, floor)
    close(found, [floor + (1 - floor) * w / mean for w in weights.tolist()])
    close(found.mean(), 1.0)
    assert objectives.floored(jnp.zeros(B), 0.0, 0.1).tolist() == pytest.approx([0.1] * B)


@FEW
@given(returns=floats((3, K)))
def test_rloo(returns: np.ndarray) -> None:
    expected = [[r - fmean(row[:k] + row[k + 1 :]) for k, r in enumerate(row)] for row in returns.tolist()]
    close(objectives.rloo(jnp.asarray(returns)), expected)


@FEW
@given(members=floats((E, B)))
def test_agreement_is_what_noise_does_not_explain(members: np.ndarray) -> None:
    means = [fmean(members[:, b]) for b in range(B)]
    noise = fmean(sum((a - means[b]) ** 2 for a in members[:, b]) / (E - 1) / E for b in range(B))
    signal = fmean((mean - fmean(means)) ** 2 for mean in means)
    expected = min(max(1 - noise / max(signal, 1e-12), 0.0), 1.0)
    assert float(agreement(jnp.float32(members))) == pytest.approx(expected, abs=1e-3)


def test_noise_agrees_on_nothing_and_copies_agree_on_all() -> None:
    noise = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
    assert float(objectives.agreement(jnp.asarray(noise))) < 0.1
    assert float(objectives.agreement(jnp.asarray(np.repeat(noise[:1], 4, axis=0)))) == pytest.approx(1)
    assert float(objectives.agreement(jnp.asarray(noise[:1]))) == 1


@FEW
@given(advantage=floats(B), spread=floats(B), typical=st.floats(0.1, 5.0))
def test_scaled_by_state(advantage: np.ndarray, spread: np.ndarray, typical: float) -> None:
    spread = np.abs(spread)
    found = objectives.scaled_by_state(jnp.float32(advantage), jnp.float32(spread), jnp.float32(typical))
    expected = [a * 1.25 * typical / (s + 0.25 * typical) for a, s in zip(advantage, spread, strict=True)]
    assert np.asarray(found) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    alike = objectives.scaled_by_state(jnp.float32(advantage), jnp.full(B, typical, jnp.float32), jnp.float32(typical))
    assert np.asarray(alike) == pytest.approx(advantage, rel=1e-4, abs=1e-5)


def test_early_decisions_are_heard_beside_late_ones() -> None:
    """Half of the states are worth ±0.05, half ±0.4. At one temperature the early choice goes from 0.50 to 0.55."""
    advantage = np.tile([0.05, -0.05, 0.4, -0.4], 64).astype(np.float32)
    spread = np.abs(advantage)
    typical = float(np.sqrt((spread**2).mean()))

    def chosen(advantage) -> tuple[float, float]:
        weights = objectives.awr_weights(advantage, fit_beta(advantage, 0.6, 20.0), 20.0)
        return tuple(float(weights[i] / (weights[i] + weights[i + 1])) for i in (0, 2))

    early, late = chosen(jnp.asarray(advantage))
    assert early < 0.6 < 0.9 < late
    early, late = chosen(objectives.scaled_by_state(jnp.asarray(advantage), jnp.asarray(spread), typical))
    assert early > 0.7
    assert late > 0.7


def test_known_return() -> None:
    found = objectives.known_return(jnp.array([0.5, jnp.nan]), jnp.array([0.1, 0.2]))
    assert np.asarray(found) == pytest.approx([0.5, 0.2])


def test_rloo_of_successes() -> None:
    """K(1-p)/(K-1) for a success, -Kp/(K-1) for a failure, nothing where all are the same."""
    found = objectives.rloo(jnp.asarray([[1.0, 1, 1, 0], [1, 1, 1, 1]]))
    close(found, [[1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0]])
    with pytest.raises(ConfigError):
        objectives.rloo(jnp.ones((3, 1)))


# Averages


@FEW
@given(x=floats((E, B)), mask=masks(B))
def test_masked_mean(x: np.ndarray, mask: np.ndarray) -> None:
    kept = [v for row in x.tolist() for v, keep in zip(row, mask.tolist(), strict=True) if keep]
    hidden = jnp.asarray(np.where(mask, x, np.float32("nan")))
    for given_mask in (jnp.asarray(mask), jnp.float32(mask)):
        found, gradient = jax.value_and_grad(objectives.masked_mean)(hidden, given_mask)
        close(found, fmean(kept) if kept else 0.0)
        close(gradient, np.broadcast_to(mask / max(len(kept), 1), (E, B)))


@FEW
@given(old=floats(B), new=floats(B), rate=st.floats(0, 1))
def test_averages_of_weights(old: np.ndarray, new: np.ndarray, rate: float) -> None:
    trees = [{"a": {"b": jnp.asarray(x)}, "frozen": jnp.asarray(x, jnp.bfloat16)} for x in (old, new)]
    mixed = [rate * a + (1 - rate) * b for a, b in zip(old.tolist(), new.tolist(), strict=True)]
    average = objectives.ema_update(*trees, rate)
    close(average["a"]["b"], mixed)
    assert average["frozen"].dtype == jnp.bfloat16
    assert (average["frozen"] == trees[1]["frozen"]).all(), "frozen leaves are the new ones, bit for bit"
    target = objectives.soft_update(*trees, 1 - rate)
    close(target["a"]["b"], mixed)
    assert target["frozen"].dtype == jnp.float32


def test_targets_move_where_bfloat16_would_not() -> None:
    target, online = {"w": jnp.ones(1)}, {"w": jnp.asarray([1.1], jnp.bfloat16)}
    assert objectives.soft_update(target, online, 0.005)["w"][0] > 1
    assert objectives.soft_update(target, online, 1.0)["w"][0] == online["w"][0].astype(jnp.float32)
