"""The watchdog says what is wrong, once, and stops a run only if it was told to."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pirl.config import WatchdogConfig
from pirl.errors import ConfigError, PirlWarning
from pirl.training.watchdog import UnhealthyError, Watchdog

FINE = {"time/stall_fraction": 0.01, "policy/grad_norm": 1.0, "eval/success_rate": 0.6, "memory/host_gib": 1.0}

WORTHLESS = {"held_out/auc": 0.55, "held_out/auc_by_chance": 0.7}


def looked(
    records: Sequence[Mapping[str, float]], folder: Path, *, free: float = 100.0, config: WatchdogConfig | None = None
) -> tuple[list[str], dict[str, float]]:
    """(what was said, what was written) over some records."""
    dog = Watchdog(config or WatchdogConfig(patience=3), folder, free_bytes=lambda _: int(free * 2**30))
    written: dict[str, float] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for record in records:
            written |= dog.look(record)
    return [str(warning.message) for warning in said], written


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    assert looked([FINE] * 20, tmp_path) == ([], {})


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        (0.3, WORTHLESS),  # it knows nothing yet, and says so
        (0.9, {"held_out/auc": 0.8, "held_out/auc_by_chance": 0.7}),
        (0.9, {"held_out/rank_correlation": 0.6, "held_out/rank_correlation_by_chance": 0.3}),
    ],
)
def test_a_critic_that_learns_is_left_alone(trained: float, held_out: dict[str, float], tmp_path: Path) -> None:
    assert looked([FINE | {"critic/mc_correlation": trained} | held_out] * 5, tmp_path) == ([], {})


@pytest.mark.parametrize(
    ("records", "name", "words"),
    [
        ([FINE | {"time/stall_fraction": 0.9}] * 5, "stall", "waits for data 90%"),
        ([FINE | {"policy/grad_norm": 0.0}] * 5, "dead_gradients", "policy/grad_norm"),
        ([FINE, *[FINE | {"eval/success_rate": 0.1}] * 3], "collapse", "from 0.60 to 0.10"),
        ([FINE, {"ript/success_rate": 0.0}, FINE, {"ript/success_rate": 0.0}], "no_success", "0 in two collections"),
        ([{"critic/mc_correlation": 0.9}, FINE | WORTHLESS, FINE | WORTHLESS], "memorised", "held_out/auc is 0.55"),
        ([FINE | {"online/success_rate": 0.0}] * 3, "no_success", "easier states"),
        ([FINE | {"memory/host_gib": 1.0 + 0.2 * i} for i in range(6)], "memory", "grew from"),
    ],
)
def test_each_trouble_is_said_once_and_written(
    tmp_path: Path, records: list[dict[str, float]], name: str, words: str
) -> None:
    said, written = looked(records, tmp_path)
    assert len(said) == 1
    assert words in said[0]
    assert written == {f"health/{name}": 1.0}


def test_one_bad_record_is_no_trouble(tmp_path: Path) -> None:
    bad = FINE | {"time/stall_fraction": 0.9, "policy/grad_norm": 0.0}
    assert looked([bad, bad, FINE, bad, bad, FINE], tmp_path) == ([], {})


def test_noise_in_success_is_no_collapse(tmp_path: Path) -> None:
    rates = [0.6, 0.45, 0.5, 0.35, 0.4, 0.32]
    assert looked([FINE | {"eval/success_rate": rate} for rate in rates], tmp_path) == ([], {})


def test_a_policy_that_did_succeed_or_was_only_tried_out_is_left_alone(tmp_path: Path) -> None:
    rates = [0.02, 0.0, 0.0, 0.0]
    assert looked([FINE | {"online/success_rate": rate} for rate in rates], tmp_path) == ([], {})
    assert looked([FINE | {"eval/success_rate": 0.0}] * 5, tmp_path) == ([], {})


def test_a_full_disk_is_said_at_once(tmp_path: Path) -> None:
    said, written = looked([FINE] * 3, tmp_path, free=0.5)
    assert written == {"health/disk": 1.0}
    assert "0.5 GiB" in said[0]


def test_it_stops_the_run_only_if_told(tmp_path: Path) -> None:
    with pytest.raises(UnhealthyError, match="success"):
        looked([FINE, *[FINE | {"eval/success_rate": 0.1}] * 3], tmp_path, config=WatchdogConfig(patience=3, stop=True))
    assert looked([FINE] * 3, tmp_path, free=0.1, config=WatchdogConfig(enabled=False)) == ([], {})


def test_a_hanging_step_is_noticed_from_beside(tmp_path: Path) -> None:
    now = [0.0]
    dog = Watchdog(WatchdogConfig(hang_seconds=60.0), tmp_path, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 10.0
        dog.beat()
    now[0] += 150.0  # long, but steps take ten seconds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dog.listen()
    now[0] += 100.0
    with pytest.warns(UserWarning, match="no step has ended for 250 s"):
        dog.listen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dog.listen()


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="patience is 0"):
        WatchdogConfig(patience=0)


def test_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    now = [0.0]
    dog = Watchdog(WatchdogConfig(hang_seconds=60.0), tmp_path, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 1
        dog.beat()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dog.paused():
            now[0] += 500
            dog.listen()
        now[0] += 30
        dog.listen()
    now[0] += 40
    with pytest.warns(PirlWarning, match="no step has ended for 70 s; usually one takes 1.0 s"):
        dog.listen()
