"""Q-chunks: from episodes and start rows to the numbers of a batch. Pure and vectorised, NumPy only.

A chunk starts at row t of an episode of T rows and spans `horizon` H actions; the critic scores the first
`critic_horizon` h. Nothing crosses an episode's end. Two rules define what the critic learns near it:

`pad` (default). The chunk stops at the first terminated step, L = that step + 1, and the target is the reward alone.
Without one, L = min(h, T-1-t) and the target bootstraps from s_{t+L}. The -1 is deliberate: LeRobot stores no
observation after the last action, so when a recording is cut (truncated, or just over) inside or exactly at the end
of a chunk, s_T does not exist. Bootstrapping from s_{T-1} with exponent T-t, or treating the cut as a terminal state,
would both be biased. Going back one step is not: the rewards before T-1 plus γ^{T-1-t} V(s_{T-1}) are an unbiased
return of the executed prefix. A cut episode loses its last reward, and its last row as a start: there L = 0, the target
would be the value of the very state being learned, and `sequence_mask` is 0. (A success loses nothing.)

With `n_step` n > 1 the target looks further than the critic: h is n · `critic_horizon` in these rules, while the critic
still scores the first `critic_horizon` actions. Rewards after them come from the data's actions, so targets are biased
towards the behaviour in the data where the policy has left it.

`drop` (Q-chunking's own rule, for reproduction). R_j, M_j, T_j and valid_j at index h-1; the critic skips chunks that
cross the end, and rewards after a success in mid-episode still count. Q-chunking stores s_T and we do not, so the
critic also skips the one chunk that ends exactly on a cut.

The critic must not see where an episode ended: in rollouts a short chunk mostly means success, and a critic that can
tell (by zeros, a held last action, a mask) learns "short = good" instead of what the actions do. So the steps after the
end are filled with the policy's plan (`Episode.intended`). Where there is none, they are borrowed from another chunk of
the batch and made continuous with the known steps (`choose_donors`, `fill_tails`), since a jump would reveal the end as
well. Borrowing happens after normalisation: actions may be relative to the chunk's first state, and only in normalised
space is a borrowed step one the critic could have met anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from pirl.data.config import Boundary, Imitated
from pirl.data.observed import seen_at
from pirl.data.takeovers import NO_MEANING, TakeoverRule, acted_by, as_learned
from pirl.errors import DataError
from pirl.names import IMAGE, IMAGE_MASK
from pirl.records import Array, BatchSizes, BatchSpec, ChunkBatch, Episode, Spec, chunk_spec

_NEVER = np.iinfo(np.int64).max // 2  # beyond any row number; halved so that additions do not overflow
_SEEN, _NOISE = 4, 1e-4  # known steps that predict a tail; ridge regularisation as a share of the variance


@dataclass(frozen=True, kw_only=True)
class EpisodeTable:
    """Concatenated episodes; every row also has the positions of its episode's end and next terminated step."""

    state: Float32[Array, "N S"]
    """Proprioception."""
    actions: Float32[Array, "N A"]
    """The commanded action."""
    rewards: Float32[Array, "N"]
    """Reward of the row's action."""
    end: Int[Array, "N"]
    """One past the last row of this recording; a truncation in mid-episode ends it as well."""
    terminated_at: Int[Array, "N"]
    """First terminated row in [row, end), or `_NEVER`."""
    plan_length: Int[Array, "N"]
    """Number of known steps of the intended chunk; 0 without one."""
    imitated: Bool[Array, "N"]
    """Whether an actor may imitate the chunk that starts here."""
    acted_by: Int[Array, "N"]
    """Who chose the row's action (`records.DEMONSTRATED`, ...)."""
    mc_return: Float32[Array, "N"]
    """Discounted return until the task terminates; NaN where the recording was cut."""
    seen_at: Int[Array, "N"]
    """The nearest row with its own observation, at or before this one."""
    episode: Int[Array, "N"]
    """Index of the row's episode in the table."""
    starts: Int[Array, "E"]
    """First row of each episode."""
    lengths: Int[Array, "E"]
    """Number of rows of each episode."""
    intended: tuple[Array | None, ...]
    """Each episode's intended chunks [T, H, A], or None."""
    numbers: Int[Array, "E"]
    """A number of each episode, its own or by its actions: the same in every table, run and process."""
    tasks: tuple[str, ...]
    """Each episode's instruction."""
    discount: float
    """The discount per step that `mc_return` and every chunk of this table use."""

    def __len__(self) -> int:
        return len(self.rewards)


