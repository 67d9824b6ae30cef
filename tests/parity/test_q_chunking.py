"""ACRLPD with the settings of benchmarks/results/qc.py is Q-chunking: its own code's numbers, from its own weights.

tests/golden/qc/README.md says how they were made. Three things are written differently and mapped here:

* Flow time runs the other way (t = 1 is noise), so the velocity has the other sign: v(x, t) = -v_qc(x, 1 - t).
* pirl averages a loss over the rows that count, the paper's code over all rows: a factor, known for each batch.
* The paper's target critic follows the critic of before the step, pirl's the one after it.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.agents import objectives as ob
from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import TrainState
from pirl.agents.chunk_critic import Successor
from pirl.agents.q_chunking import ActorPart
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params, flatten

ROOT = Path(__file__).parents[2]
WIDTH, CANDIDATES = 16, 4
CLOSE = dict(rtol=2e-5, atol=2e-6)
KEY = jax.random.key(0)
"""Nothing below draws from it."""

Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def qc() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks" / "results"))
    try:
        import qc_train
    finally:
        sys.path.pop(0)
    return qc_train


@pytest.fixture(scope="module")
def golden() -> Golden:
    with np.load(ROOT / "tests/golden/qc/best_of_n.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def agent(qc: ModuleType, golden: Golden) -> ACRLPD:
    state_dim = golden["batch_0/observations"].shape[1]
    return qc.make_agent(state_dim, width=WIDTH, samples=CANDIDATES)


def critic_weights(golden: Golden, prefix: str) -> Params:
    """The paper's critic as pirl's: the first matrix in two parts, LayerNorms beside the layer before them."""
    net = {path.removeprefix(f"{prefix}/value_net/"): x for path, x in golden.items() if path.startswith(prefix)}
    depth = sum(path.endswith("kernel") for path in net) - 1
    layers: Params = {}
    for i in range(depth):
        layer = {"bias": net[f"Dense_{i}/bias"]}
        layer |= {"scale": net[f"LayerNorm_{i}/scale"], "offset": net[f"LayerNorm_{i}/bias"]}
        kernel, states = net[f"Dense_{i}/kernel"], golden["batch_0/observations"].shape[1]
        layer |= {"hidden": kernel} if i else {"state": kernel[:, :states], "action": kernel[:, states:]}
        layers[f"layer_{i}"] = layer
    layers["head"] = {"kernel": net[f"Dense_{depth}/kernel"], "bias": net[f"Dense_{depth}/bias"]}
    return jax.tree.map(jnp.asarray, layers)


def flow_weights(golden: Golden, prefix: str, *, gradient: bool = False) -> Params:
    """The paper's flow as pirl's, with time reversed: the row of t changes sign and gives its old value to the bias;
    the last layer changes sign. `gradient` maps gradients by the same change of variables.
    """
    net = {path.removeprefix(f"{prefix}/mlp/Dense_"): x for path, x in golden.items() if path.startswith(prefix)}
    depth = len(net) // 2
    dense = {f"dense_{i}": {x: net[f"{i}/{x}"].copy() for x in ("kernel", "bias")} for i in range(depth)}
    first, last = dense["dense_0"], dense[f"dense_{depth - 1}"]
    of_time = first["kernel"][-1]
    if gradient:
        first["kernel"][-1] = first["bias"] - of_time
    else:
        first["bias"] = first["bias"] + of_time
        first["kernel"][-1] = -of_time
    for x in ("kernel", "bias"):
        last[x] = -last[x]
    return jax.tree.map(jnp.asarray, dense)


def rows(qc: ModuleType, golden: Golden, step: int) -> Any:
    """The batch that the benchmark makes of the same rows of the same data."""
    data = {name.removeprefix("data/"): jnp.asarray(x) for name, x in golden.items() if name.startswith("data/")}
    data |= {name: data[name][None] for name in ("rewards", "masks")}  # one task
    batch = qc.chunk_batch(data, jnp.asarray(golden[f"index_{step}"]))
    return batch | {name: batch[name][0] for name in ("reward_sum", "next_terminal")}


def chunks(golden: Golden, name: str) -> jax.Array:
    """Flat chunks of the paper's code as [B, N, H, A]."""
    flat = jnp.asarray(golden[name])
    return flat.reshape(len(flat), -1, 5, 5)


def successor(agent: ACRLPD, golden: Golden, step: int, batch: Any) -> Successor:
    ahead = Observation.from_dict(batch["next_observations"])
    weights = flow_weights(golden, f"params_{step}/actor_bc_flow")
    return agent.successor(weights, ahead, chunks(golden, f"draws_{step}/candidates"))


def critic_loss(agent: ACRLPD, golden: Golden, step: int, batch: Any) -> tuple[Any, Params]:
    """(loss, metrics) and gradients at the weights that the paper's code had before this step."""
    online, target = (critic_weights(golden, f"params_{step}/{name}") for name in ("critic", "target_critic"))
    y, _ = agent.target(online, target, successor(agent, golden, step, batch), batch, KEY)
    inputs = CriticInputs(state=batch["observations"]["state"])
    loss = lambda params: agent.critic_loss(params, inputs, jnp.zeros((len(y), 0, 5, 5)), batch, y, KEY, {})  # noqa: E731
    return jax.value_and_grad(loss, has_aux=True)(online)


