"""Comparisons, with runs that pretend to train: what is equal, repeated, resumed, ended by a budget, and told."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pirl import recipes
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config_io import from_dict, read_yaml
from pirl.errors import ConfigError, PirlError
from pirl.names import PARAMS_ITEM
from pirl.tune.compare import Comparison
from pirl.tune.compared import SUCCESS, table
from pirl.tune.contenders import Run, contender, runs_of

TASK = replace(recipes.get_config("bc_tabletop"), num_train_steps=800, init_weights="weights")


class FakeProcess:
    """Logs 200 steps, or an iteration, of two seconds whenever it is looked at, saves them, and ends on SIGTERM."""

    def __init__(self, lab: "Lab", words: Sequence[str]) -> None:
        self.lab, self.words, self.told = lab, words, False
        if words[0] == "train":
            self.config = from_dict(type(TASK), read_yaml(words[1]))
            self.folder = self.config.run_dir
            (self.folder).mkdir(parents=True, exist_ok=True)
            (self.folder / "metadata.json").write_text("{}")
            steps = [int(one.name) for one in self.folder.iterdir() if one.name.isdecimal()]
            self.step = max(steps, default=0) if "--resume" in words else 0

    def poll(self) -> int | None:
        if self.words[0] == "eval":
            return self.evaluate()
        if self.lab.trouble and (trouble := self.lab.trouble.pop(0)):
            self.lab.log.open("a").write(trouble)
            return 1
        if self.told:
            self.save()
            return 130
        if self.step >= self.config.num_train_steps:
            self.save()
            return 0
        self.step += 1 if self.config.agent.groups else 200
        values: dict[str, float] = {"time/seconds": 2.0, "policy/flow_loss": 1 / self.step}
        if self.config.agent.groups:
            values |= {"ript/updates": self.lab.updates, "ript/attempted_groups": 3.0}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "time": time.time(), "values": values}) + "\n")
        return None

    def save(self) -> None:
        (self.folder / str(self.step) / PARAMS_ITEM).mkdir(parents=True, exist_ok=True)
        (self.folder / str(self.step) / PARAMS_ITEM / "_METADATA").touch()

    def evaluate(self) -> int:
        out, seed = Path(self.words[self.words.index("--out") + 1]), int(self.words[1].rsplit("-", 1)[1])
        rate = (0.5 if "/BC-" in self.words[1] else 0.9) + seed / 100
        out.mkdir(parents=True)
        success = {"rate": rate, "low": rate - 0.1, "high": rate + 0.1, "successes": 1, "trials": 2}
        (out / "eval.json").write_text(json.dumps({"result": {"success": success}}))
        return 0

    def send_signal(self, sig: int) -> None:
        assert sig == signal.SIGTERM
        self.told = True

    def wait(self, timeout: float | None = None) -> int:
        return 130

    def kill(self) -> None:
        raise AssertionError("it listened")


class Lab:
    """Starts pretended processes and remembers their words."""

    def __init__(self, *trouble: str, updates: float = 150.0) -> None:
        self.words: list[list[str]] = []
        self.updates = updates
        self.trouble = list(trouble)

    def __call__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> FakeProcess:
        self.words.append([*words])
        self.log = log
        log.touch()
        return FakeProcess(self, words)

    def done(self) -> list[str]:
        """What was started, in short."""
        return [
            " ".join([words[0], Path(words[1]).name.removesuffix(".yaml"), *(w for w in words[2:3] if w == "--resume")])
            for words in self.words
        ]


def runs(folder: Path, *agents: str, seeds: Sequence[int] = (0, 1), **options: Any) -> list[Run]:
    return runs_of([TASK], agents or ("BC", "ACRLPD"), seeds, folder=folder, **options)


def compare(folder: Path, lab: Lab, found: Sequence[Run], **options: Any) -> tuple[bool, dict[str, Any]]:
    whole = Comparison(found, folder=folder, start=lab, poll_seconds=0.0, **options).run()
    return whole, json.loads((folder / "results.json").read_text())


def test_runs_are_equal_but_for_the_algorithm(tmp_path: Path) -> None:
    found = runs(tmp_path, "BC", "ACRLPD", "acrlpd_tabletop", seeds=(3,))
    assert [type(run.config.agent) for run in found] == [BCConfig, ACRLPDConfig, ACRLPDConfig]
    bc, kind, own = (run.config for run in found)
    assert replace(kind, agent=bc.agent, exp_name=bc.exp_name) == bc
    assert kind.agent == ACRLPDConfig(augment=False)  # the kind's defaults, but for what all algorithms have
    recipe = recipes.get_config("acrlpd_tabletop")
    assert (own.agent, own.freeze, own.critic_schedule) == (recipe.agent, recipe.freeze, recipe.critic_schedule)
    # A gate needs held-out episodes; where the task has none, the contender gives up some of its own.
    assert (bc.data.held_out, own.data.held_out, own.held_out) == (0, recipe.data.held_out, recipe.held_out)
    for config in (bc, kind, own):
        assert (config.seed, config.data.seed, config.num_train_steps, config.batch_size) == (3, 3, 800, 64)
        assert (config.init_weights, config.name, config.env) == ("weights", "bc_tabletop", TASK.env)
    with pytest.raises(ConfigError, match=r"agent\.type"):
        contender(TASK, "BCC")


def test_all_take_as_many_flow_steps_but_one_that_cannot(tmp_path: Path) -> None:
    steps = {
        run.agent: run.config.rollout.flow_steps for run in runs(tmp_path, "BC", "dsrl_tabletop", "qc_fql_tabletop")
    }
    assert steps == {"BC": 5, "dsrl_tabletop": 5, "qc_fql_tabletop": 1}


def test_a_comparison(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()
    whole, results = compare(folder, lab, runs(folder))
    assert whole
    # Every run is trained, then measured; the seeds are in turn.
    names = [f"{agent}-seed-{seed}" for seed in (0, 1) for agent in ("BC", "ACRLPD")]
    assert lab.done() == [f"{verb} {name}" for name in names for verb in ("train", "eval")]
    assert lab.words[1][2:6] == ["--split", "test", "--episodes", "400"]
    assert [run["result"]["value"] for run in results["runs"]] == [0.5, 0.9, 0.51, 0.91]
    assert {(run["updates"], run["episodes"]) for run in results["runs"]} == {(800, 0)}
    assert results["runs"][0]["training_seconds"] == pytest.approx(8)
    text = (folder / "table.md").read_text()
    assert text == table(results)
    assert "| BC | 0.505 | 0.4415 to 0.5685 | 0.5 | 0.51 | – | 800 | 0 | 8 s |" in text
    assert "| ACRLPD | 0.905 | 0.8415 to 0.9685 | 0.9 | 0.91 | +0.4 (" in text


def test_what_is_finished_is_not_repeated(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()
    _, first = compare(folder, lab, runs(folder))
    again = Lab()
    assert compare(folder, again, runs(folder)) == (True, first)
    assert not again.words
    # Another seed and another algorithm are added.
    compare(folder, again, runs(folder, "BC", "ACRLPD", "ript_tabletop", seeds=(0, 1, 2)))
    assert len(again.words) == 2 * 5
    with pytest.raises(ConfigError, match="another comparison: episodes: 400 there, 50 now"):
        compare(folder, again, runs(folder), episodes=50)
    changed = [replace(run, config=replace(run.config, batch_size=32)) for run in runs(folder)]
    with pytest.raises(ConfigError, match="begun with other settings: batch_size: 64 there, 32 now"):
        compare(folder, again, changed)


@pytest.mark.parametrize("looks", [3, 8, 14])
def test_an_interrupted_comparison_goes_on(looks: int, tmp_path: Path) -> None:
    folder, lab, count = tmp_path / "c", Lab(), 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count > looks

    whole, results = compare(folder, lab, runs(folder), stop=stop)
    assert not whole
    finished = sum(run["result"] is not None for run in results["runs"])
    again = Lab()
    whole, results = compare(folder, again, runs(folder))
    assert whole
    assert [run["result"]["value"] for run in results["runs"]] == [0.5, 0.9, 0.51, 0.91]
    assert {run["updates"] for run in results["runs"]} == {800}
    assert sum(words[0] == "eval" for words in (*lab.words, *again.words)) == 4
    assert len({words[1] for words in again.words if words[0] == "train"}) <= 4 - finished


class KilledError(BaseException):
    """Ends a comparison as SIGKILL would: nothing is saved."""


def test_a_killed_comparison_resumes_the_run_it_was_in(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()

    def die() -> bool:
        (process,) = list(folder.glob("*/*/metrics.jsonl")) or [None]
        if process is not None and process.read_text().count("\n") == 3:
            raise KilledError
        return False

    only = runs(folder, "BC", seeds=(0,))
    with pytest.raises(KilledError):
        compare(folder, lab, only, stop=die)
    # It had saved step 400 and logged step 600.
    (only[0].folder / "400" / PARAMS_ITEM).mkdir(parents=True)
    (only[0].folder / "400" / PARAMS_ITEM / "_METADATA").touch()
    again = Lab()
    assert compare(folder, again, only)[0]
    assert again.done() == ["train BC-seed-0 --resume", "eval BC-seed-0"]
    # Killed between training and its note: nothing is trained again.
    only[0].file(".json").unlink()
    last = Lab()
    assert compare(folder, last, only)[0]
    assert last.done() == []


def test_training_time_ends_a_run(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()
    _, results = compare(folder, lab, runs(folder, seconds=5.0))
    # Two seconds for each 200 steps: a look after six, one more until it listens at most.
    assert all(600 <= run["updates"] <= 800 for run in results["runs"])
    assert all(run["training_seconds"] >= 5 for run in results["runs"])
    assert "5 s of training for each run" in (folder / "table.md").read_text()


def test_training_time_ends_a_run_whose_rollouts_teach_nothing(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab(updates=0.0)
    _, results = compare(folder, lab, runs(folder, "ript_tabletop", "flow_ppo_tabletop", seeds=(0,), seconds=5.0))
    assert [(run["updates"], 5 <= run["training_seconds"] <= 8) for run in results["runs"]] == [(0, True)] * 2


def test_updates_end_a_run_whose_step_is_an_iteration(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()
    _, results = compare(folder, lab, runs(folder, "BC", "ript_tabletop", seeds=(0,)))
    assert [run["updates"] for run in results["runs"]] == [800, 900]  # six iterations of 150
    assert results["runs"][1]["episodes"] == 6 * 3 * 8
    assert list(results["differences"]) == ["bc_tabletop ript_tabletop"]
    assert "freeze vlm_frozen instead of None" in str(results["differences"])


def test_failures(tmp_path: Path) -> None:
    """One that the settings explain is told and repeated by the next call; another ends the comparison."""
    folder, lab = tmp_path / "c", Lab("error: training diverged: NaN\n")
    whole, results = compare(folder, lab, runs(folder))
    assert whole
    assert [run["failed"] for run in results["runs"]] == ["training diverged: NaN", None, None, None]
    assert "| BC | 0.51 (1 of 2 seeds) | – | failed | 0.51 |" in (folder / "table.md").read_text()
    again = Lab()
    _, results = compare(folder, again, runs(folder))
    assert [" ".join(one.split()[:2]) for one in again.done()] == ["train BC-seed-0", "eval BC-seed-0"]
    assert results["runs"][0]["failed"] is None
    with pytest.raises(PirlError, match="failed: no such dataset"):
        compare(tmp_path / "d", Lab("error: no such dataset\n"), runs(tmp_path / "d"))


def test_a_metric_of_the_log(tmp_path: Path) -> None:
    folder, lab = tmp_path / "c", Lab()
    _, results = compare(folder, lab, runs(folder), metric="policy/flow_loss")
    assert {words[0] for words in lab.words} == {"train"}
    assert {run["result"]["value"] for run in results["runs"]} == {1 / 800}
    assert SUCCESS not in (folder / "table.md").read_text()
    with pytest.raises(ConfigError, match="did you mean: policy/flow_loss"):
        compare(tmp_path / "d", Lab(), runs(tmp_path / "d"), metric="flow_loss")
    again = Lab()  # a mistake costs no training
    assert compare(tmp_path / "d", again, runs(tmp_path / "d", seeds=(0,)), metric="policy/flow_loss")[0]
    assert again.done() == ["train ACRLPD-seed-0"]


def test_only_comparisons_are_continued(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds no comparison"):
        compare(tmp_path / "c", Lab(), runs(tmp_path / "c"))
    assert [one.name for one in (tmp_path / "c").iterdir()] == ["thesis.txt"]
