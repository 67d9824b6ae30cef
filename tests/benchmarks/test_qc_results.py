"""Q-chunking's curves without simulators: chunks, tasks in one program, resuming, evaluation and report."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
STATE, TASKS, ROWS, BATCH = 3, 2, 40, 8


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RESULTS))
    import qc_eval
    import qc_play
    import qc_report
    import qc_train

    return {"play": qc_play, "train": qc_train, "eval": qc_eval, "report": qc_report}


@pytest.fixture
def train(modules: Any) -> Any:
    return modules["train"]


@pytest.fixture
def data() -> dict[str, jax.Array]:
    """Four episodes of ten transitions, with successes in the middle of some."""
    rng = np.random.default_rng(0)
    masks = (rng.uniform(size=(TASKS, ROWS)) > 0.2).astype(np.float32)
    arrays = {
        "observations": rng.normal(size=(ROWS, STATE)),
        "next_observations": rng.normal(size=(ROWS, STATE)),
        "actions": rng.uniform(-1, 1, size=(ROWS, 5)),
        "terminals": np.arange(ROWS) % 10 == 9,
        "rewards": -masks,
        "masks": masks,
    }
    return {key: jnp.asarray(value, jnp.float32) for key, value in arrays.items()}


@pytest.fixture
def agent(train: Any) -> Any:
    return train.make_agent(STATE, width=8, samples=3)


def test_rows_become_transitions(modules: Any):
    """The last row of an episode is a next observation and nothing else; actions are clipped."""
    rows = {
        "observations": np.arange(7, dtype=np.float32)[:, None],
        "actions": np.full((7, 5), 1, np.float32),
        "terminals": np.array([0, 0, 0, 1, 0, 0, 1], bool),
        "rewards": np.arange(14, dtype=np.float32).reshape(2, 7) - 13,
        "masks": np.ones((2, 7), np.float32),
    }
    found = modules["play"].transitions(rows)
    assert found["observations"][:, 0].tolist() == [0, 1, 2, 4, 5]
    assert found["next_observations"][:, 0].tolist() == [1, 2, 3, 5, 6]
    assert found["terminals"].tolist() == [0, 0, 1, 0, 1]
    assert found["rewards"].tolist() == [[-13, -12, -11, -9, -8], [-6, -5, -4, -2, -1]]
    assert found["actions"].max() == np.float32(1 - 1e-5)


def test_shards_are_made_once_and_load_as_one(modules: Any, tmp_path: Path):
    play = modules["play"]
    amount = play.Amount(episodes=3, rows=2, shard=2)
    assert amount.missing(tmp_path) == [0, 1]
    for index, episodes in enumerate((2, 1)):
        n = 2 * episodes
        shard = {"observations": np.ones((n, 1)), "actions": np.zeros((n, 5)), "terminals": np.arange(n) % 2 == 1}
        shard |= {"rewards": np.full((5, n), -3.0 * index), "masks": np.ones((5, n))}
        np.savez(amount.path(tmp_path, index), **shard)
    assert amount.missing(tmp_path) == []
    assert play.load("scene", tmp_path, amount)["rewards"].tolist() == [[0, 0, -1]] * 5
    assert play.load("cube-double", tmp_path, amount)["rewards"].tolist() == [[0, 0, -3]] * 5


def test_scene_episodes_without_the_cube_in_the_picture_are_made_again(modules: Any):
    qpos = np.zeros((4, 25))
    healthy = modules["play"].healthy
    assert healthy("scene", {"qpos": qpos})
    for y, z, fine in ((0.3, 0.0, False), (-0.31, 0.07, True), (-0.31, 0.02, False)):
        qpos[2, 15:17] = y, z
        assert healthy("scene", {"qpos": qpos}) is fine
    assert healthy("puzzle-3x3", {})


def test_chunks_against_a_loop(train: Any, data: dict[str, jax.Array]):
    """Q-chunking's sums, one step after the other."""
    found = train.chunk_batch(data, jnp.arange(ROWS - 4))
    d = {key: np.asarray(value, np.float64) for key, value in data.items()}
    for i in range(ROWS - 4):
        for task in range(TASKS):
            total, mask = 0.0, 1.0
            for j in range(5):
                total += 0.99**j * d["rewards"][task, i + j]
                mask = min(mask, d["masks"][task, i + j])
            np.testing.assert_allclose(found["reward_sum"][task, i], total, rtol=1e-5)
            assert found["next_terminal"][task, i] == 1 - mask
        valid, ended = [], 0.0
        for j in range(5):
            valid.append(1 - ended)
            ended = max(ended, d["terminals"][i + j])
        assert found["valid"][i].tolist() == valid
        assert found["sequence_mask"][i] == valid[-1]
        np.testing.assert_allclose(found["next_observations"]["state"][i], d["next_observations"][i + 4], rtol=1e-6)
        np.testing.assert_allclose(found["actions"][i], d["actions"][i : i + 5], rtol=1e-6)
    assert 0 < float(found["sequence_mask"].mean()) < 1


