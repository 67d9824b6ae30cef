"""A person can take over at any step; the recording says at which, and what the policy meant instead."""

import os
import pty
import threading
from pathlib import Path

import numpy as np
import pytest

from pirl.data.dataset import LeRobotSource
from pirl.data.lerobot import read_meta
from pirl.data.rows import read_columns
from pirl.errors import DataError
from pirl.robot.broker import ChunkBroker
from pirl.robot.recorder import Recorder
from pirl.robot.subscriber import RecordingSubscriber
from pirl.robot.takeover import KeySwitch, Takeover
from policy_server import HORIZON, plan


class Planned:
    def __init__(self) -> None:
        self.asked: list[float] = []

    def infer(self, obs: dict) -> dict:
        self.asked.append(float(obs["observation/state"][0]))
        return {**plan(obs), "pirl/policy": "acrlpd/7"}

    def reset(self) -> None:
        pass


def test_corrected_steps_are_marked_and_the_policy_looks_again_afterwards(tmp_path: Path) -> None:
    """Driven exactly as OpenPI's Runtime drives its agent and subscribers."""
    inner, outcomes = Planned(), [(True, "saved it"), None, False]
    policy = Takeover(
        ChunkBroker(inner, execute=5),
        lambda obs: np.array([-1.0, 0]) if obs["observation/state"][0] in (2, 3) else None,
    )
    with Recorder(tmp_path / "data", fps=5, horizon=HORIZON) as recorder:
        subscriber = RecordingSubscriber(recorder, policy, outcome=lambda: outcomes.pop(0))
        for _ in range(3):
            policy.reset()
            subscriber.on_episode_start()
            for step in range(6):
                seen = {"observation/state": np.array([step], np.float32), "prompt": "go"}
                subscriber.on_step(seen, policy.infer(seen))
            subscriber.on_episode_end()
    assert inner.asked == [0, 4] * 3
    source = LeRobotSource(tmp_path / "data", cameras={})
    assert len(source) == 2  # the one without an outcome was discarded
    episode = source.episode(0)
    assert episode.intervention is not None
    assert episode.intervention.tolist() == [False, False, True, True, False, False]
    assert episode.actions[:, 0].tolist() == [0, 1, -1, -1, 4, 5]
    assert (episode.success, source.episode(1).success, episode.task) == (True, False, "go")
    columns = read_columns(read_meta(tmp_path / "data"))
    assert columns["policy"].tolist() == (["acrlpd/7"] * 2 + ["operator"] * 2 + ["acrlpd/7"] * 2) * 2
    assert columns["note"][5] == "saved it"
    assert columns["intended_step"][:6].tolist() == [0, 1, -1, -1, 0, 1]


def test_a_time_out_is_recorded_as_one_and_other_answers_are_refused(tmp_path: Path) -> None:
    policy = ChunkBroker(Planned(), execute=5)
    outcomes = ["timeout", ("timeout", "nearly"), False, "lost"]
    with Recorder(tmp_path / "data", fps=5, horizon=HORIZON) as recorder:
        subscriber = RecordingSubscriber(recorder, policy, outcome=lambda: outcomes.pop(0))
        for said in list(outcomes):
            policy.reset()
            subscriber.on_episode_start()
            seen = {"observation/state": np.zeros(1, np.float32), "prompt": "go"}
            subscriber.on_step(seen, policy.infer(seen))
            if said == "lost":
                with pytest.raises(DataError, match="outcome is 'lost'"):
                    subscriber.on_episode_end()
                subscriber.recorder.discard()
            else:
                subscriber.on_episode_end()
    source = LeRobotSource(tmp_path / "data", cameras={})
    assert [source.episode(index).success for index in range(3)] == [False] * 3
    assert [bool(source.episode(index).truncated[-1]) for index in range(3)] == [True, True, False]


def test_a_person_need_not_wait_for_the_chunk_that_was_asked_for() -> None:
    answer, inner = threading.Event(), Planned()
    took_over = False

    class Slow(Planned):
        def infer(self, obs: dict) -> dict:
            if inner.asked:
                assert answer.wait(60)
            return inner.infer(obs)

    policy = Takeover(
        ChunkBroker(Slow(), execute=1, prefetch=True), lambda _: np.array([-1.0, 0]) if took_over else None
    )
    seen = {"observation/state": np.array([0], np.float32)}
    policy.infer(seen)
    policy.infer(seen)  # asks for the next chunk in the background
    took_over = True
    person = threading.Thread(target=policy.infer, args=(seen,), daemon=True)
    person.start()
    person.join(30)
    waited = person.is_alive()
    answer.set()
    assert not waited
    took_over = False
    policy.infer({"observation/state": np.array([7], np.float32)})
    assert inner.asked[-1] == 7  # what was asked before the takeover is not executed after it


def test_a_key_takes_over_and_hands_back() -> None:
    ours, theirs = pty.openpty()
    changes: list[bool] = []
    changed = threading.Semaphore(0)
    with os.fdopen(theirs, "rb", buffering=0) as terminal, KeySwitch(stream=terminal) as switch:
        switch.on_change(lambda on: (changes.append(on), changed.release()))
        for typed in (b" ", b"x ", b" "):
            os.write(ours, typed)
            assert changed.acquire(timeout=60)
    assert changes == [True, False, True]
    os.close(ours)
