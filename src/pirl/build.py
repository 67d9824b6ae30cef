"""Builds policy, critic, agent and learning-rate schedules from a configuration. Loads no weights or data."""

import optax

from pirl.agents.agent import Agent, Parts
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.config import RLTrainConfig
from pirl.errors import ConfigError
from pirl.models import pi0
from pirl.models.config import MLPFlowConfig, Pi0Config
from pirl.models.critic import Critic, make_critic
from pirl.models.freeze import trainable_mask
from pirl.models.mlp import MLPFlow
from pirl.models.params import Leaf
from pirl.models.pi0 import Pi0
from pirl.models.policy import FlowPolicy
from pirl.trust import load_object


def build_policy(config: RLTrainConfig) -> FlowPolicy:
    """The policy, without weights."""
    return MLPFlow(config.model) if isinstance(config.model, MLPFlowConfig) else Pi0(config.model)


def policy_leaves(config: RLTrainConfig) -> dict[str, Leaf]:
    """The policy's parameter declarations by path."""
    return MLPFlow(config.model).declare() if isinstance(config.model, MLPFlowConfig) else pi0.declare(config.model)


def build_critic(config: RLTrainConfig) -> Critic:
    """The critic that fits the policy, without weights."""
    return make_critic(
        config.critic,
        feature_width=config.model.feature_width,
        state_dim=config.robot.state_dim,
        real_action_dim=config.real_action_dim,
        critic_horizon=config.critic_horizon,
    )


def build_agent(config: RLTrainConfig) -> Agent:
    """The algorithm that the configuration names, with its policy, critic and optimizers."""
    mask = None
    if isinstance(config.model, Pi0Config) and config.freeze_rule != "full":
        mask = trainable_mask(pi0.param_shapes(config.model), config.model, config.freeze_rule)
    policy = build_policy(config)
    parts = Parts(
        policy=policy,
        policy_learner=Learner(
            tx=make_optimizer(config.policy_optimizer, make_schedule(config.policy_schedule)),
            mask=mask,
            ema_decay=config.agent.policy_ema,
        ),
        critic=build_critic(config),
        critic_learner=Learner(
            tx=make_optimizer(config.critic_optimizer, make_schedule(config.critic_schedule)),
            ema_decay=config.agent.critic_ema,
        ),
        real_action_dim=config.real_action_dim,
        flow_steps=config.rollout.flow_steps,
        encoder_frozen=not isinstance(policy, Pi0) or config.freeze_rule in ("vlm_frozen", "expert_only", "frozen"),
        compute_dtype=config.model.dtype,
    )
    algorithm = load_object(config.agent.agent, what="agent")
    if not (isinstance(algorithm, type) and issubclass(algorithm, Agent)):
        raise ConfigError(
            f"{config.agent.agent} is not an algorithm", hint="it is a subclass of pirl.agents.agent.Agent"
        )
    return algorithm.build(config.agent, parts)


def schedules(config: RLTrainConfig) -> dict[str, optax.Schedule]:
    """Learning-rate schedules by metric name."""
    found = {"policy/learning_rate": make_schedule(config.policy_schedule)}
    return found | {"critic/learning_rate": make_schedule(config.critic_schedule)} if config.has_critic else found
