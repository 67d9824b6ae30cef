"""Meta-World's MT10 from its observations instead of pictures: two CPU cores, no GPU, an MLP.

    pirl record bc_metaworld_mt10_state --episodes 400 --repo-id demos/metaworld_mt10_state --env.max-steps 200 \
--dials wrong=0.5 detour=0.25 action_noise=0.1
    pirl norm-stats demos/metaworld_mt10_state --robot metaworld_mt10 --horizon 10 \
--out assets/demos/metaworld_mt10_state
    pirl train bc_metaworld_mt10_state --exp-name bc
    pirl train acrlpd_metaworld_mt10_state --exp-name rl --init-weights checkpoints/bc_metaworld_mt10_state/bc/2000
    pirl train filtered_metaworld_mt10_state --exp-name rl --init-weights checkpoints/bc_metaworld_mt10_state/bc/2000
    pirl train recap_metaworld_mt10_state --exp-name rl --init-weights checkpoints/bc_metaworld_mt10_state/bc/2000
    pirl train dsrl_metaworld_mt10_state --exp-name rl --init-weights checkpoints/bc_metaworld_mt10_state/bc/2000
    pirl train bc_metaworld_mt10_state --exp-name successes --init-weights checkpoints/bc_metaworld_mt10_state/bc/2000 \
--data.successes-only --batch-size 64 --pi0-lr 5e-4 --policy-schedule.decay-steps 1200 --max-steps 1200
    pirl train ript_metaworld_mt10_state --exp-name rl \
--init-weights checkpoints/bc_metaworld_mt10_state/successes/1200

Meta-World: the observation of its own multi-task benchmark, 39 numbers and which of the ten tasks it is. Half of the
demonstrations act 12 cm beside the right place, a quarter corrects itself. They may last 200 steps, a policy has 120:
96 % of the scripted policies' episodes succeed in these. The discount is 1 - 1/100. Every failure is time running out,
so time-outs count as failures (`data.failure` always): otherwise the critic sees nothing but successes. These are
30 % of all steps, and the filter keeps the best 15 %. The critic learns observed returns throughout: bootstrapping from
step 300 made it worse (correlation with returns 0.70, then 0.50).

RIPT starts from what imitates the successes alone, and imitates its own better rollouts (`awr`): on the 1,400 to 1,900
rows of an iteration `nft` drifts and gains nothing.

Test states: BC 0.30, successes only 0.60, ACRLPD from BC 0.415, best of 8 0.615 (seed 0), RIPT 0.710 (one seed;
0.655 after nine iterations). Numbers: docs/results/metaworld.md, "From state".
"""

from dataclasses import replace

from pirl.agents.config import BCConfig, DSRLConfig, FilteredConfig, RECAPConfig, RIPTConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import MetaWorldConfig
from pirl.models.config import MLPFlowConfig
from pirl.models.critic_config import CriticConfig
from pirl.recipes.families import derive, improved_from_state
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CheckpointConfig, CosineSchedule

_WIDTHS = (512, 512, 512, 512)

_METAWORLD = RLTrainConfig(
    name="bc_metaworld_mt10_state",
    model=MLPFlowConfig(state_dim=49, action_dim=4, horizon=10, hidden=_WIDTHS),
    agent=BCConfig(augment=False, flow_draws=2, ema_decay=0.99),
    critic=CriticConfig(num_critics=4, hidden=(256, 256, 256), action_clip=4.0),
    data=DataConfig(
        repo_ids=("demos/metaworld_mt10_state",),
        robot="metaworld_mt10",
        cameras=(),
        tokenizer="none",
        outcome="columns",
        failure="always",
    ),
    env=MetaWorldConfig(full_state=True, one_hot=True, max_steps=120),
    rollout=RolloutConfig(num_envs=100, flow_steps=5),
    evaluation=EvalConfig(interval=1000, episodes=100, films=0),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(warmup_steps=100, peak_lr=1e-3, decay_steps=2000, decay_lr=1e-5),
    checkpoint=CheckpointConfig(save_interval=1000, keep_period=None),
    batch_size=128,
    num_train_steps=2000,
    log_interval=100,
)

_ACRLPD = improved_from_state(_METAWORLD, steps=1200, mc_steps=1200, every=600, batch_size=64)

_RIPT = replace(
    _METAWORLD,
    name="ript_metaworld_mt10_state",
    agent=RIPTConfig(
        loss="awr",
        group_size=8,
        groups_per_iteration=24,
        max_attempts=1.25,
        epochs=5,
        advantage="std",
        weigh="rollouts",
        drift_limit=0.05,
        flow_draws=2,
    ),
    rollout=RolloutConfig(num_envs=64, flow_steps=5),
    policy_schedule=CosineSchedule(warmup_steps=10, peak_lr=3e-4, decay_steps=750, decay_lr=3e-5),
    evaluation=EvalConfig(interval=3, episodes=100, films=0),
    checkpoint=CheckpointConfig(save_interval=3, keep_period=None),
    batch_size=256,
    num_train_steps=6,
    log_interval=1,
)

RECIPES = (
    _METAWORLD,
    _ACRLPD,
    derive(_ACRLPD, FilteredConfig, share=0.15),
    derive(_ACRLPD, RECAPConfig, positive_share=0.3),
    derive(_ACRLPD, DSRLConfig),
    _RIPT,
)
