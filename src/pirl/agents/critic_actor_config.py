"""Settings of CriticNFT (signed advantages) and QC-FQL (a one-step student). Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pirl.agents.q_chunking_config import QChunkingConfig
from pirl.ranges import Count, Inside, Positive, Share
from pirl.search import Choice, Item, Range, around


@dataclass(frozen=True, kw_only=True)
class CriticNFTConfig(QChunkingConfig):
    """NFT on a critic: velocities move towards chunks with positive advantages and away from negative ones."""

    agent: ClassVar[str] = "pirl.agents.critic_nft:CriticNFT"

    nft_beta: Positive = 1.0
    """β: the optimal velocity is v_old + A (u - v_old) / β, so larger values take smaller steps."""
    old_rate: Share = 0.005
    """EMA rate at which v_old follows the policy per update: the pace of improvement, each step of which stays near
    v_old. 0: a single improvement step from the imitating policy."""
    advantage_quantile: Inside = 0.9
    """Advantages are divided by this quantile of their absolute value, then clipped to ±1."""
    heed_agreement: bool = True
    """Scale all advantages by the share of their variance that the ensemble agrees on."""
    bc_loss_weight: Share = 0.1
    """λ: weight of pure imitation in the actor's loss. It keeps the policy near the data: below 0.05 velocities may
    diverge, unless `old_rate` is 0."""

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, β, the rate of v_old, imitation weight."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.nft_beta", Range(low=0.5, high=4.0, log=True)
        yield "agent.old_rate", Choice(values=(0.0, 0.002, 0.005, 0.02))
        yield "agent.bc_loss_weight", Choice(values=(0.0, 0.1, 0.3))


@dataclass(frozen=True, kw_only=True)
class QCFQLConfig(QChunkingConfig):
    """QC-FQL: a flow imitates the data; a one-step student matches the flow and maximises the critic.

    The student acts, with `rollout.flow_steps` 1.
    """

    agent: ClassVar[str] = "pirl.agents.qc_fql:QCFQL"

    alpha: Positive = 1.0
    """α: weight of the student's distance to the flow relative to its value. Smaller values follow the critic further
    away from the data. The most important setting; tune it."""
    normalise_q: bool = True
    """Divide values by their mean absolute value (FQL's `normalize_q_loss`), so that one α fits rewards of any
    scale."""
    num_action_samples: Count = 1
    """N: chunks the student samples per observation, for its loss and for targets, which use the best. 1: QC-FQL."""
    flow_steps: Count = 10
    """Euler steps of the flow that the student distils."""

    @property
    def one_step(self) -> bool:
        """True: the student takes one step."""
        return True

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """The critic's problems, and `rollout.flow_steps` other than 1."""
        yield from super().problems(run)
        if run.rollout.flow_steps != 1:
            yield (
                f"rollout.flow_steps is {run.rollout.flow_steps}, and QC-FQL's student takes one Euler step",
                "set --rollout.flow-steps 1",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, α, candidates, update-to-data ratio."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.alpha", Range(low=1.0, high=100.0, log=True)
        yield "agent.num_action_samples", Choice(values=(1, 4, 8))
        yield "agent.critic_updates", Choice(values=(1, 2, 4))
