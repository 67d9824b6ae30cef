"""The contract of a flow policy: encode once, flow many times."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from pirl.models.observation import Observation
from pirl.models.params import Params


@runtime_checkable
class FlowPolicy(Protocol):
    """A velocity field over action chunks, conditioned on an observation.

    Everything that does not depend on the noisy chunk belongs into `encode`, which is expensive and runs once per
    observation. Flow loss at several times, N candidates, guidance branches and critics all share its result.
    """

    @property
    def horizon(self) -> int:
        """Actions per chunk."""

    @property
    def action_dim(self) -> int:
        """Size of an action, as the policy sees it."""

    def init(self, key: Array) -> Params:
        """Fresh parameters."""

    def prepare(self, observation: Observation, key: Array | None = None) -> Observation:
        """Observations as `encode` reads them; augmented where a key is given. `encode` prepares what is not."""

    def encode(self, params: Params, observation: Observation) -> Any:
        """The context that `velocity` needs, as a pytree."""

    def velocity(
        self, params: Params, context: Any, x_t: Float[Array, "B N H A"], t: Float[Array, "B N"]
    ) -> Float[Array, "B N H A"]:
        """dx/dt at N noisy chunks per observation; t = 1 is noise, t = 0 is data.

        π₀ also takes a time for each step of a chunk, [B, N, H].
        """


@runtime_checkable
class Conditionable(Protocol):
    """A policy with a condition: a vector that is added to one of its biases."""

    @property
    def condition_path(self) -> str:
        """Path of that bias. It is one that noisy chunks pass by, and that `encode` does not read."""


@runtime_checkable
class Preparing(Protocol):
    """A policy that can prepare for many evaluations of its field at one context, as sampling makes them."""

    def field(self, params: Params, context: Any) -> Callable[[Array, Array], Array]:
        """`velocity` as a function of (x_t, t) alone, with all that does not depend on them computed beforehand."""

    def for_inference(self, params: Params) -> Params:
        """The same weights for `encode` and `field` alone, as they are fastest read."""


@runtime_checkable
class Optimised(Protocol):
    """A policy with rematerialisation and fused kernels, such as π₀."""

    def plain(self) -> FlowPolicy:
        """The same policy without them, to count its operations."""


def plain(policy: FlowPolicy) -> FlowPolicy:
    """The policy without rematerialisation and fused kernels."""
    return policy.plain() if isinstance(policy, Optimised) else policy
