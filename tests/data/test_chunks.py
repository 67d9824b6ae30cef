"""Q-chunks against a slow re-derivation, step by step in plain Python, and what the critic may see of an ending."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data.chunks import (
    bootstrap_rows,
    choose_donors,
    chunk_actions,
    chunk_outcomes,
    fill_tails,
    known_steps,
    tabulate,
    validate_qchunking_batch_format,
)
from pirl.errors import DataError
from pirl.records import Episode


def make_episode(number, rewards, terminated, truncated=None, plan=None, plan_horizon=6):
    """Actions and states that tell where they come from: [episode, step]."""
    steps = len(rewards)
    where = np.stack([np.full(steps, number + 1), np.arange(steps)], axis=1).astype(np.float32)
    intended = None
    if plan is not None:
        ahead = np.arange(steps)[:, None] + np.arange(plan_horizon)
        intended = np.stack([np.full(ahead.shape, number + 1), ahead], axis=-1).astype(np.float32)
        intended[:, plan:] = np.nan
    return Episode(
        task=f"task {number}",
        state=where,
        actions=where,
        rewards=np.array(rewards, np.float32),
        terminated=np.array(terminated, bool),
        truncated=np.zeros(steps, bool) if truncated is None else np.array(truncated, bool),
        intended=intended,
    )


@st.composite
def episode_lists(draw):
    """Episodes of all kinds: one step, successes at the end or in the middle, cuts, ends that nobody marked."""
    episodes = []
    for number in range(draw(st.integers(1, 4))):
        steps = draw(st.integers(1, 9))
        rewards = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=steps, max_size=steps))
        terminated = [draw(st.integers(0, 9)) == 0 for _ in range(steps)]
        terminated[-1] = draw(st.booleans())
        truncated = [draw(st.integers(0, 11)) == 0 for _ in range(steps)]
        truncated[-1] = draw(st.booleans())
        episodes.append(make_episode(number, rewards, terminated, truncated, draw(st.sampled_from([None, 0, 2, 4, 6]))))
    return episodes


def segment_end(episode, t):
    """One past the last step of the recording that step t belongs to."""
    while t + 1 < len(episode) and not episode.truncated[t]:
        t += 1
    return t + 1


def slow_outcomes(episode, t, horizon, h, gamma, boundary):
    """What a batch says about the chunk at t, from the definitions alone."""
    end = segment_end(episode, t)
    out = {"rewards": [], "masks": [], "valid": [], "terminals": []}
    mask, terminal = 1.0, 0.0
    for j in range(horizon):  # R_j, M_j, T_j, valid_j: valid_0 = 1, valid_j = 1 - T_{j-1}
        out["valid"].append(1.0 - terminal)
        inside = t + j < end
        out["rewards"].append(float(episode.rewards[t + j]) if inside else 0.0)
        if inside and episode.terminated[t + j]:
            mask = 0.0
        if inside and t + j == end - 1:
            terminal = 1.0
        out["masks"].append(mask)
        out["terminals"].append(terminal)
    window = [t + j for j in range(h) if t + j < end]
    finished = next((step for step in window if episode.terminated[step]), None)
    out["next_terminal"] = float(finished is not None)
    if boundary == "drop":
        out["sequence_mask"] = out["valid"][h - 1]
        if finished is None and t + h == end:
            out["sequence_mask"] = 0.0  # the observation after the last action was not recorded
        out["length"] = len(window)
        counted = window
        successor = min(t + len(window), end - 1)
    else:
        if finished is not None:
            counted = window[: finished - t + 1]
        else:
            counted = [step for step in window if step + 1 < end]  # steps whose successor was recorded
        out["length"] = len(counted)
        out["sequence_mask"] = float(len(counted) > 0)
        successor = min(t + len(counted), end - 1)
    out["reward_sum"] = sum(gamma ** (step - t) * float(episode.rewards[step]) for step in counted)
    out["mc_return"] = math.nan
    total = 0.0
    for step in range(t, end):
        total += gamma ** (step - t) * float(episode.rewards[step])
        if episode.terminated[step]:
            out["mc_return"] = total
            break
    return out, successor


@settings(max_examples=250, deadline=None)
@given(
    episodes=episode_lists(),
    horizon=st.integers(1, 8),
    shorter=st.integers(0, 7),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    boundary=st.sampled_from(["pad", "drop"]),
)
def test_outcomes_are_those_of_the_definitions(episodes, horizon, shorter, gamma, boundary):
    h = max(1, horizon - shorter)
    table = tabulate(episodes, discount=gamma)
    starts = [(episode, t) for episode in episodes for t in range(len(episode))]
    rows = np.arange(len(table))
    batch = chunk_outcomes(table, rows, horizon=horizon, critic_horizon=h, boundary=boundary)
    followers = bootstrap_rows(table, rows, batch["length"])
    for row, (episode, t) in enumerate(starts):
        expected, successor = slow_outcomes(episode, t, horizon, h, gamma, boundary)
        for key, value in expected.items():
            np.testing.assert_allclose(batch[key][row], value, rtol=1e-5, atol=1e-6, err_msg=f"{key} of {row}")
        np.testing.assert_array_equal(table.state[followers[row]], episode.state[successor])


def n_step_target(episode, t, h, n, gamma, value):
    """(y, L) of the chunk at t, walking step by step.

    Rewards until the task ends, n·h steps are over or the recording is; then the value of the state that was reached,
    if it was recorded. None where not one step can be counted.
    """
    y, step, end = 0.0, t, segment_end(episode, t)
    while step < t + n * h:
        if episode.terminated[step]:
            return y + gamma ** (step - t) * float(episode.rewards[step]), step - t + 1
        if step + 1 == end:
            break  # what came of this action was not recorded
        y += gamma ** (step - t) * float(episode.rewards[step])
        step += 1
    return (y + gamma ** (step - t) * value(episode, step), step - t) if step > t else (None, 0)


@settings(max_examples=250, deadline=None)
@given(
    episodes=episode_lists(),
    horizon=st.integers(1, 5),
    shorter=st.integers(0, 4),
    n=st.integers(1, 4),
    gamma=st.sampled_from([0.5, 0.99, 1.0]),
)
def test_targets_over_several_chunks_are_those_of_a_walk(episodes, horizon, shorter, n, gamma):
    h = max(1, horizon - shorter)
    table = tabulate(episodes, discount=gamma)
    rows = np.arange(len(table))
    batch = chunk_outcomes(table, rows, horizon=horizon, critic_horizon=h, boundary="pad", n_step=n)
    values = np.random.default_rng(0).normal(size=len(table))
    followers = bootstrap_rows(table, rows, batch["length"])
    y = batch["reward_sum"] + gamma ** batch["length"] * (1 - batch["next_terminal"]) * values[followers]
    where = [(number, t) for number, episode in enumerate(episodes) for t in range(len(episode))]
    for row, (number, t) in enumerate(where):
        first = row - t
        expected, length = n_step_target(episodes[number], t, h, n, gamma, lambda _, step: values[first + step])  # noqa: B023
        assert batch["length"][row] == length
        assert batch["sequence_mask"][row] == (expected is not None)
        if expected is not None:
            np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-5)
    plain = chunk_outcomes(table, rows, horizon=horizon, critic_horizon=h, boundary="pad")
    for key in ("rewards", "masks", "valid", "terminals", "mc_return"):  # what is not the target's stays
        np.testing.assert_array_equal(batch[key], plain[key])


def test_several_chunks_reach_a_success_that_one_does_not():
    table = tabulate([make_episode(0, [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1])], discount=0.5)
    rows = np.arange(6)
    batch = chunk_outcomes(table, rows, horizon=2, critic_horizon=2, boundary="pad", n_step=2)
    assert batch["length"].tolist() == [4, 4, 4, 3, 2, 1]
    assert batch["reward_sum"].tolist() == [0, 0, 0.5**3, 0.25, 0.5, 1]
    assert batch["next_terminal"].tolist() == [0, 0, 1, 1, 1, 1]
    assert bootstrap_rows(table, rows, batch["length"])[:2].tolist() == [4, 5]


@settings(max_examples=100, deadline=None)
@given(episodes=episode_lists(), horizon=st.integers(1, 8), boundary=st.sampled_from(["pad", "drop"]))
def test_a_target_never_reads_beyond_the_end_nor_twice(episodes, horizon, boundary):
    """The target is linear in the rewards: γ^l for each counted step of the episode, 0 for every other one."""
    rows = np.arange(sum(map(len, episodes)))
    table = tabulate(episodes, discount=0.9)
    settings_ = dict(horizon=horizon, critic_horizon=horizon, boundary=boundary)
    before = chunk_outcomes(table, rows, **settings_)["reward_sum"]
    for changed in range(len(table)):
        rewards = table.rewards.copy()
        rewards[changed] += 1.0
        after = chunk_outcomes(replace(table, rewards=rewards), rows, **settings_)["reward_sum"]
        for row in rows[np.abs(after - before) > 1e-5]:
            assert row <= changed < table.end[row]
            assert after[row] - before[row] == pytest.approx(0.9 ** (changed - row), abs=1e-4)


def test_a_cut_inside_the_chunk_bootstraps_from_the_last_recorded_observation():
    episode = make_episode(0, [1, 2, 3, 4], [0, 0, 0, 0], [0, 0, 0, 1])
    table = tabulate([episode], discount=0.5)
    rows = np.arange(4)
    batch = chunk_outcomes(table, rows, horizon=3, critic_horizon=3, boundary="pad")
    assert batch["length"].tolist() == [3, 2, 1, 0]
    assert bootstrap_rows(table, rows, batch["length"]).tolist() == [3, 3, 3, 3]
    assert batch["reward_sum"].tolist() == [1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3, 0]  # never the 4: its outcome is unknown
    assert batch["sequence_mask"].tolist() == [1, 1, 1, 0]
    assert batch["next_terminal"].tolist() == [0, 0, 0, 0]
    assert np.isnan(batch["mc_return"]).all()


def test_a_success_inside_the_chunk_ends_it():
    table = tabulate([make_episode(0, [0, 0, 1], [0, 0, 1])], discount=0.5)
    batch = chunk_outcomes(table, np.arange(3), horizon=4, critic_horizon=4, boundary="pad")
    assert batch["length"].tolist() == [3, 2, 1]
    assert batch["reward_sum"].tolist() == batch["mc_return"].tolist() == [0.25, 0.5, 1.0]
    assert batch["next_terminal"].tolist() == batch["sequence_mask"].tolist() == [1, 1, 1]
    dropped = chunk_outcomes(table, np.arange(3), horizon=3, critic_horizon=3, boundary="drop")
    assert dropped["sequence_mask"].tolist() == [1, 0, 0]


def critic_view(table, rows, h):
    """The critic's chunks, with the raw actions as the normalised ones."""
    known = known_steps(table, rows, critic_horizon=h)
    chunks = chunk_actions(table, rows, horizon=h)
    donors = choose_donors(chunks, known)
    return fill_tails(chunks, known, donors), known, donors


