"""Derives the recipes of many algorithms from one task's, so that shared settings are stated once.

A task's module states behaviour cloning and ACRLPD: robot, data and the numbers that depend on them. `derive` makes the
other algorithms' recipes from these, `with_adapters` the LoRA variant for a small GPU. For released policies, `offline`
makes all recipes for recorded data and `on_policy` those for a simulator; for small policies trained from scratch,
`improved` makes ACRLPD and `in_groups` RIPT.
"""

from dataclasses import fields, replace
from typing import Any

from pirl.agents.agent_config import AgentConfig
from pirl.agents.config import (
    ACRLPDConfig,
    CriticNFTConfig,
    DAggerConfig,
    DSRLConfig,
    FilteredConfig,
    FlowPPOConfig,
    QCFQLConfig,
    RECAPConfig,
    RIPTConfig,
    RLTokenConfig,
)
from pirl.config import RLTrainConfig
from pirl.models.config import GEMMA_VARIANTS, Pi0Config
from pirl.models.critic_config import CriticConfig, get_critic_preset
from pirl.training.config import AdamW, CheckpointConfig, ConstantSchedule, CosineSchedule, KeepBest

OF_THE_TASK = (
    *("discount", "reward_low", "reward_high", "reward_once"),  # returns
    *("mc_steps", "actor_warmup_steps", "gate", "target_update_rate"),  # value learning and when the actor uses it
    *("num_action_samples", "flow_steps", "flow_draws", "augment", "accumulate"),  # cost of a step
)
"""Settings that depend on the task, not on the algorithm."""

SMALL_CRITIC = CriticConfig(
    num_critics=4, hidden=(256, 256, 256), action_clip=4.0, pool_width=256, pool_heads=4, embedding_width=256
)
"""Four critics for a π₀ of ten million parameters: HL-Gauss, actions clipped at 4 standard deviations."""


def apply(base: RLTrainConfig, agent: AgentConfig, **changes: Any) -> RLTrainConfig:
    """`base` with another algorithm, named ALGORITHM_TASK, and other changes."""
    old, new = (kind.agent.partition(":")[0].rpartition(".")[2] for kind in (type(base.agent), type(agent)))
    return replace(base, name=f"{new}_{base.name.removeprefix(f'{old}_')}", agent=agent, **changes)


def derive(base: RLTrainConfig, kind: type[AgentConfig], **own: Any) -> RLTrainConfig:
    """`apply` by the algorithm's kind: takes the settings in OF_THE_TASK from `base`, then `own`."""
    agent, known = base.agent, {field.name for field in fields(kind)}
    shared = {name: getattr(agent, name) for name in OF_THE_TASK if name in known and hasattr(agent, name)}
    shared |= {name: agent.policy_ema for name in ("ema_decay", "policy_ema_decay") if name in known}
    changes: dict[str, Any] = {}
    if issubclass(kind, RECAPConfig):  # its condition waits for the value, as an actor for the critic
        shared["value_warmup_steps"] = getattr(agent, "actor_warmup_steps", 0)
    if issubclass(kind, QCFQLConfig):  # the flow keeps its Euler steps, the student takes one; one chunk per state
        shared |= {"flow_steps": base.rollout.flow_steps, "num_action_samples": 1}
        changes["rollout"] = replace(base.rollout, flow_steps=1)
    if kind.freezes_policy:  # a small actor trains at the critic's rate, with the Euler steps of rollouts
        shared |= {"flow_steps": base.rollout.flow_steps, "q_aggregation": "min"}
        changes |= {"freeze": None, "policy_schedule": base.critic_schedule}
    return apply(base, kind(**shared | own), **changes)


def with_adapters(base: RLTrainConfig) -> RLTrainConfig:
    """The variant for one 24 GB GPU: LoRA adapters instead of all weights, no EMA, a small batch."""
    assert isinstance(base.model, Pi0Config)
    model = replace(base.model, vlm=GEMMA_VARIANTS["gemma_2b_lora"], expert=GEMMA_VARIANTS["gemma_300m_lora"])
    return replace(base, name=f"{base.name}_lora", model=model, agent=base.agent.without_ema(), batch_size=16)


