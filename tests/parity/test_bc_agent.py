"""The BC agent is OpenPI's training step: three updates from the golden weights, out of OpenPI's key alone.

Noise and time are drawn inside the compiled step, as OpenPI does, so an ulp of the time may differ; the shortest period
of its embedding multiplies that by 1571. Hence FROM_RNG on losses (measured: 5e-6), not the bound for given noise.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from golden_data import FROM_RNG, NOISE_GRADIENTS, WEIGHTS_AFTER_3_STEPS, Family
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.models import freeze, pi0
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0
from pirl.training.config import AdamW, CosineSchedule
from pirl.training.optim import make_optimizer, make_schedule


def make_agent(family: Family, golden: dict) -> BC:
    # What is recomputed changes no number (tests/models/test_pi0.py), only the time to compile.
    config = replace(family.config, remat="none")
    mask = freeze.trainable_mask(pi0.param_shapes(config), config)
    return BC(
        policy=Pi0(config),
        config=BCConfig(augment=False, ema_decay=golden["ema_decay"]),
        learner=Learner(
            tx=make_optimizer(AdamW(**golden["optimizer"]), make_schedule(CosineSchedule(**golden["lr_schedule"]))),
            mask=mask if golden["ema_decay"] is None else None,
            ema_decay=golden["ema_decay"],
        ),
        real_action_dim=config.action_dim,
    )


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


def test_three_updates(family: Family):
    golden, arrays = family.json("train_steps"), family.arrays("train_steps")
    agent, batch = make_agent(family, golden), golden_batch(family)
    state = agent.init(jax.random.key(0), jax.tree.map(jnp.asarray, family.params))
    train_key = jax.random.wrap_key_data(jnp.asarray(arrays["train_rng_key_data"]))
    update = jax.jit(lambda state: agent.update(state, batch, jax.random.fold_in(train_key, state.step)))
    import time
    for expected in golden["steps"]:
        t = time.time()
        state, metrics = update(state)
        jax.block_until_ready(state)
        print(time.time() - t, float(metrics["policy/loss"]) - expected["loss"], float(metrics["policy/grad_norm"]) / expected["grad_norm"] - 1)
        assert int(state.step) == expected["step_after"]
    params = flatten(state.params["policy"])
    worst = {}
    for path, x in arrays.items():
        if path.startswith("final/"):
            path = path.removeprefix("final/")
            worst[path] = np.abs(np.asarray(params[path], np.float32) - x).max()
    print(sorted(worst.items(), key=lambda kv: -kv[1])[:4])
    trees = {"params": params}
    if state.ema: trees["ema_params"] = flatten(state.ema["policy"])
    for name, ours in trees.items():
        w = {}
        for path, e in golden[name].items():
            l2 = np.sqrt(np.square(np.asarray(ours[path], np.float64)).sum())
            w[path] = abs(l2 - e["l2"]) / max(e["l2"], 1e-9)
            assert str(ours[path].dtype) == e["dtype"], path
        print(name, sorted(w.items(), key=lambda kv: -kv[1])[:3])