def test_seeds_and_tasks_in_one_program_learn_as_each_alone(train: Any, agent: Any, data: dict[str, jax.Array]):
    """`ACRLPD.update`, mapped over seeds and the critics of their policies, is the update of each."""
    key, update = train.update_key(1), jax.jit(agent.update)
    seeds = train.init_seeds(agent, [0, 1], TASKS)
    seeds, _ = train.make_updates(agent, BATCH)(seeds, data, jnp.array([0, 1]), updates=3)
    together = jax.tree.map(lambda x: x[1], seeds)
    for task in range(TASKS):
        pick = {"rewards": data["rewards"][task : task + 1], "masks": data["masks"][task : task + 1]}
        alone = train.TrainState(**only(train.init(agent, 1, TASKS), train.AXES, task))
        for step in range(3):
            draw, noise = jax.random.split(jax.random.fold_in(key, step))
            batch = train.chunk_batch(data | pick, jax.random.randint(draw, (BATCH,), 0, ROWS - 4))
            batch |= {name: batch[name][0] for name in ("reward_sum", "next_terminal")}
            alone, _ = update(alone, batch, noise)
        close(train.fields(alone), only(together, train.AXES, task))


def only(tree: Any, axes: Any, task: int) -> Any:
    """A task's part of what tasks share."""
    if isinstance(axes, dict):
        return {name: only(tree[name], axes[name], task) for name in axes}
    return tree if axes is None else jax.tree.map(lambda x: x[task], tree)


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_interrupted_seeds_end_as_others(train: Any, agent: Any, data: dict[str, jax.Array], tmp_path: Path):
    many = train.make_updates(agent, BATCH)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    schedule = train.Schedule(steps=8, evaluate_every=4, save_every=4, per_program=2)

    def run(folder: Path, schedule: Any) -> bool:
        fresh = train.init_seeds(agent, [1, 4], TASKS)
        return train.train_seeds(many, fresh, data, [1, 4], run=folder, name="scene", schedule=schedule)

    assert run(whole, schedule)
    assert not run(parts, replace(schedule, deadline=0.0))
    assert np.load(parts / "states/scene_1-4.npz")["['step']"].tolist() == [2, 2]
    assert run(parts, schedule)
    assert {path.stem for path in (parts / "weights").iterdir()} == {f"scene_{s}_{n}" for s in (1, 4) for n in (4, 8)}
    like = jax.eval_shape(lambda: train.init_seeds(agent, [1, 4], TASKS))
    states = [train.restore(folder / "states/scene_1-4.npz", like) for folder in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_each_task_is_acted_on_by_its_critic(train: Any, agent: Any):
    """With candidates and noise alike, rows differ by the critic that chooses."""
    params = train.init(agent, 0, TASKS)["params"]
    states, keys = jnp.ones((6, STATE)), jnp.stack([jax.random.key(0)] * 6)
    act = train.make_act(agent)
    chunks = act(params, states, keys, jnp.array([0, 1] * 3))
    for task in range(TASKS):
        alone = agent.act(
            train.TrainState(step=0, params=only(params, train.AXES["params"], task)),
            train.Observation.from_dict({"state": states}),
            keys,
        )
        np.testing.assert_allclose(chunks[task::2], alone[task::2], rtol=1e-5, atol=1e-6)


class Counting:
    """A fleet whose episodes of task k take k chunks and succeed where the episode's number is even."""

    slots = 4

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.left: list[Any] = [None] * self.slots

    def tell(self, commands: list[Any]) -> list[Any]:
        answers: list[Any] = []
        for slot, command in enumerate(commands):
            if command is None:
                answers.append(None)
            elif command[0] == "begin":
                self.begun.append(command[1:])
                self.left[slot] = [command[1], command[2]]
                answers.append((np.zeros(STATE, np.float32), False, False))
            else:
                task, seed = self.left[slot]
                assert command[1] == task - 1  # the chunk that was chosen for this task
                self.left[slot] = [task, seed]
                answers.append((np.zeros(STATE, np.float32), True, seed % 2 == 0))
        return answers


def test_every_episode_is_played_once_and_counted_where_it_belongs(modules: Any):
    fleet = Counting()
    solved = modules["eval"].evaluate(
        fleet, lambda states, tasks, turn: tasks.copy(), episodes=6, seed=[3, 100], state_dim=STATE
    )
    assert Counter(task for task, _ in fleet.begun) == dict.fromkeys(range(1, 6), 6)
    assert len(set(fleet.begun)) == 30
    expected = [
        [np.random.SeedSequence([3, 100, task, episode]).generate_state(1)[0] % 2 == 0 for episode in range(6)]
        for task in range(5)
    ]
    assert solved.tolist() == expected


def test_the_report_compares_with_the_paper(modules: Any, tmp_path: Path):
    """Means over seeds, tasks averaged within a seed, the paper's figures beside; written twice it says the same."""
    report = modules["report"]
    for seed, rates in enumerate(([1.0, 1.0, 0.4, 0.6, 0.0], [1.0, 0.9, 0.5, 0.5, 0.0])):
        solved = np.array([[episode < 50 * rate for episode in range(50)] for rate in rates])
        report.append(tmp_path / "results.jsonl", "scene", seed, 100_000, solved, "float32", 1.0)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 10
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / report.PAGE).write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.report([tmp_path / "results.jsonl"], docs)
    page, raw = (docs / report.PAGE).read_text(), (docs / report.RAW).read_text()
    report.report([tmp_path / "results.jsonl"], docs)
    assert ((docs / report.PAGE).read_text(), (docs / report.RAW).read_text()) == (page, raw)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| scene | 100k | **all** | 2 | 59 [58, 60] | 58.5 [51.1, 65.8] | inside |" in page
    assert "| scene | 100k | task 2 | 2 | 95 [90, 100] | 97.5 [96, 99] | intervals overlap |" in page
    assert (docs / report.PICTURE).read_text().count("<circle") == 2


