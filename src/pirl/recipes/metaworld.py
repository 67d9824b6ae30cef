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

All of it and its table by one command: benchmarks/results/metaworld_mt10.py. The demonstrations are imperfect by
choice: half of them act 12 cm beside the right place, a quarter starts so and corrects itself. Of 400 such episodes
48 % succeeded. They may last 200 steps, a policy has 150: the expert needs at most 96 in the median of every task, so a
detour may come too late.

The policy sees two pictures of 99 pixels (81 patches each), one of the table and one at the gripper, the hand's place
and the gripper's opening, and the instruction; where the objects are it has to look for. The robot acts at 80 Hz:
chunks of 10 actions are an eighth of a second, 15 decisions an episode, all executed and all scored by the critic.
The discount is 1 - 1/100: a success after 90 steps is worth 0.40, one with a detour of 60 steps 0.22. Four critics
(HL-Gauss, actions clipped at 4 standard deviations) learn the observed returns for 500 steps while the actor
imitates, then bootstrapped ones. Seven in ten steps are of failures, so the filter keeps the best quarter. The VLM
trains in imitation and is frozen afterwards.

RIPT rolls out 32 groups of 8 an iteration; tasks that always or never succeed teach nothing and are drawn less often.

Hardware: one GPU and 16 cores that step the simulator, 1.2 GB of memory for each worker process that renders all ten
tasks on the processor. Results: not run yet.
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
