"""`pirl eval`: the success rate of a checkpoint on fixed initial states."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl.cli.app import Parser, console, positive

NAME = "eval"
HELP = """\
Runs episodes with a checkpoint and reports the success rate per task and overall, with 95 % intervals. A split's
initial states are fixed, so the same command gives the same results. Writes eval.json and, with --video, videos and a
filmstrip.png (those of the --compare policy go to compared_with/).

CHECKPOINT is a step folder or a run folder (its latest step, or the best with --best). It defines model, robot and
environment; override any setting with a dotted flag, as in `pirl train`: --env.max-steps 20, --rollout.flow-steps 5,
--agent.guidance 2. Weights trained by OpenPI need --recipe.

Choose settings and checkpoints on the validation split; report results on the test split (the default).

--data needs no environment: it measures flow loss, action error, and the critic's ranking and calibration on the run's
held-out episodes (data.held_out), or on all episodes of other datasets. Writes held_out.json."""
EXAMPLES = """\
examples:
  pirl eval checkpoints/bc_tabletop/first
  pirl eval checkpoints/acrlpd_tabletop/first --best --episodes 200 --video 4
  pirl eval checkpoints/acrlpd_tabletop/first/1600 --best-of 8 --split validation
  pirl eval checkpoints/acrlpd_tabletop/first --compare checkpoints/bc_tabletop/first --episodes 200
  pirl eval checkpoints/acrlpd_aloha_fold/box1 --data
  pirl eval checkpoints/acrlpd_aloha_fold/box1 --data recordings/tuesday --compare checkpoints/bc_aloha_fold/warm
  pirl eval gs://openpi-assets/checkpoints/pi05_libero --recipe acrlpd_libero --env.type Libero --num-envs 8"""
USAGE = (
    "%(prog)s CHECKPOINT [--episodes N | --data [DATASET ...]] [--video [N]] [--compare OTHER] [--SETTING VALUE ...]"
)

FILE, STRIP, FOLDER = "eval.json", "filmstrip.png", "evaluations"


