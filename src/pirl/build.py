"""Where a configuration becomes objects: policy, critic, agent and learning rates. Nothing is loaded or started."""

from typing import Any

import optax

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, RIPTConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.agents.ript import RIPT
from pirl.config import RLTrainConfig
from pirl.models import pi0
from pirl.models.config import MLPFlowConfig, Pi0Config
from pirl.models.critic import Critic, make_critic
from pirl.models.freeze import trainable_mask
from pirl.models.mlp import MLPFlow
from pirl.models.pi0 import Pi0
from pirl.models.policy import FlowPolicy


def build_policy(config: RLTrainConfig) -> FlowPolicy:
    """The policy, without weights."""
    return MLPFlow(config.model) if isinstance(config.model, MLPFlowConfig) else Pi0(config.model)


def build_critic(config: RLTrainConfig) -> Critic:
    """The critic that fits the policy, without weights."""
    return make_critic(
        config.critic,
        feature_width=config.model.vlm.width if isinstance(config.model, Pi0Config) else None,
        state_dim=config.robot.state_dim,
        real_action_dim=config.real_action_dim,
        critic_horizon=config.critic_horizon,
    )


def build_agent(config: RLTrainConfig) -> Agent:
    """The algorithm with its policy, critic and optimizers."""
    policy = build_policy(config)
    mask = None
    if isinstance(config.model, Pi0Config) and config.freeze_rule != "full":
        mask = trainable_mask(pi0.param_shapes(config.model), config.model, config.freeze_rule)
    policy_learner = Learner(
        tx=make_optimizer(config.policy_optimizer, make_schedule(config.policy_schedule)),
        mask=mask,
        ema_decay=config.policy_ema_decay,
    )
    encoder_frozen = isinstance(config.model, MLPFlowConfig) or config.freeze_rule in ("vlm_frozen", "expert_only")
    common: dict[str, Any] = {
        "policy": policy,
        "real_action_dim": config.real_action_dim,
        "flow_steps": config.rollout.flow_steps,
    }
    if isinstance(config.agent, BCConfig):
        return BC(config=config.agent, learner=policy_learner, **common)
    if isinstance(config.agent, RIPTConfig):
        return RIPT(
            config=config.agent,
            learner=policy_learner,
            encoder_frozen=encoder_frozen,
            compute_dtype=config.model.dtype if isinstance(config.model, Pi0Config) else "float32",
            **common,
        )
    critic_learner = Learner(
        tx=make_optimizer(config.critic_optimizer, make_schedule(config.critic_schedule)),
        ema_decay=config.agent.critic_ema_decay,
    )
    return ACRLPD(
        policy=policy,
        critic=build_critic(config),
        config=config.agent,
        policy_learner=policy_learner,
        critic_learner=critic_learner,
        encoder_frozen=encoder_frozen,
        flow_steps=config.rollout.flow_steps,
    )


def schedules(config: RLTrainConfig) -> dict[str, optax.Schedule]:
    """The learning rates by the names they are logged under."""
    found = {"policy/learning_rate": make_schedule(config.policy_schedule)}
    return found | {"critic/learning_rate": make_schedule(config.critic_schedule)} if config.has_critic else found
