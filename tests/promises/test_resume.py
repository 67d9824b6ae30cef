"""A run is decided by its seeds: twice the same, and the same again however often and however rudely it is stopped."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from pirl.agents.config import ACRLPDConfig, BCConfig, CriticNFTConfig, DSRLConfig, QCFQLConfig, RLTokenConfig
from pirl.config import EarlyStop, RLTrainConfig
from pirl.config_io import write_yaml
from pirl.training.config import SGD, ConstantSchedule
from pirl.training.loop import train
from pirl.training.metrics import MetricLog
from small_runs import (
    assert_close,
    assert_same_bits,
    compiled_once,
    position_of,
    records,
    restored,
    small_run,
    steps_of,
    table,
)

BC = BCConfig(accumulate=2, flow_draws=2)
DISTILL = ACRLPDConfig(
    discount=0.9,
    actor="distill",
    num_action_samples=2,
    flow_steps=2,
    critic_updates=2,
    q_aggregation="random_pair",
    policy_ema_decay=0.9,
    critic_ema_decay=0.9,
    accumulate=2,
)
AWR = ACRLPDConfig(
    discount=0.9,
    num_action_samples=2,
    flow_steps=2,
    actor_warmup_steps=4,
    calql_weight=0.1,
    policy_ema_decay=None,
    critic_ema_decay=None,
)
NFT = CriticNFTConfig(
    discount=0.9, num_action_samples=2, flow_steps=2, actor_warmup_steps=4, old_rate=0.1, policy_ema_decay=0.9
)
FQL = QCFQLConfig(discount=0.9, num_action_samples=2, flow_steps=2, actor_warmup_steps=4, policy_ema_decay=0.9)
DSRL = DSRLConfig(
    discount=0.9, num_action_samples=2, flow_steps=2, actor_hidden=(8,), critic_ema_decay=0.9, actor_warmup_steps=4
)
RL_TOKEN = RLTokenConfig(discount=0.9, flow_steps=2, actor_hidden=(8,), critic_ema_decay=None, accumulate=2)
STEPS = 11


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with compiled_once(tmp_path_factory.mktemp("programs")) as environment:
        yield environment


@dataclass(frozen=True)
class Pair:
    """A run that was never stopped, and the same run in several pieces."""

    kind: str
    straight: RLTrainConfig
    pieces: RLTrainConfig
    stops: tuple[int, ...]


def in_pieces(config: RLTrainConfig, *stops: int) -> None:
    """Train to each of the steps in turn, as separate runs of the program would."""
    for number, step in enumerate(stops):
        assert train(replace(config, num_train_steps=step), resume=number > 0) == 0


@pytest.fixture(scope="module", params=["bc", "distill", "awr", "nft", "fql", "dsrl", "rl_token"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: dict) -> Pair:
    """Stops before the first record, in the middle of an interval, at a record, next to a due checkpoint."""
    agent, metric, stops = {
        "bc": (BC, "policy/loss", (3, 8, STEPS)),
        "distill": (DISTILL, "critic/loss", (6, STEPS)),
        "awr": (AWR, "actor/loss", (4, 9, STEPS)),
        "nft": (NFT, "actor/loss", (6, STEPS)),
        "fql": (FQL, "actor/loss", (6, STEPS)),
        "dsrl": (DSRL, "critic/noise_loss", (6, STEPS)),
        "rl_token": (RL_TOKEN, "critic/loss", (6, STEPS)),
    }[request.param]
    watched = EarlyStop(metric=metric, mode="min", patience=100, min_delta=100.0)
    straight = small_run(tmp_path_factory.mktemp(request.param), agent, exp_name="straight", early_stop=watched)
    assert train(straight) == 0
    pieces = replace(straight, exp_name="pieces")
    in_pieces(pieces, *stops)
    return Pair(request.param, straight, pieces, stops)


def test_a_run_in_pieces_ends_in_the_same_state(pair: Pair) -> None:
    found = restored(pair.pieces)
    assert int(found.step) == STEPS
    assert_same_bits(found, restored(pair.straight))
    assert set(steps_of(pair.pieces)) == {5, 10, *pair.stops}
    assert_same_bits(restored(pair.pieces, 10), restored(pair.straight, 10))


def test_the_states_hold_what_could_be_forgotten(pair: Pair) -> None:
    """Otherwise the test above says nothing: everything in a state moves, and is another thing than the weights."""
    first, last = restored(pair.pieces, pair.stops[0]), restored(pair.pieces)
    state = {name: getattr(last, name) for name in ("params", "target", "ema", "opt", "scalars")}
    both = {"policy", "critic"}
    expected = {
        "bc": ({"policy"}, set(), {"policy"}, set()),
        "distill": ({"policy", "critic"}, {"policy", "critic"}, {"policy", "critic"}, {"beta", "mean_weight"}),
        "awr": ({"policy", "critic"}, {"critic"}, set(), {"beta", "mean_weight"}),
        "nft": (both, {"critic", "old"}, both, {"scale", "agreement", "error"}),
        "fql": ({*both, "flow"}, {"critic"}, both, {"q_size"}),
        "dsrl": ({"policy", "critic", "actor", "noise_critic", "temperature"}, {"critic"}, {"critic"}, set()),
        "rl_token": ({"policy", "critic", "actor"}, {"critic", "actor"}, set(), set()),
    }[pair.kind]
    assert tuple(set(state[name]) for name in ("params", "target", "ema", "scalars")) == expected
    fixed = {("target", "policy")} | ({("params", "policy")} if pair.straight.agent.freezes_policy else set())
    for name, groups in state.items():
        for group, tree in groups.items():
            moved = any(
                np.any(np.asarray(a) != np.asarray(b))
                for a, b in zip(jax.tree.leaves(getattr(first, name)[group]), jax.tree.leaves(tree), strict=True)
            )
            assert moved == ((name, group) not in fixed), f"{name}/{group}"


def test_a_run_in_pieces_leaves_the_same_records(pair: Pair) -> None:
    expected = records(pair.straight.run_dir)
    assert [line["step"] for line in expected] == [4, 8, STEPS]
    assert records(pair.pieces.run_dir) == expected
    rows = table(pair.straight.run_dir)
    assert len(rows) == 4
    assert rows[0] == ["step", *expected[0]["values"]]
    assert table(pair.pieces.run_dir) == rows


def test_a_run_in_pieces_stands_where_the_other_does(pair: Pair) -> None:
    """Data, patience, and the three steps after the last record, which are in no file yet."""
    found, expected = position_of(pair.pieces), position_of(pair.straight)
    assert found == expected
    assert expected["stream"]["data"]["step"] == STEPS
    assert {len(values) for values in expected["pending"].values()} == {3}
    assert expected["patience"]["waited"] == 1


def test_seeds_decide(tmp_path: Path, cache: dict) -> None:
    """The same seeds twice: the same bits and records. Another seed of either kind: another run."""
    first = small_run(tmp_path, BC, exp_name="first", num_train_steps=4)
    others = {
        "again": replace(first, exp_name="again"),
        "seed": replace(first, exp_name="seed", seed=first.seed + 1),
        "data": replace(first, exp_name="data", data=replace(first.data, seed=first.data.seed + 1)),
    }
    for config in (first, *others.values()):
        assert train(config) == 0
    state, lines = restored(first), records(first.run_dir)
    assert_same_bits(restored(others["again"]), state)
    assert records(others["again"].run_dir) == lines
    assert table(others["again"].run_dir) == table(first.run_dir)
    for name in ("seed", "data"):
        assert records(others[name].run_dir) != lines
        with pytest.raises(AssertionError):
            assert_same_bits(restored(others[name]).params, state.params)


@pytest.mark.parametrize("agent", [BCConfig(flow_draws=2), replace(DISTILL, accumulate=1)], ids=["bc", "distill"])
def test_parts_of_a_batch_are_the_batch(agent: BCConfig | ACRLPDConfig, tmp_path: Path, cache: dict) -> None:
    """Three steps in parts and whole: the same losses and weights, but for the order of sums.

    Plain gradient descent: Adam would blow the last bits of a vanishing gradient up to a whole step.
    """
    plain, rate = SGD(), ConstantSchedule(lr=0.05)
    whole = small_run(tmp_path, agent, num_train_steps=3, log_interval=1, exp_name="whole")
    whole = replace(whole, policy_optimizer=plain, critic_optimizer=plain, policy_schedule=rate, critic_schedule=rate)
    parts = replace(
        whole, exp_name="parts", agent=replace(agent, accumulate=4 if agent == BCConfig(flow_draws=2) else 2)
    )
    assert train(whole) == train(parts) == 0
    assert_close(restored(parts), restored(whole), rtol=1e-4, atol=1e-6)
    for found, expected in zip(records(parts.run_dir), records(whole.run_dir), strict=True):
        assert found["values"] == pytest.approx(expected["values"], rel=1e-4, abs=1e-6)
    losses = [
        line["values"]["policy/loss" if isinstance(agent, BCConfig) else "actor/loss"]
        for line in records(whole.run_dir)
    ]
    assert len(set(losses)) == 3


def test_what_a_busy_machine_adds_is_no_difference(tmp_path: Path) -> None:
    """The watchdog's word on late data is a row of its own, in whichever run it came."""
    for folder, notes in (("calm", {}), ("busy", {"health/stall": 1.0, "health/disk": 1.0})):
        with MetricLog(tmp_path / folder, (), interval=1) as log:
            log.write(4, {"policy/loss": 0.5, "time/step": len(notes)})
            log.write(4, notes)
    assert records(tmp_path / "busy") == records(tmp_path / "calm")
    assert table(tmp_path / "busy") == table(tmp_path / "calm") == [["step", "policy/loss"], ["4", "0.5"]]


