"""Checkpoints of transformers that act: from weights that were prepared once, as from those that were saved."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from acting_runs import fresh_state, save_run, walking
from pirl.agents.config import ACRLPDConfig, BCConfig, DSRLConfig, RIPTConfig, RLTokenConfig
from pirl.errors import CheckpointError
from pirl.models.config import PRESETS
from pirl.training.acting import open_checkpoint

AGENTS = {
    "plain": BCConfig(),
    "best of three": ACRLPDConfig(actor="best_of_n", num_action_samples=3),
    "guided": RIPTConfig(loss="cfg", guidance=2.0),
    "from chosen noise": DSRLConfig(flow_steps=3, actor_hidden=(8,)),
    "edited": RLTokenConfig(actor_hidden=(8,)),
}


@pytest.mark.parametrize("name", AGENTS)
def test_prepared_weights_act_as_saved_ones(name: str, tmp_path: Path) -> None:
    config = walking(tmp_path, AGENTS[name])
    model = replace(PRESETS["pi0_tiny"], horizon=3, dtype="float32", attention="plain")
    data = replace(config.data, cameras=("base_0_rgb",), tokenizer="byte")
    config = replace(config, model=model, data=data, rollout=replace(config.rollout, num_envs=1))
    acting = open_checkpoint(save_run(config, {5: 0.5}) / "5")
    layers = acting.state.params["policy"]["PaliGemma"]["llm"]["layers"]
    assert isinstance(layers, list)
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    seen = {"state": np.array([0.3, -0.2], np.float32), "image": image, "prompt": "go right"}
    found = acting.chunk(seen, seed=1)
    saved = acting.policy.use(fresh_state(config, 5), jax.random.key(1)).plan({0: seen}, {0: (0, 0)})[0]
    assert found.shape == (3, 2)
    np.testing.assert_allclose(found, saved, rtol=0, atol=1e-5)
    differs = np.abs(found - acting.chunk(seen, seed=2)).max() > 1e-2
    assert differs == (name != "from chosen noise")  # which is the same for the same observation
    first, second = acting.chunk(seen), acting.chunk(seen)  # new noise for every chunk, unless a seed is given
    np.testing.assert_array_equal(first, acting.chunk(seen, seed=0))
    assert (np.abs(first - second).max() > 1e-2) == differs


def test_weights_alone_do_not_act_where_more_was_learned(tmp_path: Path) -> None:
    step = save_run(walking(tmp_path, RLTokenConfig()), {5: 0.5}) / "5"
    shutil.rmtree(step / "train_state")
    with pytest.raises(CheckpointError, match="no train_state, and with it no actor or critic") as raised:
        open_checkpoint(step)
    assert "best-of" not in str(raised.value.hint)
