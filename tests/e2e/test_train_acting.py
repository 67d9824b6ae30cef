"""Whole runs that act: what they write, which checkpoints they keep, when they stop, and what OpenPI is given."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collecting_runs import ONLINE, RIPT, make_trouble, online_run, ript_run, saving, traced_once
from pirl.agents.agent import Agent, TrainState
from pirl.agents.config import RIPTConfig
from pirl.build import build_agent
from pirl.checkpoints.weights import load
from pirl.config import EarlyStop, RLTrainConfig
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.normalize import NormStats, save_norm_stats
from pirl.data.robots import get_robot
from pirl.envs.config import TabletopConfig
from pirl.models.observation import Observation
from pirl.models.params import flatten
from pirl.names import BASE_CAMERA
from pirl.parallel.sharding import make_mesh
from pirl.planning.plan import batch_shapes
from pirl.recipes import get_config
from pirl.recipes.debug import shrink
from pirl.rollout.config import EvalConfig, OnlineConfig
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.pool import LocalPool
from pirl.rollout.record import RolloutRecorder, expert_rollouts
from pirl.training.acting import open_checkpoint
from pirl.training.build import build_acting, build_transform
from pirl.training.config import KeepBest
from pirl.training.loop import train
from small_runs import assert_same_bits, compiled_once, position_of, records, restored, steps_of

WATCHED = EvalConfig(interval=2, episodes=4)
TABLE = TabletopConfig(max_steps=4)


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with traced_once(), compiled_once(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def ript(tmp_path_factory: pytest.TempPathFactory) -> RLTrainConfig:
    """Five iterations, each evaluated, the best kept, all episodes recorded."""
    folder = tmp_path_factory.mktemp("ript")
    config = ript_run(folder, num_train_steps=5, evaluation=replace(WATCHED, interval=1))
    config = replace(config, rollout=replace(config.rollout, record=str(folder / "dataset")))
    config = saving(config, save_interval=1, keep_last=1, keep_best=KeepBest())
    assert train(config) == 0
    return config


def test_a_run_learns_and_says_so(ript: RLTrainConfig) -> None:
    lines = records(ript.run_dir)
    trained = [line for line in lines if "ript/updates" in line["values"]]
    evaluated = [line for line in lines if "eval/success_rate" in line["values"]]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in evaluated] == [0, 1, 2, 3, 4, 5]
    updates = sum(line["values"]["ript/updates"] for line in trained)
    assert int(restored(ript).step) == updates > 5
    for name in ("ript/loss", "ript/drift", "rollout/lost_episodes", "curriculum/success_mean", "bc/loss"):
        assert any(name in line["values"] for line in trained), name
    for line in trained:
        low = ript.agent.groups_per_iteration  # type: ignore[union-attr]
        assert low <= line["values"]["ript/attempted_groups"] <= 2 * low
    fresh = build_agent(ript).init(jax.random.split(jax.random.key(ript.seed))[0])
    before, after = flatten(fresh.params["policy"]), flatten(restored(ript).params["policy"])
    assert all(np.any(np.asarray(before[name]) != np.asarray(after[name])) for name in before)


def test_evaluations_are_filmed(ript: RLTrainConfig) -> None:
    """The first success and the first failure of each, and all in one picture."""
    for step in range(6):
        names = {path.name for path in (ript.run_dir / "films" / str(step)).iterdir()}
        films = {name.partition("-")[0] for name in names if name.endswith(".mp4")}
        (line,) = (x for x in records(ript.run_dir) if x["step"] == step and "eval/success_rate" in x["values"])
        rate = line["values"]["eval/success_rate"]
        assert films == {kind for kind, some in (("success", rate > 0), ("failure", rate < 1)) if some}
        assert "filmstrip.png" in names


def test_the_best_is_kept_in_openpi_s_layout(ript: RLTrainConfig) -> None:
    """Of equals the later one; step 0 was evaluated, but not saved."""
    rates = {
        line["step"]: line["values"]["eval/success_rate"]
        for line in records(ript.run_dir)
        if line["step"] and "eval/success_rate" in line["values"]
    }
    best = max(rates, key=lambda step: (rates[step], step))
    assert steps_of(ript) == sorted({best, 5})
    for step in steps_of(ript):
        folder = ript.run_dir / str(step)
        assert {path.name for path in folder.iterdir() if path.is_dir()} == {"params", "assets", "train_state", "extra"}
        assert list(folder.glob("assets/**/norm_stats.json"))


def test_every_episode_was_recorded(ript: RLTrainConfig) -> None:
    assert ript.rollout.record is not None
    source = recorded(Path(ript.rollout.record), "synthetic", size=8)
    episodes = [source.episode(index) for index in range(len(source))]
    rounds = [line["values"] for line in records(ript.run_dir) if "ript/updates" in line["values"]]
    sizes = [int(values["ript/attempted_groups"]) * RIPT.group_size for values in rounds]
    assert len(episodes) == sum(sizes) == position_of(ript)["stream"]["collector"]["recorded"]
    for first, size, values in zip(np.cumsum([0, *sizes]), sizes, rounds, strict=False):
        mine = episodes[first : first + size]
        assert np.mean([bool(episode.success) for episode in mine]) == pytest.approx(values["ript/success_rate"])
        assert all(episode.rewards.sum() == float(bool(episode.success)) for episode in mine)
    assert source.frames(0)[BASE_CAMERA].shape == (len(episodes[0]), 6, 8, 3)


def recorded(folder: Path, robot: str, *, size: int) -> Any:
    config = DataConfig(repo_ids=(str(folder),), robot=robot, cache="ram", outcome="columns")
    return create_source(config, get_robot(robot), image_size=size)


def test_no_better_is_over_early(tmp_path: Path) -> None:
    """The first measurement is the best there is; the second is the last."""
    stop = EarlyStop(patience=1, min_delta=1.0)
    config = ript_run(tmp_path, num_train_steps=9, evaluation=WATCHED, early_stop=stop)
    assert train(config) == 0
    assert steps_of(config)[-1] == 4
    assert [line["step"] for line in records(config.run_dir) if "eval/return" in line["values"]] == [0, 2, 4]


def test_what_openpi_serves_follows_the_condition(tmp_path: Path) -> None:
    """`cfg`: the condition is part of the served bias, and the run goes on from weights without it."""
    agent = replace(RIPT, loss="cfg", bc_weight=0.0)
    straight = saving(ript_run(tmp_path, agent, num_train_steps=3, exp_name="straight"), save_interval=2)
    assert train(straight) == 0
    pieces = replace(straight, exp_name="pieces")
    assert train(replace(pieces, num_train_steps=2)) == 0
    assert_same_bits(restored(pieces, 2), restored(straight, 2))
    assert train(pieces, resume=True) == 0
    state = restored(straight)
    assert_same_bits(restored(pieces), state)
    assert np.any(np.asarray(state.ema["condition"]["embedding"]))

    algorithm = build_agent(straight)
    served = load(straight.run_dir / "3", jax.eval_shape(lambda: state.policy))
    assert_same_bits(served, algorithm.inference_params(state))  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        assert_same_bits(served, state.policy)

    observation = Observation.from_dict({"image": {}, "image_mask": {}, "state": np.ones((2, 2), np.float32)})
    keys = jax.random.split(jax.random.key(0), 2)
    for guidance in (1.0, 2.5):
        acting = open_checkpoint(
            straight.run_dir, change=lambda own, g=guidance: replace(own, agent=replace(own.agent, guidance=g))
        )
        found = build_agent(acting.found.config).act(acting.state, observation, keys)
        np.testing.assert_array_equal(found, algorithm.act(state, observation, keys, guidance=guidance))  # type: ignore[call-arg]


def test_from_nothing_but_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dataset: the first collection comes before the first batch. Stopped in it, and again later, it goes on; what
    has left the small replay buffer leaves the disk when no checkpoint names it.
    """
    stats = NormStats(mean=np.zeros(2), std=np.ones(2), q01=-np.ones(2), q99=np.ones(2))
    save_norm_stats(tmp_path / "assets" / "walk", {"state": stats, "actions": stats})
    config = online_run(tmp_path, online=replace(ONLINE, start_step=0), num_train_steps=5)
    data = replace(config.data, repo_ids=(), asset_id="walk", assets_dir=str(tmp_path / "assets"), replay_episodes=13)
    config = saving(replace(config, data=data, exp_name="straight"), save_interval=2, keep_last=1)
    assert train(config) == 0
    stream = position_of(config)["stream"]
    assert stream["replay"]["appended"] > len(stream["replay"]["episodes"]) == 13
    assert {path.name for path in (config.run_dir / "replay").iterdir()} == set(stream["replay"]["episodes"])

    stopped = replace(config, exp_name="stopped")
    for moment, reached in ((4, 0), (10, 3)):
        make_trouble(monkeypatch, tmp_path, terminate=moment)
        assert train(stopped, resume=reached > 0) == 130
        position = position_of(stopped)
        assert position["step"] == reached
        assert 0 < len(position["stream"]["collector"]["rollouts"]) < ONLINE.episodes
    monkeypatch.undo()
    assert train(stopped, resume=True) == 0
    assert_same_bits(restored(stopped), restored(config))
    assert position_of(stopped) == position_of(config)
    assert records(stopped.run_dir) == records(config.run_dir)
    named = set(stream["replay"]["episodes"])
    assert {path.name for path in (stopped.run_dir / "replay").iterdir()} == named