# What cannot be tested from inside: signals.


def start(file: Path, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`pirl train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pirl", "train", str(file), *words],
        env=os.environ | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(child: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    """Until something is there; a child that ends before is a failure."""
    deadline = time.monotonic() + 120
    while not seen():
        assert child.poll() is None, child.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "the run came to nothing within two minutes"
        time.sleep(0.02)


def goes_on_as_if_nothing_had_happened(config: RLTrainConfig, folder: Path, steps: int = 3) -> None:
    """A few more steps, and the state is that of a run of this length that nobody touched."""
    reached = steps_of(config)[-1]
    config = replace(config, num_train_steps=reached + steps)
    assert train(config, resume=True) == 0
    untouched = replace(config, checkpoint=replace(config.checkpoint, base_dir=str(folder), save_interval=10**6))
    assert train(untouched) == 0
    assert_same_bits(restored(config), restored(untouched))
    assert records(config.run_dir) == records(untouched.run_dir)
    assert table(config.run_dir) == table(untouched.run_dir)
    assert position_of(config) == position_of(untouched)


def test_asked_to_stop_it_saves_and_goes_on(tmp_path: Path, cache: dict) -> None:
    """SIGTERM, resumed on the command line; SIGINT, resumed here. The processes compile for themselves."""
    config = small_run(tmp_path / "runs", BC, num_train_steps=10**6)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=10**6))
    file = write_yaml(tmp_path / "run.yaml", config)
    reached = 0
    for words, sent in (((), signal.SIGTERM), (("--resume",), signal.SIGINT)):
        child = start(file, *words)
        try:
            wait_for(child, lambda last=reached: len(records(config.run_dir)) > last // 4 + 1)
            child.send_signal(sent)
            said = child.communicate(timeout=60)[1]
        finally:
            child.kill()
        assert child.returncode == 130, said
        found = re.search(r"interrupted after step (\d+); --resume continues", said)
        assert found, said
        before, reached = reached, int(found[1])
        assert steps_of(config)[-1] == reached > before
        assert "Traceback" not in said
    goes_on_as_if_nothing_had_happened(config, tmp_path / "untouched")


def test_killed_at_any_moment_it_goes_on_from_a_complete_step(tmp_path: Path, cache: dict) -> None:
    """Three times without warning, with a checkpoint being written most of the time."""
    config = small_run(tmp_path / "runs", BC, num_train_steps=10**6)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=2, keep_last=2))
    file = write_yaml(tmp_path / "run.yaml", config)
    moments, reached = random.Random(0), 0
    for number in range(3):
        child = start(file, *(["--resume"] if number else []), environment=cache)
        try:
            wait_for(child, lambda last=reached: max(steps_of(config), default=0) > last)
            time.sleep(moments.uniform(0, 0.3))
        finally:
            child.kill()
            child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert 1 <= len(steps_of(config)) <= 3  # old ones go as new ones come, with a process that dies in between
        reached = steps_of(config)[-1]
    goes_on_as_if_nothing_had_happened(config, tmp_path / "untouched")
