"""The contract of a flow policy: encode once, flow many times."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from pirl.models.observation import Observation
from pirl.models.params import Params


@runtime_checkable
class FlowPolicy(Protocol):
    """A velocity field over action chunks, conditioned on an observation.

    Put everything that does not depend on the noisy chunk into `encode`: it is expensive and runs once per observation.
    Flow loss at several times, N candidates, guidance branches and critics share its result.
    """

    @property
    def horizon(self) -> int:
        """Actions per chunk."""

    @property
    def action_dim(self) -> int:
        """Size of an action at the model's input (padded)."""

    def init(self, key: Array) -> Params:
        """Fresh parameters."""

    def prepare(self, observation: Observation, key: Array | None = None) -> Observation:
        """Preprocess images for `encode`, augmented if a key is given. `encode` itself prepares raw images."""

    def encode(self, params: Params, observation: Observation) -> Any:
        """The pytree that `velocity` takes as its context."""

    def velocity(
        self, params: Params, context: Any, x_t: Float[Array, "B N H A"], t: Float[Array, "B N"]
    ) -> Float[Array, "B N H A"]:
        """dx/dt at N noisy chunks per observation; t = 1 is noise, t = 0 is data.

        π₀ also accepts one time per step, [B, N, H].
        """


@runtime_checkable
class Conditionable(Protocol):
    """A policy that can be conditioned by adding a vector to one of its biases."""

    @property
    def condition_path(self) -> str:
        """Parameter path of that bias. `velocity` reads it and `encode` does not, so conditions share one context."""


@runtime_checkable
class Preparing(Protocol):
    """A policy that can precompute what repeated evaluations of its field at one context share, as in sampling."""

    def field(self, params: Params, context: Any) -> Callable[[Array, Array], Array]:
        """`velocity` as a function of (x_t, t), with everything that does not depend on them precomputed."""

    def for_inference(self, params: Params) -> Params:
        """The weights in the layout that `encode` and `field` read fastest; only those two accept it."""


@runtime_checkable
class Optimised(Protocol):
    """A policy with rematerialisation and fused kernels, such as π₀."""

    def plain(self) -> FlowPolicy:
        """The same policy without them, for counting FLOPs."""


def plain(policy: FlowPolicy) -> FlowPolicy:
    """The policy without rematerialisation and fused kernels."""
    return policy.plain() if isinstance(policy, Optimised) else policy
