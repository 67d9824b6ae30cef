"""Offline metrics of an agent on held-out episodes, always on the same rows with the same noise.

One jitted program computes all network outputs: flow loss, the policy's chunk and, for agents with a critic, the
values of the recorded chunk and of the policy's candidates. `Measured` turns rows into metrics. Metrics depend only on
weights and data: a checkpoint gives the same numbers during training and afterwards.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from pirl.agents.agent import Agent, TrainState
from pirl.data.chunks import chunk_actions
from pirl.data.held_out import rows_of
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.pool import make_resident
from pirl.data.takeovers import as_learned
from pirl.data.transforms import Transform
from pirl.files import json_text, write_text
from pirl.models import flow
from pirl.models.observation import Observation, with_prompt
from pirl.parallel.distributed import is_main
from pirl.parallel.placement import batch_on
from pirl.parallel.sharding import data_sharding, replicated
from pirl.records import EpisodeSource
from pirl.rollout.collector import Say
from pirl.training import compiler
from pirl.training.config import HeldOutConfig
from pirl.training.held_out_metrics import returns_to_go
from pirl.training.measured import Measured

FLOW_DRAWS = 4
"""Flow times per chunk; the loss at a single time is mostly noise."""
BATCH_SIZE = 32


class HeldOut:
    """Computes `held_out/...` metrics and writes the details to a file."""

    def __init__(
        self,
        agent: Agent,
        transform: Transform,
        loader: ACRLPDDataLoader,
        source: EpisodeSource,
        mesh: jax.sharding.Mesh,
        config: HeldOutConfig,
        *,
        discount: float,
        flow_steps: int,
        key: jax.Array,
        file: Path | None = None,
    ) -> None:
        """`loader` makes batches of `source`; its batch size is a multiple of the mesh's size."""
        self._agent, self._transform, self._loader = agent, transform, loader
        self._values = agent.q_values if agent.config.learns_values else None
        self._config, self._discount, self._flow_steps = config, discount, flow_steps
        self._key, self._file = key, file
        rule = loader.takeovers
        self._episodes = [as_learned(source.episode(index), rule) for index in range(len(source))]
        self._outcomes = [episode.success for episode in self._episodes]
        everything = np.arange(len(source))
        self._resident = make_resident(source, everything, frames=source.frames, discount=discount, takeovers=rule)
        self._number = np.array(getattr(source, "kept", range(len(source))))
        self._episode, steps = rows_of(source.lengths, self._outcomes, config.rows)
        starts = self._resident.table.starts[self._episode]
        self._step = self._resident.table.seen_at[starts + steps] - starts
        self._program = jax.jit(
            batch_on(data_sharding(mesh))(self._measure),
            out_shardings=replicated(mesh),
            compiler_options=compiler.for_acting() or None,
        )

    @property
    def interval(self) -> int:
        """Steps between measurements."""
        return self._config.interval

    @property
    def programs(self) -> int:
        """Number of compiled programs (1)."""
        return int(getattr(self._program, "_cache_size")())  # noqa: B009

    def __call__(self, state: TrainState, step: int, say: Say = lambda _: None) -> dict[str, float]:
        """Measure; returns metrics and writes the details to the file."""
        say(f"measuring {len(self._episode)} held-out rows")
        measured = self.measure(state)
        metrics = measured.metrics()
        if self._file is not None and is_main():
            write_text(self._file, json_text({"step": step, **measured.to_json()}))
        told = ("held_out/action_error", "held_out/auc", "held_out/rank_correlation")
        say("held out: " + ", ".join(f"{name.split('/')[1]} {metrics[name]:.3g}" for name in told if name in metrics))
        return metrics

    def measure(self, state: TrainState) -> Measured:
        """Per-row results for these weights."""
        table, size = self._resident.table, self._loader.batch_size
        rows = table.starts[self._episode] + self._step
        count = len(rows)
        padded = np.concatenate([rows, np.full(-count % size, rows[-1])])
        keys = jax.vmap(lambda row: jax.random.fold_in(self._key, row))(jnp.arange(len(padded)))
        state, parts = replace(state, opt={}), []
        for first in range(0, len(padded), size):
            chosen = slice(first, first + size)
            batch = self._loader.batch_at(self._resident, padded[chosen])
            parts.append(self._program(state, batch, keys[chosen]))
        found = {
            name: np.concatenate([part[name] for part in fetched], axis=0)[:count]
            for fetched in [jax.device_get(parts)]
            for name in fetched[0]
        }
        return self._measured(rows, found)

    def _measured(self, rows: np.ndarray, found: dict[str, np.ndarray]) -> Measured:
        """Join network outputs with the episodes' outcomes and returns."""
        table, robot = self._resident.table, self._transform.robot
        chunk, dims = found.pop("chunk"), robot.action_dim
        recorded, valid = found.pop("actions"), found.pop("valid")
        error = np.abs(chunk - recorded)[..., :dims].astype(np.float64)
        robot_error = np.full(error.shape, np.nan)
        if np.isfinite(chunk).all():
            units = self._transform.robot_actions(chunk, table.state[rows])
            robot_error = np.abs(units - chunk_actions(table, rows, horizon=chunk.shape[1])).astype(np.float64)
        returns = [
            returns_to_go(one.rewards, one.terminated, one.truncated, one.success, self._discount)
            for one in self._episodes
        ]
        outcome = np.array([-1 if one is None else int(one) for one in self._outcomes])
        ended = np.isfinite(table.mc_return[rows])
        return Measured(
            episode=self._number[self._episode],
            step=self._step,
            length=table.lengths[self._episode],
            outcome=outcome[self._episode],
            returns=np.concatenate(returns)[rows],
            ended=ended,
            error=error,
            robot_error=robot_error,
            valid=valid.astype(np.float64),
            numbers={name: x.astype(np.float64) for name, x in found.items()},
        )

    def _measure(self, state: TrainState, batch: Any, keys: Key[Array, "B"]) -> dict[str, Array]:
        """Network outputs for one batch of rows; each row has its own key, so results do not depend on batching."""
        act, flowing, sampling = (jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(keys) for k in range(3))
        here = Observation.from_dict(batch["observations"])
        actions, valid = batch["actions"], batch["valid"]
        first = jnp.zeros(len(actions), jnp.int32)
        prompts = batch.get("suffixed_prompts")
        acting = here if prompts is None else with_prompt(here, prompts, first)
        chunk = self._agent.act(state, acting, act).astype(jnp.float32)
        found = {"chunk": chunk, "actions": actions, "valid": valid}
        policy, dims = getattr(self._agent, "policy", None), self._transform.robot.action_dim
        with_values = "critic" in state.params  # a checkpoint may hold the policy alone
        if policy is None:
            return found
        context = policy.encode(state.policy, here)
        imitator = self._agent.imitator(state)
        if imitator is not None:
            seen = context if imitator is state.policy else policy.encode(imitator, here)
            error = flow.squared_error(policy, imitator, seen, actions, jax.vmap(_draw)(flowing, actions))
            found["flow_loss"] = flow.chunk_loss(error, valid=valid, dims=dims)
        if self._values is None or not with_values:
            return found

        def candidates(context: Any) -> Array:
            noise = flow.noise(sampling, self._config.candidates, policy.horizon, policy.action_dim)
            return flow.sample(policy, state.policy, context, noise, num_steps=self._flow_steps)

        there = Observation.from_dict(batch["next_observations"])
        own, recorded = candidates(context), batch["critic_actions"][:, None]
        later = self._values(state, there, candidates(policy.encode(state.policy, there))).mean(0).max(1)
        horizon = recorded.shape[2]
        values = self._values(state, here, jnp.concatenate([recorded, own[:, :, :horizon]], axis=1))
        mean = values.mean(0)
        off = jnp.abs(own - actions[:, None])[..., :dims].mean(-1)
        apart = (off * valid[:, None]).sum(-1) / jnp.maximum(valid.sum(-1), 1)[:, None]
        chosen = mean[:, 1:].argmax(1)
        target = batch["reward_sum"] + self._discount ** batch["length"] * (1 - batch["next_terminal"]) * later
        return found | {
            "q": mean[:, 0],
            "q_spread": values.std(0)[:, 0],
            "candidate_mean": mean[:, 1:].mean(1),
            "candidate_best": mean[:, 1:].max(1),
            "candidate_error": apart.mean(1),
            "chosen_error": jnp.take_along_axis(apart, chosen[:, None], axis=1)[:, 0],
            "td_error": mean[:, 0] - target,
            "learns": batch["sequence_mask"],
        }


def _draw(key: Array, actions: Float[Array, "H A"]) -> flow.Draws:
    """Flow noise and times for one row, from its key alone."""
    noise_key, time_key = jax.random.split(key)
    drawn = flow.draw(noise_key, time_key, actions[None], FLOW_DRAWS)
    return flow.Draws(drawn.noise[0], drawn.time[0])
