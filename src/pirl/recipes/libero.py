"""LIBERO, a Franka arm in simulation: four suites of ten tasks.

    pirl train acrlpd_libero --exp-name q1 --data-path physical-intelligence/libero my/rollouts --mesh.fsdp 8
    pirl train acrlpd_libero_lora --exp-name q1 --data-path physical-intelligence/libero my/rollouts
    pirl train bc_libero --exp-name warm --mesh.fsdp 8
    pirl train filtered_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train recap_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train dagger_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train critic_nft_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train qc_fql_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train dsrl_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train rl_token_libero --exp-name first --data-path physical-intelligence/libero my/rollouts
    pirl train ript_libero_goal --exp-name r1 --init-weights checkpoints/bc_libero/warm/30000 --env.assets LIBERO_ASSETS
    pirl train flow_ppo_libero_goal --exp-name p1 --init-weights checkpoints/bc_libero/warm/30000

π₀.₅, because its released LIBERO checkpoint is the strongest: chunks of 10 actions, no state in the prompt, as in its
training. The critic reads the state and scores the 5 actions that OpenPI's client executes before replanning. The
discount is 1 - 1/500: the longest episodes have 520 steps, and a success there is still worth 0.35 at the start. Ten
critics with LayerNorm and dropout 0.1 predict histograms of the return (HL-Gauss). They see actions up to ±2: quantiles
put 98 % of the data within ±1, and a Gaussian's 4 standard deviations at 1.7. For 2,000 steps they regress observed
returns, then bootstrapped targets: by bootstrapping alone a success propagates by one chunk per 1/τ = 200 updates, and
would need 6,400 for the 32 chunks of an average demonstration. The actor imitates until the rank correlation of values
and returns on held-out episodes reaches 0.3, and follows the critics less where they disagree. One episode in ten of
each outcome is held out for validation.

The dataset physical-intelligence/libero has only successful demonstrations: from them the critic learns which path is
shorter, not what fails. Add rollouts with outcomes (a column next.success). Copy the checkpoint's statistics from its
assets/physical-intelligence/libero to assets/physical-intelligence/libero.

Behaviour cloning has the settings of OpenPI's pi05_libero. The other algorithms start where ACRLPD does, with its
discount, critic, warm-up and gate, as for ALOHA. DAgger needs rollouts that an operator corrected (a column
intervention).

RIPT (`ript_libero_goal`) needs no critic and no dataset: groups of 8 rollouts from the same initial state; only the
action expert trains. A released checkpoint solves most of libero_goal: start from a weaker one (few demonstrations), or
every group is rejected because all its rollouts succeed. Of the 50 initial states of each task, 40 are for training;
the last 10 are for evaluation, during training (100 episodes) and for the result: `pirl eval CHECKPOINT --split
validation --episodes 100`. LIBERO's own test (`--split test`) uses all 50, of which this policy has seen 40.
`--variant quick` runs two small iterations, `--variant benchmark` evaluates 50 episodes of every task before and after.

PPO over the denoising path (`flow_ppo_libero_goal`): the same states, rollouts and trained weights; πRL's rates (5e-6
for the expert, 1e-4 for the value), clip and passes, a value on the frozen prefix.

Hardware, by `pirl plan`, not measured: acrlpd_libero 12 GiB and bc_libero 15 GiB on each of 8 devices with --mesh.fsdp
8; acrlpd_libero_lora 17 GiB, so one 24 GB card; all with --model.remat full. Results: not run at full size yet. OpenPI
reports 96.85 % on average for pi05_libero at 30,000 steps.
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import LiberoConfig
from pirl.models.config import get_preset
from pirl.models.critic_config import get_critic_preset
from pirl.recipes.families import offline, on_policy, with_adapters
from pirl.rollout.config import CurriculumConfig, EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CosineSchedule

_STEPS = 30_000

_DATA = DataConfig(
    repo_ids=("physical-intelligence/libero",), robot="libero", outcome="sparse_success", critic_horizon=5
)

_ACRLPD = RLTrainConfig(
    name="acrlpd_libero",
    model=replace(get_preset("pi05"), horizon=10, discrete_state_input=False),
    agent=ACRLPDConfig(
        discount=0.998, num_action_samples=8, mc_steps=2000, actor_warmup_steps=2000, gate=0.3, heed_agreement=True
    ),
    critic=replace(get_critic_preset("ten"), action_clip=2.0),
    init_weights="gs://openpi-assets/checkpoints/pi05_libero",
    data=replace(_DATA, held_out=0.1),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(peak_lr=1e-5, decay_lr=1e-6, decay_steps=_STEPS),
    batch_size=128,
    num_train_steps=_STEPS,
)

_BC = RLTrainConfig(
    name="bc_libero",
    model=_ACRLPD.model,
    agent=BCConfig(ema_decay=0.999),
    init_weights="gs://openpi-assets/checkpoints/pi05_base",
    data=_DATA,
    policy_schedule=CosineSchedule(warmup_steps=10_000, peak_lr=5e-5, decay_lr=5e-5, decay_steps=1_000_000),
    batch_size=256,
    num_train_steps=_STEPS,
)

_RIPT, _FLOW_PPO = on_policy(
    replace(_BC, name="bc_libero_goal"),
    discount=0.998,
    init_weights=_ACRLPD.init_weights,
    data=replace(_DATA, repo_ids=(), asset_id="physical-intelligence/libero"),
    env=LiberoConfig(suite="libero_goal"),
    rollout=RolloutConfig(backend="process", num_envs=16, num_workers=8, execute=5),
    curriculum=CurriculumConfig(contexts=400, held_out=10),
    evaluation=EvalConfig(interval=5, episodes=100),
)

RECIPES = (_ACRLPD, with_adapters(_ACRLPD), _BC, _RIPT, _FLOW_PPO, with_adapters(_BC), *offline(_ACRLPD, reaction=10))
