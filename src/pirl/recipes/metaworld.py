"""Meta-World's MT10: ten tasks of a Sawyer arm, one language-conditioned π₀ of twelve million parameters, from scratch.

    pirl record bc_metaworld_mt10 --episodes 1000 --repo-id demos/metaworld_mt10 --env.max-steps 200 \
--dials wrong=0.5 detour=0.25 action_noise=0.1
    pirl norm-stats demos/metaworld_mt10 --robot metaworld --horizon 10 --out assets/demos/metaworld_mt10
    pirl train bc_metaworld_mt10 --exp-name first
    pirl train acrlpd_metaworld_mt10 --exp-name first --init-weights checkpoints/bc_metaworld_mt10/first/10000
    pirl train filtered_metaworld_mt10 --exp-name first --init-weights checkpoints/bc_metaworld_mt10/first/10000
    pirl train recap_metaworld_mt10 --exp-name first --init-weights checkpoints/bc_metaworld_mt10/first/10000
    pirl train dsrl_metaworld_mt10 --exp-name first --init-weights checkpoints/bc_metaworld_mt10/first/10000
    pirl train ript_metaworld_mt10 --exp-name first --init-weights checkpoints/acrlpd_metaworld_mt10/first/4000

benchmarks/results/metaworld_mt10.py runs all of this and writes the table. The demonstrations are imperfect on purpose:
half of them act 12 cm beside the right place, and a quarter start that way and correct themselves. Of 400 such episodes
48 % succeeded. They may take 200 steps, a policy has 150: the expert's median is at most 96 in every task, so a detour
may exceed the limit.

The policy sees two images of 99 pixels (81 patches each), one of the table and one from the gripper, the position of
the hand, the opening of the gripper, and the instruction, but no object positions. The robot acts at 80 Hz: a chunk of
10 actions is an eighth of a second, so an episode has 15 decisions, all executed and all scored by the critic.
The discount is 1 - 1/100: a success after 90 steps is worth 0.40, one with a detour of 60 steps 0.22. Four critics
(HL-Gauss, actions clipped at 4 standard deviations) regress observed returns for the first 500 steps, while the actor
imitates, then bootstrapped targets. Running out of time is the only failure there is, so it ends the task
(`data.failure always`). Seven in ten steps belong to failures, so the filter keeps the best quarter. The VLM trains
during imitation and is frozen afterwards.

RIPT rolls out 32 groups of 8 per iteration; tasks that always or never succeed give no signal and are drawn less often.

Hardware: one GPU and 16 cores for the simulator, 1.2 GB of memory for each worker process that renders all ten tasks on
the CPU. Results: not run yet.
"""

from dataclasses import replace

from pirl.agents.config import BCConfig, DSRLConfig, FilteredConfig, RECAPConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import MetaWorldConfig
from pirl.models.config import get_preset
from pirl.names import BASE_CAMERA, LEFT_WRIST_CAMERA
from pirl.recipes.families import SMALL_CRITIC, derive, improved, in_groups
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, CosineSchedule

_PIXELS = 99
_CAMERAS = (BASE_CAMERA, LEFT_WRIST_CAMERA)

_BC = RLTrainConfig(
    name="bc_metaworld_mt10",
    model=replace(
        get_preset("pi0_mini"), cameras=_CAMERAS, image_size=_PIXELS, action_dim=4, horizon=10, max_token_len=12
    ),
    agent=BCConfig(augment=False, flow_draws=4, ema_decay=0.998),
    critic=SMALL_CRITIC,
    data=DataConfig(
        repo_ids=("demos/metaworld_mt10",),
        robot="metaworld",
        cameras=_CAMERAS,
        tokenizer="word",
        outcome="columns",
        failure="always",
        episodes_per_memory_pool=None,
    ),
    env=MetaWorldConfig(wrist_camera=True, render_size=_PIXELS, max_steps=150),
    rollout=RolloutConfig(backend="process", num_envs=80, num_workers=8, flow_steps=5),
    evaluation=EvalConfig(interval=5000, episodes=100),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(warmup_steps=300, peak_lr=5e-4, decay_steps=10_000, decay_lr=1e-5),
    checkpoint=CheckpointConfig(save_interval=5000, keep_period=None),
    batch_size=128,
    num_train_steps=10_000,
    log_interval=100,
)

_ACRLPD = improved(_BC, discount=0.99, steps=4000)

RECIPES = (
    _BC,
    _ACRLPD,
    derive(_ACRLPD, FilteredConfig, share=0.25),
    derive(_ACRLPD, RECAPConfig, positive_share=0.3),
    derive(_ACRLPD, DSRLConfig),
    in_groups(_BC, groups=32, workers=16, iterations=20, updates=600),
)