def tabulate(
    episodes: Sequence[Episode], *, discount: float, imitated: Imitated = "all", takeovers: TakeoverRule = NO_MEANING
) -> EpisodeTable:
    """Concatenate episodes. Raises if columns are inconsistent and names the episode.

    `imitated` applies to episodes with plans (the policy's own), `takeovers` to episodes with operator interventions.
    """
    if not episodes:
        raise DataError(
            "no episodes to build chunks from", hint="check the dataset's filters and its number of episodes"
        )
    for number, episode in enumerate(episodes):
        _check_episode(number, episode, first=episodes[0])
    actors = [acted_by(episode, takeovers.window) for episode in episodes]
    episodes = [as_learned(episode, takeovers) for episode in episodes]
    lengths = np.array([len(episode) for episode in episodes])
    starts = np.cumsum(lengths) - lengths
    rows = np.arange(lengths.sum())
    terminated = np.concatenate([episode.terminated for episode in episodes])
    last = np.concatenate([episode.truncated for episode in episodes])
    last[starts + lengths - 1] = True
    end = _next_row(np.where(last, rows + 1, _NEVER))
    terminated_at = _next_row(np.where(terminated, rows, _NEVER))
    rewards = np.concatenate([episode.rewards for episode in episodes]).astype(np.float32, copy=False)
    return EpisodeTable(
        state=np.concatenate([episode.state for episode in episodes]).astype(np.float32, copy=False),
        actions=np.concatenate([episode.actions for episode in episodes]).astype(np.float32, copy=False),
        rewards=rewards,
        end=end,
        terminated_at=np.where(terminated_at < end, terminated_at, _NEVER),
        plan_length=np.concatenate([_plan_lengths(episode) for episode in episodes]),
        imitated=np.concatenate([_imitated(episode, imitated) for episode in episodes]),
        acted_by=np.concatenate(actors),
        mc_return=_returns(rewards, terminated, last, discount),
        seen_at=seen_at(episodes, starts, rows),
        episode=np.repeat(np.arange(len(episodes)), lengths),
        starts=starts,
        lengths=lengths,
        intended=tuple(episode.intended for episode in episodes),
        numbers=np.array([_number(episode) for episode in episodes], np.int32),
        tasks=tuple(episode.task for episode in episodes),
        discount=discount,
    )


def chunk_outcomes(
    table: EpisodeTable,
    rows: Int[Array, "B"],
    *,
    horizon: int,
    critic_horizon: int,
    boundary: Boundary,
    n_step: int = 1,
) -> ChunkBatch:
    """The fields of a batch other than observations and actions, by the rules in the module docstring."""
    steps, ahead = np.arange(horizon), n_step * critic_horizon
    remaining = table.end[rows] - rows
    to_terminated = table.terminated_at[rows] - rows
    inside = steps < remaining[:, None]
    rewards = table.rewards[_inside(table, rows, max(horizon, ahead))]
    next_terminal = to_terminated < ahead
    if boundary == "pad":
        there = rows + np.minimum(ahead, remaining - 1)
        length = np.where(next_terminal, to_terminated + 1, np.maximum(table.seen_at[there] - rows, 0))
        learns = length > 0
    else:
        length = np.minimum(ahead, remaining)
        there = np.minimum(rows + length, table.end[rows] - 1)
        learns = (remaining > ahead) & (table.seen_at[there] == there) | (remaining >= ahead) & next_terminal
    discounts = table.discount ** np.arange(ahead)
    counted = np.where(np.arange(ahead) < length[:, None], rewards[:, :ahead], np.float32(0))
    return ChunkBatch(
        rewards=np.where(inside, rewards[:, :horizon], np.float32(0)),
        masks=(steps < to_terminated[:, None]).astype(np.float32),
        valid=(inside & table.imitated[rows][:, None]).astype(np.float32),
        terminals=(steps >= remaining[:, None] - 1).astype(np.float32),
        next_terminal=next_terminal.astype(np.float32),
        sequence_mask=learns.astype(np.float32),
        length=length.astype(np.int32),
        reward_sum=(counted @ discounts).astype(np.float32),
        mc_return=table.mc_return[rows],
        episode=table.numbers[table.episode[rows]],
    )


