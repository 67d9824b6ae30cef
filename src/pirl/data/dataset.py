"""LeRobot datasets as a source of episodes, mixtures of them, and a human-readable summary."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped, UInt8

from pirl import names
from pirl.data import labels, lerobot, outcomes, rows, video, witness
from pirl.data.cache import CacheConfig, FrameCache
from pirl.data.lerobot import DatasetMeta, EpisodeMeta
from pirl.data.outcomes import EpisodeOutcome, OutcomeRule
from pirl.data.schema import INFO_FILE
from pirl.errors import ConfigError, DataError, PirlWarning, listing
from pirl.records import Episode, EpisodeSource

MODEL_SIZE = 224


class LeRobotSource(EpisodeSource):
    """One LeRobot dataset. Reads and checks numeric columns at once; decodes images on first access."""

    def __init__(
        self,
        path: str | Path,
        *,
        cameras: Mapping[str, str],
        state_key: str | Sequence[str] = names.LEROBOT_STATE,
        action_key: str | Sequence[str] = names.LEROBOT_ACTION,
        outcome: OutcomeRule | None = None,
        image_size: int | None = MODEL_SIZE,
        resize: video.Resize = "fast",
        letterbox: bool = False,
        cache: CacheConfig | None = None,
    ) -> None:
        """Open a dataset folder or repo id.

        `cameras` maps the model's slots to the dataset's feature keys. Several state or action keys are concatenated.
        `letterbox` stores images with their black borders, so that datasets of different aspect ratios can be mixed.
        """
        self.meta, self.columns = rows.read_dataset(lerobot.resolve(path))
        for key in cameras.values():
            self.meta.camera(key)
        self._keys = dict(cameras)
        keys = tuple(dict.fromkeys(cameras.values()))
        self._letterbox = letterbox
        self.cache = FrameCache(self.meta, keys, size=image_size, method=resize, letterbox=letterbox, config=cache)
        self._state = read_vectors(self.meta, self.columns, state_key)
        self._actions = read_vectors(self.meta, self.columns, action_key)
        self._interventions = read_interventions(self.meta, self.columns)
        self.observed = read_observed(self.meta, self.columns)
        self._tasks = read_tasks(self.meta, self.columns)
        self.rule, self.outcomes = read_outcomes(self.meta, self.columns, outcome or OutcomeRule())
        vectors = [key for keys in (state_key, action_key) for key in ((keys,) if isinstance(keys, str) else keys)]
        witness.check_columns(self.meta, self.columns, [*vectors, *outcomes.COLUMNS])

    @property
    def lengths(self) -> Int[np.ndarray, "E"]:
        """Number of steps of each episode."""
        return self.meta.lengths

    @property
    def cameras(self) -> tuple[str, ...]:
        """The model's camera slots that this dataset fills."""
        return tuple(self._keys)

    def frame_sizes(self) -> dict[str, tuple[int, int]]:
        """Height and width of each slot's images."""
        return {slot: self.cache.frame_size(key) for slot, key in self._keys.items()}

    @property
    def letterbox(self) -> bool:
        """Whether images include the black borders that make them square."""
        return self._letterbox

    def __len__(self) -> int:
        return len(self.meta.episodes)

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of the episode at position `index`, as views of the arrays in memory."""
        meta, outcome = self.meta.episodes[index], self.outcomes[index]
        rows = slice(meta.start, meta.start + meta.length)
        return Episode(
            task=self._tasks[index],
            state=self._state[rows],
            actions=self._actions[rows],
            rewards=outcome.rewards,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.success,
            intended=_intended(self.columns, rows, self._actions.shape[1]),
            intervention=None if self._interventions is None else self._interventions[rows],
            observed=None if self.observed is None else self.observed[rows],
        )

    def frames(self, index: int) -> Mapping[str, UInt8[np.ndarray, "T h w 3"]]:
        """Images of the episode at position `index`, by slot."""
        return {slot: self.cache.frames(index, key) for slot, key in self._keys.items()}

    def prepare(self) -> bool:
        """Choose the cache tier and fill it; True for the pool tier, which decodes on demand."""
        self.cache.build()
        return self.cache.tier == "pool"


class _Derived(EpisodeSource):
    """Episodes of other sources, whose cameras and pictures are alike."""

    first: EpisodeSource
    """One of them."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras, which all sources share."""
        return self.first.cameras

    def frame_sizes(self) -> dict[str, tuple[int, int]]:
        """Height and width of the pictures of each camera, the same in all sources."""
        return dict(self.first.frame_sizes())

    @property
    def letterbox(self) -> bool:
        """Whether pictures include the black borders that make them square."""
        return self.first.letterbox


