"""`kill -9` at random moments, then the same command again: it must end as if nothing had happened.

    python tests/campaign/kills.py --kills 1000 --seed 7 --only train,ript,online,export,eval,tune

Each round kills the same command several times, lets it finish, and compares all its results bit by bit with an
undisturbed run. After each kill every named step is checked against its checksums, and no process may survive. Half of
the kills fall anywhere; the others fall while a checkpoint or an export is being written.

Importing jax takes seconds, so it is done once: each run is a fork of this process, made before jax has any threads.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC"):  # threads do not survive a fork
    os.environ.setdefault(name, "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

LIMIT = 1200.0
"""Most seconds for one command to finish."""
ORPHANS = 20.0
"""Most seconds for a killed command's child processes to end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that can be repeated."""

    words: Callable[[Path], list[str]]
    """The command line for a folder."""
    prepare: Callable[[Path], None]
    """Prepares a folder."""
    look: Callable[[Path], Any]
    """Its results as JSON values, without times."""
    writing: str
    """Glob of files that exist while something is being written."""
    held: Callable[[Path], int] | None = None
    """How much of what was saved is readable; a kill must never reduce it."""


def cases() -> dict[str, Case]:
    """All cases: training offline, in rollout groups (local and in workers) and online; export; evaluation; search;
    recording; statistics.
    """
    from collecting_runs import ROLLOUT, online_run, ript_run, saving
    from pirl.agents.config import BCConfig
    from pirl.rollout.config import EvalConfig
    from small_runs import small_run

    def train(make: Callable[[Path], Any]) -> Case:
        return Case(
            words=lambda folder: ["train", str(folder / "run.yaml"), "--resume", "auto"],
            prepare=lambda folder: _write(folder / "run.yaml", make(folder / "runs")),
            look=_look_at_runs,
            writing="runs/*/*/*.orbax-checkpoint-tmp*",
        )

    offline = lambda folder: saving(small_run(folder, BCConfig(), num_train_steps=30), save_interval=3, keep_last=2)  # noqa: E731
    evaluated = {"evaluation": EvalConfig(interval=2, episodes=3)}
    groups = lambda folder: saving(ript_run(folder, **evaluated), save_interval=1, keep_last=2)  # noqa: E731
    workers = replace(ROLLOUT, backend="process")
    apart = lambda folder: replace(groups(folder), rollout=workers)  # noqa: E731
    online = lambda folder: saving(online_run(folder), save_interval=2, keep_last=2)  # noqa: E731
    acting = {"rollout": replace(ROLLOUT, num_workers=1), "evaluation": EvalConfig(interval=2, episodes=6)}
    trial = lambda folder: replace(groups(folder), name="walk", num_train_steps=2, **acting)  # noqa: E731
    return {
        "train": train(offline),
        "ript": train(groups),
        "ript-workers": train(apart),
        "online": train(online),
        "export": Case(
            words=lambda folder: ["export", "openpi", str(folder / "5"), "--out", str(folder / "out"), "--overwrite"],
            prepare=_prepare_export,
            look=_look_at_export,
            writing=".out.writing*",
        ),
        "eval": Case(
            words=lambda folder: ["eval", str(folder / "5"), "--episodes", "6", "--out", str(folder / "out")],
            prepare=_prepare_eval,
            look=lambda folder: json.loads((folder / "out/eval.json").read_text())["result"],
            writing="out/.eval.json*",
        ),
        "tune": Case(
            words=lambda folder: [
                "tune",
                str(folder / "run.yaml"),
                "--trials",
                "2",
                "--space",
                str(folder / "space.yaml"),
            ],
            prepare=lambda folder: _prepare_tune(folder, trial),
            look=_look_at_search,
            writing="runs/*/*/*.orbax-checkpoint-tmp*",
        ),
        "record": Case(
            words=lambda folder: ["record", "bc_tabletop", *EPISODES, "--root", str(folder / "data"), "--append"],
            prepare=lambda _: None,
            look=lambda folder: {"enough": _episodes(folder) >= int(EPISODES[1])},
            writing="data/.writing/*",
            held=_episodes,
        ),
        "norm-stats": Case(
            words=lambda folder: [
                *("norm-stats", str(folder / "data"), "--robot", "tabletop"),
                *("--out", str(folder / "out"), "--overwrite"),
            ],
            prepare=_prepare_statistics,
            look=lambda folder: (folder / "out/norm_stats.json").read_text().replace(str(folder), ""),
            writing="out/.*",
        ),
    }


EPISODES = ("--episodes", "12")


def _episodes(folder: Path) -> int:
    """Episodes of a dataset, every row and picture of them read; 0 where there is none yet."""
    from pirl.data.dataset import LeRobotSource

    root = folder / "data"
    if not (root / "meta/info.json").is_file():
        return 0
    source = LeRobotSource(root, cameras={"base_0_rgb": "observation.images.image"}, image_size=None)
    for number in range(len(source)):
        assert len(source.frames(number)["base_0_rgb"]) == len(source.episode(number).actions)
    return len(source)


