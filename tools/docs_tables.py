"""Tables for `docs_check.py`: what it reduces, leaves out, and creates for pages that take it for granted."""

import re
from pathlib import Path

import numpy as np

from pirl.data.robots import get_robot
from pirl.records import Context, Episode, Rollout
from pirl.rollout.pool import EnvInfo
from pirl.rollout.record import RolloutRecorder

TESTED = ("docs/extending.md",)
"""Pages whose Python blocks `tests/test_docs.py` runs."""
LEFT_OUT = {
    r"^git clone": "there is a clone already",
    r"^make |^(\.venv/bin/)?(pytest|mkdocs|ruff|mypy) ": "runs by itself",
    r"python benchmarks/": "a benchmark",
    r"^pirl serve (?!.*--shadow)": "serves until it is stopped",
    r"pirl serve .*box1 --shadow|/reload$|^openssl ": "belongs to a server that is not running",
    r"^pirl improve (?!.*--show)|pirl\.robot\.simulated|recordings/first$": "needs a policy server, and minutes",
    r"^pirl demo(?! --quick)": "ten minutes; --quick is run",
    r"^(pip|apt-get|docker|kubectl) |libero_install": "installs or downloads",
    r"^rsync |^uv run scripts/serve_policy": "needs a robot, and OpenPI",
    r"\bsrun\b|#SBATCH|JAX_PROCESS_ID=|^ray start|RAY_ADDRESS=": "needs several machines",
    r"ript_libero|ript_aloha|_metaworld|--env\.type Libero": "needs a MuJoCo simulator",
    r"^pirl (inspect checkpoint|eval|export \w+) (gs|hf)://": "downloads weights",
    r"--model pi0 |get_preset\(\"pi0\"\)": "needs full-size weights",
}
"""Commands and Python blocks that are not run -> the reason."""
INSTEAD = {
    r"\.venv/bin/pirl": "pirl",
    r"--init-weights (gs://\S+|\S+\.npz)": "",  # a tiny model has random initial weights
    r'LeRobotWriter\("recordings/cubes"': 'LeRobotWriter("recordings/more_cubes"',  # other datasets exist
    r"(tune bc_tabletop) --trials \d+": r"\1 --trials 2",
    r"(tune acrlpd_tabletop) --trials \d+": r"\1 --trials 1",
    r"^(pirl completion \w+) > ~/.*": r"\1 > completion",
    r"^(pirl plan .*)": r"\1 --debug",
}
"""Pattern -> replacement in commands. `docs_check.smaller` also takes a hundredth of the steps, a 25th of the episodes,
and `--debug` for full-size models."""
DATASETS = {
    **{f"recordings/{name}": "aloha" for name in ("fold_box", "attempts", "cubes")},
    **{f"recordings/{name}": "droid" for name in ("kitchen", "demos", "rollouts")},
    **{f"lerobot/lerobot/aloha_sim_{task}_human": "aloha_sim" for task in ("transfer_cube", "insertion")},
    **dict.fromkeys(("recordings/pick", "lerobot/physical-intelligence/libero", "lerobot/my/rollouts"), "libero"),
}
"""Datasets that pages take for granted -> robot. Hub names are in LeRobot's home."""
ALL_PAGES = "all pages, after the quickstart"
GIVEN = {
    ALL_PAGES: (
        "rm -rf to_robot compared compare.html",
        "pirl norm-stats physical-intelligence/libero --robot libero --horizon 10",
        "pirl norm-stats recordings/kitchen --robot droid --horizon 15 --out assets/droid",
        "pirl export pytorch checkpoints/bc_aloha_fold/warm --out pi0_torch --dtype float32",
    ),
    "docs/cli.md": (
        "pirl export openpi checkpoints/debug/first --out checkpoints/my_run/20000",
        "pirl export openpi checkpoints/debug/first --out checkpoints/lora/20000",
        "cp pi0_torch/model.safetensors . && echo 'recipe: acrlpd_libero' > my.yaml",
        "pirl tune acrlpd_tabletop --show-space > wide.yaml",
    ),
    "docs/evaluation.md": (
        "pirl export openpi checkpoints/acrlpd_tabletop/first --out to_robot/1600",
        "echo 'recipe: acrlpd_tabletop' > my.yaml",
    ),
    "docs/tuning.md": ("pirl tune acrlpd_tabletop --show-space > wide.yaml",),
}
"""Commands that create what a page takes for granted besides datasets."""
ALONE = re.compile(r"^pirl (demo|doctor|plan (?!\S+\.yaml))|^python examples/")
"""Independent commands: they run once, in their own folder, at any time."""
LOOKS = re.compile(r"^pirl (inspect|recipes (ls|show))\b|--(help|dry-run|show-space)\b")
"""Read-only commands: they run once."""


def make_dataset(folder: Path, name: str, *, episodes: int = 3, steps: int = 60) -> None:
    """Write a LeRobot dataset of a robot with random motion; every other episode succeeds."""
    robot, rng, last = get_robot(name), np.random.default_rng(0), np.arange(steps) == steps - 1
    info = EnvInfo(robot=name, tasks=("",), num_inits=None, max_steps=steps, fps=10, action_dim=robot.action_dim)
    with RolloutRecorder(folder, info=info) as recorder:
        for number in range(episodes):
            won = number % 2 == 0
            episode = Episode(
                task="fold the box",
                state=rng.normal(size=(steps, robot.state_dim)).astype(np.float32),
                actions=rng.normal(size=(steps, robot.action_dim)).astype(np.float32),
                rewards=(last & won).astype(np.float32),
                terminated=last & won,
                truncated=last & (not won),
                success=won,
            )
            frames = {keys[0]: rng.integers(0, 255, (steps, 32, 32, 3), np.uint8) for keys in robot.cameras.values()}
            every, start = np.arange(steps), np.zeros(1, np.int64)
            context = Context("", number)
            recorder.add(
                Rollout(context=context, number=number, episode=episode, starts=start, frames=frames, frame_steps=every)
            )
