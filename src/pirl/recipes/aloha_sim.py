"""gym-aloha's TransferCube with a π₀ of ten million parameters: imperfect demonstrations, from scratch, on one GPU.

    pirl record bc_aloha_transfer_small --episodes 300 --processes 8 --repo-id demos/aloha_transfer --dials miss=0.35 \
let_go=0.35 time_scale=0.7 grasp_error=0.006 waypoint_noise=0.01 action_noise=0.005
    pirl norm-stats demos/aloha_transfer --robot aloha_sim --horizon 20 --out assets/demos/aloha_transfer
    pirl train bc_aloha_transfer_small --exp-name bc
    pirl train acrlpd_aloha_transfer_small --exp-name rl --init-weights checkpoints/bc_aloha_transfer_small/bc/8000
    pirl train filtered_aloha_transfer_small --exp-name rl --init-weights checkpoints/bc_aloha_transfer_small/bc/8000
    pirl train recap_aloha_transfer_small --exp-name rl --init-weights checkpoints/bc_aloha_transfer_small/bc/8000
    pirl train dsrl_aloha_transfer_small --exp-name rl --init-weights checkpoints/bc_aloha_transfer_small/bc/8000
    pirl train ript_aloha_transfer_small --exp-name rl --init-weights checkpoints/bc_aloha_transfer_small/bc/8000

The scripted expert makes two wrong choices on purpose: it reaches 5 cm beside the cube, or it lets go of the cube
before the other arm has it. About 40 % of its episodes succeed, after 140 of at most 200 steps. Three cameras of 75x99
pixels, without shadows: from above, where the cube is three pixels wide, and at both wrists, where it fills the picture
when it is grasped. The policy plans 20 actions and executes 10. The discount is 1 - 1/200: a success is
worth half at the start.

Four critics (HL-Gauss, actions clipped at 4 standard deviations) learn the observed returns for 500 steps, and the
actor imitates for as long. The VLM trains in imitation and is frozen afterwards, so one prefix serves everything.
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig, DSRLConfig, FilteredConfig, RECAPConfig, RIPTConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import AlohaConfig
from pirl.models.config import get_preset
from pirl.models.critic_config import CriticConfig
from pirl.names import CAMERAS
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, ConstantSchedule, CosineSchedule

_DISCOUNT = 0.995

_BC = RLTrainConfig(
    name="bc_aloha_transfer_small",
    model=replace(get_preset("pi0_mini"), cameras=CAMERAS, image_size=99),
    agent=BCConfig(augment=False, flow_draws=4, mask_padding=True, ema_decay=0.998),
    critic=CriticConfig(
        num_critics=4, hidden=(256, 256, 256), action_clip=4.0, pool_width=256, pool_heads=4, embedding_width=256
    ),
    data=DataConfig(
        repo_ids=("demos/aloha_transfer",),
        robot="aloha_sim",
        cameras=CAMERAS,
        tokenizer="word",
        outcome="columns",
        critic_horizon=10,
        episodes_per_memory_pool=None,
    ),
    env=AlohaConfig(
        task="transfer",
        cameras=("top", "left_wrist", "right_wrist"),
        render_size=(75, 99),
        fast_render=True,
        max_steps=200,
    ),
    rollout=RolloutConfig(backend="process", num_envs=64, num_workers=8, flow_steps=5),
    evaluation=EvalConfig(interval=4000, episodes=64),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(warmup_steps=300, peak_lr=5e-4, decay_steps=8000, decay_lr=1e-5),
    checkpoint=CheckpointConfig(save_interval=4000, keep_period=None),
    batch_size=128,
    num_train_steps=8000,
    log_interval=100,
)

_ACRLPD = replace(
    _BC,
    name="acrlpd_aloha_transfer_small",
    agent=ACRLPDConfig(
        discount=_DISCOUNT,
        num_action_samples=4,
        flow_steps=5,
        flow_draws=4,
        target_ess=0.3,
        bc_loss_weight=0.0,
        target_update_rate=0.01,
        mc_steps=500,
        actor_warmup_steps=500,
        augment=False,
        policy_ema_decay=0.998,
    ),
    freeze="vlm_frozen",
    policy_schedule=CosineSchedule(warmup_steps=50, peak_lr=3e-4, decay_steps=3000, decay_lr=1e-5),
    critic_schedule=ConstantSchedule(lr=5e-4),
    evaluation=EvalConfig(interval=1500, episodes=64),
    checkpoint=CheckpointConfig(save_interval=1500, keep_period=None),
    num_train_steps=3000,
)

_FILTERED = replace(
    _ACRLPD,
    name="filtered_aloha_transfer_small",
    agent=FilteredConfig(
        discount=_DISCOUNT, share=0.3, flow_draws=4, mask_padding=True, augment=False, ema_decay=0.998
    ),
)

_RECAP = replace(
    _ACRLPD,
    name="recap_aloha_transfer_small",
    agent=RECAPConfig(
        discount=_DISCOUNT,
        positive_share=0.3,
        value_warmup_steps=500,
        flow_draws=4,
        augment=False,
        policy_ema_decay=0.998,
    ),
)

_DSRL = replace(
    _ACRLPD,
    name="dsrl_aloha_transfer_small",
    agent=DSRLConfig(
        discount=_DISCOUNT,
        num_action_samples=4,
        flow_steps=5,
        q_aggregation="min",
        target_update_rate=0.01,
        mc_steps=500,
        actor_warmup_steps=500,
        augment=False,
    ),
    freeze=None,
    policy_schedule=ConstantSchedule(lr=5e-4),
)

_RIPT = replace(
    _BC,
    name="ript_aloha_transfer_small",
    agent=RIPTConfig(group_size=8, groups_per_iteration=24, max_attempts=1.5, epochs=2, flow_draws=4),
    freeze="vlm_frozen",
    rollout=RolloutConfig(backend="process", num_envs=192, num_workers=12, flow_steps=5),
    evaluation=EvalConfig(interval=5, episodes=64),
    policy_schedule=CosineSchedule(warmup_steps=1, peak_lr=1e-4, decay_steps=400, decay_lr=1e-5),
    checkpoint=CheckpointConfig(save_interval=5, keep_period=None),
    num_train_steps=15,
    log_interval=1,
)

RECIPES = (_BC, _ACRLPD, _FILTERED, _RECAP, _DSRL, _RIPT)