class MixedSource(_Derived):
    """Several sources one after the other, with how often each episode is to be sampled."""

    def __init__(self, sources: Sequence[EpisodeSource], weights: Sequence[float | int] | None = None) -> None:
        """Mix the sources; `weights` are their relative shares of samples (None: equal)."""
        if not sources:
            raise ConfigError("a mixed source of no sources", hint="name at least one dataset")
        shares = np.ones(len(sources)) if weights is None else np.asarray(weights, dtype=np.float64)
        if shares.shape != (len(sources),) or not np.isfinite(shares).all() or (shares < 0).any() or not shares.any():
            raise ConfigError(
                f"weights are {weights} for {len(sources)} sources",
                hint="give each source one finite weight, none negative, not all zero",
            )
        _check_alike(sources)
        self.sources, self.first = tuple(sources), sources[0]
        self._ends = np.cumsum([len(source) for source in sources])
        per_source = [
            share * source.lengths / source.lengths.sum() for share, source in zip(shares, sources, strict=True)
        ]
        self._weights = np.concatenate(per_source) / shares.sum()

    @property
    def weights(self) -> Float[np.ndarray, "E"]:
        """Probability of each episode: a source's share, spread over its episodes by their number of steps."""
        return self._weights

    @property
    def lengths(self) -> Int[np.ndarray, "E"]:
        """Number of steps of each episode."""
        return np.concatenate([source.lengths for source in self.sources])

    def prepare(self) -> bool:
        """Prepare all sources; True if any still decodes at each call."""
        found = [source.prepare() for source in self.sources]
        return any(found)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode."""
        source, local = self._locate(index)
        return source.episode(local)

    def frames(self, index: int) -> Mapping[str, UInt8[np.ndarray, "T h w 3"]]:
        """Images of one episode."""
        source, local = self._locate(index)
        return source.frames(local)

    def _locate(self, index: int) -> tuple[EpisodeSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[which], index - int(self._ends[which]) + len(self.sources[which])


class SubsetSource(_Derived):
    """Some of the episodes of a source, in its order."""

    def __init__(self, source: EpisodeSource, kept: Sequence[int] | Int[np.ndarray, "E"]) -> None:
        self.source = self.first = source
        self.kept = [int(index) for index in kept]
        """Indices of its episodes in the source."""

    @property
    def weights(self) -> Float[np.ndarray, "E"] | None:
        """Probability of each episode, if the source defines it."""
        weights = self.source.weights
        return None if weights is None else weights[self.kept] / weights[self.kept].sum()

    @property
    def lengths(self) -> Int[np.ndarray, "E"]:
        """Number of steps of each episode."""
        return self.source.lengths[self.kept]

    def prepare(self) -> bool:
        """Prepare the whole source."""
        return self.source.prepare()

    def __len__(self) -> int:
        return len(self.kept)

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode."""
        return self.source.episode(self.kept[index])

    def frames(self, index: int) -> Mapping[str, UInt8[np.ndarray, "T h w 3"]]:
        """Images of one episode."""
        return self.source.frames(self.kept[index])


def successful(source: EpisodeSource) -> SubsetSource:
    """Only the successful episodes of a source, for filtered imitation."""
    kept = [index for index in range(len(source)) if source.episode(index).success]
    if not kept:
        raise DataError(
            f"none of {len(source)} episodes is known to have succeeded",
            hint="check the outcomes with `pirl inspect data`, or train on all episodes",
        )
    return SubsetSource(source, kept)


