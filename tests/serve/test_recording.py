"""What stock clients ask and get becomes a dataset that training reads without inventing observations."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.chunks import bootstrap_rows, chunk_outcomes, tabulate
from pirl.data.dataset import LeRobotSource
from pirl.data.fit import Expected, fit_problems
from pirl.data.labels import Label, append
from pirl.data.outcomes import OutcomeRule
from pirl.data.pool import make_resident
from pirl.data.rows import read_columns
from pirl.errors import ConfigError, DataError
from pirl.robot.broker import ChunkBroker
from pirl.robot.client import PolicyClient
from pirl.serve.planner import Planner
from pirl.serve.recording import ExchangeRecorder
from pirl.serve.session import Exchange
from serving_runs import SEEN, Client, running


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked(step: int, *, episode: int | str = 0, session: int = 0, **changes: Any) -> Exchange:
    """The state says which step it is; the chunk's actions say which step they are for."""
    state, chunk = np.array([step, session], np.float32), np.stack([np.arange(3) + step, np.full(3, session)], 1)
    usual: dict[str, Any] = dict(
        session=session,
        episode=episode,
        step=step,
        observation={"observation/state": state, "prompt": "go right"},
        chunk=chunk.astype(np.float32),
        policy="walk/5",
        value=None,
        told=False,
        early=False,
    )
    return Exchange(**usual | changes)


def source(root: Path) -> LeRobotSource:
    return LeRobotSource(root, cameras={}, outcome=OutcomeRule(rule="sparse_success"))


def test_a_stock_client_is_recorded_chunk_by_chunk(planner: Planner, tmp_path: Path) -> None:
    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=2, robot_type="synthetic")
    more = {"on_exchange": recorder.exchange, "on_close": recorder.closed}
    chunks = []
    with running(planner, **more) as server:
        with Client(server.port) as robot, Client(server.port) as other:
            for step in range(3):
                seen = SEEN | {"observation/state": np.array([0.1 * step, 0.0], np.float32)}
                chunks.append(robot.ask(seen)["actions"])
                other.ask(SEEN)
        until(lambda: recorder.episodes["saved"] == 2)
    recorder.close()
    columns = read_columns(source(tmp_path / "seen").meta)
    first = int(np.flatnonzero(columns["action"][:, 0] == chunks[0][0, 0])[0])
    rows = slice(first, first + 6)
    np.testing.assert_array_equal(columns["action"][rows], np.concatenate([chunk[:2] for chunk in chunks]))
    np.testing.assert_allclose(columns["observation.state"][rows, 0], [0, 0, 0.1, 0.1, 0.2, 0.2])
    np.testing.assert_array_equal(columns["observed"][rows], [1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(columns["intended"][rows][::2], chunks)
    assert set(columns["policy"].tolist()) == {planner.name}


def test_chunks_start_and_bootstrap_where_the_robot_was_seen(tmp_path: Path) -> None:
    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=2)
    for step in (0, 2, 4):
        recorder.exchange(asked(step))
    recorder.exchange(asked(0, episode=1))
    recorder.close()
    for index, outcome in enumerate(("failure", "success")):
        append(tmp_path / "seen", Label(episode_index=index, by="ann", outcome=outcome))
    found = source(tmp_path / "seen")
    episode = found.episode(0)
    assert len(episode) == 6
    resident = make_resident(found, np.arange(2), frames=lambda _: {}, discount=0.9)
    drawn = resident.draw(np.random.default_rng(0), 500)
    assert set(drawn.tolist()) == {0, 2, 4, 6}
    assert set(resident.draw_imitable(np.random.default_rng(0), 500).tolist()) == {0, 2, 4, 6}
    rows = np.array([0, 2, 4])
    batch = chunk_outcomes(resident.table, rows, horizon=3, critic_horizon=2, boundary="pad")
    np.testing.assert_array_equal(batch["length"], [2, 2, 2])
    np.testing.assert_array_equal(batch["next_terminal"], [0, 0, 1])  # a labelled failure ends the task
    np.testing.assert_array_equal(bootstrap_rows(resident.table, rows, batch["length"])[:2], [2, 4])
    # A longer look ahead stops where the robot was seen last; a shorter one would learn nothing, and is refused.
    three = chunk_outcomes(resident.table, rows, horizon=3, critic_horizon=3, boundary="pad")
    np.testing.assert_array_equal(three["length"][:2], [2, 2])
    one = chunk_outcomes(resident.table, rows, horizon=3, critic_horizon=1, boundary="pad")
    np.testing.assert_array_equal(one["sequence_mask"], [0, 0, 0])
    dropped = chunk_outcomes(resident.table, rows, horizon=3, critic_horizon=3, boundary="drop")
    np.testing.assert_array_equal(dropped["sequence_mask"], [0, 0, 0])
    expected = Expected(discount=0.9, rewards=None, once=False)
    problems = [
        one for one in fit_problems([found], Expected(**vars(expected) | {"ahead": 1})) if isinstance(one, DataError)
    ]
    assert "up to 2 steps between two observations" in problems[0].message
    assert problems[0].hint == "--data.critic-horizon 2"
    assert not any(
        isinstance(one, DataError) for one in fit_problems([found], Expected(**vars(expected) | {"ahead": 2}))
    )


def test_a_dataset_without_the_column_is_read_as_before(tmp_path: Path) -> None:
    from dataclasses import replace

    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=3)
    recorder.exchange(asked(0))
    recorder.exchange(asked(3))
    recorder.close()
    episode = source(tmp_path / "seen").episode(0)
    plain = tabulate([replace(episode, observed=None)], discount=0.9)
    np.testing.assert_array_equal(plain.seen_at, np.arange(6))
    np.testing.assert_array_equal(tabulate([episode], discount=0.9).seen_at, [0, 0, 0, 3, 3, 3])