def test_verdicts(modules: Any):
    report = modules["report"]
    theirs = report.Estimate(0.5, 0.4, 0.6)
    for ours, expected in (
        ((0.45, 0.3, 0.6), "inside"),
        ((0.3, 0.1, 0.5), "intervals overlap"),
        ((0.3, 0.2, 0.35), "below"),
        ((0.8, 0.7, 0.9), "above"),
    ):
        assert report.verdict(report.Estimate(*ours), theirs) == expected
    assert report.paper("scene", 0, 50_000) is None
    assert report.paper("cube-single", 0, 100_000) is None
    assert report.paper("puzzle-3x3", 3, 200_000) == report.Estimate(1.0, 1.0, 1.0)


def test_the_most_exact_type_that_is_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RESULTS))
    import qc

    def row(dtype: str, rate: float, together: int = 1) -> dict[str, Any]:
        return {"dtype": dtype, "flags": "", "together": together, "rate": rate}

    rates = [row("float32", 300.0, 4), row("float32", 200.0), row("bfloat16", 600.0, 4), row("bfloat16", 500.0)]
    assert qc.choose(rates, 300_000, 1000) == rates[0]
    assert qc.choose(rates, 400_000, 1000) == rates[2]
    assert qc.choose(rates, 900_000, 1000) == rates[3]
    assert qc.choose([], 1, 1) == {"dtype": "bfloat16", "flags": "", "together": 1}


def test_stages_take_what_all_hands_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Every command that `all` starts is one the program takes, with the run's settings."""
    monkeypatch.syspath_prepend(str(RESULTS))
    import qc

    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command[2:])

        def wait(self) -> int:
            return 0

        def poll(self) -> None:
            return None

        terminate = wait

    monkeypatch.setattr(qc.subprocess, "Popen", Process)
    run = ["--run", str(tmp_path), "--docs", str(tmp_path), "--steps", "30", "--seeds", "4", "5"]
    qc.all_stage(qc.parse(["all", *run]))
    parsed = [qc.parse(command) for command in commands]
    assert [args.stage for args in parsed] == ["data", *["speed"] * 6, "data", "eval", "train"]
    assert {(args.steps, tuple(args.seeds)) for args in parsed} == {(30, (4, 5))}
    assert [args.domains for args in parsed if args.stage == "data"] == [["puzzle-3x3"], ["scene"]]
    assert (parsed[-1].dtype, parsed[-1].together) == ("bfloat16", 1)