def as_episode(actions):
    steps = len(actions)
    return Episode(
        task="",
        state=np.zeros((steps, 1), np.float32),
        actions=actions.astype(np.float32),
        rewards=np.zeros(steps, np.float32),
        terminated=np.arange(steps) == steps - 1,
        truncated=np.zeros(steps, bool),
    )


def unrelated(rng, steps, dims=3):
    return rng.normal(size=(steps, dims))


def wandering(rng, steps, dims=3):
    return np.cumsum(rng.normal(0, 0.3, (steps, dims)), axis=0)


def reaching(rng, steps, dims=3):
    """Positions on minimum-jerk reaches from place to place, with the noise of a sensor; the last is a gripper."""
    rows, here = [], rng.uniform(-1, 1, dims)
    while len(rows) < steps:
        there, part = rng.uniform(-1, 1, dims), np.linspace(0, 1, rng.integers(12, 25))[1:, None]
        rows += list(here + (there - here) * (10 * part**3 - 15 * part**4 + 6 * part**5))
        here = there
    positions = np.array(rows[:steps]) + rng.normal(0, 0.002, (steps, dims))
    positions[:, -1] = np.where(positions[:, 0] > 0, 1.0, -1.0)
    return positions


def moving(rng, steps, dims=3):
    """The same as differences, but for the gripper."""
    positions = reaching(rng, steps + 1, dims)
    return np.concatenate([8 * np.diff(positions[:, :-1], axis=0), positions[1:, -1:]], axis=1)