def bootstrap_rows(table: EpisodeTable, rows: Int[Array, "B"], length: Int[Array, "B"]) -> Int[Array, "B"]:
    """Row that the target bootstraps from: t + L, or the episode's last row if it does not bootstrap."""
    return np.minimum(rows + length, table.end[rows] - 1)


def chunk_actions(table: EpisodeTable, rows: Int[Array, "B"], *, horizon: int) -> Float32[Array, "B H A"]:
    """The raw actions of each chunk. After the episode's end: the plan, and beyond it the last action repeated.

    OpenPI repeats the last action, too. `valid` masks the repetition, and it never reaches the critic (`fill_tails`).
    """
    actions = table.actions[_inside(table, rows, horizon)]
    remaining = table.end[rows] - rows
    planned = np.minimum(table.plan_length[rows], horizon)
    for sample in np.flatnonzero(planned > remaining):
        row, first, last = rows[sample], remaining[sample], planned[sample]
        episode = table.episode[row]
        plans = table.intended[episode]
        assert plans is not None  # plan_length says so
        plan = plans[row - table.starts[episode]]
        actions[sample, first:last] = plan[first:last]
        actions[sample, last:] = plan[last - 1]
    return actions


def chunk_actors(table: EpisodeTable, rows: Int[Array, "B"], *, horizon: int) -> Int[Array, "B H"]:
    """Who chose each step; steps after the end repeat the last one."""
    return table.acted_by[_inside(table, rows, horizon)].astype(np.int32)


def known_steps(table: EpisodeTable, rows: Int[Array, "B"], *, critic_horizon: int) -> Int[Array, "B"]:
    """Number of the critic's steps that were executed or planned; the rest must be borrowed."""
    return np.minimum(critic_horizon, np.maximum(table.end[rows] - rows, table.plan_length[rows]))


def choose_donors(chunks: Float[Array, "B h A"], known: Int[Array, "B"]) -> Int[Array, "B"]:
    """For each chunk the index of the chunk in the batch that lends its tail; its own if all steps are known.

    The donor is the fully known chunk nearest over the last two known steps, since its continuation is the most
    plausible here; ties go to the first. If the batch has no fully known chunk, all others are candidates.
    """
    horizon = chunks.shape[1]
    donors = np.arange(len(chunks))
    whole = np.flatnonzero(known >= horizon)
    lenders = whole if len(whole) else donors.copy()
    for sample in np.flatnonzero(known < horizon):
        last = slice(max(known[sample] - 2, 0), known[sample])
        distance = np.square(chunks[lenders, last] - chunks[sample, last]).sum((1, 2))
        donors[sample] = lenders[np.argmin(np.where(lenders == sample, np.inf, distance))]
    return donors


def fill_tails(chunks: Float[Array, "B h A"], known: Int[Array, "B"], donors: Int[Array, "B"]) -> Float[Array, "B h A"]:
    """Chunks with the unknown steps of chunk i filled from the same steps of chunk `donors[i]`.

    The tail of a chunk with known steps y, from a donor with tail x' and known steps y', is x' + C (y - y'). C is the
    linear prediction of tails from known steps, from the covariance of the batch's fully known chunks: if these were
    Gaussian, the result would be a sample of what follows y. So smooth motions continue without a jump, and
    uncorrelated actions are copied unchanged. Results are clipped to the range of the fully known chunks. Dimensions
    with only two values (such as a gripper's) are copied unchanged.

    A donor that is itself too short (no chunk of the batch is fully known) repeats its known steps cyclically.
    """
    horizon = chunks.shape[1]
    filled, steps, lengths = chunks.copy(), np.arange(horizon), np.unique(known[known < horizon])
    if not len(lengths):
        return filled
    whole = chunks[known >= horizon].astype(np.float64)
    moving = _moving(whole)
    ranges = whole[..., moving].min((0, 1), initial=np.inf), whole[..., moving].max((0, 1), initial=-np.inf)
    deviation = np.moveaxis(whole[..., moving] - whole[..., moving].sum(0) / max(len(whole), 1), 2, 0)
    covariance = deviation.swapaxes(1, 2) @ deviation
    for length in lengths:
        needy = np.flatnonzero(known == length)
        lender = donors[needy]
        tail = chunks[lender[:, None], steps[length:] % known[lender, None]]
        seen = slice(max(length - _SEEN, 0), length)
        apart = np.moveaxis((chunks[needy, seen] - chunks[lender, seen])[..., moving], 2, 0)
        follows = tail[..., moving] + np.moveaxis(apart @ _prediction(covariance, seen), 0, 2)
        tail[..., moving] = np.clip(follows, *ranges)
        filled[needy, length:] = tail
    return filled


