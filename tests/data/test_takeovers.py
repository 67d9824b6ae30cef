"""A takeover is blamed on the policy's steps before it: who acted, and what critics see, against walks step by step."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data.chunks import (
    bootstrap_rows,
    chunk_actions,
    chunk_actors,
    chunk_outcomes,
    known_steps,
    tabulate,
    validate_qchunking_batch_format,
)
from pirl.data.config import DataConfig
from pirl.data.dataset import LeRobotSource
from pirl.data.inspection import inspect_dataset
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.replay import MemorySource
from pirl.data.takeovers import TakeoverRule, acted_by, as_learned
from pirl.errors import ConfigError
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED, DEMONSTRATED, Episode
from pirl.robot.recorder import Recorder

LETTERS = {"d": DEMONSTRATED, ".": AUTONOMOUS, "x": BLAMED, "C": CORRECTED}


def written(actors: Any) -> str:
    return "".join({number: letter for letter, number in LETTERS.items()}[int(one)] for one in actors)


def episode_of(flags: str, *, success: bool = True, cut: int | None = None, horizon: int = 0) -> Episode:
    """`C` is a person's step. Actions tell their step; plans go on with 100 and more behind the step they begin at."""
    steps = len(flags)
    last = np.arange(steps) == steps - 1
    plans = None
    if horizon:
        plans = np.broadcast_to(100.0 + np.arange(steps)[:, None] + np.arange(horizon), (steps, horizon))[..., None]
        plans = np.where(np.array([flag == "C" for flag in flags])[:, None, None], np.nan, plans).astype(np.float32)
    return Episode(
        task="go",
        state=np.arange(steps, dtype=np.float32)[:, None],
        actions=np.arange(steps, dtype=np.float32)[:, None],
        rewards=(last & success).astype(np.float32),
        terminated=last & success,
        truncated=(last & (not success)) | (np.arange(steps) == (-1 if cut is None else cut)),
        success=success,
        intervention=np.array([flag == "C" for flag in flags]),
        intended=plans,
    )


@pytest.mark.parametrize(
    ("flags", "window", "expected"),
    [
        ("......CC", 3, "...xxxCC"),
        ("......CC", 0, "......CC"),
        ("..CC", 9, "xxCC"),
        ("CC....", 3, "CC...."),  # nobody handed over before the first step
        ("CC....C", 2, "CC..xxC"),
        ("CC..C..CC", 3, "CCxxCxxCC"),  # back to the hand-over, not further
        (".......C", 1, "......xC"),
        ("C", 3, "C"),
        ("....", 3, "...."),
    ],
)
def test_who_acted(flags: str, window: int, expected: str) -> None:
    assert written(acted_by(episode_of(flags), window)) == expected


def test_what_ended_before_is_not_blamed() -> None:
    """A recording that stopped, or a task that was solved, in the steps before a takeover."""
    assert written(acted_by(episode_of("......CC", cut=3), 9)) == "....xxCC"
    solved = episode_of("......CC")
    solved.terminated[4] = True
    assert written(acted_by(solved, 9)) == ".....xCC"
    solved.terminated[5] = True
    assert written(acted_by(solved, 9)) == "......CC"
    assert as_learned(solved, TakeoverRule(meaning="failure", window=9)) is solved


def test_a_dataset_that_does_not_say_is_a_demonstration() -> None:
    silent = Episode(**{**vars(episode_of("....")), "intervention": None})
    assert written(acted_by(silent, 3)) == "dddd"
    assert as_learned(silent, TakeoverRule(meaning="failure", window=3)) is silent


# The critic's targets, from the definitions alone