def same(found: Params, expected: Params, scale: float = 1.0) -> None:
    got, wanted = flatten(found), flatten(expected)
    assert got.keys() == wanted.keys()
    for path, leaf in got.items():
        np.testing.assert_allclose(scale * leaf, wanted[path], err_msg=path, **CLOSE)


@pytest.mark.parametrize("step", range(4))
def test_chunks_are_cut_alike(qc: ModuleType, golden: Golden, step: int) -> None:
    batch = rows(qc, golden, step)
    for ours, theirs in {"observations": "observations", "actions": "actions", "valid": "valid"}.items():
        got = batch[ours]["state"] if ours == "observations" else batch[ours]
        np.testing.assert_allclose(got, golden[f"batch_{step}/{theirs}"], rtol=1e-6)
    last = {name: golden[f"batch_{step}/{name}"][:, -1] for name in ("rewards", "masks", "valid", "next_observations")}
    np.testing.assert_allclose(batch["reward_sum"], last["rewards"], rtol=1e-6)
    np.testing.assert_allclose(1 - batch["next_terminal"], last["masks"])
    np.testing.assert_allclose(batch["sequence_mask"], last["valid"])
    np.testing.assert_allclose(batch["next_observations"]["state"], last["next_observations"])
    assert (last["valid"].min() == 0) == (step == 3)  # the last batch crosses ends, the others do not
    assert 0 < last["masks"].mean() < 1


@pytest.mark.parametrize("step", range(4))
def test_the_policy_chooses_the_same_chunks(agent: ACRLPD, qc: ModuleType, golden: Golden, step: int) -> None:
    batch = rows(qc, golden, step)
    ahead = successor(agent, golden, step, batch)
    critic = critic_weights(golden, f"params_{step}/critic")
    values = agent.values(critic, agent.critic.embed(critic, ahead.inputs), ahead.candidates).mean(0)
    best = jnp.clip(ob.take_candidate(ahead.candidates, ob.select_best(values)), -1, 1)
    np.testing.assert_allclose(best[:, None], chunks(golden, f"sampled_{step}"), **CLOSE)


@pytest.mark.parametrize("step", range(4))
def test_the_critic_descends_on_the_same_loss(agent: ACRLPD, qc: ModuleType, golden: Golden, step: int) -> None:
    batch = rows(qc, golden, step)
    (loss, info), grads = critic_loss(agent, golden, step, batch)
    counted = float(batch["sequence_mask"].mean())
    np.testing.assert_allclose(counted * loss, golden[f"info_{step}/critic/critic_loss"], rtol=2e-5)
    np.testing.assert_allclose(info["critic/q_mean"], golden[f"info_{step}/critic/q_mean"], rtol=2e-5)
    if f"grads_{step}/critic/value_net/Dense_0/bias" in golden:
        same(grads, critic_weights(golden, f"grads_{step}/critic"), scale=counted)


def test_three_steps_lead_the_critic_and_its_target_to_the_same_weights(
    agent: ACRLPD, qc: ModuleType, golden: Golden
) -> None:
    critic = critic_weights(golden, "params_0/critic")
    opt = agent.critic_learner.init(critic)[1]
    for step in range(3):
        _, grads = critic_loss(agent, golden, step, rows(qc, golden, step))
        before = critic
        critic, opt = agent.critic_learner.step(critic, grads, opt)
        same(critic, critic_weights(golden, f"params_{step + 1}/critic"))
        slow = critic_weights(golden, f"params_{step}/target_critic")
        slow = ob.soft_update(slow, before, agent.config.target_update_rate)  # pirl's update takes `critic`
        same(slow, critic_weights(golden, f"params_{step + 1}/target_critic"))


@pytest.mark.parametrize("step", range(4))
def test_the_flow_descends_on_the_same_loss(agent: ACRLPD, qc: ModuleType, golden: Golden, step: int) -> None:
    batch = rows(qc, golden, step)
    weights = flow_weights(golden, f"params_{step}/actor_bc_flow")
    critic = critic_weights(golden, f"params_{step}/critic")
    time = 1 - jnp.asarray(golden[f"draws_{step}/time"])
    part = ActorPart(
        observation=Observation.from_dict(batch["observations"]),
        actions=batch["actions"],
        critic_actions=batch["critic_actions"],
        valid=batch["valid"],
        draws=flow.Draws(chunks(golden, f"draws_{step}/noise"), time),
        candidate_noise=jnp.zeros((len(time), 0, 5, 5)),
    )
    state = TrainState(
        step=jnp.zeros((), jnp.int32), params={"policy": weights, "critic": critic},
        target={"critic": critic}, ema={}, opt={}, scalars=agent.scalars(),
    )  # fmt: skip
    (loss, aux), grads = jax.value_and_grad(agent.actor_loss, has_aux=True)(weights, state, part)
    # The paper's mean counts steps behind an end as zeros, pirl's leaves them out of each chunk's mean.
    expected = (aux.flow_loss * batch["valid"].mean(1)).mean()
    np.testing.assert_allclose(expected, golden[f"info_{step}/actor/bc_flow_loss"], rtol=2e-5)
    if step == 0:  # every step counts: the two means are one
        np.testing.assert_allclose(loss, golden["info_0/actor/bc_flow_loss"], rtol=2e-5)
        same(grads, flow_weights(golden, "grads_0/actor_bc_flow", gradient=True))
