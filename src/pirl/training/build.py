"""From a configuration to the parts of a run: policy, critic, agent, loader, weights to start from."""

import zlib
from typing import Any

import jax
import optax

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.config import RLTrainConfig
from pirl.data import create
from pirl.data.create import create_acrlpd_data_loader, create_transform
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.transforms import Transform
from pirl.models import pi0
from pirl.models.config import MLPFlowConfig, Pi0Config
from pirl.models.critic import Critic, make_critic
from pirl.models.freeze import trainable_mask
from pirl.models.mlp import MLPFlow
from pirl.models.params import Params
from pirl.models.pi0 import Pi0
from pirl.models.policy import FlowPolicy
from pirl.models.weights import check_finite, load
from pirl.training.optim import make_optimizer, make_schedule
from pirl.training.sharding import data_sharding, sharded_shapes


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
    if isinstance(config.agent, BCConfig):
        return BC(policy=policy, config=config.agent, learner=policy_learner, real_action_dim=config.real_action_dim)
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
        encoder_frozen=isinstance(config.model, MLPFlowConfig) or config.freeze_rule in ("vlm_frozen", "expert_only"),
    )


def schedules(config: RLTrainConfig) -> dict[str, optax.Schedule]:
    """The learning rates by the names they are logged under."""
    found = {"policy/learning_rate": make_schedule(config.policy_schedule)}
    return found | {"critic/learning_rate": make_schedule(config.critic_schedule)} if config.has_critic else found


def asset_id(config: RLTrainConfig) -> str:
    """Whose statistics these are, in checkpoints as in `data.assets_dir`: those of a checkpoint are found there."""
    data = config.data
    return data.asset_id or (create.asset_id(data.repo_ids[0]) if data.repo_ids else config.robot.name)


def build_transform(config: RLTrainConfig) -> Transform:
    """Between the robot's units and the model's; also what an acting policy uses."""
    size = config.model.image_size if isinstance(config.model, Pi0Config) else 224
    return create_transform(
        config.data,
        horizon=config.horizon,
        action_dim=config.model.action_dim,
        state_dim=config.state_dim,
        token_len=config.token_len,
        quantile=config.quantile_norm,
        discrete_state=config.discrete_state,
        image_size=size,
    )


def build_loader(config: RLTrainConfig, transform: Transform, mesh: Any) -> ACRLPDDataLoader:
    """Batches on the devices of the mesh, each host reading its share."""
    return create_acrlpd_data_loader(
        config.data,
        transform=transform,
        horizon=config.horizon,
        discount=config.discount,
        batch_size=config.batch_size,
        next_observations=config.has_critic,
        sharding=data_sharding(mesh),
        host_id=jax.process_index(),
        host_count=jax.process_count(),
    )


def load_policy(config: RLTrainConfig, mesh: Any, key: jax.Array) -> Params | None:
    """The weights to start from, read straight into their shards; None where training starts from nothing."""
    if config.init_weights is None or not isinstance(config.model, Pi0Config):
        return None
    leaves = pi0.declare(config.model)

    def fresh(path: str) -> jax.Array:
        leaf = leaves[path]
        return leaf.init(jax.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape)

    reference = sharded_shapes(mesh, pi0.param_shapes(config.model))
    params = load(config.init_weights, reference, init=fresh)
    check_finite(params, source=config.init_weights)
    return params