def walked(episode: Episode, t: int, ahead: int, gamma: float, window: int, reward: float, value: Any) -> Any:
    """(y, L, return) of the chunk at t where takeovers are failures, walking step by step; y None where nothing counts.

    A walker pays and stops at the first step that ends something: the task, or (blamed) the policy's turn.
    """
    flags = np.asarray(episode.intervention)
    steps = len(episode)

    def blamed(step: int) -> bool:
        if flags[step]:
            return False
        for later in range(step, min(step + window + 1, steps)):
            if flags[later]:
                return True
            if episode.terminated[later] or episode.truncated[later]:
                return False
        return False

    def over(step: int) -> bool:
        return bool(episode.truncated[step]) or step + 1 == steps

    total, step, known = 0.0, t, math.nan
    while True:
        total += gamma ** (step - t) * (float(episode.rewards[step]) + (reward if blamed(step) else 0.0))
        if episode.terminated[step] or blamed(step):
            known = total
            break
        if over(step):
            break
        step += 1
    y, step = 0.0, t
    while step < t + ahead:
        lost = blamed(step)
        paid = gamma ** (step - t) * (float(episode.rewards[step]) + (reward if lost else 0.0))
        if episode.terminated[step] or lost:
            return y + paid, step - t + 1, known
        if over(step):
            break
        y, step = y + paid, step + 1
    return (y + gamma ** (step - t) * value(step) if step > t else None), step - t, known


