"""Settings of the other actors on Q-chunking's critic: signed advantages, and a one-step student. No jax here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pirl.agents.q_chunking_config import QChunkingConfig
from pirl.ranges import Count, Inside, Positive, Share
from pirl.search import Choice, Item, Range, around


@dataclass(frozen=True, kw_only=True)
class CriticNFTConfig(QChunkingConfig):
    """NFT on a critic: velocities move towards chunks the critic prefers and away from those it does not."""

    agent: ClassVar[str] = "pirl.agents.critic_nft:CriticNFT"

    nft_beta: Positive = 1.0
    """β: the best velocity is v_old + A (u - v_old) / β, so a larger one moves less."""
    old_rate: Share = 0.005
    """How far v_old moves towards the policy in each update: the pace of the improvement, each step of which stays near
    v_old. 0: a single step, from the policy that imitated."""
    advantage_quantile: Inside = 0.9
    """Advantages are divided by this quantile of their size, then clipped to ±1."""
    heed_agreement: bool = True
    """Shrink all advantages by the share of them that the critics of the ensemble agree on."""
    bc_loss_weight: Share = 0.1
    """λ: share of the actor's loss that imitates the data whatever the critic thinks. It is what holds the policy near
    the data: below 0.05 velocities may run away, unless `old_rate` is 0."""

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, β, the pace of v_old, share of imitation."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.nft_beta", Range(low=0.5, high=4.0, log=True)
        yield "agent.old_rate", Choice(values=(0.0, 0.002, 0.005, 0.02))
        yield "agent.bc_loss_weight", Choice(values=(0.0, 0.1, 0.3))


@dataclass(frozen=True, kw_only=True)
class QCFQLConfig(QChunkingConfig):
    """QC-FQL: a flow imitates the data, a student takes its many steps in one and climbs the critic.

    The student acts, with `rollout.flow_steps` 1.
    """

    agent: ClassVar[str] = "pirl.agents.qc_fql:QCFQL"

    alpha: Positive = 1.0
    """α: weight of the student's distance to the flow beside its value. Smaller trusts the critic further away from the
    data. The most important setting; tune it."""
    normalise_q: bool = True
    """Divide values by their mean size (FQL's `normalize_q_loss`), so that one α fits rewards of any scale."""
    num_action_samples: Count = 1
    """N: student's chunks per observation, for its loss and for targets, which take the best of them. 1: QC-FQL."""
    flow_steps: Count = 10
    """Euler steps of the flow that the student learns from."""

    @property
    def one_step(self) -> bool:
        """The student's."""
        return True

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Those of the critic, and a student that takes more than one step."""
        yield from super().problems(run)
        if run.rollout.flow_steps != 1:
            yield (
                f"rollout.flow_steps is {run.rollout.flow_steps}, and QC-FQL's student takes one Euler step",
                "say so, since servers and reports go by it: --rollout.flow-steps 1",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, α, candidates, update-to-data ratio."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.alpha", Range(low=1.0, high=100.0, log=True)
        yield "agent.num_action_samples", Choice(values=(1, 4, 8))
        yield "agent.critic_updates", Choice(values=(1, 2, 4))
