"""A learned condition of a flow policy: a vector that is added to one of its biases.

Only noisy chunks pass through that bias (`Conditionable`), so all conditions share the prefix. Weights with the
condition added are a plain policy that OpenPI serves unchanged.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.errors import ConfigError
from pirl.models.params import Params, flatten, nest
from pirl.models.policy import Conditionable, FlowPolicy


def path_of(policy: FlowPolicy) -> str:
    """Path of the bias."""
    if not isinstance(policy, Conditionable):
        raise ConfigError(
            f"a condition for a {type(policy).__name__}, which has no place for one",
            hint="give it a `condition_path` (pirl.models.policy.Conditionable), or take another algorithm",
        )
    return policy.condition_path


def fresh(policy: FlowPolicy, params: Params) -> Float[Array, "D"]:
    """A zero condition, which changes nothing; a random one would perturb the policy."""
    return jnp.zeros(flatten(params)[path_of(policy)].shape, jnp.float32)


def folded(policy: FlowPolicy, params: Params, condition: Float[Array, "D"]) -> Params:
    """The policy's weights with the condition added."""
    flat, path = flatten(params), path_of(policy)
    return nest(flat | {path: flat[path] + condition})
