"""gym-aloha's TransferCube from its state instead of pictures: imperfect demonstrations on two CPU cores, in minutes.

    pirl record bc_aloha_transfer_state --episodes 300 --repo-id demos/aloha_transfer_state --env.max-steps 200 \
--dials time_scale=0.5 miss=0.25 retry=0.3 let_go=0.3 grasp_error=0.004 waypoint_noise=0.01 action_noise=0.005
    pirl norm-stats demos/aloha_transfer_state --robot aloha_sim_full --horizon 10 --out assets/demos/aloha_transfer_state
    pirl train bc_aloha_transfer_state --exp-name first
    pirl train acrlpd_aloha_transfer_state --exp-name first --init-weights \
checkpoints/bc_aloha_transfer_state/first/3000
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig, DSRLConfig, FilteredConfig, RECAPConfig, RIPTConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import AlohaConfig
from pirl.models.config import MLPFlowConfig
from pirl.models.critic_config import CriticConfig
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, ConstantSchedule, CosineSchedule

_DISCOUNT = 0.992

_BC = RLTrainConfig(
    name="bc_aloha_transfer_state",
    model=MLPFlowConfig(state_dim=21, action_dim=14, horizon=10, hidden=(512, 512, 512, 512)),
    agent=BCConfig(augment=False, flow_draws=4, ema_decay=0.99),
    critic=CriticConfig(num_critics=4, hidden=(256, 256, 256), action_clip=4.0),
    data=DataConfig(
        repo_ids=("demos/aloha_transfer_state",),
        robot="aloha_sim_full",
        cameras=(),
        tokenizer="none",
        outcome="columns",
    ),
    env=AlohaConfig(task="transfer", full_state=True, max_steps=130),
    rollout=RolloutConfig(num_envs=50, flow_steps=5),
    evaluation=EvalConfig(interval=5000, episodes=50, films=0),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(warmup_steps=100, peak_lr=1e-3, decay_steps=3000, decay_lr=1e-5),
    checkpoint=CheckpointConfig(save_interval=5000, keep_period=None),
    batch_size=128,
    num_train_steps=3000,
    log_interval=100,
)

_ACRLPD = replace(
    _BC,
    name="acrlpd_aloha_transfer_state",
    agent=ACRLPDConfig(
        discount=_DISCOUNT,
        num_action_samples=4,
        flow_steps=5,
        flow_draws=2,
        target_ess=0.3,
        bc_loss_weight=0.0,
        target_update_rate=0.01,
        mc_steps=300,
        actor_warmup_steps=300,
        augment=False,
        policy_ema_decay=0.99,
    ),
    policy_schedule=CosineSchedule(warmup_steps=50, peak_lr=5e-4, decay_steps=1200, decay_lr=1e-5),
    critic_schedule=ConstantSchedule(lr=5e-4),
    batch_size=64,
    num_train_steps=1200,
)

_FILTERED = replace(
    _ACRLPD,
    name="filtered_aloha_transfer_state",
    agent=FilteredConfig(discount=_DISCOUNT, share=0.3, flow_draws=2, augment=False, ema_decay=0.99),
)

_RECAP = replace(
    _ACRLPD,
    name="recap_aloha_transfer_state",
    agent=RECAPConfig(
        discount=_DISCOUNT,
        positive_share=0.3,
        value_warmup_steps=300,
        flow_draws=2,
        augment=False,
        policy_ema_decay=0.99,
    ),
)

_DSRL = replace(
    _ACRLPD,
    name="dsrl_aloha_transfer_state",
    agent=DSRLConfig(
        discount=_DISCOUNT,
        num_action_samples=2,
        flow_steps=5,
        q_aggregation="min",
        target_update_rate=0.01,
        mc_steps=300,
        actor_warmup_steps=300,
        augment=False,
    ),
    policy_schedule=ConstantSchedule(lr=5e-4),
)

_RIPT = replace(
    _BC,
    name="ript_aloha_transfer_state",
    agent=RIPTConfig(group_size=8, groups_per_iteration=12, max_attempts=1.5, epochs=2, flow_draws=4),
    rollout=RolloutConfig(num_envs=96, flow_steps=5),
    policy_schedule=CosineSchedule(warmup_steps=1, peak_lr=2e-4, decay_steps=200, decay_lr=2e-5),
    num_train_steps=8,
    log_interval=1,
)

RECIPES = (_BC, _ACRLPD, _FILTERED, _RECAP, _DSRL, _RIPT)