class Still(Agent):
    """An agent that does nothing: pictures are all that matters."""

    def __init__(self, config: RLTrainConfig) -> None:
        self.shape, self.config = (config.horizon, config.model.action_dim), config.agent

    def init(self, key: Any, policy_params: Any = None) -> TrainState:
        return TrainState(step=0, params={})

    def update(self, state: TrainState, batch: Any, key: Any) -> Any:
        raise NotImplementedError

    def act(self, state: TrainState, observation: Observation, keys: Any, **_: Any) -> Any:
        return jnp.zeros((len(keys), *self.shape))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four demonstrations on a table, and assets."""
    folder = tmp_path_factory.mktemp("table")
    with LocalPool(TABLE, 1) as pool:
        with RolloutRecorder(folder / "demos", info=pool.info) as recorder:
            contexts = fixed_contexts(pool.info, 4, "train")
            for rollout in expert_rollouts(TabletopConfig(), contexts, dials=None, seed=0):
                recorder.add(rollout)
    stats = {
        name: NormStats(mean=np.zeros(dim), std=np.ones(dim), q01=-np.ones(dim), q99=np.ones(dim))
        for name, dim in (("state", 4), ("actions", 3))
    }
    save_norm_stats(folder / "assets" / "demos", stats)
    return folder


def on_a_table(recipe: str, demos: Path, **changes: Any) -> RLTrainConfig:
    config = shrink(get_config(recipe))
    names = {"repo_ids": (str(demos / "demos"),), "assets_dir": str(demos / "assets"), "tokenizer": "word"}
    return replace(config, data=replace(config.data, **names), env=TABLE, evaluation=None, **changes)


def test_replayed_pictures_are_those_of_a_dataset(demos: Path, tmp_path: Path) -> None:
    """Demonstrations read from disk and episodes just collected fill one batch, picture by picture the same size."""
    config = on_a_table("acrlpd_tabletop", demos, online=OnlineConfig(start_step=1, episodes=2))
    config = saving(config, base_dir=str(tmp_path))
    agent = Still(config)
    with build_acting(config, agent, build_transform(config), make_mesh()) as (stream, _):
        state = agent.init(None)
        found = [next(iter(stream.round(step, state, lambda: False, lambda _: None))) for step in (1, 2)]
        pictures = [np.asarray(batch["observations"]["image"][BASE_CAMERA]) for batch in found]
        kept = stream.state()["replay"]["episodes"]
        replayed = [stream._replay.frames(i)[BASE_CAMERA] for i in range(2)]  # type: ignore[attr-defined]
        assert len(kept) == len(stream._replay) == 2  # type: ignore[attr-defined]
    assert pictures[0].shape == pictures[1].shape
    source = recorded(demos / "demos", "tabletop", size=config.model.image_size)  # type: ignore[union-attr]
    offline = np.concatenate([source.frames(i)[BASE_CAMERA] for i in range(len(source))])
    assert offline.shape[1:] == replayed[0].shape[1:] == pictures[0].shape[1:]
    known = {image.tobytes() for image in offline}
    fresh = {image.tobytes() for frames in replayed for image in frames}
    assert [all(image.tobytes() in known for image in images) for images in pictures] == [True, False]
    assert sum(image.tobytes() in fresh for image in pictures[1]) >= len(pictures[1]) // 2


def test_batches_are_what_their_step_was_compiled_for(demos: Path) -> None:
    """It is compiled before there is one. With another shape, or one array more, it would have to be again."""
    ript = on_a_table("ript_tabletop", demos)
    assert isinstance(ript.agent, RIPTConfig)
    for config in (
        get_config("debug"),
        get_config("debug_bc"),
        on_a_table("acrlpd_tabletop_online", demos),
        ript,
        replace(ript, agent=replace(ript.agent, bc_weight=0.1)),
    ):
        with build_acting(config, build_agent(config), build_transform(config), make_mesh()) as (stream, _):
            batch = stream.example()
        assert jax.tree.map(str, jax.tree.map(jax.typeof, batch)) == jax.tree.map(
            str, jax.tree.map(jax.typeof, batch_shapes(build_agent(config), config.batch_sizes))
        ), config.name
