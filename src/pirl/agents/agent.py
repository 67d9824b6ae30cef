"""The contract of an algorithm.

An agent defines the losses: `init` makes a state, `update` is one training step as one pure function, `act` turns
observations into chunks. The other methods describe the algorithm to the rest of pirl; their defaults fit most
algorithms. Nothing outside `agents/` and `recipes/` depends on which algorithm it runs.

To add your own, write a config (a subclass of `AgentConfig` whose `agent` names the class) and a subclass of `Agent`.
See `examples/08_own_agent.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from pirl.agents.agent_config import AgentConfig
from pirl.agents.learner import Learner
from pirl.models import flow
from pirl.models.critic import Critic
from pirl.models.flow import Steer
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy
from pirl.records import BatchSizes, BatchSpec, Rollout, chunk_spec

Metrics = dict[str, Array]
"""Device scalars by slash-separated names such as `critic/loss`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a run trains, by group: `policy`, usually `critic`, and further groups of the algorithm."""

    step: Any
    """Number of updates so far (int32 scalar)."""
    params: dict[str, Params]
    """Weights by group; frozen leaves of the policy are in bfloat16."""
    target: dict[str, Params] = field(default_factory=dict)
    """Target networks: slow copies for computing targets, in float32."""
    ema: dict[str, Params] = field(default_factory=dict)
    """EMA of the weights by group, for acting and evaluation; groups without an EMA are absent."""
    opt: dict[str, Any] = field(default_factory=dict)
    """Optimizer state by group, over the trainable leaves only."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Adaptive scalars of the algorithm, such as a temperature."""
    frozen: frozenset[str] = field(default=frozenset(), metadata={"static": True})
    """Paths (`group/leaf/…`) of weights that never train. They exist once: `ema` and `target` share them."""

    @property
    def policy(self) -> Params:
        """The weights to act with: the EMA if there is one."""
        return self.ema.get("policy", self.params["policy"])


class Choice(NamedTuple):
    """A chosen chunk, with a critic's estimates."""

    chunk: Float[Array, "B H A"]
    value: Float[Array, "B"] | None = None
    """The critic's value of the chunk; None without a comparison of candidates."""
    spread: Float[Array, "B"] | None = None
    """Standard deviation of the values of all candidates."""
    notes: dict[str, Array] | None = None
    """Additional arrays that learning needs, as declared in `Agent.notes`; rows first."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts an algorithm is built from. `Agent.build` takes what it needs."""

    policy: FlowPolicy
    """The flow policy, without weights."""
    policy_learner: Learner
    """Optimizer, mask and EMA of the policy's weights."""
    critic: Critic
    """A critic that matches the policy, without weights."""
    critic_learner: Learner
    """Optimizer and EMA of the critic's weights."""
    real_action_dim: int
    """Action dimensions the robot has; the rest is padding."""
    flow_steps: int
    """Euler steps when acting."""
    encoder_frozen: bool = False
    """Whether all weights that `policy.encode` uses are frozen."""
    compute_dtype: str = "float32"
    """The type the model casts its weights to."""


def parts_of(cls: type[Any], parts: Parts) -> dict[str, Any]:
    """The parts whose names are fields of the dataclass, as keyword arguments."""
    return {field.name: getattr(parts, field.name) for field in fields(cls) if hasattr(parts, field.name)}


class Lesson(NamedTuple):
    """Training data from an iteration's groups of rollouts: see `Agent.lesson`."""

    groups: Int[np.ndarray, "g"]
    """Indices of the groups to train on."""
    columns: Mapping[str, Float[np.ndarray, "g K"]]
    """Per-rollout values that each of its rows carries into the batch, such as `advantage`."""
    constants: Mapping[str, float]
    """Values that are the same in all rows."""
    of_plans: Mapping[str, Sequence[Float[np.ndarray, "_"]]] = MappingProxyType({})
    """Per-plan values, for algorithms with credit per plan: one array per rollout of the groups, in order, with one
    entry per plan."""


