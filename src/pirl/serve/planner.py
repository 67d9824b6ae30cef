"""A checkpoint for serving: batches of observations in, chunks out, with all batch sizes compiled beforehand.

`row` prepares one observation and may run in any thread; `plan` runs on the device, one batch after the other. A row's
noise depends on the seed and the row's own number, never on the other rows of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pirl.agents.agent import Agent, Choice, TrainState
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.data.robots import Robot
from pirl.data.transforms import Transform
from pirl.errors import DataError, PirlError
from pirl.models import flow
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation
from pirl.names import ACTIONS, IMAGE, IMAGE_MASK
from pirl.nested import flatten
from pirl.processes import return_freed_memory
from pirl.rollout.policy import row_keys
from pirl.serve.novelty import Novelty
from pirl.training import compiler
from pirl.training.acting import Acting
from pirl.training.features import features

LONGEST_PROMPT = 2000
"""Longest instruction, in characters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One observation, ready for the device."""

    state: Float[np.ndarray, "S"]
    """The robot's state, in its own units."""
    inputs: Mapping[str, Any]
    """OpenPI's model input, without a batch axis."""
    number: tuple[int, int]
    """(episode, step), from which the row's noise is derived."""
    before: Float[np.ndarray, "H M"] | None = None
    """The rest of the previous chunk, relative to this observation's state, normalised, zero-padded."""
    overlap: int = 0
    """Number of real (not padded) steps in `before`."""
    frozen: int = 0
    """Number of steps of `before` that will be executed before the reply is used."""


class PlannedChunk(NamedTuple):
    """The plan from one observation on."""

    chunk: Float[np.ndarray, "H A"]
    """Actions in the robot's units."""
    value: float | None
    """The critic's value of the chunk, if the critic chose it."""
    spread: float | None
    """Standard deviation of the candidates' values, if the critic chose."""
    novelty: float | None = None
    """Distance of the observation from the training data, if enabled."""