def batches_of(kind, count, rng, *, h=10, size=128):
    """(table, rows) of batches drawn from episodes that stop anywhere: the steps before an end are like any others."""
    table = tabulate([as_episode(kind(rng, rng.integers(30, 50))) for _ in range(60)], discount=0.9)
    return [(table, rng.integers(0, len(table), size)) for _ in range(count)]


def auc(chunks, short, rng):
    """How well a logistic regression on second differences tells the chunks that were filled; 0.5 is not at all.

    The last dimension is left out: a gripper's bends are real, and would hide others.
    """
    bend = np.linalg.norm(np.diff(chunks[..., :-1], 2, axis=1), axis=-1)
    bend = np.concatenate([bend, bend.max(1, keepdims=True)], axis=1)
    features = np.concatenate([bend, np.log(bend + 1e-4)], axis=1)
    features = np.c_[(features - features.mean(0)) / features.std(0), np.ones(len(features))]
    order = rng.permutation(len(short))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    x, y = features[train], short[train].astype(float)
    balance, w = np.where(y > 0, 0.5 / y.mean(), 0.5 / (1 - y.mean())), np.zeros(features.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        hessian = (x * (balance * p * (1 - p))[:, None]).T @ x + np.eye(len(w))
        w -= np.linalg.solve(hessian, x.T @ (balance * (p - y)) + w)
    score = features[test] @ w
    filled, others = score[short[test]], score[~short[test]]
    return (filled[:, None] > others).mean()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(unrelated, 0.45, 0.6), (wandering, 0.9, 0.64), (moving, 0.85, 0.64), (reaching, 0.97, 0.64)],
)
def test_no_bend_tells_where_the_episode_ended(kind, before, after):
    """A random donor's steps as they are give the end away wherever actions are smooth."""
    rng, h = np.random.default_rng(0), 10
    seen, spliced, short = [], [], []
    for table, rows in batches_of(kind, 50, rng, h=h):
        filled, known, _ = critic_view(table, rows, h)
        chunks = chunk_actions(table, rows, horizon=h)
        donors = rng.choice(np.flatnonzero(known == h), len(rows))
        unknown = np.arange(h) >= known[:, None]
        seen.append(filled)
        spliced.append(np.where(unknown[..., None], chunks[donors], chunks))
        short.append(known < h)
    short = np.concatenate(short)
    assert auc(np.concatenate(spliced), short, rng) > before
    assert auc(np.concatenate(seen), short, rng) < after