def improved(bc: RLTrainConfig, *, discount: float, steps: int) -> RLTrainConfig:
    """ACRLPD from a clone that was trained from scratch, with the VLM frozen, so that one prefix serves all losses.

    For 500 steps the critic regresses observed returns and the actor imitates.
    """
    own = {"num_action_samples": 4, "flow_steps": bc.rollout.flow_steps, "target_ess": 0.3, "bc_loss_weight": 0.0}
    own |= {"target_update_rate": 0.01, "mc_steps": 500, "actor_warmup_steps": 500}
    return replace(
        _measured(derive(bc, ACRLPDConfig, discount=discount, **own), every=steps // 2),
        freeze="vlm_frozen",
        policy_schedule=CosineSchedule(warmup_steps=50, peak_lr=3e-4, decay_steps=steps, decay_lr=1e-5),
        critic_schedule=ConstantSchedule(lr=5e-4),
        num_train_steps=steps,
    )


def improved_from_state(bc: RLTrainConfig, *, steps: int, mc_steps: int, every: int, batch_size: int) -> RLTrainConfig:
    """ACRLPD from a cloned MLP policy, whose weights all train. Evaluates and saves at every `every`th step."""
    own = {"num_action_samples": 4, "flow_steps": bc.rollout.flow_steps, "target_ess": 0.3, "bc_loss_weight": 0.0}
    own |= {"discount": 0.99, "target_update_rate": 0.01, "mc_steps": mc_steps, "actor_warmup_steps": 300}
    return replace(
        _measured(derive(bc, ACRLPDConfig, **own), every=every),
        policy_schedule=CosineSchedule(warmup_steps=50, peak_lr=5e-4, decay_steps=steps, decay_lr=1e-5),
        critic_schedule=ConstantSchedule(lr=5e-4),
        batch_size=batch_size,
        num_train_steps=steps,
    )


def in_groups(bc: RLTrainConfig, *, groups: int, workers: int, iterations: int, updates: int) -> RLTrainConfig:
    """RIPT from such a clone, with the VLM frozen. All rollouts of an iteration run in parallel."""
    agent = RIPTConfig(group_size=8, groups_per_iteration=groups, max_attempts=1.5, epochs=2, flow_draws=4)
    return replace(
        _measured(apply(bc, agent), every=5),
        freeze="vlm_frozen",
        rollout=replace(bc.rollout, num_envs=8 * groups, num_workers=workers),
        policy_schedule=CosineSchedule(warmup_steps=1, peak_lr=1e-4, decay_steps=updates, decay_lr=1e-5),
        num_train_steps=iterations,
        log_interval=1,
    )


def _measured(config: RLTrainConfig, *, every: int) -> RLTrainConfig:
    """The recipe with evaluations and checkpoints at the same steps."""
    checkpoint, evaluation = replace(config.checkpoint, save_interval=every), config.evaluation
    return replace(config, checkpoint=checkpoint, evaluation=evaluation and replace(evaluation, interval=every))


def offline(acrlpd: RLTrainConfig, *, reaction: int) -> tuple[RLTrainConfig, ...]:
    """Recipes of all other offline algorithms for a released policy.

    Filtered imitation, RECAP and DAgger train all weights, as ACRLPD, or adapters. CriticNFT and QC-FQL compare the
    policy with a second one: with the VLM frozen both share one prefix, and only the expert exists twice. DSRL and RLT
    leave the policy unchanged. The filter keeps the share that RECAP labels better. `reaction`: the steps in half a
    second, which are blamed for a takeover.
    """
    base = replace(acrlpd, data=replace(acrlpd.data, takeover_window=reaction))
    watched = replace(base, data=replace(base.data, outcome="sparse_success"))  # DAgger needs no outcomes
    whole = derive(base, FilteredConfig, share=0.3), derive(base, RECAPConfig), derive(watched, DAggerConfig)
    expert = replace(base, freeze="vlm_frozen")
    parts = [(expert, CriticNFTConfig), (expert, QCFQLConfig), (base, DSRLConfig), (base, RLTokenConfig)]
    return *whole, *map(with_adapters, whole), *(derive(start, kind) for start, kind in parts)


def on_policy(bc: RLTrainConfig, *, discount: float, **task: Any) -> tuple[RLTrainConfig, RLTrainConfig]:
    """RIPT and FlowPPO from a released policy in a simulator: 16 groups of 8 rollouts; only the action expert trains.

    Both use the same states, rollouts and trained weights; FlowPPO has πRL's learning rates, 5e-6 for the expert and
    1e-4 for the value.
    """
    sizes: dict[str, Any] = {"group_size": 8, "groups_per_iteration": 16, "accumulate": 4}
    ript = apply(
        bc,
        RIPTConfig(max_attempts=3.0, epochs=2, flow_draws=4, **sizes),
        freeze="vlm_frozen",
        policy_optimizer=AdamW(weight_decay=1e-4),
        policy_schedule=CosineSchedule(warmup_steps=10, peak_lr=1e-5, decay_lr=1e-6, decay_steps=2000),
        checkpoint=CheckpointConfig(save_interval=1, keep_period=None, keep_best=KeepBest()),
        batch_size=128,
        num_train_steps=30,
        log_interval=1,
        **task,
    )
    ppo = apply(
        ript,
        FlowPPOConfig(discount=discount, bootstrap_timeouts=False, **sizes),
        critic=get_critic_preset("pair"),
        policy_schedule=ConstantSchedule(lr=5e-6, warmup_steps=10),
        critic_schedule=ConstantSchedule(lr=1e-4),
    )
    return ript, ppo