def _moving(whole: Float[Array, "n h A"]) -> Int[Array, "m"]:
    """The dimensions that take more than two values; none if there are fewer than two chunks."""
    if len(whole) < 2:
        return np.zeros(0, np.int64)
    ends = (whole == whole.min((0, 1))) | (whole == whole.max((0, 1)))
    return np.flatnonzero(~ends.all((0, 1)))


def _prediction(covariance: Float[Array, "A h h"], seen: slice) -> Float[Array, "A k t"]:
    """Cᵀ of `fill_tails`: regresses the later steps on the `seen` ones; the ridge keeps it solvable."""
    noise = _NOISE * np.trace(covariance, axis1=1, axis2=2) / covariance.shape[1] + 1e-12
    of_seen = covariance[:, seen, seen] + noise[:, None, None] * np.eye(seen.stop - seen.start)
    return np.linalg.solve(of_seen, covariance[:, seen, seen.stop :])


def validate_qchunking_batch_format(
    batch: ChunkBatch, *, next_observations: bool = True, corrections: bool = False
) -> None:
    """Check keys, shapes and dtypes of a batch (host or device arrays) against `chunk_spec`.

    Images may be smaller than the model's input, since the device adds the letterbox.
    """
    actions, critic = (_present(batch, key, 3) for key in ("actions", "critic_actions"))
    observations = batch.get("observations")
    if not isinstance(observations, dict):
        raise DataError("batch['observations'] is not a dict of arrays", hint="build batches with ACRLPDDataLoader")
    size, horizon, action_dim = actions.shape
    if critic.shape[1] > horizon:
        raise DataError(
            f"batch['critic_actions'] has shape {critic.shape}, more than the {horizon} steps of a chunk",
            hint="critic_horizon must not exceed horizon",
        )
    prompt = _present(observations, "tokenized_prompt", 2) if "tokenized_prompt" in observations else None
    sizes = BatchSizes(
        batch=size,
        horizon=horizon,
        critic_horizon=critic.shape[1],
        action_dim=action_dim,
        state_dim=_present(observations, "state", 2).shape[1],
        cameras=tuple(observations.get("image", {})),
        token_len=0 if prompt is None else prompt.shape[1],
    )
    _compare(batch, chunk_spec(sizes, next_observations=next_observations, corrections=corrections), "")


def _compare(found: Any, spec: BatchSpec, where: str) -> None:
    """Raise unless every array of the spec is present with its shape and dtype kind."""
    for key, wanted in spec.items():
        name = f"{where}.{key}".lstrip(".")
        if found.get(key) is None:
            raise DataError(
                f"batch[{name!r}] is missing; found {', '.join(sorted(found)) or 'nothing'}",
                hint="build batches with ACRLPDDataLoader",
            )
        if not isinstance(wanted, Spec):
            if not isinstance(found[key], dict) or (key in (IMAGE, IMAGE_MASK) and set(found[key]) != set(wanted)):
                found_keys = sorted(found[key]) if isinstance(found[key], dict) else type(found[key]).__name__
                raise DataError(f"batch[{name!r}] holds {found_keys}, it needs {sorted(wanted)}")
            _compare(found[key], wanted, name)
            continue
        array = found[key]
        shape = (wanted.shape[0], *array.shape[1:3], 3) if len(wanted.shape) == 4 else wanted.shape
        if tuple(array.shape) != shape:
            raise DataError(f"batch[{name!r}] has shape {tuple(array.shape)}, it needs {shape}")
        if np.dtype(array.dtype).kind != np.dtype(wanted.dtype).kind:
            raise DataError(f"batch[{name!r}] has dtype {array.dtype}, it needs {wanted.dtype}")