def _prepare_statistics(folder: Path) -> None:
    from pirl.cli import app

    assert app.main(["record", "bc_tabletop", *EPISODES, "--root", str(folder / "data")]) == 0


def _write(file: Path, config: Any) -> None:
    from pirl.config_io import write_yaml

    write_yaml(file, config, overwrite=True)


def _prepare_export(folder: Path) -> None:
    source = sorted((ROOT / "tests/golden/openpi/pi0/ckpt").glob("*/*/*"))[0]
    shutil.copytree(source, folder / "5")


def _prepare_eval(folder: Path) -> None:
    from acting_runs import save_run, walking
    from pirl.agents.config import BCConfig

    run = save_run(walking(folder / "made", BCConfig()), {5: 0.5})
    shutil.copytree(run / "5", folder / "5")


def _prepare_tune(folder: Path, make: Callable[[Path], Any]) -> None:
    _write(folder / "run.yaml", make(folder / "runs"))
    (folder / "space.yaml").write_text("pi0_lr: {low: 1e-4, high: 1e-1, log: true}\n")


def _look_at_runs(folder: Path) -> Any:
    """State, records and position of each run, and the names of all files in its folder."""
    import jax
    import numpy as np

    from pirl.recipes import load
    from small_runs import position_of, records, restored, steps_of, table

    found = {}
    for run in sorted(path.parent for path in (folder / "runs").glob("*/*/config.yaml")):
        config = load(str(run / "config.yaml"))
        leaves = jax.tree.leaves_with_path(restored(config))
        found[run.name] = {
            "steps": steps_of(config),
            "state": {jax.tree_util.keystr(path): sha(np.asarray(leaf).tobytes()) for path, leaf in leaves},
            "records": records(run),
            "table": table(run),
            "position": position_of(config),
            "names": sorted(child.name for child in run.iterdir() if child.name != ".lock"),
            "episodes": sorted(file.name for name in ("replay", "rollouts") for file in (run / name).glob("*")),
        }
    return found


def _look_at_export(folder: Path) -> Any:
    import jax
    import numpy as np

    from pirl.checkpoints.weights import load_openpi

    leaves = jax.tree.leaves_with_path(load_openpi(folder / "out"))
    return {
        "weights": {jax.tree_util.keystr(path): sha(np.asarray(leaf).tobytes()) for path, leaf in leaves},
        "names": sorted(child.name for child in folder.iterdir() if child.suffix != ".log"),
    }


def _look_at_search(folder: Path) -> Any:
    results = json.loads((folder / "runs/walk/tune/results.json").read_text().replace(str(folder), ""))
    for trial in results["trials"]:
        del trial["seconds"]
    return results


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def fork(work: Callable[[], int], log: Path) -> int:
    """Fork a process that does the work in its own session and writes its output to a file."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            code = work()
        except BaseException:  # a copy must never return to the caller
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int, seconds: float) -> int | None:
    """Wait for the exit code; None after a timeout."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def do(work: Callable[[], int], log: Path) -> None:
    """Do the work in a fork; raises if it fails."""
    pid = fork(work, log)
    if (code := ended(pid, LIMIT)) != 0:
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise AssertionError(f"exit code {code}; the end of {log}:\n{log.read_text()[-3000:]}")