def _check_alike(sources: Sequence[EpisodeSource]) -> None:
    """Raise unless all sources have the same cameras, vector sizes and image sizes: one batch mixes their samples."""
    first = sources[0].episode(0)
    expected = (set(sources[0].cameras), first.state.shape[1], first.actions.shape[1])
    for number, source in enumerate(sources):
        episode = source.episode(0)
        found = (set(source.cameras), episode.state.shape[1], episode.actions.shape[1])
        if found != expected:
            raise DataError(
                f"source {number} has cameras {sorted(found[0])}, {found[1]} states and {found[2]} actions; "
                f"source 0 has {sorted(expected[0])}, {expected[1]} and {expected[2]}",
                hint="mix datasets of one robot, or bring them to one layout first",
            )
        sizes, wanted = source.frame_sizes(), sources[0].frame_sizes()
        if different := [camera for camera in wanted if sizes[camera] != wanted[camera]]:
            raise DataError(
                f"source {number} has pictures of {', '.join(f'{c} {sizes[c]}' for c in different)}; "
                f"in source 0 they are {', '.join(f'{c} {wanted[c]}' for c in different)}",
                hint="open all of them with letterbox=True: then each is a square of the model's size",
            )


def read_vectors(
    meta: DatasetMeta, columns: Mapping[str, np.ndarray], keys: str | Sequence[str]
) -> Float32[np.ndarray, "N D"]:
    """Numeric columns, concatenated to float32 vectors; raises if a value is not finite."""
    parts = []
    for key in (keys,) if isinstance(keys, str) else keys:
        feature = meta.feature(key)
        if not feature.is_number:
            raise DataError(
                f"{meta.root / INFO_FILE}: feature {key!r} is {feature.dtype}, expected numbers",
                hint="check the state key and the action key",
            )
        _check_rows(meta, columns[key], key)
        parts.append(columns[key].reshape(len(columns[key]), -1))
    return np.concatenate(parts, axis=1, dtype=np.float32)


def _check_rows(meta: DatasetMeta, column: np.ndarray, key: str, *, flags: bool = False) -> None:
    """Raise unless every value is finite, or with `flags` 0 or 1."""
    good = np.isin(column, (0, 1)) if flags else np.isfinite(column)
    good = good.reshape(len(column), -1).all(axis=1)
    if good.all():
        return
    row = int(np.argmin(good))
    episode = next(one for one in meta.episodes if one.start <= row < one.start + one.length)
    raise DataError(
        f"{episode.data.path}: episode {episode.index}: {key} is {'neither 0 nor 1' if flags else 'not finite'} at "
        f"frame {row - episode.start} ({int((~good).sum())} such rows in the dataset): {column[row]}",
        hint="repair or remove the episode"
        + ("" if flags else "; one such value would spoil the normalisation and the training"),
    )


