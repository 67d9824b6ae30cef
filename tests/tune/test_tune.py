"""The search over settings, with runs that pretend to train: what is tried, stopped, repeated, kept and refused."""

import csv
import json
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pirl import recipes
from pirl.agents.config import ACRLPDConfig
from pirl.config import RLTrainConfig
from pirl.errors import ConfigError, PirlError
from pirl.names import PARAMS_ITEM
from pirl.rollout.evaluate import Rate
from pirl.search import Choice, Range
from pirl.tune.children import devices, explain
from pirl.tune.run import Tuner
from pirl.tune.space import Space
from pirl.tune.study import COMPARED, Evaluated, Search, Study, read_evaluations

SPACE: Space = {
    "pi0_lr": Range(low=1e-4, high=1e-2, log=True),
    "agent.target_ess": Range(low=0.1, high=0.9),
    "agent.critic_updates": Choice(values=(1, 2, 4)),
}
Curve = Callable[[RLTrainConfig], list[float]]
"""The success at steps 200, 400, 600 and 800 that a configuration leads to."""


def hill(config: RLTrainConfig) -> list[float]:
    """Best at a target_ess of 0.6 and four critic updates."""
    assert isinstance(config.agent, ACRLPDConfig)
    top = 0.9 - abs(config.agent.target_ess - 0.6) - 0.05 * (4 - config.agent.critic_updates)
    return [round(max(top, 0.0) * share, 2) for share in (0.4, 0.6, 0.8, 1.0)]


class FakeRun:
    """One evaluation each time it is looked at; on SIGTERM a checkpoint and the exit code of an interrupted run."""

    def __init__(self, lab: "Lab", words: Sequence[str], log: Path) -> None:
        self.config = recipes.load(words[1])
        self.folder, self.log, self.lab = self.config.run_dir, log, lab
        self.told: list[int] = []
        (self.folder).mkdir(parents=True, exist_ok=True)
        (self.folder / "metadata.json").write_text("{}")
        self.done = len(read_evaluations(self.folder, "eval/success_rate")[0])
        if not self.done:
            self.write(0, 0.5)

    def write(self, step: int, rate: float) -> None:
        low, high = Rate(successes=round(rate * self.lab.episodes), trials=self.lab.episodes).interval
        values = {"eval/success_rate": rate, "eval/success_low": low, "eval/success_high": high, "eval/return": rate}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 0.0, "values": values}) + "\n")

    def save(self, step: int) -> None:
        (self.folder / str(step) / PARAMS_ITEM).mkdir(parents=True)
        (self.folder / str(step) / PARAMS_ITEM / "_METADATA").touch()

    def poll(self) -> int | None:
        self.lab.most_at_once = max(self.lab.most_at_once, len(self.lab.running))
        code = self.next()
        if code is not None:
            self.lab.running.remove(self)
        return code

    def next(self) -> int | None:
        if self.told:
            self.save(200 * self.done)
            return 130
        trouble = self.lab.trouble(self)
        if trouble is not None:
            code, said = trouble
            with self.log.open("a") as file:
                file.write(said)
            return code
        if self.done == 4:
            self.save(800)
            return 0
        self.done += 1
        self.write(200 * self.done, self.lab.curve(self.config)[self.done - 1])
        return None

    def send_signal(self, sig: int) -> None:
        self.told.append(sig)

    def wait(self, timeout: float | None = None) -> int:
        assert self.told
        return 130

    def kill(self) -> None:
        raise AssertionError("it listened")


class Lab:
    """Starts pretended runs and remembers them."""

    def __init__(self, curve: Curve = hill, *, episodes: int = 400) -> None:
        self.curve, self.episodes = curve, episodes
        self.runs: list[FakeRun] = []
        self.words: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.running: list[FakeRun] = []
        self.most_at_once = 0
        self.trouble: Callable[[FakeRun], tuple[int, str] | None] = lambda run: None

    def __call__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> FakeRun:
        run = FakeRun(self, words, log)
        self.runs.append(run)
        self.running.append(run)
        self.words.append([*words])
        self.environments.append(environment)
        return run


