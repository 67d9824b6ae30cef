"""The contract of an algorithm.

An agent holds the losses and nothing else: `init` makes a state, `update` is one training step as one pure function,
`act` turns observations into chunks. `training/loop.py` jits `update` once, with shardings and donation; it does not
know which algorithm it runs.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Key

from pirl.models.flow import Steer
from pirl.models.observation import Observation
from pirl.models.params import Params

Metrics = dict[str, Array]
"""Scalars on the device, by slash-separated names such as `critic/loss`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a run is made of. Groups are `policy` and, where the algorithm has one, `critic`."""

    step: Any
    """Number of updates so far (int32 scalar)."""
    params: dict[str, Params]
    """Weights by group; frozen leaves of the policy are in bfloat16."""
    target: dict[str, Params] = field(default_factory=dict)
    """Slowly following copies that targets are computed with, in float32."""
    ema: dict[str, Params] = field(default_factory=dict)
    """Averages of the weights by group, for acting and evaluation; a group without averaging is absent."""
    opt: dict[str, Any] = field(default_factory=dict)
    """Optimizer state by group, over the trainable leaves only."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """What an algorithm adapts as it goes, such as a temperature."""

    @property
    def policy(self) -> Params:
        """The weights to act with: averaged where there is an average."""
        return self.ema.get("policy", self.params["policy"])


class Choice(NamedTuple):
    """What was chosen to do, and what a critic says of it."""

    chunk: Float[Array, "B H A"]
    value: Float[Array, "B"] | None = None
    """The critic's value of the chunk; None where nothing was compared."""
    spread: Float[Array, "B"] | None = None
    """Standard deviation of the values of all candidates."""


@runtime_checkable
class Agent(Protocol):
    """One algorithm."""

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, around given policy weights where there are some."""

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One training step: all losses, gradients, optimizers, averages and targets."""

    def act(
        self, state: TrainState, observation: Observation, keys: Key[Array, "B"], *, steer: Steer | None = None
    ) -> Float[Array, "B H A"]:
        """One chunk per observation, in the model's normalised action space; `steer` changes the field it follows.

        Each row has a key of its own, so what a policy does in an episode does not depend on its neighbours.
        """