def add_arguments(parser: Parser) -> None:
    """Arguments of `pirl eval`; settings are left to the checkpoint's own configuration."""
    parser.usage, parser.takes_settings = USAGE, True
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="step folder, run folder or gs:// address")
    add("--episodes", type=positive, default=50, metavar="N", help="episodes, cycling over tasks (default 50)")
    add("--split", choices=("test", "validation"), default="test", help="initial states (default test)")
    add("--best", action="store_true", help="use the run's best step, by its evaluations during training")
    add(
        "--best-of",
        type=positive,
        metavar="N",
        help="best of N candidates by the critic (default 1, or evaluation.best_of)",
    )
    add("--execute", type=positive, metavar="N", help="steps of a chunk to execute before replanning")
    add("--num-envs", type=positive, metavar="N", help="parallel environments")
    add("--backend", choices=("local", "process", "ray"), help="where environments run")
    add("--seed", type=int, metavar="S", help="seed of the policy's noise (default 0; with --data the run's own)")
    add("--video", type=positive, nargs="?", const=3, metavar="N", help="save videos of N successes and failures (3)")
    add("--compare", metavar="OTHER", help="also evaluate this checkpoint on the same states and test the difference")
    text = "measure on held-out episodes instead, without an environment (default: of the run's own datasets)"
    add("--data", nargs="*", metavar="DATASET", help=text)
    add("--recipe", metavar="NAME", help="recipe or YAML file with the checkpoint's model, robot and environment")
    add("--out", type=Path, metavar="DIR", help=f"output folder (default {FOLDER}/... in the run)")
    add("--overwrite", action="store_true", help="replace existing results")
    add("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, write."""
    if args.seed is not None and args.seed < 0:
        args.usage_error("--seed is 0 or more")
    if args.data is not None:
        from pirl.cli import eval_data

        return eval_data.run(args)
    args.seed = args.seed or 0

    from pirl.recipes import load
    from pirl.rollout.films import Highlights
    from pirl.training.acting import find_checkpoint
    from pirl.training.build import build_pool

    recipe = load(args.recipe) if args.recipe else None
    found = find_checkpoint(args.checkpoint, best=args.best, config=recipe)
    found = replace(found, config=changed_by_flags(found.config, args))
    other = find_checkpoint(args.compare, best=args.best, config=recipe) if args.compare else None
    asked = {"": _asked(args, found)}
    if other is not None:
        config = replace(other.config, env=found.config.env, rollout=found.config.rollout)
        other = replace(other, config=config)
        asked["compared_with"] = _asked(args, other)
    out = args.out or _own_folder(_default_folder(args, found, other), asked, overwrite=args.overwrite)
    check_target(out / FILE, asked, overwrite=args.overwrite)
    with build_pool(found.config) as pool:
        films = {name: Highlights(args.video or 0) for name in asked}
        evaluated = {"": _evaluate(args, found, pool, films[""])}
        if other is not None:
            evaluated["compared_with"] = _evaluate(args, other, pool, films["compared_with"])
    result: dict[str, Any] = {"evaluation": asked[""], "result": evaluated[""].to_json()}
    if other is not None:
        result["compared_with"] = {
            "evaluation": asked["compared_with"],
            "result": evaluated["compared_with"].to_json(),
            "comparison": _comparison(*evaluated.values()),
        }
    text = write_result(out / FILE, result)
    if args.video:  # after the results are written: filming must not lose them
        for name, seen in films.items():
            _film(seen.rollouts, found.config.env, pool.info.fps, out / name)
    if args.json:
        print(text, end="")
    else:
        _show(result, evaluated, out)
    return 0


def changed_by_flags(config: Any, args: argparse.Namespace) -> Any:
    """The checkpoint's configuration with the flags of this command line.

    `rollout.best_of` is for collecting; what is evaluated is what training evaluates, by default a plain sample.
    """
    changes = {"best_of": 1 if config.evaluation is None else config.evaluation.best_of}
    names = ("best_of", "execute", "num_envs", "backend")
    changes |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if changes.get("num_envs", config.rollout.num_workers) < config.rollout.num_workers:
        changes["num_workers"] = changes["num_envs"]
    config = replace(config, rollout=replace(config.rollout, **changes))
    if not args.settings:
        return config
    from pirl.recipes.flags import apply_flags

    return apply_flags(config, args.settings, prog=f"pirl {NAME} {args.checkpoint}")


def _default_folder(args: argparse.Namespace, found: Any, other: Any = None) -> Path:
    """A folder in the run, named after step, split, best_of and comparison; in the working directory without a run."""
    name = f"{found.folder.name}-{args.split}"
    if found.config.rollout.best_of > 1:
        name += f"-best-of-{found.config.rollout.best_of}"
    if other is not None:
        name += f"-vs-{other.config.name}-{other.folder.name}"
    return (found.run or Path()) / FOLDER / name


def _own_folder(folder: Path, asked: Mapping[str, Any], *, overwrite: bool) -> Path:
    """The folder, or a sibling if it holds results for another number of episodes or another seed."""
    import json

    try:
        there = json.loads((folder / FILE).read_text(encoding="utf-8"))["evaluation"]
        differs = [name for name in ("episodes", "seed") if there[name] != asked[""][name]]
    except (OSError, ValueError, KeyError, TypeError):
        return folder
    if overwrite or not differs:
        return folder
    return folder.with_name("-".join([folder.name, *(f"{name}-{asked[''][name]}" for name in differs)]))


def _asked(args: argparse.Namespace, found: Any) -> dict[str, Any]:
    """The settings that determine the result."""
    from pirl.config_io import tag, to_dict

    config = found.config
    return {
        "checkpoint": str(found.folder),
        "trained_at": found.metadata.get("started_at"),
        "recipe": config.name,
        "exp_name": config.exp_name,
        "env": None if config.env is None else {"type": tag(type(config.env)), **to_dict(config.env)},
        "split": args.split,
        "episodes": args.episodes,
        "seed": args.seed,
        "best_of": config.rollout.best_of,
        "execute": config.execute,
        "flow_steps": config.rollout.flow_steps,
        "num_envs": config.rollout.num_envs,
    }


def check_target(file: Path, asked: Mapping[str, Any], *, overwrite: bool) -> None:
    """Before an hour of simulation: is the place free, or that of this very evaluation? Files of others stay."""
    import json

    from pirl.errors import EnvError

    if not file.exists():
        if films := [path for name in asked for path in _films(file.parent / name)]:
            raise EnvError(f"{films[0]} exists, and no {FILE} says what it shows", hint="choose another --out")
        return
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
        found = {"": there["evaluation"]}
        if "compared_with" in there:
            found["compared_with"] = there["compared_with"]["evaluation"]
    except (OSError, ValueError, KeyError, TypeError):
        raise EnvError(
            f"{file} holds no results of pirl and is not replaced", hint="choose another --out, or move it away"
        ) from None
    if not overwrite and found != json.loads(json.dumps(asked)):
        raise EnvError(
            f"{file} holds the results of another evaluation", hint="choose another --out, or replace it: --overwrite"
        )


def _evaluate(args: argparse.Namespace, found: Any, pool: Any, films: Any) -> Any:
    """Load a checkpoint and run all contexts; `films` gets every rollout. The weights are freed afterwards."""
    from pirl.progress import Progress
    from pirl.rollout.contexts import fixed_contexts
    from pirl.rollout.evaluate import evaluate
    from pirl.training.acting import load_acting

    policy = load_acting(found).use(args.seed)
    label = f"{found.config.name}/{found.config.exp_name} {found.folder.name}"
    with Progress(label, args.episodes, unit="episodes") as progress:
        won = 0

        def seen(rollout: Any) -> None:
            nonlocal won
            won += bool(rollout.episode.success)
            films.add(rollout)
            progress.advance(status=f"{won} succeeded")

        contexts = fixed_contexts(pool.info, args.episodes, args.split)
        return evaluate(pool, policy, contexts, retries=found.config.rollout.retries, on_rollout=seen)


def _film(rollouts: Sequence[Any], env_config: Any, fps: int, out: Path) -> None:
    """Write videos and a filmstrip; deletes those of an earlier evaluation."""
    import warnings

    from pirl.envs.make import make_env
    from pirl.errors import PirlError, PirlWarning
    from pirl.rollout.films import write_films

    out.mkdir(exist_ok=True)
    for old in _films(out):
        old.unlink()
    try:
        env = make_env(env_config)
    except PirlError:  # the simulator is not installed here
        env = None
    films = write_films(rollouts, env, out, fps=fps)
    if env is not None:
        env.close()
    if not films:
        warnings.warn("the environment shows no pictures: no film was made", PirlWarning, stacklevel=2)


def _films(out: Path) -> list[Path]:
    """An evaluation's video files and filmstrip."""
    films = [path for path in sorted(out.glob("*.mp4")) if re.fullmatch(r"(success|failure)-\d{4,}\.mp4", path.name)]
    return films + [path for path in (out / STRIP,) if path.exists()]


def _comparison(first: Any, second: Any) -> dict[str, Any]:
    from pirl.rollout.evaluate import compare

    found = compare(second, first)
    return {
        "difference": found.difference,
        "p_value": found.p_value,
        "both": found.both,
        "neither": found.neither,
        "only_this": found.only_second,
        "only_other": found.only_first,
    }


def write_result(file: Path, result: Mapping[str, Any]) -> str:
    from pirl.checkpoints.run_directory import io_errors
    from pirl.files import json_text, write_text

    text = json_text(result)
    with io_errors(f"{file} cannot be written"):
        write_text(file, text)
    return text


def _show(result: Mapping[str, Any], evaluated: Mapping[str, Any], out: Path) -> None:
    """Print tables and the files' paths."""
    shown = console()
    for name, evaluation in evaluated.items():
        of = result[name] if name else result
        shown.print(_table(of["evaluation"], evaluation))
    if "compared_with" in result:
        c = result["compared_with"]["comparison"]
        shown.print(
            f"difference {c['difference']:+.3f}, p = {c['p_value']:.3g} (McNemar, exact, paired): both succeed "
            f"{c['both']} times, neither {c['neither']}, only the first {c['only_this']}, only the second "
            f"{c['only_other']}",
            highlight=False,
        )
    strip = f", {STRIP}" if (out / STRIP).exists() else ""
    shown.print(f"{out / FILE}{strip}", highlight=False, soft_wrap=True)


def _table(asked: Mapping[str, Any], evaluation: Any) -> Any:
    from rich.table import Table

    from pirl.rollout.evaluate import Evaluation

    title = f"{asked['checkpoint']}: {asked['episodes']} episodes, {asked['split']} states, seed {asked['seed']}"
    table = Table("task", "success", "95 % interval", "return", "steps", "lost", title=title, title_justify="left")
    tasks = {task: [t for t in evaluation.trials if t.context.task == task] for task in evaluation.by_task}
    for task, trials in {**tasks, "all": evaluation.trials}.items():
        part = Evaluation(trials=trials)
        if task == "all":
            table.add_section()
        low, high = part.success.interval
        lost = sum(trial.error is not None for trial in trials)
        metrics = part.metrics()
        table.add_row(
            task,
            f"{part.success.value:.3f} ({part.success.successes}/{part.success.trials})",
            f"{low:.3f} to {high:.3f}",
            f"{metrics['eval/return']:.3f}",
            f"{metrics['eval/length']:.1f}",
            f"{lost}",
        )
    return table
