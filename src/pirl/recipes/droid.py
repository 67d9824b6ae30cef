"""DROID, a Franka arm with two cameras at 15 Hz, on your own recordings.

    pirl train acrlpd_droid --exp-name q1 --data-path recordings/kitchen --mesh.fsdp 8
    pirl train acrlpd_droid_lora --exp-name q1 --data-path recordings/kitchen
    pirl train bc_droid --exp-name warm --data-path recordings/kitchen --mesh.fsdp 8
    pirl train filtered_droid --exp-name first --data-path recordings/kitchen
    pirl train recap_droid --exp-name first --data-path recordings/kitchen
    pirl train dagger_droid --exp-name first --data-path recordings/kitchen
    pirl train critic_nft_droid --exp-name first --data-path recordings/kitchen
    pirl train qc_fql_droid --exp-name first --data-path recordings/kitchen
    pirl train dsrl_droid --exp-name first --data-path recordings/kitchen
    pirl train rl_token_droid --exp-name first --data-path recordings/kitchen

π₀.₅ from its released DROID checkpoint: chunks of 15 joint velocities and gripper positions, 8 of them executed and
scored. The discount is 1 - 1/500: a success after 20 seconds (300 steps) is worth 0.55 at the start, one after 600
steps, where episodes end, 0.30. Ten critics with LayerNorm and dropout 0.1 predict histograms of the return (HL-Gauss).
They see actions up to ±2: quantiles put 98 % of the data within ±1, and a Gaussian's 4 standard deviations at 1.7. For
2,000 steps they regress observed returns, then bootstrapped targets: by bootstrapping alone a success would need 7,600
updates to propagate over the 38 chunks of 20 seconds (one chunk per 1/τ = 200 updates). The actor imitates until the
rank correlation of values and returns on held-out episodes reaches 0.3, and follows the critics less where they
disagree. If your episodes are longer, raise `agent.discount`. Bring your own LeRobot dataset with the columns of
OpenPI's DROID converter and an outcome column (next.success or next.reward). Copy the checkpoint's statistics from its
assets/droid to assets/droid, so that joints keep their normalisation. For joint positions instead of velocities:
`--data.robot droid_joint_position`, with your own statistics. One episode in ten of each outcome is held out for
validation. The other algorithms start where ACRLPD does, as for ALOHA; the last 8 steps before a takeover (half a
second) are blamed for it.

Hardware, by `pirl plan`, not measured: acrlpd_droid_lora 17 GiB, so one 24 GB card; the full model as for LIBERO.
Results: not run at full size yet.
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.models.config import get_preset
from pirl.models.critic_config import get_critic_preset
from pirl.recipes.families import offline, with_adapters
from pirl.training.config import AdamW, CosineSchedule

_PI05_DROID = "gs://openpi-assets/checkpoints/pi05_droid"
_STEPS = 30_000

_ACRLPD = RLTrainConfig(
    name="acrlpd_droid",
    model=replace(get_preset("pi05"), horizon=15),
    agent=ACRLPDConfig(
        discount=0.998, num_action_samples=8, mc_steps=2000, actor_warmup_steps=2000, gate=0.3, heed_agreement=True
    ),
    critic=replace(get_critic_preset("ten"), action_clip=2.0),
    init_weights=_PI05_DROID,
    data=DataConfig(robot="droid", asset_id="droid", critic_horizon=8, held_out=0.1),
    policy_optimizer=AdamW(weight_decay=1e-4),
    policy_schedule=CosineSchedule(peak_lr=1e-5, decay_lr=1e-6, decay_steps=_STEPS),
    batch_size=128,
    num_train_steps=_STEPS,
)

_BC = RLTrainConfig(
    name="bc_droid",
    model=_ACRLPD.model,
    agent=BCConfig(),
    init_weights=_PI05_DROID,
    data=DataConfig(robot="droid", asset_id="droid", outcome="sparse_success", held_out=0.1),
    batch_size=32,
    num_train_steps=20_000,
)

RECIPES = (_ACRLPD, with_adapters(_ACRLPD), _BC, with_adapters(_BC), *offline(_ACRLPD, reaction=8))