def search(folder: Path, **changes: Any) -> Search:
    config = recipes.get_config("acrlpd_tabletop")
    config = replace(config, checkpoint=replace(config.checkpoint, base_dir=str(folder)), **changes)
    return Search(config=config, space=SPACE)


def tune(asked: Search, lab: Lab, trials: int, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """How it ended, and what results.json says."""
    with Study(asked) as study:
        ending = Tuner(study, trials=trials, start=lab, poll_seconds=0.0, **options).run()
    return ending, json.loads((asked.folder / "results.json").read_text())["trials"]


def without_time(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in trial.items() if name not in ("seconds", "run")} for trial in trials]


def test_a_search(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    ending, trials = tune(asked, lab, 12)
    assert (ending.finished, ending.interrupted) == (True, False)
    assert [trial["number"] for trial in trials] == list(range(12))
    # The recipe as it is comes first, in its own numbers.
    assert trials[0]["settings"] == {"pi0_lr": 7e-4, "agent.target_ess": 0.3, "agent.critic_updates": 2}
    assert lab.runs[0].config == replace(asked.config, exp_name="tune-trial-000")
    # Every run is what its trial says.
    for trial, run in zip(trials, lab.runs, strict=True):
        assert isinstance(run.config.agent, ACRLPDConfig)
        assert run.config.policy_schedule.peak_lr == trial["settings"]["pi0_lr"]  # type: ignore[union-attr]
        assert run.config.policy_schedule.decay_lr == pytest.approx(trial["settings"]["pi0_lr"] / 10)  # type: ignore[union-attr]
        assert run.config.agent.target_ess == trial["settings"]["agent.target_ess"]
        assert trial["settings"]["agent.target_ess"] == float(f"{trial['settings']['agent.target_ess']:.4g}")
        assert trial["run"] == str(tmp_path / "acrlpd_tabletop" / f"tune-trial-{trial['number']:03d}")
        if trial["state"] == "done":
            assert [e["value"] for e in trial["evaluations"]] == hill(run.config)
            assert [e["step"] for e in trial["evaluations"]] == [200, 400, 600, 800]
    found = json.loads((asked.folder / "results.json").read_text())
    done = [trial for trial in trials if trial["state"] == "done"]
    best = max(done, key=lambda trial: trial["evaluations"][-1]["value"])
    assert found["best"] == best["number"]
    assert best["evaluations"][-1]["value"] > done[0]["evaluations"][-1]["value"] + 0.15
    # A configuration one can train, under a name that is free.
    trained = recipes.load(str(asked.folder / "best.yaml"))
    assert trained == replace(lab.runs[best["number"]].config, exp_name="tune-best")
    with (asked.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["agent.target_ess"] for row in rows] == [str(trial["settings"]["agent.target_ess"]) for trial in trials]
    assert [row["state"] for row in rows] == [trial["state"] for trial in trials]
    assert all(0 <= float(row["low"]) <= float(row["eval/success_rate"]) <= float(row["high"]) <= 1 for row in rows)


def test_the_same_command_gives_the_same_trials(tmp_path: Path) -> None:
    first, again, other = (
        tune(search(tmp_path / name, seed=seed), Lab(), 8)[1] for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert without_time(first) == without_time(again)
    assert first[0]["settings"] == other[0]["settings"]
    assert all(mine["settings"] != theirs["settings"] for mine, theirs in zip(first[1:], other[1:], strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A search that nothing disturbed."""
    return tune(search(tmp_path_factory.mktemp("whole")), Lab(), 7)[1]


@pytest.mark.parametrize("looks", [1, 13, 30])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(
    looks: int, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    asked, lab = search(tmp_path), Lab()
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count > looks

    ending, trials = tune(asked, lab, 7, stop=stop)
    assert (ending.finished, ending.interrupted) == (False, True)
    begun = len(lab.runs)
    was_open = [trial for trial in trials if trial["state"] == "open"]
    if was_open:
        assert lab.runs[-1].told == [signal.SIGTERM]  # once: a second one would find no handler
    ending, trials = tune(asked, lab, 7)
    assert ending.finished
    assert without_time(trials) == without_time(whole)
    # The run it was in is gone on with; what is finished is not done again.
    assert len(lab.runs) == 7 + len(was_open)
    for trial in was_open:
        file, *rest = lab.words[begun - 1][1:]
        assert lab.words[begun] == ["train", file, "--resume", *rest]
        assert lab.runs[begun].folder == Path(trial["run"])
    again = Lab()
    ending, trials = tune(asked, again, 7)
    assert ending.finished
    assert not again.runs
    assert without_time(trials) == without_time(whole)
    ending, trials = tune(asked, again, 8)  # one more
    assert (len(again.runs), len(trials)) == (1, 8)


def test_a_run_that_somebody_else_stopped_ends_the_search_and_is_resumed(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    lab.trouble = lambda run: (130, "interrupted\n") if len(lab.runs) == 2 and run.done == 2 else None
    ending, trials = tune(asked, lab, 3)
    assert (ending.interrupted, [trial["state"] for trial in trials]) == (True, ["done", "open"])
    lab.trouble = lambda run: None
    ending, trials = tune(asked, lab, 3)
    assert (ending.finished, [trial["state"] for trial in trials]) == (True, ["done"] * 3)
    assert lab.words[2][2] == "--overwrite"  # there was no checkpoint yet


def falls_behind(config: RLTrainConfig) -> list[float]:
    """All alike, but for those with few critic updates, after the first."""
    assert isinstance(config.agent, ACRLPDConfig)
    bad = config.agent.critic_updates == 1 and not config.exp_name.endswith("000")
    return [0.4, 0.1 if bad else 0.6, 0.8, 0.9]


def test_a_trial_that_falls_behind_is_stopped(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab(falls_behind)
    _, trials = tune(asked, lab, 14)
    pruned = [trial for trial in trials if trial["state"] == "pruned"]
    assert len(pruned) > 1
    for trial in trials:
        bad = trial["settings"]["agent.critic_updates"] == 1 and trial["number"] > 0
        # As long as there is little to compare with, nothing is stopped.
        assert (trial["state"] == "pruned") == (bad and trial["number"] >= COMPARED)
        assert lab.runs[trial["number"]].told == ([signal.SIGTERM] if trial in pruned else [])
    assert all([e["step"] for e in trial["evaluations"]] == [200, 400] for trial in pruned)
    assert re.fullmatch(
        r"eval/success_rate 0\.100 \(0\.07\d to 0\.13\d\) at step 400, where the median of \d+ trials is 0\.600",
        pruned[0]["reason"],
    )
    # What came before the first step is the same for all, and compared by nobody.
    assert all(e["step"] > 0 for trial in trials for e in trial["evaluations"])


def test_few_episodes_stop_nobody(tmp_path: Path) -> None:
    """The same curves, measured with 2 episodes: 0.1 and 0.6 cannot be told apart."""
    _, trials = tune(search(tmp_path), Lab(falls_behind, episodes=2), 10)
    assert {trial["state"] for trial in trials} == {"done"}


def test_failed_trials_are_noted_and_the_search_goes_on(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    endings = {
        0: (1, "step 3 loss nan\nerror: training diverged: at step 3 actor/loss = nan\n  hint: a smaller rate\n"),
        2: (-signal.SIGKILL, "step 7\n"),
        3: (1, "internal error: XlaRuntimeError: RESOURCE_EXHAUSTED: 9 GiB\n  hint: PIRL_DEBUG=1\n"),
        5: (1, "error: something odd about these settings\n"),
    }
    lab.trouble = lambda run: endings.get(int(run.config.exp_name[-3:])) if run.done == 1 else None
    ending, trials = tune(asked, lab, 7)
    assert ending.finished
    assert {trial["number"]: trial["reason"] for trial in trials if trial["state"] == "failed"} == {
        0: "training diverged: at step 3 actor/loss = nan",
        2: "killed, probably out of memory",
        3: "out of memory: internal error: XlaRuntimeError: RESOURCE_EXHAUSTED: 9 GiB",
        5: "something odd about these settings",
    }
    assert json.loads((asked.folder / "results.json").read_text())["best"] in (1, 4, 6)


def test_a_failure_that_would_repeat_itself_ends_the_search_and_costs_no_trial(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    lab.trouble = lambda run: (1, "error: demos/tabletop is not there\n  hint: record it\n")
    with pytest.raises(PirlError, match=r"^trial 0 failed: demos/tabletop is not there") as found:
        tune(asked, lab, 5)
    assert str(asked.folder / "trial-000.log") in found.value.hint
    lab.trouble = lambda run: None
    ending, trials = tune(asked, lab, 5)
    assert (ending.finished, [trial["state"] for trial in trials]) == (True, ["done"] * 5)
    # Later on the settings are given the blame, but not for ever.
    lab.trouble = lambda run: (1, "error: the disk is full\n")
    with pytest.raises(PirlError, match=r"^3 trials in a row failed, the last one: the disk is full"):
        tune(asked, lab, 12)
    assert len(lab.runs) == 1 + 5 + 3


def test_impossible_combinations_cost_nothing(tmp_path: Path) -> None:
    space = {"batch_size": Choice(values=(64, 66)), "agent.accumulate": Choice(values=(1, 4))}
    asked, lab = replace(search(tmp_path), space=space), Lab(lambda config: [0.5] * 4)
    _, trials = tune(asked, lab, 12)
    impossible = [trial for trial in trials if trial["settings"] == {"batch_size": 66, "agent.accumulate": 4}]
    assert impossible
    assert all(trial["reason"].startswith("not possible: batch_size 66 cannot be split") for trial in impossible)
    assert len(lab.runs) == 12 - len(impossible)


@pytest.mark.parametrize("keep", ["best", "all"])
def test_only_checkpoints_of_the_best_stay(keep: str, tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    for run in (0, 1):
        (asked.folder.with_name(f"tune-trial-{run:03d}") / "replay").mkdir(parents=True)
    _, trials = tune(asked, lab, 8, keep=keep)
    best = json.loads((asked.folder / "results.json").read_text())["best"]
    kept = [trial["number"] for trial in trials if (Path(trial["run"]) / "800").exists()]
    done = [trial["number"] for trial in trials if trial["state"] == "done"]
    assert kept == (done if keep == "all" else [best])
    assert all((Path(trial["run"]) / "metrics.jsonl").exists() for trial in trials)
    assert (asked.folder.with_name("tune-trial-001") / "replay").exists() == (keep == "all" or best == 1)
    assert not list(tmp_path.rglob(".*.deleted"))
    if keep == "all":  # the other way later
        tune(asked, lab, 8, keep="best")
        assert len([1 for trial in trials if (Path(trial["run"]) / "800").exists()]) == 1


def test_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    lab = Lab()
    ending, trials = tune(search(tmp_path), lab, 9, jobs=3)
    assert ending.finished
    assert (len(trials), lab.most_at_once) == (9, 3)
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in lab.environments} == {"0,7", "2", "5"}
    assert devices(0, 1, {"CUDA_VISIBLE_DEVICES": "0,1"}) == {}  # one trial may have all of them
    assert devices(1, 2, {"CUDA_VISIBLE_DEVICES": "3"}) == {}  # too few to share out
    assert devices(1, 2, {}) == {}


def test_after_the_time_no_trial_is_begun(tmp_path: Path) -> None:
    asked, lab = search(tmp_path), Lab()
    ending, trials = tune(asked, lab, 3, timeout=60.0, clock=lambda: 30.0 * len(lab.runs))
    assert (ending.finished, ending.interrupted) == (False, False)
    assert [trial["state"] for trial in trials] == ["done", "done"]  # the last one was not broken off
    assert tune(asked, lab, 3)[0].finished


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metric": "eval/return"}, "metric: eval/success_rate there, eval/return now"),
        (
            {"space": {**SPACE, "agent.critic_updates": Choice(values=(1, 8))}},
            "space of agent.critic_updates: [1, 2, 4] there, [1, 8] now",
        ),
        (
            {"space": {"pi0_lr": SPACE["pi0_lr"]}},
            "space of agent.target_ess: {low: 0.1, high: 0.9} there, not searched",
        ),
        ({"seed": 7}, "seed: 42 there, 7 now"),
        ({"num_train_steps": 400}, "num_train_steps: 1600 there, 400 now"),
    ],
)
def test_a_study_is_not_gone_on_with_as_another(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    tune(search(tmp_path), Lab(), 2)
    own = {name: value for name, value in changes.items() if name in ("metric", "space")}
    asked = replace(search(tmp_path, **{name: changes[name] for name in changes.keys() - own.keys()}), **own)
    with pytest.raises(ConfigError, match=f"was begun as another search\n    {re.escape(told)}") as found:
        Study(asked)
    assert "--study" in found.value.hint
    assert tune(replace(asked, study="other"), Lab(), 1)[0].finished
    assert tune(search(tmp_path), Lab(), 2)[0].finished  # it was not hurt, nor kept locked


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    asked = search(tmp_path)
    (asked.folder / "800").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not a study"):
        Study(asked)
    other = replace(asked, study="other")
    with Study(other), pytest.raises(ConfigError, match="another process is searching in"):
        Study(other)


def test_a_trial_is_worth_its_last_evaluation(tmp_path: Path) -> None:
    """Not the best one on its way: that would reward noise."""
    asked = search(tmp_path)
    with Study(asked) as study:
        trial = study.ask()
        study.values(trial)
        for step, value in ((200, 0.9), (400, 0.25), (400, 0.5)):  # what is reported twice counts once
            study.report(trial, Evaluated(step=step, value=value, low=value - 0.125, high=value + 0.125))
        result = study.finish(trial, "done")
    assert [e.value for e in result.evaluations] == [0.9, 0.25]
    assert result.last == Evaluated(step=400, value=0.25, low=0.125, high=0.375)
    with Study(asked) as study:
        best = study.best()
        assert best == result


def test_half_written_records_wait_for_their_end(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "values": {"eval/success_rate": 0.5}},
        {"step": 50, "values": {"actor/loss": 1.0}},
        {"step": 200, "values": {"eval/success_rate": 0.6, "eval/success_low": 0.5, "eval/success_high": 0.7}},
        {"step": 400, "values": {"eval/success_rate": math.nan}},
        {"step": 450, "values": {"actor/loss": 1.0}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 600, "values": {"eval/succ')
    found = read_evaluations(tmp_path, "eval/success_rate")
    assert found == ([Evaluated(step=200, value=0.6, low=0.5, high=0.7)], 450)
    assert read_evaluations(tmp_path / "missing", "eval/success_rate") == ([], 0)


def test_reasons() -> None:
    assert explain(1, "") == ("exit code 1", False)
    assert explain(1, "Traceback ...\nValueError: no\n") == ("ValueError: no", False)
    assert explain(1, "error: a\nlater\nerror: training diverged: x\n  hint: y\n") == ("training diverged: x", True)
    assert explain(1, "CUDA error: out of memory\n") == ("out of memory: CUDA error: out of memory", True)