def _present(batch: Any, key: str, ndim: int) -> Any:
    array = batch.get(key)
    if array is None or np.ndim(array) != ndim:
        found = "is missing" if array is None else f"has shape {np.shape(array)},"
        raise DataError(f"batch[{key!r}] {found} it needs {ndim} axes", hint="build batches with ACRLPDDataLoader")
    return array


def _inside(table: EpisodeTable, rows: Int[Array, "B"], horizon: int) -> Int[Array, "B H"]:
    """Row numbers t .. t+H-1, clipped to the last row of the episode."""
    return np.minimum(rows[:, None] + np.arange(horizon), table.end[rows][:, None] - 1)


def _next_row(marks: Int[Array, "N"]) -> Int[Array, "N"]:
    """For every row the nearest mark at or after it."""
    return np.minimum.accumulate(marks[::-1])[::-1]


def _plan_lengths(episode: Episode) -> Int[Array, "T"]:
    """Number of leading steps of each intended chunk that are not NaN (shorter plans are padded with NaN)."""
    if episode.intended is None:
        return np.zeros(len(episode), np.int64)
    known = ~np.isnan(episode.intended).any(axis=-1)
    return np.logical_and.accumulate(known, axis=1).sum(axis=1)


def _imitated(episode: Episode, rule: Imitated) -> Bool[Array, "T"]:
    """Whether a row is the start of a plan; all rows of episodes that were not planned in chunks."""
    if rule == "all" or episode.intended is None:
        return np.ones(len(episode), bool)
    known = _plan_lengths(episode)
    begins = np.append(True, known[1:] >= known[:-1])
    return begins & (rule == "plans" or episode.success is not False)


def _returns(
    rewards: Float[Array, "N"], terminated: Bool[Array, "N"], last: Bool[Array, "N"], discount: float
) -> Float32[Array, "N"]:
    """Discounted returns to the end; NaN in recordings that stop without terminating."""
    returns, following = np.empty(len(rewards)), np.nan
    columns = zip(rewards.tolist(), terminated.tolist(), last.tolist(), strict=True)
    for row, (reward, done, cut) in reversed(list(enumerate(columns))):
        following = reward + discount * (0.0 if done else np.nan if cut else following)
        returns[row] = following
    return returns.astype(np.float32)


def _number(episode: Episode) -> int:
    return crc32(episode.actions.tobytes()) >> 1 if episode.number is None else episode.number


def _check_episode(number: int, episode: Episode, *, first: Episode) -> None:
    """Raise unless columns have equal lengths and vectors have the sizes of the first episode's."""
    steps = len(episode)
    wanted: dict[str, tuple[int, ...]] = {
        **({} if episode.intervention is None else {"intervention": (steps,)}),
        "rewards": (steps,),
        "terminated": (steps,),
        "truncated": (steps,),
        "state": (steps, *first.state.shape[1:]),
        "actions": (steps, *first.actions.shape[1:]),
        **({} if episode.observed is None else {"observed": (steps,)}),
    }
    for name, shape in wanted.items():
        found = getattr(episode, name).shape
        if found != shape or steps == 0:
            raise DataError(
                f"episode {number} ({episode.task!r}): {name} has shape {found}, "
                f"expected {shape if steps else 'at least one step'}",
                hint="all columns of an episode have its length, and all episodes the same vector sizes",
            )
    plans = episode.intended
    if plans is not None and (plans.ndim != 3 or len(plans) != steps or plans.shape[2:] != first.actions.shape[1:]):
        raise DataError(
            f"episode {number} ({episode.task!r}): intended has shape {plans.shape}, "
            f"expected ({steps}, H, {first.actions.shape[1]})"
        )
