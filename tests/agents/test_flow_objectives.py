"""Every formula of critic-free RL on a flow against plain Python, number by number."""

from statistics import fmean

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import naive_ript as naive
from pirl.agents import flow_objectives as fo
from pirl.errors import ConfigError, EnvError
from pirl.models import flow

B, N, H, A, G, K = 3, 2, 2, 2, 3, 5
FEW = settings(max_examples=25, deadline=None)
SHAPE = (B, N, H, A)


def floats(shape, low: float = -3, high: float = 3):
    # XLA flushes subnormal numbers to zero.
    return hnp.arrays(np.float32, shape, elements=st.floats(low, high, width=32, allow_subnormal=False))


def close(found, expected, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


# Groups


@FEW
@given(rewards=hnp.arrays(np.float64, (G, K), elements=st.sampled_from([0.0, 1.0, 0.5, -2.0])))
@pytest.mark.parametrize("how", ["rloo", "std"])
def test_advantages_are_those_of_the_formula(rewards: np.ndarray, how: str) -> None:
    found = fo.group_advantages(rewards, how, limit=1.5)
    close(found, naive.advantages(rewards.tolist(), how, 1.5), rtol=1e-12, atol=1e-12)
    assert isinstance(found, np.ndarray)
    equal = np.array([len(set(row)) == 1 for row in rewards.tolist()])
    assert (fo.accepted(rewards) == ~equal).all()
    assert (found[equal] == 0).all(), "groups without a difference carry no signal"
    close(fo.group_advantages(rewards, "rloo").sum(1), np.zeros(G), atol=1e-12)


def test_advantages_of_successes() -> None:
    """K(1 - p)/(K - 1) and -Kp/(K - 1); standard deviations make rare successes count for more than ±1."""
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    close(fo.group_advantages(rewards), [[1, -1 / 3, -1 / 3, -1 / 3], [0] * 4, [0] * 4])
    close(fo.group_advantages(rewards, "std")[0], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    assert fo.group_advantages(rewards, "std", limit=1.0).max() == 1
    assert fo.accepted(rewards).tolist() == [True, False, False]


def test_rewards_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(EnvError, match=r"groups \[1\] are not finite"):
        fo.group_advantages(np.array([[0.0, 1], [np.nan, 1]]))
    for how in ("rloo", "std"):
        with pytest.raises(ConfigError, match="groups of 1 rollout"):
            fo.group_advantages(np.ones((3, 1)), how)


# NFT


@FEW
@given(v=floats(SHAPE), old=floats(SHAPE), u=floats(SHAPE), a=floats((B, H), -1, 1), beta=st.floats(0.25, 2))
def test_nft(v: np.ndarray, old: np.ndarray, u: np.ndarray, a: np.ndarray, beta: float) -> None:
    """Two branches, and the linearised policy gradient with a trust region: the same number."""
    found = fo.nft_loss(*map(jnp.asarray, (v, old, u, a)), beta)
    for index in np.ndindex(SHAPE):
        numbers = (float(v[index]), float(old[index]), float(u[index]), float(a[index[0], index[2]]), beta)
        close(found[index], naive.nft(*numbers), rtol=1e-4, atol=1e-4)
        close(naive.nft(*numbers), naive.nft_as_trust_region(*numbers), rtol=1e-9, atol=1e-9)


@FEW
@given(v=floats(SHAPE), old=floats(SHAPE), u=floats(SHAPE), a=floats((B, H), -1, 1), beta=st.floats(0.25, 2))
def test_gradient_of_nft(v: np.ndarray, old: np.ndarray, u: np.ndarray, a: np.ndarray, beta: float) -> None:
    def total(v):
        return fo.nft_loss(v, *map(jnp.asarray, (old, u, a)), beta).sum()

    found, step = jax.grad(total)(jnp.asarray(v)), 1e-4
    for index in np.ndindex(SHAPE):
        rest = (float(old[index]), float(u[index]), float(a[index[0], index[2]]), beta)
        rise = naive.nft(float(v[index]) + step, *rest) - naive.nft(float(v[index]) - step, *rest)
        close(found[index], rise / (2 * step), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("advantage", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_nft_has_its_minimum_at_a_finite_place(advantage: float) -> None:
    """v_old + A (u - v_old) / β, also for negative advantages: where the raw loss has none."""
    old, u, beta = 0.3, 1.1, 2.0
    v = jnp.linspace(-5, 5, 2001)
    full = lambda x: jnp.full((1, 1, 1, 2001), x)  # noqa: E731
    losses = fo.nft_loss(v.reshape(1, 1, 1, -1), full(old), full(u), jnp.full((1, 1), advantage), beta)
    close(v[jnp.argmin(losses)], old + advantage * (u - old) / beta, atol=0.006)


# FPO


@FEW
@given(loss=floats(B, 0, 5), old=floats(B, 0, 5), a=floats(B), clip=st.floats(0.05, 0.5))
def test_fpo(loss: np.ndarray, old: np.ndarray, a: np.ndarray, clip: float) -> None:
    found, ratio = fo.fpo_loss(*map(jnp.asarray, (loss, old, a)), clip)
    expected = [naive.fpo(*map(float, numbers), clip) for numbers in zip(loss, old, a, strict=True)]
    close(np.stack([found, ratio], 1), expected, rtol=1e-4)


@pytest.mark.parametrize("advantage", [-0.5, 0.5])
@pytest.mark.parametrize("gap", [-4.0, -0.2, -0.03, 0.03, 0.2, 4.0])
def test_gradient_of_fpo(advantage: float, gap: float) -> None:
    """A ratio counts until it has left the interval on the side that the advantage asks for."""
    old, step = 6.0, 1e-5

    def total(loss):
        return fo.fpo_loss(loss, jnp.full(1, old), jnp.full(1, advantage), 0.05)[0].sum()

    found = float(jax.grad(total)(jnp.full(1, old - gap))[0])
    rise = naive.fpo(old - gap + step, old, advantage, 0.05)[0] - naive.fpo(old - gap - step, old, advantage, 0.05)[0]
    close(found, rise / (2 * step), rtol=1e-3, atol=1e-4)
    stopped = abs(gap) > 3 or (gap * advantage > 0 and abs(gap) > 0.06)
    assert (found == 0) == stopped


# Weights


@FEW
@given(advantage=floats(B + 2), loss=st.sampled_from(["nft", "awr", "filter", "cfg", "fpo", "raw"]))
def test_what_becomes_of_an_advantage(advantage: np.ndarray, loss: str) -> None:
    """The last two rows only fill up the batch: the mean is that of the others."""
    rows = jnp.asarray([1.0] * B + [0.0] * 2)
    found = fo.row_weights(loss, jnp.asarray(advantage), rows, beta=0.7, cap=4.0)
    told = naive.Settings(
        **{"loss": loss, "real_dims": 1, "nft_beta": 1, "awr_beta": 0.7, "weight_cap": 4.0, "fpo_clip": 0.1},
        **{"condition_dropout": 0.2, "bc_weight": 0, "rate": 0.1, "decay": None},
    )
    expected = naive.weights(told, advantage[:B].tolist())
    close(found[:B], expected, rtol=1e-4)
    total = sum(abs(w) for w in expected)
    share = sum(max(-w, 0) for w in expected) / total if total > 1e-3 else None
    if share is not None:
        close(fo.negative_share(found, rows), share, atol=1e-4)
    if loss == "awr" or (loss == "filter" and any(expected)):
        close(found[:B].mean(), 1.0)


@pytest.mark.parametrize("size", [2, 5, 8, 12])
@pytest.mark.parametrize("how", ["rloo", "std"])
def test_the_largest_advantage_of_a_group(how: str, size: int) -> None:
    """No group of outcomes has a larger one, and the one with a single success, or a single failure, has it."""
    every = np.array([[float(k < won) for k in range(size)] for won in range(1, size)])
    found = np.abs(np.array(naive.advantages(every.tolist(), how, 3.0)))
    assert found.max() == pytest.approx(fo.largest_advantage(size, how))
    assert found[[0, -1]].max(1) == pytest.approx([found.max()] * 2)


def test_nft_by_the_largest_advantage_keeps_what_clipping_loses() -> None:
    """One success of eight has 2.65 standard deviations, one of two 1: clipped both are 1."""
    groups = np.array([[1.0] + [0.0] * 7, [1.0] * 4 + [0.0] * 4])
    advantage = jnp.asarray(fo.group_advantages(groups, "std")[:, 0])
    given = dict(beta=1.0, cap=20.0, acceptance=0.5)
    clipped = fo.row_weights("nft", advantage, jnp.ones(2), **given)
    divided = fo.row_weights("nft", advantage, jnp.ones(2), largest=fo.largest_advantage(8, "std"), **given)
    close(clipped, [0.5, 0.5])
    close(divided, [0.5, 0.5 / 7**0.5])


def test_rows_that_count_more_weigh_more_in_the_mean() -> None:
    """Two rows of half the weight are one row."""
    given = dict(beta=0.7, cap=20.0)
    two = fo.row_weights("awr", jnp.asarray([0.3, 0.3, -1.0]), jnp.asarray([0.5, 0.5, 1.0]), **given)
    one = fo.row_weights("awr", jnp.asarray([0.3, -1.0]), jnp.ones(2), **given)
    close(two, [one[0], one[0], one[1]])


def test_weights_without_any_row_are_finite() -> None:
    for loss in ("awr", "filter"):
        assert np.isfinite(fo.row_weights(loss, jnp.ones(4), jnp.zeros(4), beta=0.5, cap=20.0)).all()
    assert float(fo.negative_share(jnp.zeros(4), jnp.ones(4))) == 0


# Guidance


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.7])
def test_guided_sampling_on_linear_fields(scale: float) -> None:
    """dx/dt = k x: a step of the guided field multiplies by 1 - (k_u + s (k_c - k_u))/n."""
    of_condition, of_none, steps = 0.8, -0.5, 7
    field = flow.guided(lambda x, t: of_condition * x, lambda x, t: of_none * x, scale)
    noise = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    rate = fmean([of_none * (1 - scale), of_condition * scale]) * 2
    close(flow.euler(field, jnp.asarray(noise), steps), noise * (1 - rate / steps) ** steps, rtol=1e-4)
