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

The scripted expert makes two deliberate errors: it reaches 5 cm beside the cube, or it drops the cube before the other
arm has it. About 40 % of its episodes succeed, after 140 of at most 200 steps. Three cameras of 75x99
pixels, without shadows: from above, where the cube is three pixels wide, and at both wrists, where it fills the picture
when it is grasped. The policy plans 20 actions and executes 10. The discount is 1 - 1/200: a success is
worth one half at the start. Running out of time is the only failure there is, so it ends the task
(`data.failure always`).

Four critics (HL-Gauss, actions clipped at 4 standard deviations) regress observed returns for the first 500 steps,
while the actor imitates. The VLM trains during imitation and is frozen afterwards, so that all losses share one prefix.
"""

from dataclasses import replace

from pirl.agents.config import BCConfig, DSRLConfig, FilteredConfig, RECAPConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import AlohaConfig
from pirl.models.config import get_preset
from pirl.names import CAMERAS
from pirl.recipes.families import SMALL_CRITIC, derive, improved, in_groups
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, CosineSchedule

_BC = RLTrainConfig(
    name="bc_aloha_transfer_small",
    model=replace(get_preset("pi0_mini"), cameras=CAMERAS, image_size=99),
    agent=BCConfig(augment=False, flow_draws=4, mask_padding=True, ema_decay=0.998),
    critic=SMALL_CRITIC,
    data=DataConfig(
        repo_ids=("demos/aloha_transfer",),
        robot="aloha_sim",
        cameras=CAMERAS,
        tokenizer="word",
        outcome="columns",
        failure="always",
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

_ACRLPD = improved(_BC, discount=0.995, steps=3000)

RECIPES = (
    _BC,
    _ACRLPD,
    derive(_ACRLPD, FilteredConfig, share=0.3, mask_padding=True),
    derive(_ACRLPD, RECAPConfig, positive_share=0.3),
    derive(_ACRLPD, DSRLConfig),
    in_groups(_BC, groups=24, workers=12, iterations=15, updates=400),
)
