"""What is frozen is read where it lies: not copied, not given away, in memory once. And a step is compiled once."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.agent import TrainState
from pirl.agents.learner import Learner
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict
from pirl.errors import ConfigError
from pirl.models.config import PRESETS
from pirl.models.params import flatten
from pirl.parallel.sharding import data_sharding, make_mesh, sharded_shapes, state_shardings
from pirl.planning.plan import batch_shapes
from pirl.recipes import get_config
from pirl.training.step import Step, shared_leaves


def config(**change: Any) -> RLTrainConfig:
    base = get_config("acrlpd_aloha_fold")
    model = replace(PRESETS["pi0_tiny"], horizon=base.horizon, cameras=base.cameras, action_dim=32)
    base = replace(base, model=model, data=replace(base.data, tokenizer="byte"))
    settings = {"batch_size": 2, "agent": {"num_action_samples": 2, "flow_steps": 2, "augment": False}}
    return from_dict(RLTrainConfig, settings | change, base=base)


def pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.dtype == jnp.bfloat16]


@pytest.fixture(scope="module")
def frozen() -> tuple[Any, RLTrainConfig]:
    chosen = config(freeze="vlm_frozen")
    return build_agent(chosen), chosen


def test_frozen_weights_are_not_copied_and_the_rest_is_as_without(frozen: tuple[Any, RLTrainConfig]) -> None:
    agent, chosen = frozen
    key, mesh = jax.random.key(1), make_mesh()
    data = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), batch_shapes(build_agent(chosen), chosen.batch_sizes))
    shapes = jax.eval_shape(agent.init, key)
    init = jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes))
    plain, plain_metrics = jax.jit(agent.update)(init(key), data, key)

    step = Step(agent, mesh, shapes)
    state = step.shared(init(key))
    before = pointers(state.params["policy"])
    assert len(before) > 10
    given = state.params["policy"]["action_out_proj"]["kernel"]
    state, metrics = step(state, data, key)
    assert pointers(state.params["policy"]) == pointers(state.ema["policy"]) == before
    assert given.is_deleted(), "what trains is given away"
    for name, value in plain_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=1e-5, atol=1e-7)
    step(state, data, key)
    assert step.programs == 1

    layers = shapes.params["policy"]["PaliGemma"]["llm"]["layers"]["mlp"]["gating_einsum"]
    copied = re.compile(re.escape(f"= bf16[{','.join(map(str, layers.shape))}]") + r"\S* copy\(")
    lowered = step.lower(shapes, data, key)
    arguments = len(jax.tree.leaves((shapes, data, key))) - len(before)
    assert len(jax.tree.leaves(lowered.args_info)) == arguments, "the average's frozen weights are no arguments"
    assert not copied.search(lowered.compile().as_text())
    given_away = jax.jit(agent.update, donate_argnums=0).lower(shapes, data, key).compile()
    assert len(copied.findall(given_away.as_text())) == 2, "the policy's and its average's, if they are not kept apart"


def test_all_is_given_away_where_all_trains() -> None:
    chosen = config()
    agent = build_agent(chosen)
    assert shared_leaves(jax.eval_shape(agent.init, jax.random.key(0))) == {}


def test_the_state_says_what_is_frozen_whatever_its_type(frozen: tuple[Any, RLTrainConfig]) -> None:
    agent, _ = frozen
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    policy = flatten(shapes.params["policy"])
    assert shapes.frozen == {f"policy/{path}" for path, leaf in policy.items() if leaf.dtype == jnp.bfloat16}
    assert len(shared_leaves(shapes)) == 2 * len(shapes.frozen), "the policy's and its average's"
    assert shared_leaves(replace(shapes, frozen=frozenset())) == {}


def test_weights_that_train_are_float32() -> None:
    learner = Learner(tx=optax.sgd(1.0), mask={"a": True, "b": False})
    with pytest.raises(ConfigError, match="a trains and is bfloat16"):
        learner.init({"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(2, jnp.bfloat16)})


def test_what_is_frozen_must_not_be_changed(frozen: tuple[Any, RLTrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    agent, chosen = frozen
    update = type(agent).update

    def touching(self: Any, state: TrainState, batch: Any, key: Any) -> Any:
        new, metrics = update(self, state, batch, key)
        return replace(new, params=jax.tree.map(lambda x: x + 0, new.params)), metrics

    monkeypatch.setattr(type(agent), "update", touching)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    with pytest.raises(AssertionError, match=r"ACRLPD\.update changed what is frozen"):
        Step(agent, make_mesh(), shapes).lower(
            shapes, batch_shapes(agent, replace(chosen.batch_sizes, batch=2)), jax.random.key(0)
        )


def test_what_a_frozen_policy_was_is_what_it_is() -> None:
    """`distill` keeps the policy it started from: of what is frozen there is no second copy, of the rest there is."""
    chosen = config(
        freeze="vlm_frozen",
        agent={"num_action_samples": 2, "flow_steps": 2, "augment": False, "actor": "distill"},
    )
    agent = build_agent(chosen)
    key, mesh = jax.random.key(1), make_mesh()
    shapes = jax.eval_shape(agent.init, key)
    step = Step(agent, mesh, shapes)
    data = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), batch_shapes(build_agent(chosen), chosen.batch_sizes))
    state = step.shared(jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes))(key))
    before = jax.tree.map(np.asarray, state.target["policy"])
    state, _ = step(state, data, key)
    for (path, was), now, then in zip(
        jax.tree.leaves_with_path(state.target["policy"]),
        jax.tree.leaves(state.params["policy"]),
        jax.tree.leaves(before),
        strict=True,
    ):
        frozen = now.dtype == jnp.bfloat16
        assert (was.unsafe_buffer_pointer() == now.unsafe_buffer_pointer()) == frozen, path
        np.testing.assert_array_equal(np.asarray(was), then, err_msg=str(path))


def test_compiled_ahead_it_is_compiled_once(
    compile_log: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """For the shapes alone, in a thread; the first call says how long it took."""
    chosen = get_config("debug_bc")
    agent, key, mesh = build_agent(chosen), jax.random.key(1), make_mesh()
    shapes = sharded_shapes(mesh, jax.eval_shape(agent.init, key))
    expected = batch_shapes(build_agent(chosen), chosen.batch_sizes)
    step = Step(agent, mesh, shapes)
    step.prepare(shapes, expected, key)
    state = step.shared(jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes))(key))
    for number in range(2):
        batch = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), expected), data_sharding(mesh))
        state, metrics = step(state, batch, jax.random.fold_in(key, number))
    assert np.isfinite(metrics["policy/loss"])
    assert step.programs == 1
    assert finished(compile_log()) == 1
    assert re.fullmatch(r"step compiled in \d+ s(, kept in .*)?\n", capsys.readouterr().out)


def test_who_leaves_does_not_wait_for_a_program() -> None:
    """What is being lowered at that moment is not compiled any more."""
    chosen = get_config("debug_bc")
    agent, key, mesh = build_agent(chosen), jax.random.key(1), make_mesh()
    shapes = sharded_shapes(mesh, jax.eval_shape(agent.init, key))
    gone, lowered = threading.Event(), Mock()
    with Step(agent, mesh, shapes) as step:
        step._program = Mock(lower=lambda *_: lowered if gone.wait(60) else None)
        step.prepare(shapes, batch_shapes(build_agent(chosen), chosen.batch_sizes), key)
    gone.set()
    assert step._ahead is not None
    step._ahead.result()
    lowered.compile.assert_not_called()


def finished(lines: list[str]) -> int:
    return sum("Finished XLA compilation of jit(update)" in line for line in lines)


@pytest.fixture
def compile_log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What jax says of programs it compiles, in all threads."""
    jax.config.update("jax_log_compiles", True)
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.getMessage() for record in caplog.records]
    jax.config.update("jax_log_compiles", False)
