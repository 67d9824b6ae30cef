"""The BC agent is OpenPI's training step: three updates from the golden weights, out of OpenPI's key alone.

Times are drawn as OpenPI draws them: our own are of the same distribution, but not the same numbers. Noise and time are
drawn inside the compiled step, so an ulp of the time may differ; the shortest period
of its embedding multiplies that by 1571. Hence FROM_RNG on losses (measured: 7e-6), not the bound for given noise.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden_data import FAMILIES, FROM_RNG, NOISE_GRADIENTS, Family
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.models import flow, freeze, pi0
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0
from pirl.training.config import AdamW, CosineSchedule

# Weights after three steps, the last of a learning rate of 1e-3: an ulp of the time in a gradient that is nearly zero
# is a share of a step to Adam. Measured: 2e-5, on pi05_asym's position embedding; everywhere else below 4e-6.
WEIGHTS = dict(rtol=0, atol=5e-5)
DRAW = flow.draw

# Families whose two transformers differ in width: both models, with adapters and without, with an average and without.
# The others are their like and are left to tests/parity/test_model.py, which takes the same three steps with all.
UNEVEN = [name for name, family in FAMILIES.items() if family.config.vlm.width != family.config.expert.width]


def make_agent(family: Family, golden: dict) -> BC:
    # What is recomputed changes no number (tests/models/test_pi0.py), only the time to compile.
    config = replace(family.config, remat="none")
    learner = Learner(
        tx=make_optimizer(AdamW(**golden["optimizer"]), make_schedule(CosineSchedule(**golden["lr_schedule"]))),
        mask=freeze.trainable_mask(pi0.param_shapes(config), config),
        ema_decay=golden["ema_decay"],
    )
    agent = BCConfig(augment=False, ema_decay=golden["ema_decay"])
    return BC(policy=Pi0(config), config=agent, policy_learner=learner, real_action_dim=config.action_dim)


def golden_batch(family: Family) -> dict:
    observation = family.observation
    return {
        "observations": {
            "image": observation.images,
            "image_mask": observation.image_masks,
            "state": observation.state,
            "tokenized_prompt": observation.tokenized_prompt,
            "tokenized_prompt_mask": observation.tokenized_prompt_mask,
        },
        "actions": jnp.asarray(family.inputs["actions"]),
        # OpenPI's loss does not know about padding: what `valid` says must not matter.
        "valid": jnp.zeros(family.inputs["actions"].shape[:2]),
    }


def openpi_draw(
    noise_key: jax.Array, time_key: jax.Array, actions: jax.Array, num: int = 1, *, delay: int = 0
) -> flow.Draws:
    assert not delay
    time = jax.random.beta(time_key, 1.5, 1.0, (len(actions), num)) * 0.999 + 0.001
    return DRAW(noise_key, time_key, actions, num)._replace(time=time)


@pytest.mark.parametrize("family", UNEVEN or sorted(FAMILIES), indirect=True)
def test_three_updates(family: Family, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flow, "draw", openpi_draw)
    golden, arrays = family.json("train_steps"), family.arrays("train_steps")
    agent, batch = make_agent(family, golden), golden_batch(family)
    state = agent.init(jax.random.key(0), jax.tree.map(jnp.asarray, family.params))
    train_key = jax.random.wrap_key_data(jnp.asarray(arrays["train_rng_key_data"]))
    update = jax.jit(lambda state, batch: agent.update(state, batch, jax.random.fold_in(train_key, state.step)))
    for expected in golden["steps"]:
        state, metrics = update(state, batch)
        np.testing.assert_allclose(metrics["policy/loss"], expected["loss"], **FROM_RNG)
        np.testing.assert_allclose(metrics["policy/grad_norm"], expected["grad_norm"], rtol=1e-4)
        assert int(state.step) == expected["step_after"]

    params = flatten(state.params["policy"])
    stored = {path.removeprefix("final/"): x for path, x in arrays.items() if path.startswith("final/")}
    assert stored
    for path, expected in stored.items():
        if not path.endswith(NOISE_GRADIENTS):
            np.testing.assert_allclose(np.asarray(params[path], np.float32), expected, err_msg=path, **WEIGHTS)
    assert bool(state.ema) == (golden["ema_decay"] is not None)
    trees = {"params": params} | ({"ema_params": flatten(state.ema["policy"])} if state.ema else {})
    for name, ours in trees.items():
        assert set(ours) == set(golden[name])
        for path, expected in golden[name].items():
            assert str(ours[path].dtype) == expected["dtype"], path
            if not path.endswith(NOISE_GRADIENTS):
                l2 = np.sqrt(np.square(np.asarray(ours[path], np.float64)).sum())
                np.testing.assert_allclose(l2, expected["l2"], rtol=1e-5, atol=1e-6, err_msg=f"{name}: {path}")
