"""How weights learn: what is frozen stays, the average follows, a batch in parts is the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.errors import ConfigError
from pirl.models.observation import Observation

PARAMS = {"body": {"kernel": jnp.asarray([[1.0, 2.0], [3.0, 4.0]]) / 3}, "head": {"bias": jnp.asarray([0.1, -0.7])}}
MASK = {"body": {"kernel": False}, "head": {"bias": True}}


def close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_frozen_leaves_have_neither_gradient_nor_optimizer_state():
    learner = Learner(tx=optax.adam(0.1), mask=MASK, ema_decay=0.5)
    params, opt = learner.init(PARAMS)
    assert params["body"]["kernel"].dtype == jnp.bfloat16
    assert params["head"]["bias"].dtype == jnp.float32
    assert {x.shape for x in jax.tree.leaves(opt)} == {(), (2,)}
    trainable, frozen = learner.split(params)
    assert (trainable, frozen) == ({"head": params["head"]}, {"body": params["body"]})

    new, _ = learner.step(params, {"head": {"bias": jnp.asarray([2.0, -3.0])}}, opt)
    # Adam's first step is one learning rate long, whatever the gradient.
    np.testing.assert_allclose(new["head"]["bias"], [0.0, -0.6], atol=1e-6)
    assert new["body"]["kernel"] is params["body"]["kernel"]
    average = learner.average(params, new)
    np.testing.assert_allclose(average["head"]["bias"], [0.05, -0.65], atol=1e-6)
    assert average["body"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(average["body"]["kernel"], new["body"]["kernel"])


def test_without_a_mask_everything_trains_and_without_a_decay_nothing_is_averaged():
    learner = Learner(tx=optax.sgd(0.5))
    params, opt = learner.init(PARAMS)
    assert params is PARAMS
    new, _ = learner.step(params, jax.tree.map(jnp.ones_like, params), opt)
    close(new, jax.tree.map(lambda old: old - 0.5, PARAMS))
    assert learner.average(PARAMS, new) is PARAMS


def make_batch(size: int):
    """A tree with a typed record in it, as the agents' parts are."""
    rng = np.random.default_rng(0)
    state = jnp.asarray(rng.normal(size=(size, 2)), jnp.float32)
    return Observation(images={}, image_masks={}, state=state), jnp.arange(size)


def loss(params, batch):
    observation, number = batch
    out = jnp.tanh(observation.state @ params["body"]["kernel"] + params["head"]["bias"])
    per_sample = jnp.square(out).sum(-1)
    return per_sample.mean(), (observation, number, per_sample)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_a_batch_in_parts_gives_the_same_loss_gradient_and_order(parts: int):
    batch = make_batch(6)
    value, aux, grads = accumulated(loss, PARAMS, batch, parts)
    (expected, whole), gradient = jax.value_and_grad(loss, has_aux=True)(PARAMS, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close((aux, grads), (whole, gradient))
    np.testing.assert_array_equal(aux[1], np.arange(6))
    out = in_parts(lambda part: loss(PARAMS, part)[1], batch, parts)
    close(out, whole)


def test_parts_are_computed_one_after_the_other():
    """That is what saves memory: the program holds activations of one part, and no part is a copy of the batch."""
    seen = []

    def function(part):
        seen.append(part[0].state.shape)
        return part[1]

    jax.eval_shape(lambda batch: in_parts(function, batch, 3), make_batch(6))
    assert set(seen) == {(2, 2)}


def test_a_batch_that_does_not_split_is_refused():
    for call in (lambda: accumulated(loss, PARAMS, make_batch(6), 4), lambda: in_parts(lambda x: x, make_batch(6), 4)):
        with pytest.raises(ConfigError, match=r"batch of 6 does not split into 4 equal parts\n  hint: .*accumulate"):
            call()