@pytest.mark.parametrize("kind", [unrelated, wandering, moving, reaching])
def test_borrowed_steps_are_as_large_as_others(kind):
    """No zeros, no held action, nothing out of range: sizes over many batches are those of chunks without an end."""
    rng, h = np.random.default_rng(1), 10
    lent, own = [], []
    for table, rows in batches_of(kind, 40, rng, h=h):
        filled, known, _ = critic_view(table, rows, h)
        chunks = chunk_actions(table, rows, horizon=h)
        for sample in np.flatnonzero(known < h):
            np.testing.assert_array_equal(filled[sample, : known[sample]], chunks[sample, : known[sample]])
        unknown = np.arange(h) >= known[:, None]
        lent.append(filled[unknown])
        own.append(filled[known == h].reshape(-1, chunks.shape[-1]))
    lent, own = np.concatenate(lent), np.concatenate(own)
    if kind is not wandering:  # which at its end is further away than before
        np.testing.assert_allclose(lent.std(0), own.std(0), rtol=0.25)
    assert (np.abs(lent).max(0) <= np.abs(own).max(0)).all()
    if kind in (moving, reaching):
        assert set(np.unique(lent[:, -1])) == {-1.0, 1.0}  # a switch stays one


def test_steady_motions_go_on():
    """Where all that chunks differ in is an offset, a tail follows its own known steps, as far as any chunk goes."""
    episodes = [make_episode(n, [0] * 12, [0] * 11 + [1]) for n in range(5)]
    table, h = tabulate(episodes, discount=0.9), 6
    rows = np.arange(len(table))
    seen, known, donors = critic_view(table, rows, h)
    assert ((donors == rows) == (known == h)).all()
    assert (known[donors] == h).all()
    step = rows % 12
    np.testing.assert_allclose(seen[..., 1], np.minimum(step[:, None] + np.arange(h), 11), atol=0.05)
    np.testing.assert_allclose(seen[..., 0], np.broadcast_to(rows[:, None] // 12 + 1, seen[..., 0].shape), atol=0.05)


def test_the_nearest_lends_and_of_equals_the_first():
    chunks = np.zeros((5, 4, 1), np.float32)
    chunks[:, :, 0] = [[0, 5, 0, 0], [0, 1, 7, 7], [0, 2, 8, 8], [0, 2, 9, 9], [9, 9, 9, 9]]
    known = np.array([2, 4, 4, 4, 1])
    assert choose_donors(chunks, known).tolist() == [2, 1, 2, 3, 1]


def test_rollouts_show_the_critic_what_the_policy_meant_to_do():
    table = tabulate([make_episode(0, [0, 0, 1], [0, 0, 1], plan=6), make_episode(1, [0] * 9, [0] * 9)], discount=0.9)
    seen, known, _ = critic_view(table, np.array([1, 2, 3]), h=5)
    assert known.tolist() == [5, 5, 5]
    assert seen[0, :, 1].tolist() == [1, 2, 3, 4, 5]
    assert seen[1, :, 1].tolist() == [2, 3, 4, 5, 6]
    assert (seen[:2, :, 0] == 1).all()


def test_a_plan_that_was_too_short_is_completed_by_another_sample():
    table = tabulate([make_episode(0, [0, 1], [0, 1], plan=3), make_episode(1, [0] * 9, [0] * 9)], discount=0.9)
    actions = chunk_actions(table, np.array([1]), horizon=6)
    assert actions[0, :, 1].tolist() == [1, 2, 3, 3, 3, 3]  # for the actor: held, and masked by `valid`
    seen, known, _ = critic_view(table, np.array([1, 3]), h=5)
    assert known.tolist() == [3, 5]
    assert seen[0].tolist() == [[1, 1], [1, 2], [1, 3], [2, 4], [2, 5]]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_batches_without_a_whole_chunk_still_show_real_actions(size):
    table = tabulate([make_episode(n, [0, 1], [0, 1]) for n in range(size)], discount=0.9)
    rows = np.arange(size) * 2
    seen, known, donors = critic_view(table, rows, h=5)
    assert known.tolist() == [2] * size
    assert (seen[:, :, 0] >= 1).all()
    assert (seen[:, :, 1] == [0, 1, 0, 1, 0]).all()  # the donor's steps in turn, none of them held
    if size > 1:
        assert (donors != np.arange(size)).all()
        assert (seen[:, 2:, 0] == (donors + 1)[:, None]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.zeros(2, np.float32)}, r"terminated has shape \(3,\), expected \(2,\)"),
        ({"terminated": np.zeros(2, bool)}, r"terminated has shape \(2,\), expected \(3,\)"),
        ({"actions": np.zeros((3, 5), np.float32)}, r"actions has shape \(3, 5\), expected \(3, 2\)"),
        ({"intended": np.zeros((3, 4, 7), np.float32)}, r"intended has shape \(3, 4, 7\), expected \(3, H, 2\)"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(change, message):
    good = make_episode(0, [0, 0, 1], [0, 0, 1])
    values = {name: getattr(good, name) for name in good.__dataclass_fields__} | change
    bad = object.__new__(Episode)  # as an untyped caller would build it
    for name, value in values.items():
        object.__setattr__(bad, name, value)
    with pytest.raises(DataError, match="episode 1 .*" + message):
        tabulate([good, bad], discount=0.9)
    with pytest.raises(DataError, match="no episodes"):
        tabulate([], discount=0.9)


def good_batch(size=3, horizon=4, h=2):
    def floats(*shape):
        return np.zeros(shape, np.float32)

    observations = {
        "image": {"base_0_rgb": np.zeros((size, 4, 4, 3), np.uint8)},
        "image_mask": {"base_0_rgb": np.ones(size, bool)},
        "state": floats(size, 2),
        "tokenized_prompt": np.zeros((size, 5), np.int32),
        "tokenized_prompt_mask": np.ones((size, 5), bool),
    }
    return {
        "observations": observations,
        "next_observations": dict(observations),
        "actions": floats(size, horizon, 2),
        "critic_actions": floats(size, h, 2),
        **{key: floats(size, horizon) for key in ("rewards", "masks", "valid", "terminals")},
        **{key: floats(size) for key in ("next_terminal", "sequence_mask", "reward_sum", "mc_return")},
        **{key: np.zeros(size, np.int32) for key in ("length", "episode")},
    }


def test_a_good_batch_is_accepted():
    batch = good_batch()
    validate_qchunking_batch_format(batch)
    del batch["next_observations"]
    validate_qchunking_batch_format(batch, next_observations=False)
    with pytest.raises(DataError, match="next_observations"):
        validate_qchunking_batch_format(batch)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("actions", np.zeros((3, 4), np.float32), r"actions.* has shape \(3, 4\), it needs 3 axes"),
        ("masks", np.zeros((3, 5), np.float32), r"masks.* has shape \(3, 5\), it needs \(3, 4\)"),
        ("valid", None, r"valid.* is missing"),
        ("next_terminal", np.zeros((3, 1), np.float32), r"next_terminal.* \(3, 1\), it needs \(3,\)"),
        ("length", np.zeros(3, np.float32), "length.* dtype float32, it needs int32"),
        ("critic_actions", np.zeros((3, 5, 2), np.float32), r"critic_actions.* \(3, 5, 2\), more than the 4 steps"),
        ("observations.state", np.zeros((2, 2), np.float32), r"observations.state.* \(2, 2\), it needs \(3, 2\)"),
        ("observations.image.base_0_rgb", np.zeros((3, 4, 4, 3), np.float32), r"image.base_0_rgb.* dtype float32"),
        ("observations.image_mask.base_0_rgb", np.ones(2, bool), r"image_mask.base_0_rgb.* \(2,\), it needs \(3,\)"),
        ("observations.image_mask", {}, r"image_mask.* holds \[\], it needs \['base_0_rgb'\]"),
        ("observations.tokenized_prompt_mask", np.ones((3, 4), bool), r"prompt_mask.* \(3, 4\), it needs \(3, 5\)"),
        ("observations", 3, "observations.* is not a dict"),
    ],
)
def test_a_bad_batch_is_refused_by_key_and_shape(path, value, message):
    batch = good_batch()
    *parents, key = path.split(".")
    node = batch
    for parent in parents:
        node = node[parent]
    node[key] = value
    with pytest.raises(DataError, match=message):
        validate_qchunking_batch_format(batch)


