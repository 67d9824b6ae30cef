"""Clone demonstrations, then improve the clone on the same recordings by Q-chunking (ACRLPD), all from Python.

    python examples/04_bc_then_acrlpd.py                                 1.5 minutes of CPU, most of it compiling
    python examples/04_bc_then_acrlpd.py --demos 1500 --bc-steps 2400 --acrlpd-steps 1600      as the recipes do

The recipes' results (README.md) are from `pirl train`; the second line was not run. Your own dataset, robot and model
are fields of `config.data` and `config.model`; every field is explained by `pirl train bc_tabletop --help`.
"""

import argparse
from dataclasses import replace

import pirl

parser = argparse.ArgumentParser()
for flag, default in (("--demos", 60), ("--bc-steps", 30), ("--acrlpd-steps", 15), ("--episodes", 40)):
    parser.add_argument(flag, type=int, default=default)
args = parser.parse_args()


def adapted(name: str, steps: int) -> pirl.RLTrainConfig:
    """The recipe with data, statistics and checkpoints in one folder, and without evaluations during training."""
    config = pirl.get_config(name)
    data = replace(config.data, repo_ids=("example_runs/demos",), assets_dir="example_runs/assets")
    checkpoint = replace(config.checkpoint, base_dir="example_runs/checkpoints")
    rollout = replace(config.rollout, num_envs=args.episodes)
    return replace(config, data=data, checkpoint=checkpoint, rollout=rollout, num_train_steps=steps, evaluation=None)


bc, acrlpd = adapted("bc_tabletop", args.bc_steps), adapted("acrlpd_tabletop", args.acrlpd_steps)
# At first only the critic trains, for the recipe's share of the steps.
alone = acrlpd.agent.actor_warmup_steps * args.acrlpd_steps // pirl.get_config("acrlpd_tabletop").num_train_steps
acrlpd = replace(acrlpd, agent=replace(acrlpd.agent, actor_warmup_steps=alone))
with pirl.LocalPool(bc.env, args.episodes) as pool:
    with pirl.RolloutRecorder(bc.data.repo_ids[0], info=pool.info, existing="overwrite") as recorder:
        contexts = pirl.recording_contexts(pool.info, args.demos, "train")
        for rollout in pirl.expert_rollouts(bc.env, contexts, dials=None, seed=0):
            recorder.add(rollout)
    stats = pirl.compute_norm_stats(pirl.create_source(bc.data, bc.robot), bc.robot, bc.horizon)
    pirl.save_norm_stats("example_runs/assets/demos", stats, overwrite=True)

    pirl.train(bc, overwrite=True)
    pirl.train(replace(acrlpd, init_weights=str(bc.run_dir / str(args.bc_steps))), overwrite=True)

    for config in (bc, acrlpd):  # on states unseen in training, the same for both
        policy = pirl.open_checkpoint(config.run_dir).use(seed=0)
        result = pirl.evaluate(pool, policy, pirl.fixed_contexts(pool.info, args.episodes, "test"))
        print(f"{config.name}: success {result.success} in {args.episodes} episodes")