class Planner:
    """One checkpoint and its compiled programs."""

    def __init__(
        self,
        acting: Acting,
        *,
        seed: int = 0,
        batch_sizes: Sequence[int] = (1,),
        real_time: bool = False,
        real_time_limit: float = 5.0,
        default_prompt: str | None = None,
        novelty: Novelty | None = None,
    ) -> None:
        """Call `compile` before `plan`. `default_prompt` is for observations without an instruction."""
        self.config: RLTrainConfig = acting.found.config
        self.name = policy_name(acting)
        transform = acting.policy.transform
        self.transform: Transform = replace(transform, default_prompt=default_prompt or transform.default_prompt)
        self.candidates = self.config.rollout.best_of
        self.batch_sizes, self.real_time, self._limit = tuple(sorted(batch_sizes)), real_time, real_time_limit
        self._state: TrainState = acting.state
        self._key, self._novelty = jax.random.key(seed), novelty
        self._programs: dict[tuple[int, bool], Any] = {}

    @property
    def robot(self) -> Robot:
        """The robot whose observations it reads."""
        return self.transform.robot

    def compile(self, like: "Planner | None" = None) -> "Planner":
        """Compile and run every program once. Reuses the programs of `like` if it differs only in its weights."""
        if like is not None and like._sort() == self._sort():
            self._programs = like._programs
        empty = self.row(example(self.robot), number=(0, 0))
        before = np.zeros((self.config.horizon, self.transform.action_dim), np.float32)
        for real_time in (False, True) if self.real_time else (False,):
            row = replace(empty, before=before) if real_time else empty
            for size in self.batch_sizes:
                inputs = _batch([row] * size)
                if (size, real_time) not in self._programs:
                    act = self._continue if real_time else self._act
                    program = jax.jit(act, compiler_options=dict(compiler.for_acting()) or None)
                    self._programs[size, real_time] = program.lower(self._state, self._key, *inputs).compile()
                jax.block_until_ready(self._programs[size, real_time](self._state, self._key, *inputs))
        return_freed_memory()
        return self

    def row(
        self,
        observation: Mapping[str, Any],
        *,
        number: tuple[int, int],
        before: Float[np.ndarray, "P A"] | None = None,
        delay: int = 0,
    ) -> Row:
        """Prepare one observation in the robot's keys; `before` is the rest of the last chunk, in the robot's units."""
        try:
            return self._row(observation, number, before, delay)
        except PirlError:
            raise
        except Exception as error:  # observations are untrusted
            raise DataError(
                f"the observation cannot be read: {type(error).__name__}: {str(error)[:200]}",
                hint=f"send what robot {self.robot.name!r} sees: see `pirl inspect checkpoint`",
            ) from error

    def _row(self, observation: Mapping[str, Any], number: tuple[int, int], before: Any, delay: int) -> Row:
        robot, transform = self.robot, self.transform
        raw = flatten(observation)
        prompts = transform.acting_prompts([raw])
        if prompts and len(prompts[0]) > LONGEST_PROMPT:
            raise DataError(f"an instruction of {len(prompts[0])} characters", hint=f"at most {LONGEST_PROMPT}")
        state = robot.find_state(raw)
        continues = before is not None and len(before) > 0
        low = transform.low_dim(state[None], before[None] if continues else None, prompts)
        images, masks = transform.images(raw)
        inputs: dict[str, Any] = {key: value[0] for key, value in low.items()}
        target = inputs.pop(ACTIONS, None)
        inputs[IMAGE] = {slot: images[slot] for slot in self.config.cameras}
        inputs[IMAGE_MASK] = {slot: masks[slot] for slot in self.config.cameras}
        row = Row(state=state, inputs=inputs, number=number)
        if target is None:
            return row
        padded = np.zeros((self.config.horizon, target.shape[-1]), np.float32)
        padded[: len(target)] = target
        return replace(row, before=padded, overlap=len(target), frozen=min(delay, len(target)))

    def plan(self, rows: Sequence[Row]) -> list[PlannedChunk | PirlError]:
        """A chunk or an error for each row. Either all rows continue a previous chunk (`before`), or none."""
        count = len(rows)
        size = next(size for size in self.batch_sizes if size >= count)
        filled = [*rows, *[rows[-1]] * (size - count)]
        program = self._programs[size, rows[0].before is not None]
        choice, seen = jax.device_get(program(self._state, self._key, *_batch(filled)))
        plans = [self._decoded(choice, i, row) for i, row in enumerate(rows)]
        if self._novelty is None:
            return plans
        scores = self._novelty.of(seen[:count]).tolist()
        return [
            plan if isinstance(plan, PirlError) else plan._replace(novelty=score)
            for plan, score in zip(plans, scores, strict=True)
        ]

    def _decoded(self, choice: Choice, i: int, row: Row) -> PlannedChunk | PirlError:
        try:
            chunk = self.transform.robot_actions(np.asarray(choice.chunk[i], np.float32)[None], row.state[None])[0]
        except PirlError as error:  # not finite; other rows are unaffected
            return error
        if choice.value is None or choice.spread is None:
            return PlannedChunk(chunk, None, None)
        return PlannedChunk(chunk, float(choice.value[i]), float(choice.spread[i]))

    def _act(self, state: TrainState, key: Any, numbers: Any, inputs: Any) -> Any:
        return self._choose(build_agent(self.config), state, inputs, row_keys(key, numbers), None)

    def _continue(
        self,
        state: TrainState,
        key: Any,
        numbers: Any,
        inputs: Any,
        before: Any,
        frozen: Any,
        overlap: Any,
    ) -> Any:
        """Like `_act`, consistent with the previous chunk: by conditioning (policies trained for it), else by guidance.

        Guidance differentiates the policy, which requires attention without a fused kernel.
        """
        model, delay = self.config.model, self.config.agent.real_time_delay
        if delay:

            def given(velocity: flow.Velocity) -> flow.Velocity:
                return flow.prefixed(velocity, before, jnp.minimum(frozen, delay))

            return self._choose(build_agent(self.config), state, inputs, row_keys(key, numbers), given)
        if isinstance(model, Pi0Config):
            model = replace(model, attention="plain")
        weights = flow.prefix_weights(frozen, overlap, self.config.horizon)

        def steer(velocity: flow.Velocity) -> flow.Velocity:
            return flow.continued(velocity, before, weights, self._limit)

        agent = build_agent(replace(self.config, model=model))
        return self._choose(agent, state, inputs, row_keys(key, numbers), steer)

    def _choose(self, agent: Agent, state: TrainState, inputs: Any, keys: Any, steer: flow.Steer | None) -> Any:
        """(choice, features for novelty or None).

        Both encode the observation with identical expressions, so XLA computes it once (a test counts the matmuls).
        """
        observation = Observation.from_dict(inputs)
        choice = agent.choose(state, observation, keys, best_of=self.candidates, steer=steer)
        return choice, None if self._novelty is None else features(agent, state, observation)

    def _sort(self) -> Any:
        """Everything that compiled programs depend on: equal for two checkpoints of one run."""
        config, weights = self.config, jax.tree.map(lambda x: (x.shape, str(x.dtype), x.sharding), self._state)
        parts = (config.model, config.agent, config.critic, config.rollout, config.data.cameras, config.robot)
        return (
            parts,
            self._novelty is None,
            self.real_time,
            self._limit,
            self.batch_sizes,
            jax.tree.structure(weights),
            str(weights),
        )


def policy_name(acting: Acting) -> str:
    """RECIPE/RUN/STEP; the folder's name for weights outside a run."""
    found = acting.found
    return f"{found.config.name}/{found.config.exp_name}/{found.step}" if found.run else found.folder.name


def example(robot: Robot) -> dict[str, Any]:
    """An empty observation of this robot: zeros, black images and no instruction."""
    first, *others = robot.state_keys[0]
    found: dict[str, Any] = {key: np.zeros(1, np.float32) for key in others}
    found[first] = np.zeros(robot.state_dim - len(others), np.float32)
    pictures = {keys[0]: np.zeros((224, 224, 3), np.uint8) for keys in robot.cameras.values()}
    return found | pictures | {robot.prompt_keys[0]: ""}


def _batch(rows: Sequence[Row]) -> tuple[Any, ...]:
    """Inputs of a program besides weights and key."""
    numbers = np.array([row.number for row in rows], np.uint32)
    inputs = jax.tree.map(lambda *leaves: np.stack(leaves), *(row.inputs for row in rows))
    if rows[0].before is None:
        return numbers, inputs
    frozen, overlap = (np.array([getattr(row, name) for row in rows], np.int32) for name in ("frozen", "overlap"))
    return numbers, inputs, np.stack([row.before for row in rows]), frozen, overlap  # type: ignore[misc]
