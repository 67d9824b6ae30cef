"""The embedded tabletop, level `easy`: images, language and a π₀ of 270,000 parameters, in minutes on a laptop.

    pirl record bc_tabletop --episodes 1500 --repo-id demos/tabletop
    pirl norm-stats demos/tabletop --robot tabletop --horizon 4 --out assets/demos/tabletop
    pirl train bc_tabletop --exp-name first
    pirl train acrlpd_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train ript_tabletop --exp-name first --init-weights checkpoints/acrlpd_tabletop/first/1600
    pirl train flow_ppo_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train acrlpd_tabletop_online --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train dagger_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train filtered_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train recap_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train critic_nft_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train qc_fql_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train dsrl_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train dsrl_tabletop_online --exp-name first --init-weights checkpoints/bc_tabletop/first/2400
    pirl train rl_token_tabletop --exp-name first --init-weights checkpoints/bc_tabletop/first/2400

Hardware: a CPU. The demonstrations are imperfect on purpose: a quarter goes to a wrong zone, a quarter takes a detour,
some let go too early. Imitation copies the mixture; success labels and a discount are enough to do better.
"""

from dataclasses import replace

from pirl.agents.config import (
    ACRLPDConfig,
    BCConfig,
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
from pirl.data.config import DataConfig
from pirl.envs.config import TabletopConfig
from pirl.models.config import get_preset
from pirl.models.critic_config import get_critic_preset
from pirl.names import BASE_CAMERA
from pirl.rollout.config import EvalConfig, OnlineConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, ConstantSchedule, CosineSchedule, KeepBest

_BC = RLTrainConfig(
    name="bc_tabletop",
    model=get_preset("pi0_tiny"),
    agent=BCConfig(augment=False, flow_draws=2),
    critic=get_critic_preset("tiny"),
    data=DataConfig(
        repo_ids=("demos/tabletop",),
        robot="tabletop",
        cameras=(BASE_CAMERA,),
        tokenizer="word",
        outcome="columns",
        cache="disk",
    ),
    env=TabletopConfig(level="easy"),
    rollout=RolloutConfig(num_envs=128, flow_steps=5),
    evaluation=EvalConfig(interval=800, episodes=400),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(warmup_steps=100, peak_lr=1.5e-3, decay_steps=2400, decay_lr=3e-5),
    checkpoint=CheckpointConfig(save_interval=800, keep_period=None),
    batch_size=64,
    num_train_steps=2400,
    log_interval=50,
)

_ACRLPD = replace(
    _BC,
    name="acrlpd_tabletop",
    agent=ACRLPDConfig(
        discount=0.9,
        num_action_samples=4,
        flow_steps=4,
        flow_draws=2,
        target_ess=0.3,
        members="all",
        heed_agreement=False,
        bc_loss_weight=0.0,
        target_update_rate=0.02,
        actor_warmup_steps=300,
        augment=False,
        policy_ema_decay=0.98,
    ),
    freeze="vlm_frozen",
    policy_schedule=CosineSchedule(warmup_steps=20, peak_lr=7e-4, decay_steps=1600, decay_lr=7e-5),
    critic_schedule=ConstantSchedule(lr=1e-3),
    num_train_steps=1600,
)

_ONLINE = replace(
    _ACRLPD,
    name="acrlpd_tabletop_online",
    online=OnlineConfig(start_step=400, episodes=128, updates_per_step=0.05),
)

_RIPT = replace(
    _BC,
    name="ript_tabletop",
    agent=RIPTConfig(group_size=8, groups_per_iteration=48, max_attempts=1.0, epochs=2, advantage="std", flow_draws=2),
    freeze="vlm_frozen",
    rollout=RolloutConfig(num_envs=384, flow_steps=5),
    evaluation=EvalConfig(interval=5, episodes=400),
    policy_schedule=CosineSchedule(warmup_steps=1, peak_lr=5e-4, decay_steps=150, decay_lr=5e-5),
    checkpoint=CheckpointConfig(save_interval=5, keep_period=None),
    batch_size=256,
    num_train_steps=15,
    log_interval=1,
)

_DAGGER = replace(
    _ACRLPD,
    name="dagger_tabletop",
    agent=DAggerConfig(flow_draws=2, augment=False, ema_decay=0.98),
    data=replace(_ACRLPD.data, takeover_window=4),
)

_FILTERED = replace(
    _ACRLPD,
    name="filtered_tabletop",
    agent=FilteredConfig(discount=0.9, share=0.3, flow_draws=2, augment=False, ema_decay=0.98),
)

_RECAP = replace(
    _ACRLPD,
    name="recap_tabletop",
    agent=RECAPConfig(
        discount=0.9,
        positive_share=0.3,
        value_warmup_steps=300,
        flow_draws=2,
        augment=False,
        policy_ema_decay=0.98,
    ),
)

_FLOW_PPO = replace(
    _RIPT,
    name="flow_ppo_tabletop",
    agent=FlowPPOConfig(
        noise_level=0.7,
        group_size=8,
        groups_per_iteration=48,
        epochs=4,
        discount=0.98,
        bootstrap_timeouts=False,
    ),
    policy_schedule=CosineSchedule(warmup_steps=16, peak_lr=2e-4, decay_steps=640, decay_lr=4e-5),
    critic_schedule=ConstantSchedule(lr=1e-3),
    evaluation=EvalConfig(interval=10, episodes=400),
    checkpoint=CheckpointConfig(save_interval=10, keep_period=None, keep_best=KeepBest()),
    num_train_steps=40,
)

_CRITIC_NFT = replace(
    _ACRLPD,
    name="critic_nft_tabletop",
    agent=CriticNFTConfig(
        discount=0.9,
        nft_beta=0.5,
        old_rate=0.02,
        num_action_samples=4,
        flow_steps=4,
        flow_draws=2,
        target_update_rate=0.02,
        actor_warmup_steps=300,
        augment=False,
        policy_ema_decay=0.98,
    ),
)

_QC_FQL = replace(
    _ACRLPD,
    name="qc_fql_tabletop",
    agent=QCFQLConfig(
        discount=0.9,
        num_action_samples=1,
        flow_steps=5,
        flow_draws=2,
        target_update_rate=0.02,
        actor_warmup_steps=300,
        augment=False,
        policy_ema_decay=0.98,
    ),
    rollout=replace(_BC.rollout, flow_steps=1),
)

_DSRL = replace(
    _ACRLPD,
    name="dsrl_tabletop",
    agent=DSRLConfig(
        discount=0.9,
        num_action_samples=4,
        flow_steps=5,
        q_aggregation="min",
        target_update_rate=0.02,
        actor_warmup_steps=400,
        actor_hidden=(128, 128),
        augment=False,
    ),
    critic=replace(get_critic_preset("tiny"), action_clip=3.0),
    freeze=None,
    policy_schedule=ConstantSchedule(lr=1e-3),
)

_DSRL_ONLINE = replace(_DSRL, name="dsrl_tabletop_online", online=_ONLINE.online)

_RL_TOKEN = replace(
    _DSRL,
    name="rl_token_tabletop",
    agent=RLTokenConfig(
        discount=0.9,
        num_action_samples=4,
        flow_steps=5,
        q_aggregation="min",
        target_update_rate=0.02,
        actor_warmup_steps=400,
        actor_hidden=(128, 128),
        augment=False,
    ),
)

RECIPES = (
    _BC,
    _ACRLPD,
    _ONLINE,
    _RIPT,
    _DAGGER,
    _FILTERED,
    _RECAP,
    _FLOW_PPO,
    _CRITIC_NFT,
    _QC_FQL,
    _DSRL,
    _DSRL_ONLINE,
    _RL_TOKEN,
)
