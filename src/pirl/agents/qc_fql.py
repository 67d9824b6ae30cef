"""QC-FQL: a one-step student of a flow, with the critic's gradient (Q-chunking 2507.07969, FQL 2502.02538).

    flow      min E‖v(x_t, t | s) - u‖²                                   imitates the data
    student   min E[α ‖μ(s, z) - flow(s, z)‖² - λ_Q Q(s, μ(s, z))]        z ~ N(0, 1);  λ_Q = 1/mean|Q|, or 1
              μ(s, z) = z - v_μ(z, 1 | s)

The flow takes all its Euler steps from z, the student a single one. The student's weights are a second copy of the
policy's, so a checkpoint is a plain π₀ that is sampled with `num_steps=1`. The student is the policy: it acts, has the
EMA and is served, and targets use its chunks at s'. Q's gradient reaches it through the chunk alone. Frozen leaves
exist once, in the student.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents.agent import Metrics, TrainState
from pirl.agents.critic_actor_config import QCFQLConfig
from pirl.agents.q_chunking import ActorAux, ActorPart, QChunking
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.params import Params

RATE = 0.1
"""Rate at which the running mean |Q| of the student's chunks follows the latest batch."""


@dataclass(frozen=True, kw_only=True)
class QCFQL(QChunking):
    """`QChunking` with QC-FQL's actor. The group `policy` holds the student, `flow` the flow."""

    config: QCFQLConfig

    @property
    def acting_steps(self) -> int:
        """1: the student's Euler steps."""
        return 1

    @property
    def samples(self) -> bool:
        """Always: the student's loss needs its own chunks at s."""
        return True

    def more_weights(self, policy: Params) -> dict[str, Params]:
        """The flow's trainable leaves, initialised from the policy."""
        return {"flow": jax.tree.map(jnp.copy, self.policy_learner.split(policy)[0])}

    def imitator(self, state: TrainState) -> Params | None:
        """The flow's weights; None for a checkpoint loaded to act, which holds the student alone."""
        if "flow" not in state.params:
            return None
        return self.policy_learner.join(state.params["flow"], self.policy_learner.split(state.params["policy"])[1])

    def scalars(self) -> dict[str, Array]:
        """The running mean |Q| of the student's chunks, initially the width of the value range."""
        low, high = self.value_range
        return super().scalars() | {"q_size": jnp.float32(high - low)}

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """The sum of both networks' losses; `params` are the student's, the flow's are in `state`."""
        c, dims = self.config, self.critic.real_action_dim
        flowing = self.policy_learner.join(state.params["flow"], self.policy_learner.split(params)[1])
        context = self.policy.encode(params, part.observation)
        seen = context if self.encoder_frozen else self.policy.encode(flowing, part.observation)
        error = flow.squared_error(self.policy, flowing, seen, part.actions, part.draws)
        imitation = flow.chunk_loss(error, valid=self.imitated(part), dims=dims)

        noise = part.candidate_noise
        taught = flow.sample(self.policy, flowing, jax.lax.stop_gradient(seen), noise, num_steps=c.flow_steps)
        chunks = noise - self.policy.velocity(params, context, noise, jnp.ones(noise.shape[:2])).astype(jnp.float32)
        distill = flow.chunk_loss(jnp.square(chunks - jax.lax.stop_gradient(taught)), dims=dims)

        inputs = CriticInputs.of(jax.lax.stop_gradient(context))
        found = self.compared(state, inputs, part.critic_actions, chunks)
        q = found.values.mean(1)
        scale = 1 / state.scalars["q_size"] if c.normalise_q else 1.0
        climb = jnp.where(self.actor_open(state), scale, 0.0)
        loss = self.raised(jnp.ones(()), part) * imitation + c.alpha * distill - climb * q
        logged = {"actor/distill": distill, "actor/q": q, "actor/q_size": jnp.abs(found.values).mean(1)}
        advantage, spread = found.advantage, found.values.std(1)
        aux = ActorAux(inputs, chunks, found.members, advantage, spread, jnp.ones_like(q), imitation, logged)
        return loss.mean(), jax.lax.stop_gradient(aux)

    def sampled(self, params: Params, context: Any, noise: Float[Array, "B N H A"]) -> Float[Array, "B N H A"]:
        """The student's chunks, without gradients."""
        if not noise.size:
            return noise
        return jax.lax.stop_gradient(flow.sample(self.policy, params, context, noise, num_steps=1))

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """Update the running mean |Q| from this batch, for the next step."""
        (low, high), known = self.value_range, state.scalars["q_size"]
        latest = (1 - RATE) * known + RATE * aux.logged["actor/q_size"].mean()
        return state.scalars | {"q_size": jnp.maximum(latest, 1e-3 * (high - low))}

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """The advantage of the data's chunks over the student's."""
        return {"actor/advantage": aux.advantage.mean()}