def read_tasks(meta: DatasetMeta, columns: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """The instruction of each episode: its first frame's. Warns about episodes in which the task changes."""
    tasks, changing = [], []
    for episode in meta.episodes:
        numbers = columns["task_index"][episode.start : episode.start + episode.length]
        if (first := int(numbers[0])) not in meta.tasks:
            raise DataError(
                f"{episode.data.path}: episode {episode.index}: task_index is {first}, known are {sorted(meta.tasks)}",
                hint="the list of tasks is incomplete: download or export the dataset again",
            )
        if episode.tasks and meta.tasks[first] not in episode.tasks and set(episode.tasks) <= set(meta.tasks.values()):
            raise DataError(
                f"{episode.data.path}: episode {episode.index}: task_index {first} is {meta.tasks[first]!r}, but the "
                f"list of episodes says {', '.join(map(repr, episode.tasks))}",
                hint="the tasks are in another order than they were: download or export the dataset again",
            )
        if (numbers != first).any():
            changing.append(str(episode.index))
        tasks.append(meta.tasks[first])
    if changing:
        warnings.warn(
            f"{meta.root}: the task changes within {len(changing)} episodes, of which the first task is used for the "
            f"whole episode; their numbers are\n{listing(changing)}",
            PirlWarning,
            stacklevel=3,
        )
    return tuple(tasks)


def _intended(columns: Mapping[str, np.ndarray], rows: slice, size: int) -> Float32[np.ndarray, "T H A"] | None:
    """What a recorded policy planned from each row on: its chunk from the step that was due, then NaN.

    None if the dataset lacks the columns. Rows without a chunk (step -1) are all NaN.
    """
    chunks, due = columns.get(names.INTENDED), columns.get(names.INTENDED_STEP)
    if chunks is None or due is None or chunks.ndim != 3 or chunks.shape[2] != size:
        return None
    chunks, due, horizon = chunks[rows].astype(np.float32), due[rows, None], chunks.shape[1]
    steps = due + np.arange(horizon)
    known = (due >= 0) & (steps < horizon)
    rest = np.take_along_axis(chunks, np.clip(steps, 0, horizon - 1)[..., None], axis=1)
    return np.where(known[..., None], rest, np.float32(np.nan))


def read_interventions(meta: DatasetMeta, columns: Mapping[str, np.ndarray]) -> Bool[np.ndarray, "N"] | None:
    """LeRobot's column `intervention`: rows in which an operator acted. None if the dataset lacks it."""
    if names.INTERVENTION not in meta.features:
        return None
    return _scalars(meta, columns, names.INTERVENTION, flags=True).astype(bool)


def read_observed(meta: DatasetMeta, columns: Mapping[str, np.ndarray]) -> Bool[np.ndarray, "N"] | None:
    """pirl's column `observed`: rows with their own observation. None if the dataset lacks it (all rows have one)."""
    if names.OBSERVED not in meta.features:
        return None
    return _scalars(meta, columns, names.OBSERVED, flags=True).astype(bool)


def _scalars(meta: DatasetMeta, columns: Mapping[str, np.ndarray], key: str, *, flags: bool) -> Shaped[np.ndarray, "N"]:
    """A column of one finite number per row; with `flags` only 0 and 1 are accepted, other values are ambiguous."""
    feature = meta.feature(key)
    if not feature.is_number or columns[key].ndim != 1:
        raise DataError(
            f"{meta.root / INFO_FILE}: {key} is {feature.dtype} of shape {feature.shape}, expected one "
            f"{'truth value' if flags else 'number'}, shape (1,)",
            hint="store one value per frame, or rename the feature if it means something else",
        )
    _check_rows(meta, columns[key], key, flags=flags)
    return columns[key]


def read_outcomes(
    meta: DatasetMeta, columns: Mapping[str, np.ndarray], rule: OutcomeRule
) -> tuple[OutcomeRule, tuple[EpisodeOutcome, ...]]:
    """The outcome rule in effect and each episode's outcome.

    Labels of `pirl label` take precedence over next.success, unless there is a success file or the rule is `columns`.
    """
    verdicts = labels.newest(labels.read(meta.root, {one.index: one.length for one in meta.episodes}))
    by_people = bool(verdicts) and rule.success_file is None and rule.rule != "columns"
    if by_people:
        rule = replace(rule, success_file=labels.LABELS_FILE)
    rule = outcomes.settle(rule, columns, where=str(meta.root))
    used = outcomes.COLUMNS if rule.rule == "columns" else (names.NEXT_SUCCESS, names.NEXT_TRUNCATED)
    known = {
        name: _scalars(meta, columns, name, flags=name != names.NEXT_REWARD) for name in used if name in meta.features
    }
    filed: Mapping[int, bool] = {}
    if rule.success_file is not None and not by_people:
        path = Path(rule.success_file).expanduser()
        filed = outcomes.read_success_file(path, {episode.index for episode in meta.episodes})

    def of(episode: EpisodeMeta) -> EpisodeOutcome:
        rows = {name: column[episode.start : episode.start + episode.length] for name, column in known.items()}
        if not by_people:
            return outcomes.derive(rows, rule, length=episode.length, label=filed.get(episode.index))
        if (verdict := verdicts.get(episode.index)) is not None:
            told = (verdict.success, verdict.moment)
            return outcomes.derive(rows, rule, length=episode.length, label=told[0], moment=told[1])
        recorded = replace(rule, success_file=None) if names.NEXT_SUCCESS in rows else rule
        return outcomes.derive(rows, recorded, length=episode.length)

    return rule, tuple(of(episode) for episode in meta.episodes)