class Agent:
    """One algorithm. Subclasses are frozen dataclasses."""

    policy: FlowPolicy
    """The policy it improves."""
    config: AgentConfig
    """Its settings."""
    flow_steps: int = 10
    """Euler steps when acting."""

    # Required for every algorithm

    @classmethod
    def build(cls, config: Any, parts: Parts) -> "Agent":
        """Build the algorithm from its settings and parts; by default parts are matched to fields by name."""
        return cls(config=config, **parts_of(cls, parts))  # type: ignore[call-arg]

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A new state, with the given policy weights or freshly initialised ones."""
        raise NotImplementedError(f"{type(self).__name__}.init")

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One training step: all losses, gradients, optimizers, averages and targets."""
        raise NotImplementedError(f"{type(self).__name__}.update")

    def act(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: Steer | None = None,
    ) -> Float[Array, "B H A"]:
        """One chunk per observation, in the model's normalised action space; `steer` modifies the velocity field.

        Each row has its own key, so an episode does not depend on its neighbours. `best_of` candidates are sampled
        where the agent can choose among them; None is the agent's default. By default: plain sampling.
        """
        context = self.policy.encode(state.policy, observation)
        noise = flow.noise(keys, 1, self.policy.horizon, self.policy.action_dim)
        return flow.sample(self.policy, state.policy, context, noise, num_steps=self.flow_steps, steer=steer)[:, 0]

    # Defaults that fit most algorithms

    def choose(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: Steer | None = None,
    ) -> Choice:
        """`act`, with a critic's values if candidates were compared."""
        return Choice(self.act(state, observation, keys, best_of=best_of, steer=steer))

    def batch_spec(self, sizes: BatchSizes) -> BatchSpec:
        """Shapes and dtypes of the batches for `update`."""
        c = self.config
        return chunk_spec(
            sizes,
            next_observations=c.learns_values,
            corrections=c.heeds_corrections,
            tasks=c.knows_tasks,
            suffixes=len(c.prompt_suffixes),
        )

    def imitator(self, state: TrainState) -> Params | None:
        """The weights whose flow loss measures imitation of the data; None if they are not in the state."""
        return state.policy

    def served(self, state: TrainState) -> Params | None:
        """The weights for OpenPI, if they are neither the policy's nor its EMA; otherwise None."""
        return None

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """Groups of weights that `act` needs, in addition to the served ones."""
        return frozenset()

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """Each critic's values of N chunks per observation, for algorithms that learn values."""
        raise NotImplementedError(f"{type(self).__name__}.q_values")

    def heard(self, state: TrainState, measured: Mapping[str, float], say: Callable[[str], None]) -> TrainState:
        """Update the state from evaluation metrics, such as `held_out/...`; reports changes through `say`.

        Called after every evaluation. Without held-out episodes it is called once before training, with no metrics.
        """
        return state

    def verdict(self, state: TrainState, measured: Mapping[str, float]) -> str | None:
        """A warning for the final summary, from the last held-out metrics; None if the result is as intended."""
        return None

    # Algorithms that learn from groups of their own rollouts (`config.groups`)

    @property
    def notes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the arrays that `explore` notes per plan. Rollouts store them; batches hold them under `notes`."""
        return {}

    def explore(
        self, state: TrainState, observation: Observation, keys: Key[Array, "B"], *, best_of: int | None = None
    ) -> Choice:
        """`act` during collection, for algorithms that explore differently (`config.explores`)."""
        return Choice(self.act(state, observation, keys, best_of=best_of))

    def prepare(self, rewards: Float[np.ndarray, "G K"]) -> Lesson:
        """Training data from complete groups of K rollouts, given the reward of each rollout."""
        raise NotImplementedError(f"{type(self).__name__}.prepare")

    def lesson(self, groups: Sequence[Sequence[Rollout]]) -> Lesson:
        """Training data from complete groups of rollouts; by default from their successes alone."""
        assert self.config.groups is not None
        won = [[float(bool(rollout.episode.success)) for rollout in group] for group in groups]
        return self.prepare(np.array(won).reshape(-1, self.config.groups.size))

    def moved_far(self, metrics: Mapping[str, Any]) -> bool:
        """Whether to end the iteration's passes early, from the metrics of the latest update."""
        return False
