"""The loop promotes what is better, rolls back what is worse, and goes on after any interruption. Training is faked."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fake_pirl
from pirl.cli.app import main
from pirl.data.labels import Label, append
from pirl.errors import ConfigError
from pirl.improve import processes, state
from pirl.improve.config import LoopConfig
from pirl.improve.loop import WaitingForLabelsError, improve
from pirl.improve.processes import ProcessError
from pirl.robot.compare import Assignment
from pirl.rollout.record import num_recorded
from policy_server import policy_server

FAKE = str(Path(fake_pirl.__file__))


class InterruptedForTestError(Exception):
    """Stands for a kill: nothing of the loop runs after it."""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lists what was called; the loop starts real processes."""
    monkeypatch.setattr(processes, "pirl", lambda *words: [sys.executable, FAKE, *words])
    monkeypatch.setenv("FAKE_PIRL_CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture
def calls(commands: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, and everything happens in this process, which is quicker."""

    def run(command: Sequence[str], log: Path) -> None:
        try:
            fake_pirl.main(list(command[2:]))
        except SystemExit as error:
            raise ProcessError(str(error)) from error

    @contextmanager
    def serving(checkpoint: str, words: Sequence[str], *, host: str, port: int, log: Path) -> Iterator[str]:
        with policy_server(lambda _: fake_pirl.reply_of(checkpoint)) as server:
            yield f"ws://127.0.0.1:{server.port}"

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(processes, "serving", serving)
    return commands


def config_of(tmp_path: Path, gain: float, **settings: Any) -> LoopConfig:
    start = tmp_path / "start"
    start.mkdir(exist_ok=True)
    (start / "skill").write_text("0.3")
    robot = f"{shlex.quote(sys.executable)} {shlex.quote(FAKE)} robot {{server}} {{dataset}} {{inits}}"
    usual: dict[str, Any] = dict(generations=1, episodes=3, comparison=40, look_every=20, block=4, port=0)
    return LoopConfig(
        folder=str(tmp_path / "loop"),
        recipe="recipe",
        start=str(start),
        robot=robot,
        train=("--gain", str(gain)),
        **usual | settings,
    )


def test_a_better_candidate_is_promoted_and_the_next_is_trained_from_it(tmp_path: Path, calls: Path) -> None:
    config = config_of(tmp_path, 0.7, demonstrations=("demos",))
    found = improve(config, lambda _: None)
    first = found.finished[0]
    assert first.decision == "promote"
    assert found.policy == found.base == first.candidate == str(config.path / "runs/recipe/generation-001/10")
    assert first.comparison is not None
    assert first.comparison["verdict"] == "better"
    assert sum(first.comparison["episodes"]) in (20, 40)  # it stopped at a look
    said = calls.read_text().splitlines()
    assert [line.split()[0] for line in said[:2]] == ["robot", "train"]
    assert said[1].endswith(f"--data-path demos {config.path}/generations/001/episodes --gain 0.7 --resume auto")
    page = (config.path / "loop.html").read_text()
    assert "promote" in page
    assert "Finished." in page
    again = improve(config_of(tmp_path, 0.0, generations=2), lambda _: None)  # everything there is stays
    assert again.finished[0] == first
    assert again.finished[1].policy == first.candidate
    trained = next(line for line in calls.read_text().splitlines() if "generation-002" in line)
    assert f"--init-weights {first.candidate}" in trained
    assert "generations/001/comparison" in trained


def test_with_real_processes(tmp_path: Path, commands: Path) -> None:
    """Servers and robot are processes of their own, whose output is kept; none is left."""
    config = config_of(tmp_path, 0.7, comparison=16, look_every=16)
    found = improve(config, lambda _: None)
    assert found.finished[0].decision in ("promote", "keep")
    logs = {file.name for file in (config.path / "generations/001").glob("*.log")}
    assert logs == {"serve.log", "serve-current.log", "serve-candidate.log", "robot.log", "train.log"}
    assert "fake_pirl.py train recipe" in (config.path / "generations/001/train.log").read_text()


def test_the_comparison_is_blind_and_pairs_share_initial_states(tmp_path: Path, calls: Path) -> None:
    config = config_of(tmp_path, 0.7)
    improve(config, lambda _: None)
    folder = config.path / "generations/001"
    assignment = Assignment(**json.loads((folder / "assignment.json").read_text()))
    assert assignment.episodes == 40  # fixed when the comparison begins
    robots = [line.split() for line in calls.read_text().splitlines() if line.startswith("robot")]
    inits = [int(word) for words in robots[1:] for word in words[3].split(",")]
    assert [number - inits[0] for number in inits] == [assignment.pair(episode) for episode in range(len(inits))]
    from pirl.data.lerobot import read_meta
    from pirl.data.rows import read_columns

    columns = read_columns(read_meta(folder / "comparison"))
    assert set(columns["policy"].tolist()) == {"blind"}
    acted = [round(float(row[0]), 3) for row in columns["action"]]
    assert acted == [(0.3, 1.0)[assignment.arm(episode)] for episode in range(len(acted))]


def test_a_worse_candidate_is_rolled_back(tmp_path: Path, calls: Path) -> None:
    config = config_of(tmp_path, -0.3)
    (tmp_path / "start/skill").write_text("1.0")
    worse = LoopConfig(**{**vars(config), "train": ("--gain", "-1")})
    found = improve(worse, lambda _: None)
    assert found.finished[0].decision == "roll back"
    assert found.policy == found.base == config.start


@pytest.mark.parametrize(("start", "base"), [("candidate", "generation-001"), ("current", "start")])
def test_an_undecided_candidate_leaves_the_robot_its_policy(tmp_path: Path, calls: Path, start: str, base: str) -> None:
    config = config_of(tmp_path, 0.0, comparison=8, look_every=8, train_next_from=start)
    found = improve(config, lambda _: None)
    assert found.finished[0].decision == "keep"
    assert found.policy == config.start
    assert base in found.base


def test_a_candidate_that_fails_the_held_out_check_is_not_compared(tmp_path: Path, calls: Path) -> None:
    config = config_of(tmp_path, 0.7, held_out=5)
    assert improve(config, lambda _: None).finished[0].held_out == {"rate": 1.0, "low": 0.0, "high": 1.0}
    found = improve(config_of(tmp_path, -0.5, held_out=5, generations=2), lambda _: None)
    assert found.finished[1].decision == "roll back"
    assert found.finished[1].comparison is None
    assert num_recorded(config.path / "generations/002/comparison") == 0


def test_interrupted_anywhere_it_goes_on_and_repeats_nothing(tmp_path: Path, calls: Path) -> None:
    """Stopped before every part once, and with every command failing half-way once."""
    config, interruptions = config_of(tmp_path, 0.7), 0
    done: set[str] = set()

    def say(text: str) -> None:
        kind = text.split("] ")[-1].split(" ")[0]
        if kind not in done and text.startswith("["):
            done.add(kind)
            raise InterruptedForTestError

    while True:
        try:
            found = improve(config, say)
            break
        except InterruptedForTestError:
            interruptions += 1
    assert interruptions == 4  # collect, train, compare, promote
    said = calls.read_text().splitlines()
    assert [line.split()[0] for line in said].count("train") == 1
    assert found.finished[0].decision == "promote"
    assert num_recorded(config.path / "generations/001/episodes") == 3
    assert state.read(config.path, start="") == found


def test_a_command_that_fails_is_told_and_resumed(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, 0.7)
    monkeypatch.setenv("FAKE_PIRL_FAIL", "1,3")
    for _ in range(2):  # the first robot call, then the first training
        with pytest.raises(ProcessError, match="told to fail"):
            improve(config, lambda _: None)
    improve(config, lambda _: None)
    said = calls.read_text().splitlines()
    collected = [line.split()[3] for line in said if line.startswith("robot")][:2]
    assert collected == ["20000,20001,20002", "20002"]  # two episodes were recorded before it failed
    assert [line.endswith("--resume auto") for line in said if line.startswith("train")][:2] == [True, True]


def test_episodes_without_outcomes_wait_for_labels(tmp_path: Path, calls: Path) -> None:
    from pirl.data.writer import LeRobotWriter

    config = config_of(tmp_path, 0.7)
    dataset = config.path / "generations/001/episodes"
    feature = {"dtype": "float32", "shape": [1], "names": None}
    with LeRobotWriter(dataset, fps=5, features={"observation.state": feature, "action": feature}) as writer:
        for _ in range(3):
            writer.add_frame({"observation.state": 0.0, "action": 0.0})
            writer.save_episode(task="go")
    with pytest.raises(WaitingForLabelsError, match="3 of 3 episodes have no outcome"):
        improve(config, lambda _: None)
    for index in range(3):
        append(dataset, Label(episode_index=index, by="ann", outcome="failure", moment=None, quality=None))
    assert improve(config, lambda _: None).finished[0].collected["successes"] == 0


def test_a_classifier_labels_what_it_knows_and_leaves_the_rest(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIRL_SILENT", "1")
    config = config_of(tmp_path, 0.7, classifier=0.9, demonstrations=("demos",), generations=2)
    with pytest.raises(WaitingForLabelsError, match="1 of 3 episodes have no outcome"):
        improve(config, lambda _: None)
    dataset = config.path / "generations/001/episodes"
    append(dataset, Label(episode_index=2, by="ann", outcome="failure"))
    append(dataset, Label(episode_index=1, by="ann", outcome="failure"))  # what a person sees counts
    with pytest.raises(WaitingForLabelsError):  # the next generation's
        improve(config, lambda _: None)
    assert state.read(config.path, start="").finished[0].collected["successes"] == 1
    said = [line for line in calls.read_text().splitlines() if line.startswith("label")]
    assert said[0] == f"label {dataset} --classify {config.start} --precision 0.9 --learn demos"
    before = config.path / "generations/001"
    assert said[1].endswith(f"--learn demos {before}/episodes {before}/comparison")
    assert len(said) == 2


def test_a_loop_runs_once_at_a_time(tmp_path: Path, calls: Path) -> None:
    config = config_of(tmp_path, 0.7)

    def again(text: str) -> None:
        with pytest.raises(ConfigError, match="another `pirl improve`"):
            improve(config, lambda _: None)
        raise InterruptedForTestError

    with pytest.raises(InterruptedForTestError):
        improve(config, again)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"robot": "drive {server}"}, "lacks {server} or {dataset}"),
        ({"robot": "drive {server} {dataset} {policy}"}, "policy"),
        ({"robot": "drive {server"}, "robot command"),
        ({"block": 3, "look_every": 3}, "blocks of 3"),
        ({"look_every": 6}, "looked at every 6"),
        ({"episodes": 0}, "episodes is 0"),
        ({"alpha": 1.0}, "alpha"),
        ({"classifier": 0.3}, "classifier is 0.3"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LoopConfig(folder="x", recipe="y", start="z", **settings)


def test_the_command_shows_its_settings_and_refuses_unknown_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loop.yaml"
    file.write_text("folder: x\nrecipe: y\nstart: z\n")
    assert main(["improve", str(file), "--show", "--generations", "7"]) == 0
    shown = capsys.readouterr().out
    assert "generations: 7" in shown
    assert "# Episodes to collect per generation." in shown
    file.write_text("folder: x\nrecipe: y\nstart: z\nepisode: 3\n")
    assert main(["improve", str(file)]) == 1
    assert "did you mean: episodes" in capsys.readouterr().err
    assert main(["improve", str(tmp_path / "none.yaml")]) == 1