def test_steps_that_a_client_tells_count_and_robots_do_not_mix(tmp_path: Path) -> None:
    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=3)
    for step in (0, 1, 3):
        for session in (0, 1):
            recorder.exchange(asked(step, session=session, episode="a", told=True))
    recorder.exchange(asked(0, session=0, episode="b", told=True))  # another name ends the episode before
    recorder.closed(1)
    recorder.close()
    found = source(tmp_path / "seen")
    assert sorted(found.lengths.tolist()) == [3, 6, 6]
    for index in range(3):
        episode = found.episode(index)
        assert len(set(episode.actions[:, 1].tolist())) == 1
        if len(episode) == 6:
            np.testing.assert_array_equal(episode.actions[:, 0], [0, 1, 2, 3, 4, 5])
            np.testing.assert_array_equal(episode.state[:, 0], [0, 1, 1, 3, 3, 3])


@pytest.mark.parametrize("why", ["early", "too many steps", "memory"])
def test_what_cannot_be_recorded_rightly_is_given_up(tmp_path: Path, why: str) -> None:
    limit = 1e-9 if why == "memory" else 1.0
    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=3, max_pending_gb=limit)
    recorder.exchange(asked(0, told=True))
    recorder.exchange(asked(9 if why == "too many steps" else 3, told=True, early=why == "early"))
    recorder.exchange(asked(12, told=True))  # the rest of it
    recorder.close()
    assert recorder.episodes == {"given up": 1}
    assert not (tmp_path / "seen/meta").exists()


def test_pirls_own_client_is_recorded_unless_it_asks_early(planner: Planner, tmp_path: Path) -> None:
    for prefetch in (False, True):
        recorder = ExchangeRecorder(tmp_path / str(prefetch), fps=5, execute=2)
        more = {"on_exchange": recorder.exchange, "on_close": recorder.closed}
        with running(planner, **more) as server, PolicyClient("127.0.0.1", server.port) as client:
            broker = ChunkBroker(client, 2, prefetch=prefetch)
            actions = [broker.infer(SEEN)["actions"] for _ in range(6)]
            broker.replan()
        until(lambda counted=recorder.episodes: bool(counted))
        recorder.close()
        assert recorder.episodes == {"given up" if prefetch else "saved": 1}
        if not prefetch:
            np.testing.assert_array_equal(source(tmp_path / "False").episode(0).actions, actions)


def test_a_full_disk_is_said_and_the_robot_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ExchangeRecorder(tmp_path / "seen", fps=5, execute=3)
    failing = [True]
    whole = ExchangeRecorder._begin

    def begin(self: ExchangeRecorder, row: dict[str, Any]) -> Any:
        if failing.pop():
            raise OSError("No space left on device")
        return whole(self, row)

    monkeypatch.setattr(ExchangeRecorder, "_begin", begin)
    failing[:0] = [False]
    for episode in (0, 1):
        recorder.exchange(asked(0, episode=episode))
    recorder.close()
    assert recorder.episodes == {"failed": 1, "saved": 1}
    assert len(source(tmp_path / "seen")) == 1


def test_the_command_needs_the_robots_rate() -> None:
    import argparse

    from pirl.cli.serve import _recorder

    assert _recorder(argparse.Namespace(record=None), None) is None
    with pytest.raises(ConfigError, match="--record-fps"):
        _recorder(argparse.Namespace(record=Path("x"), record_fps=None), None)
    with pytest.raises(DataError, match="0 executed steps"):
        ExchangeRecorder("x", fps=5, execute=0)