@st.composite
def corrected_episodes(draw: Any) -> list[Episode]:
    """Takeovers anywhere and any number of them, episodes that end in every way, in the middle too."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        runs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
        first = draw(st.booleans())
        flags = np.repeat([(i % 2 == 0) == first for i in range(len(runs))], runs)
        steps = len(flags)
        terminated = np.array([draw(st.integers(0, 11)) == 0 for _ in range(steps)])
        truncated = np.array([draw(st.integers(0, 11)) == 0 for _ in range(steps)])
        terminated[-1], truncated[-1] = draw(st.booleans()), draw(st.booleans())
        rewards = draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=steps, max_size=steps))
        plain = vars(episode_of("." * steps))
        changed = {"terminated": terminated, "truncated": truncated, "rewards": np.array(rewards, np.float32)}
        found.append(Episode(**{**plain, **changed, "intervention": None if draw(st.booleans()) else flags}))
        if found[-1].intervention is None:
            found[-1] = Episode(**{**vars(found[-1]), "intervention": np.zeros(steps, bool)})
    return found


@settings(max_examples=250, deadline=None)
@given(
    episodes=corrected_episodes(),
    horizon=st.integers(1, 5),
    shorter=st.integers(0, 3),
    n=st.integers(1, 3),
    window=st.integers(1, 5),
    gamma=st.sampled_from([0.5, 1.0]),
    reward=st.sampled_from([0.0, -3.0]),
)
def test_targets_are_those_of_a_walk(
    episodes: list[Episode], horizon: int, shorter: int, n: int, window: int, gamma: float, reward: float
) -> None:
    h = max(1, horizon - shorter)
    rule = TakeoverRule(meaning="failure", window=window, reward=reward)
    table = tabulate(episodes, discount=gamma, takeovers=rule)
    rows = np.arange(len(table))
    batch = chunk_outcomes(table, rows, horizon=horizon, critic_horizon=h, boundary="pad", n_step=n)
    values = np.random.default_rng(0).normal(size=len(table))
    followers = bootstrap_rows(table, rows, batch["length"])
    y = batch["reward_sum"] + gamma ** batch["length"] * (1 - batch["next_terminal"]) * values[followers]
    for row, (episode, t) in enumerate([(one, t) for one in episodes for t in range(len(one))]):
        first = row - t
        expected, length, known = walked(
            episode,
            t,
            n * h,
            gamma,
            window,
            reward,
            lambda step, first=first: values[first + step],
        )
        assert batch["length"][row] == length
        assert batch["sequence_mask"][row] == (expected is not None)
        if expected is not None:
            np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch["mc_return"][row], known, rtol=1e-5, atol=1e-5)


def test_an_ignored_takeover_changes_nothing() -> None:
    episode = episode_of("...CC..")
    assert as_learned(episode, TakeoverRule(window=3, reward=-5.0)) is episode


def test_the_critic_sees_the_plan_and_not_the_person() -> None:
    """A chunk that a takeover cuts: its steps behind are those that the policy meant, as behind any end."""
    episode = episode_of("....CCCC", horizon=6)
    rule = TakeoverRule(meaning="failure", window=2, reward=-1.0)
    table = tabulate([episode], discount=0.5, takeovers=rule)
    rows = np.array([0, 1, 3, 4])
    actions = chunk_actions(table, rows, horizon=6)[..., 0]
    assert actions.tolist() == [
        [0, 1, 2, 3, 104, 105],
        [1, 2, 3, 104, 105, 106],
        [3, 104, 105, 106, 107, 108],
        [4, 5, 6, 7, 7, 7],  # the person's own: to the end of the episode
    ]
    assert known_steps(table, rows, critic_horizon=6).tolist() == [6, 6, 6, 4]
    batch = chunk_outcomes(table, rows, horizon=6, critic_horizon=6, boundary="pad")
    assert batch["next_terminal"].tolist() == [1, 1, 1, 1]
    assert batch["length"].tolist() == [3, 2, 1, 4]
    np.testing.assert_allclose(batch["reward_sum"], [-0.25, -0.5, -1.0, 0.125])
    assert batch["valid"].sum(1).tolist() == [4, 3, 1, 4]
    assert [written(row) for row in chunk_actors(table, rows, horizon=6)] == ["..xxxx", ".xxxxx", "xxxxxx", "CCCCCC"]
    as_recorded = tabulate([episode], discount=0.5, takeovers=TakeoverRule(window=2))
    assert [written(row) for row in chunk_actors(as_recorded, rows[:2], horizon=6)] == ["..xxCC", ".xxCCC"]
    # Three steps that count are the person's success, and nobody's failure.
    ordinary = chunk_outcomes(as_recorded, rows, horizon=6, critic_horizon=6, boundary="pad")
    assert ordinary["next_terminal"].tolist() == [0, 0, 1, 1]


# From the robot's recorder to batches


EPISODES = [
    ("......CC", True, False),  # a person ends it
    ("CC......", True, False),  # from the first frame
    (".......C", False, True),  # in the last frame; out of time
    ("...CC..CCC..", True, False),  # twice, and handed back
    ("....CCCC", False, True),  # out of time after a takeover
    ("....", False, False),  # a failure that nobody prevented
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recorded") / "data"
    with Recorder(root, fps=5, horizon=3) as recorder:
        for number, (flags, success, truncated) in enumerate(EPISODES):
            recorder.start(task="go")
            for step, flag in enumerate(flags):
                chunk = None if flag == "C" else (np.full((3, 2), step, np.float32), 0)
                observation = {"observation/state": np.array([number, step], np.float32)}
                recorder.step(observation, np.full(2, step, np.float32), intended=chunk, intervention=flag == "C")
            recorder.end(success, truncated=truncated)
    return root


class Plain:
    def low_dim(self, state: Any, actions: Any, prompts: Any) -> dict[str, Any]:
        return {"state": state} | ({} if actions is None else {"actions": actions})


def batches(source: Any, *, count: int = 3, **changes: Any) -> Iterator[Any]:
    corrections = changes.pop("corrections", True)
    config = DataConfig(prefetch=0, **changes)
    with ACRLPDDataLoader(
        source, Plain(), config=config, batch_size=64, horizon=3, discount=0.9, corrections=corrections
    ) as loader:
        yield from (loader.sample_batch() for _ in range(count))


def test_batches_of_a_recording_say_who_acted_and_what_failed(recorded: Path) -> None:
    source = LeRobotSource(recorded, cameras={})
    expected = ["....xxCC", "CC......", ".....xxC", ".xxCCxxCCC..", "..xxCCCC", "...."]
    failing = dict(takeover="failure", takeover_window=2, takeover_reward=-2.0)
    seen = set()
    for ordinary, failed in zip(
        batches(source, count=6, takeover_window=2), batches(source, count=6, **failing), strict=True
    ):
        validate_qchunking_batch_format(ordinary, corrections=True)
        for i, (episode, step) in enumerate(ordinary["observations"]["state"].astype(int)):
            flags = expected[episode]
            assert written(ordinary["acted_by"][i]) == flags[step : step + 3].ljust(3, flags[-1])
            lost = flags.find("x", step)  # the first blamed step from here on, if no end comes before
            reached = lost >= 0 and lost < step + 3
            assert failed["next_terminal"][i] == (reached or ordinary["next_terminal"][i])
            if reached:
                assert failed["length"][i] == lost - step + 1
                assert failed["reward_sum"][i] == pytest.approx(-2.0 * 0.9 ** (lost - step))
            else:
                assert failed["reward_sum"][i] == ordinary["reward_sum"][i]
            seen.add((episode, step))
            if flags[step] == "x":
                assert failed["mc_return"][i] == -2.0
    assert len(seen) == sum(len(flags) for flags, _, _ in EPISODES)


def test_without_the_column_batches_are_what_they_were(recorded: Path) -> None:
    """Whatever the settings; with it, only those that ask see anything of it while takeovers are ignored."""
    source = LeRobotSource(recorded, cameras={})
    bare = [
        (Episode(**{**vars(source.episode(i)), "intervention": None}), source.frames(i)) for i in range(len(source))
    ]
    silent = MemorySource(cameras=(), items=bare)
    plain = list(batches(silent, corrections=False))
    for other in (
        batches(silent, takeover="failure", takeover_window=2, takeover_reward=-2.0),
        batches(source, takeover_window=7),
    ):
        for left, right in zip(plain, other, strict=True):
            assert set(right) == set(left) | {"acted_by"}
            for name in left.keys() - {"observations", "next_observations"}:
                np.testing.assert_array_equal(left[name], right[name], err_msg=name)
            np.testing.assert_array_equal(left["observations"]["state"], right["observations"]["state"])
    assert (next(batches(silent))["acted_by"] == DEMONSTRATED).all()


def test_the_same_settings_are_the_same_batches(recorded: Path) -> None:
    source = LeRobotSource(recorded, cameras={})
    rule = dict(takeover="failure", takeover_window=2)
    for left, right in zip(batches(source, **rule), batches(source, **rule), strict=True):
        for name in ("acted_by", "reward_sum", "critic_actions", "actions"):
            np.testing.assert_array_equal(left[name], right[name])


def test_an_inspection_says_what_corrections_do(recorded: Path) -> None:
    text = str(inspect_dataset(recorded))
    assert "interventions: 6 in 5 of 6 episodes, 14 of 48 frames (29.2%)" in text
    assert "critics (data.takeover ignore): every frame is an ordinary transition" in text
    failing = DataConfig(takeover="failure", takeover_window=3, takeover_reward=-2.0)
    text = str(inspect_dataset(recorded, settings=failing))
    assert "(data.takeover_window 3): 14 frames before 5 takeovers" in text  # a hand-back comes before one of them
    assert "imitates 14 corrected frames, the policy's other 20 " in text
    assert "loses the task in the first blamed frame, with a reward of -2" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(takeover_reward=1.0), "takeover_reward is 1.0"),
        (dict(takeover="failure", takeover_window=0), "takeover_window is 0"),
        (dict(takeover="failure", boundary="drop"), "boundary is 'drop'"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)


def test_a_takeovers_reward_is_a_failures_unless_it_has_its_own() -> None:
    config = DataConfig(takeover="failure", outcome="sparse_success", failure_reward=-2.0)
    assert TakeoverRule.of(config).reward == -2.0
    own = DataConfig(takeover="failure", outcome="sparse_success", takeover_reward=-7.0)
    assert (TakeoverRule.of(own).reward, own.reward_range) == (-7.0, (-7.0, 1.0))
    assert DataConfig(outcome="sparse_success", takeover_reward=-7.0).reward_range == (0.0, 1.0)