@pytest.mark.parametrize("imitated", ["all", "plans", "successes"])
def test_an_actor_imitates_what_was_planned_and_did_not_fail(imitated):
    """Plans of four steps, made anew after three; a failure, a success, an end nobody judged, and a demonstration."""
    kinds = {"failed": False, "succeeded": True, "unknown": None, "shown": True}
    ends = [0, 0, 0, 0, 1]
    episodes = [replace(make_episode(n, ends, ends), success=success) for n, success in enumerate(kinds.values())]
    plans = np.zeros((5, 4, episodes[0].actions.shape[1]), np.float32)
    for row, known in enumerate((4, 3, 2, 4, 3)):
        plans[row, known:] = np.nan
    episodes = [replace(episode, intended=plans) for episode in episodes[:3]] + episodes[3:]

    table = tabulate(episodes, discount=0.9, imitated=imitated)
    chunk = chunk_outcomes(table, np.arange(20), horizon=4, critic_horizon=4, boundary="pad")
    everything = tabulate(episodes, discount=0.9)
    other = chunk_outcomes(everything, np.arange(20), horizon=4, critic_horizon=4, boundary="pad")

    begins = np.array([1, 0, 0, 1, 0])
    own = {"all": np.ones(5), "plans": begins, "successes": begins}[imitated]
    failed = 0 * begins if imitated == "successes" else own
    expected = np.concatenate([failed, own, own, np.ones(5)])
    np.testing.assert_array_equal(chunk["valid"][:, 0], expected)
    np.testing.assert_array_equal(chunk["valid"], other["valid"] * expected[:, None])
    for name in set(chunk) - {"valid"}:  # the critic learns the same from all
        np.testing.assert_array_equal(chunk[name], other[name], err_msg=name)
