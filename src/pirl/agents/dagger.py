"""HG-DAgger (arXiv 1810.02890) on a flow policy: imitate demonstrations and corrections, not the steps before
takeovers.

    min Σ_i w_i ℓ_i / Σ_i w_i        ℓ_i = mean_h ‖v(x_t, t | s_i) - u‖²_h   over the steps that count

    w        1 for demonstrations, `correction_weight` for an operator's chunks, `policy_weight` for the policy's own,
             and 0 for those that begin in the `data.takeover_window` steps before a takeover
    steps    up to the next handover, without those that a takeover is blamed on

Corrections show what to do in states that the policy itself reached, which demonstrations do not cover; actions that
led to a takeover are not imitated. No value is learned. Without corrections this is behaviour cloning.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pirl.agents import corrections
from pirl.agents.agent import TrainState
from pirl.agents.bc import BC, Counts
from pirl.agents.config import DAggerConfig
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED


@dataclass(frozen=True, kw_only=True)
class DAgger(BC):
    """Behaviour cloning, weighted by who acted."""

    config: DAggerConfig

    def counts(self, state: TrainState, batch: Any) -> Counts:
        """Steps and weights from `acted_by`; weights are normalised to mean 1 over the batch."""
        c, acted_by = self.config, batch["acted_by"]
        steps = corrections.imitated_steps(acted_by)
        steps = steps * batch["valid"] if c.mask_padding else steps
        weight = corrections.chunk_weights(acted_by, correction=c.correction_weight, autonomous=c.policy_weight)
        logged = {
            "data/autonomous": corrections.begun_by(acted_by, AUTONOMOUS).mean(),
            "data/blamed": corrections.begun_by(acted_by, BLAMED).mean(),
            "data/corrected": corrections.begun_by(acted_by, CORRECTED).mean(),
            "data/imitated": jnp.mean(steps * (weight > 0)[:, None]),
        }
        return Counts(steps, weight / jnp.maximum(weight.mean(), jnp.finfo(weight.dtype).tiny), logged=logged)
