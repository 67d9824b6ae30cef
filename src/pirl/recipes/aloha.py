"""ALOHA, two arms with 14 joints at 50 Hz: folding a box, or any task you recorded.

    pirl train acrlpd_aloha_fold --exp-name box1 --data-path recordings/fold_box --mesh.fsdp 8
    pirl train acrlpd_aloha_fold_lora --exp-name box1 --data-path recordings/fold_box
    pirl train bc_aloha_fold --exp-name warm --data-path recordings/fold_box
    pirl train filtered_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train recap_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train dagger_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train critic_nft_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train qc_fql_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train dsrl_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train rl_token_aloha_fold --exp-name first --data-path recordings/fold_box --init-weights \
checkpoints/bc_aloha_fold/warm/20000
    pirl train ript_aloha_transfer --exp-name r1 --init-weights gs://openpi-assets/checkpoints/pi0_aloha_sim
    pirl train flow_ppo_aloha_transfer --exp-name p1 --init-weights gs://openpi-assets/checkpoints/pi0_aloha_sim

`rl_fold_box` is an alias of acrlpd_aloha_fold. Bring your own LeRobot dataset with demonstrations and the robot's own
attempts. Outcomes come from next.success or next.reward; without such a column, pass `--data.outcome sparse_success
--data.success-file outcomes.json`. Compute statistics first: `pirl norm-stats recordings/fold_box --robot aloha
--horizon 20`.

Q-chunking: π₀ predicts 20 actions (0.4 s); the critic scores and the robot executes all of them. The discount is
1 - 1/1000, for a task of 20 seconds at 50 Hz: a success is worth 0.37 at the start; with 0.99 it would be 0.00004. Ten
critics of 3 × 512 with LayerNorm and dropout 0.1 predict histograms of the return (HL-Gauss) from actions clipped at 4
standard deviations. For 2,000 steps they regress observed returns, then bootstrapped targets; the actor imitates until
the rank correlation of values and returns on held-out episodes reaches 0.3. Best of 4; advantage-weighted imitation
with a BC weight of 0.05, closer to uniform weights where the ten critics disagree. Behaviour cloning uses OpenPI's
settings and is a good start: `--init-weights checkpoints/bc_aloha_fold/warm/20000`.

One episode in ten of each outcome is held out for validation (`data.held_out`), because a real task has no simulator.

The other algorithms train on the same recordings with the same discount, critic, warm-up and gate, so their results
are comparable. Start them from a clone that sometimes succeeds. Filtered imitation, RECAP and DAgger train all weights,
or adapters (`_lora`). CriticNFT and QC-FQL train only the action expert: each compares the policy with a second one,
and with the VLM frozen one prefix serves both. DSRL and RLT leave π₀ unchanged. The last 25 steps before a takeover
(half a second) are blamed for it.

RIPT in simulation (`ript_aloha_transfer`): gym-aloha's TransferCube, 50 actions planned and 10 executed as in OpenPI's
client, groups of 8 rollouts, and full rendering, because the checkpoint was trained on it.

PPO over the denoising path (`flow_ppo_aloha_transfer`): the same with πRL's rates (5e-6 for the expert, 1e-4 for the
value) and a value on the frozen prefix.

Hardware, by `pirl plan`, not measured: acrlpd_aloha_fold 12 GiB on each of 8 devices with --mesh.fsdp 8;
acrlpd_aloha_fold_lora 18 GiB, so one 24 GB card; bc_aloha_fold 62 GiB on one device; all with --model.remat full. The
others: docs/which-algorithm.md. Results: not run at full size yet.
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import AlohaConfig
from pirl.models.config import get_preset
from pirl.models.critic_config import get_critic_preset
from pirl.names import BASE_CAMERA
from pirl.recipes.families import offline, on_policy, with_adapters
from pirl.rollout.config import EvalConfig, RolloutConfig
from pirl.training.config import AdamW, CosineSchedule

_PI0_BASE = "gs://openpi-assets/checkpoints/pi0_base"
_STEPS = 50_000

_ACRLPD = RLTrainConfig(
    name="acrlpd_aloha_fold",
    model=replace(get_preset("pi0"), horizon=20),
    agent=ACRLPDConfig(
        discount=0.999,
        num_action_samples=4,
        bc_loss_weight=0.05,
        mc_steps=2000,
        actor_warmup_steps=2000,
        gate=0.3,
        heed_agreement=True,
    ),
    critic=replace(get_critic_preset("ten"), action_clip=4.0),
    init_weights=_PI0_BASE,
    data=DataConfig(robot="aloha", held_out=0.1),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(peak_lr=1e-5, decay_lr=1e-6, decay_steps=_STEPS),
    critic_optimizer=AdamW(weight_decay=1e-4),
    critic_schedule=CosineSchedule(peak_lr=3e-4, decay_lr=3e-5, decay_steps=_STEPS),
    batch_size=128,
    num_train_steps=_STEPS,
)

_BC = RLTrainConfig(
    name="bc_aloha_fold",
    model=_ACRLPD.model,
    agent=BCConfig(),
    init_weights=_PI0_BASE,
    data=DataConfig(robot="aloha", outcome="sparse_success", held_out=0.1),
    batch_size=32,
    num_train_steps=20_000,
)

_RIPT, _FLOW_PPO = on_policy(
    replace(_BC, name="bc_aloha_transfer"),
    discount=0.998,
    model=get_preset("pi0"),
    init_weights="gs://openpi-assets/checkpoints/pi0_aloha_sim",
    data=DataConfig(robot="aloha_sim", cameras=(BASE_CAMERA,), asset_id="lerobot/aloha_sim_transfer_cube_human"),
    env=AlohaConfig(task="transfer"),
    rollout=RolloutConfig(backend="process", num_envs=16, num_workers=8, execute=10),
    evaluation=EvalConfig(interval=5, episodes=50),
)

RECIPES = (_ACRLPD, with_adapters(_ACRLPD), _BC, _RIPT, _FLOW_PPO, with_adapters(_BC), *offline(_ACRLPD, reaction=25))
