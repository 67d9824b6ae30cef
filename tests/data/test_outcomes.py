"""Rewards and ends: success and labelled failures end the task, everything else only ends the recording."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.chunks import chunk_outcomes, tabulate
from pirl.data.dataset import LeRobotSource
from pirl.data.outcomes import EpisodeOutcome, OutcomeRule, derive, describe, read_success_file
from pirl.errors import ConfigError, DataError
from pirl.records import Episode

GOLDEN = Path(__file__).parents[1] / "golden/lerobot"


def columns(**named: list[float]) -> dict[str, np.ndarray]:
    return {
        f"next.{name}": np.array(values, dtype=np.float32 if name == "reward" else bool)
        for name, values in named.items()
    }


def check(
    outcome: EpisodeOutcome, rewards: list[float], terminated: list[int], truncated: list[int], success: bool | None
) -> None:
    assert outcome.rewards.tolist() == rewards
    assert outcome.terminated.tolist() == [bool(flag) for flag in terminated]
    assert outcome.truncated.tolist() == [bool(flag) for flag in truncated]
    assert outcome.success is success


@pytest.mark.parametrize(
    ("recorded", "rewards", "terminated", "truncated", "success"),
    [
        # success decides, whatever done says
        ({"reward": [0, 0, 1], "done": [0, 0, 1], "success": [0, 0, 1]}, [0, 0, 1], [0, 0, 1], [0, 0, 0], True),
        ({"reward": [0, 0, 0], "done": [0, 0, 1], "success": [0, 0, 0]}, [0, 0, 0], [0, 0, 1], [0, 0, 0], False),
        # ... unless failing would be the cheapest way to stop paying, or the recording was cut off
        ({"reward": [-1, -1, -1], "success": [0, 0, 0]}, [-1, -1, -1], [0, 0, 0], [0, 0, 1], False),
        ({"success": [0, 0, 0], "truncated": [0, 0, 1]}, [0, 0, 0], [0, 0, 0], [0, 0, 1], False),
        # done alone is a success if it paid, else a time-out
        ({"reward": [0, 0, 1], "done": [0, 0, 1]}, [0, 0, 1], [0, 0, 1], [0, 0, 0], True),
        ({"reward": [0, 0, 0], "done": [0, 0, 1]}, [0, 0, 0], [0, 0, 0], [0, 0, 1], False),
        ({"reward": [0, 1, 0], "done": [0, 0, 1]}, [0, 1, 0], [0, 0, 0], [0, 0, 1], False),
        # nobody said that it ended
        ({"reward": [0, 0, 0], "done": [0, 0, 0]}, [0, 0, 0], [0, 0, 0], [0, 0, 1], None),
        ({"reward": [0, 0, 0]}, [0, 0, 0], [0, 0, 0], [0, 0, 1], None),
        ({"reward": [0, 0, 1]}, [0, 0, 1], [0, 0, 1], [0, 0, 0], True),
        # only the column next.truncated tells a failure that ends the task from a time-out
        ({"reward": [0, 0, -1], "done": [0, 0, 1], "truncated": [0, 0, 0]}, [0, 0, -1], [0, 0, 1], [0, 0, 0], False),
        ({"reward": [0, 0, 1], "done": [0, 0, 1], "truncated": [0, 0, 1]}, [0, 0, 1], [0, 0, 0], [0, 0, 1], False),
        (
            {"reward": [0, 0, 0], "done": [0, 0, 1], "success": [0, 0, 0], "truncated": [0, 0, 0]},
            [0, 0, 0],
            [0, 0, 1],
            [0, 0, 0],
            False,
        ),
        ({"success": [0, 0, 1], "truncated": [0, 0, 1]}, [0, 0, 1], [0, 0, 1], [0, 0, 0], True),
        ({"reward": [0.0], "success": [0]}, [0], [1], [0], False),
    ],
)
def test_recorded_columns(
    recorded: dict[str, list[float]],
    rewards: list[float],
    terminated: list[int],
    truncated: list[int],
    success: bool | None,
) -> None:
    found = columns(**recorded)
    for rule in ("auto", "columns"):
        check(derive(found, OutcomeRule(rule=rule), length=len(rewards)), rewards, terminated, truncated, success)


@pytest.mark.parametrize(("rule", "shift"), [("sparse_success", 0), ("step_penalty", -1)])
def test_declared_rules(rule: str, shift: float) -> None:
    plain, with_file = OutcomeRule(rule=rule), OutcomeRule(rule=rule, success_file="labels.json")
    reached, missed = [shift, shift, 1 + shift], [shift] * 3
    check(derive({}, plain, length=3), reached, [0, 0, 1], [0, 0, 0], True)
    check(derive({}, with_file, length=3, label=True), reached, [0, 0, 1], [0, 0, 0], True)
    lost = ([0, 0, 1], [0, 0, 0]) if rule == "sparse_success" else ([0, 0, 0], [0, 0, 1])
    check(derive({}, with_file, length=3, label=False), missed, *lost, False)
    check(derive({}, with_file, length=3, label=None), missed, [0, 0, 0], [0, 0, 1], None)
    # A recorded success is believed; the file is believed more; a recorded reward is replaced.
    recorded = columns(success=[0, 0, 0], reward=[5, 5, 5])
    check(derive(recorded, plain, length=3), missed, *lost, False)
    check(derive(recorded, with_file, length=3, label=True), reached, [0, 0, 1], [0, 0, 0], True)


def test_running_out_of_time_may_be_the_failure() -> None:
    """What `pirl record` writes of an episode that reaches the time limit: a critic is to see a 0, or to bootstrap."""
    out_of_time = columns(reward=[0, 0, 0], done=[0, 0, 1], truncated=[0, 0, 1], success=[0, 0, 0])
    in_time = columns(reward=[0, 0, 1], done=[0, 0, 1], truncated=[0, 0, 0], success=[0, 0, 1])
    for failure in ("auto", "terminal", "timeout"):
        found = derive(out_of_time, OutcomeRule(rule="columns", failure=failure), length=3)
        check(found, [0, 0, 0], [0, 0, 0], [0, 0, 1], False)
    always = OutcomeRule(rule="columns", failure="always")
    check(derive(out_of_time, always, length=3), [0, 0, 0], [0, 0, 1], [0, 0, 0], False)
    check(derive(in_time, always, length=3), [0, 0, 1], [0, 0, 1], [0, 0, 0], True)
    unlabelled = columns(reward=[0, 0, 0])
    check(derive(unlabelled, always, length=3), [0, 0, 0], [0, 0, 0], [0, 0, 1], None)


@pytest.mark.parametrize("rule", ["sparse_success", "step_penalty"])
def test_what_a_failure_means_is_a_setting(rule: str) -> None:
    shift = -float(rule == "step_penalty")

    def ends(label: bool | None, **options: Any) -> EpisodeOutcome:
        recorded = options.pop("recorded", {})
        return derive(recorded, OutcomeRule(rule=rule, success_file="f", **options), length=3, label=label)

    check(ends(False, failure="terminal"), [shift] * 3, [0, 0, 1], [0, 0, 0], False)
    check(ends(False, failure="timeout"), [shift] * 3, [0, 0, 0], [0, 0, 1], False)
    check(ends(False, failure_reward=-5.0), [shift, shift, shift - 5], [0, 0, 1], [0, 0, 0], False)
    # Neither an unlabelled episode nor one that was recorded as cut off is a lost task.
    check(ends(None, failure="terminal", failure_reward=-5.0), [shift] * 3, [0, 0, 0], [0, 0, 1], None)
    cut = columns(truncated=[0, 0, 1])
    check(ends(False, failure="terminal", failure_reward=-5.0, recorded=cut), [shift] * 3, [0, 0, 0], [0, 0, 1], False)
    check(ends(False, failure="always", recorded=cut), [shift] * 3, [0, 0, 1], [0, 0, 0], False)
    check(ends(True, failure="terminal", failure_reward=-5.0), [shift, shift, shift + 1], [0, 0, 1], [0, 0, 0], True)


def test_the_fatal_action_gets_a_target() -> None:
    """A failure told by a file reaches the critic: its last chunk has a target of its own, and so has every return."""

    def batch(failure: str) -> Any:
        found = derive({}, OutcomeRule(rule="sparse_success", success_file="f", failure=failure), length=4, label=False)
        episode = Episode(
            task="",
            state=np.zeros((4, 1)),
            actions=np.zeros((4, 1)),
            rewards=found.rewards,
            terminated=found.terminated,
            truncated=found.truncated,
            success=found.success,
        )
        table = tabulate([episode], discount=0.9)
        return chunk_outcomes(table, np.arange(4), horizon=2, critic_horizon=2, boundary="pad")

    lost, cut = batch("terminal"), batch("timeout")
    assert lost["sequence_mask"].tolist() == [1, 1, 1, 1]
    assert lost["next_terminal"].tolist() == [0, 0, 1, 1]
    assert lost["mc_return"].tolist() == [0, 0, 0, 0]
    assert cut["sequence_mask"].tolist() == [1, 1, 1, 0]
    assert cut["next_terminal"].tolist() == [0, 0, 0, 0]
    assert np.isnan(cut["mc_return"]).all()


@pytest.mark.parametrize("recorded", [{}, {"done": [0, 0, 1]}])
@pytest.mark.parametrize("rule", ["auto", "columns"])
def test_without_labels_a_rule_must_be_declared(recorded: dict[str, list[float]], rule: str) -> None:
    with pytest.raises(DataError, match="sparse_success if every episode is a successful demonstration"):
        derive(columns(**recorded), OutcomeRule(rule=rule), length=3)


def test_a_success_file_needs_a_reward_shape() -> None:
    with pytest.raises(ConfigError, match="declare rule sparse_success"):
        derive(columns(reward=[0, 1]), OutcomeRule(rule="columns", success_file="labels.json"), length=2)


@pytest.mark.parametrize(
    "text",
    [
        '{"0": true, "2": false}',
        '[{"episode_index": 0, "success": true}, {"episode_index": 2, "success": false}]',
        '{"episode_index": 0, "success": true}\n{"episode_index": 2, "success": false}\n\n',
        '{"0": true}\n{"2": false}',
    ],
)
def test_forms_of_success_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "labels"
    path.write_text(text)
    assert read_success_file(path, range(5)) == {0: True, 2: False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"7": true}', "episode 7 is not in the dataset"),
        ('{"0": "yes"}', "success 'yes'"),
        ('{"0": 1}', "success 1"),
        ('{"zero": true}', "not a success file"),
        ("[1, 2]", "not a success file"),
        ('{"0": true', "not a success file"),
        ('{"0": true}\n{"0": false}', "both a success and a failure"),
    ],
)
def test_bad_success_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "labels.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_success_file(path, range(5))
    assert str(path) in caught.value.message


def test_a_missing_success_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json"):
        read_success_file(tmp_path / "gone.json", range(5))


def test_a_source_applies_the_rule_to_every_episode(own_home: Path) -> None:
    path = own_home / "labels.json"
    path.write_text(json.dumps({"0": False, "1": True, "2": True}))
    source = LeRobotSource(
        GOLDEN / "v30_video", cameras={}, outcome=OutcomeRule(rule="step_penalty", success_file=str(path))
    )
    assert [source.episode(index).success for index in range(5)] == [False, True, True, None, None]
    assert [source.episode(index).rewards.sum() for index in range(5)] == [-37, -79, -51, -45, -63]
    assert [bool(source.episode(index).truncated[-1]) for index in range(5)] == [True, False, False, True, True]
    said = describe(source.rule, source.outcomes, source.columns)
    assert "step_penalty" in said
    assert str(path) in said
    assert "2 episodes succeed, 1 fail, 2 unlabelled; 2 end terminated, 3 truncated" in said


def test_golden_episodes_end_as_they_were_recorded() -> None:
    """There 0, 2 and 3 succeed; next.done is set at the end of the failures 1 and 4 too."""
    source = LeRobotSource(GOLDEN / "v21_video", cameras={})
    assert [source.episode(index).success for index in range(5)] == [True, False, True, True, False]
    for index in range(5):
        episode = source.episode(index)
        assert episode.terminated.sum() + episode.truncated.sum() == 1
        assert episode.terminated[-1]  # neither was cut off: next.success labels all of them
        assert episode.rewards.sum() == float(bool(episode.success))


def test_the_description_names_the_rule() -> None:
    outcomes = [derive({}, OutcomeRule(rule="sparse_success"), length=2)]
    assert "every episode taken for a success" in describe(OutcomeRule(rule="sparse_success"), outcomes, ())
    recorded = columns(success=[0, 1])
    outcomes = [derive(recorded, OutcomeRule(), length=2)]
    assert "next.success (reward 1 at success): 1 episodes" in describe(OutcomeRule(rule="columns"), outcomes, recorded)