def in_session(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Attack:
    """One case, with the results and duration of an undisturbed run."""

    def __init__(self, name: str, case: Case, folder: Path, moments: random.Random) -> None:
        self.name, self.case, self.folder, self.moments = name, case, folder, moments
        self.counts: Counter[str] = Counter()
        self.rounds = 0
        first = self._fresh()
        self._finish(first)  # compiles
        again = self._fresh()
        began = time.monotonic()
        self._finish(again)
        self.seconds = time.monotonic() - began
        self.expected = self._seen(first)
        assert self._seen(again) == self.expected, f"{name}: two runs that nobody touched differ"

    def round(self, kills: int) -> None:
        """Kill the command several times, let it finish, and compare."""
        folder = self._fresh()
        for _ in range(kills):
            self._kill(folder)
        self._finish(folder)
        found = self._seen(folder)
        assert found == self.expected, f"{self.name}, {folder}: {_difference(found, self.expected)}"
        shutil.rmtree(folder)

    def _kill(self, folder: Path) -> None:
        from pirl.cli import app

        while_writing = self.moments.random() < 0.5
        pid = fork(lambda: app.main(self.case.words(folder)), folder / "said.log")
        if while_writing:
            end = time.monotonic() + self.seconds
            while not self._is_writing(folder) and time.monotonic() < end:
                time.sleep(0.001)
            code = ended(pid, self.moments.uniform(0, 0.1))
        else:
            code = ended(pid, self.moments.uniform(0, 1.05 * self.seconds))
        if code is None:
            written = self._is_writing(folder)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.counts["killed while writing" if written else "killed"] += 1
        else:
            assert code == 0, f"{self.name}: exit code {code}\n{(folder / 'said.log').read_text()[-3000:]}"
            self.counts["done before"] += 1
        end = time.monotonic() + ORPHANS
        while (left := in_session(pid)) and time.monotonic() < end:
            time.sleep(0.01)
        assert not left, f"{self.name}: processes {left} outlived {pid}"
        do(lambda: self._check_steps(folder), folder / "checked.log")

    def _is_writing(self, folder: Path) -> bool:
        try:
            return any(folder.glob(self.case.writing))
        except FileNotFoundError:  # a folder went meanwhile
            return False

    def _check_steps(self, folder: Path) -> int:
        """Check that every named step is complete and that nothing saved has been lost."""
        from pirl.checkpoints.checksums import damage, read_checksums

        if self.case.held is not None:
            count = folder / "held.log"
            held = self.case.held(folder)
            assert held >= (int(count.read_text()) if count.exists() else 0), f"{held} of {count.read_text()} are left"
            count.write_text(str(held))
        for params in folder.glob("runs/*/*/*/params"):
            if params.parent.name.isdecimal():
                assert read_checksums(params.parent), params
                assert not (reason := damage(params.parent)), reason
        return 0

    def _fresh(self) -> Path:
        self.rounds += 1
        folder = (
            self.folder / f"{self.name}-{self.rounds}" / "work"
        )  # the same last name: nothing differs but the number
        folder.mkdir(parents=True)
        do(lambda: self.case.prepare(folder) or 0, folder / "prepared.log")
        return folder

    def _finish(self, folder: Path) -> None:
        from pirl.cli import app

        do(lambda: app.main(self.case.words(folder)), folder / "said.log")

    def _seen(self, folder: Path) -> Any:
        def work() -> int:
            (folder / "seen.log").write_text(json.dumps(self.case.look(folder)))
            return 0

        do(work, folder / "looked.log")
        return json.loads((folder / "seen.log").read_text())


def _difference(found: Any, expected: Any, path: str = "") -> str:
    """The first place where two JSON values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected}):
            if found.get(key) != expected.get(key):
                return _difference(found.get(key), expected.get(key), f"{path}/{key}")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}/{i}")
    return f"{path}: {str(found)[:300]} instead of {str(expected)[:300]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="over all cases (default 100)")
    parser.add_argument("--per-round", type=int, default=4, help="kills before a command may finish (default 4)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="train,ript,ript-workers,online,export,eval,tune,record,norm-stats", help="cases, by comma"
    )
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    folder = Path(tempfile.mkdtemp(prefix="pirl-kills-"))
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PIRL_HOME": str(folder / "home"),
        "PIRL_TRUST": "acting_runs,collecting_runs",
    }
    _import_all()
    began, moments, wanted = time.monotonic(), random.Random(args.seed), args.only.split(",")
    known = cases()
    attacks: dict[str, Attack] = {}
    killed = 0
    while killed < args.kills and (time.monotonic() - began) / 60 < args.minutes:
        for name in wanted:
            if name not in attacks:
                attacks[name] = Attack(name, known[name], folder, moments)
                print(f"{name}: {attacks[name].seconds:.1f} s when nobody kills it", flush=True)
            attacks[name].round(min(args.per_round, max(args.kills - killed, 1)))
            counts = sum((one.counts for one in attacks.values()), Counter[str]())
            killed = counts["killed"] + counts["killed while writing"]
            print(f"{killed} kills", end="\r", flush=True)
            if killed >= args.kills:
                break
    for attack in attacks.values():
        print(f"{attack.name}: {', '.join(f'{count} {what}' for what, count in sorted(attack.counts.items()))}")
    print(
        f"{killed} kills in {time.monotonic() - began:.0f} s, seed {args.seed}: nothing lost, nothing different",
        flush=True,
    )
    shutil.rmtree(folder)
    return 0


def _import_all() -> None:
    """Import what the commands need before forking; nothing may start a thread."""
    import collecting_runs
    import pirl.checkpoints.inspect
    import pirl.cli.app
    import pirl.cli.eval
    import pirl.cli.export
    import pirl.cli.norm_stats
    import pirl.cli.record
    import pirl.cli.train
    import pirl.cli.tune
    import pirl.recipes
    import pirl.rollout.evaluate
    import pirl.training.acting
    import pirl.training.loop
    import pirl.tune.run
    import pirl.tune.study

    del collecting_runs, pirl
    assert len(os.listdir("/proc/self/task")) == 1, "something has started a thread"


if __name__ == "__main__":
    raise SystemExit(main())
