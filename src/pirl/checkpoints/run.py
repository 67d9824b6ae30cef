"""Checkpoints of a run: OpenPI's folders, written in the background, complete or absent.

<run>/<step>/params        the weights to act with (averaged where there is an average), as OpenPI reads them
<run>/<step>/assets        norm_stats.json for each robot
<run>/<step>/train_state   everything else that is needed to go on bit by bit; the weights above are repeated only where
                           what acts is not what learns (a condition that became part of a bias)
<run>/<step>/extra         metadata.json (configuration, versions, metrics) and extra.json (data position, seed, ...)

With `checkpoint.save` `params` only the newest step keeps its train_state.

Orbax writes a step into a temporary folder and renames it. Old steps are renamed before they are deleted. So whatever
has a number for a name is whole, however a process ended.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from filelock import FileLock

from pirl import __version__
from pirl.agents.agent import TrainState
from pirl.checkpoints.checksums import damage, damaged_step, extra_text, read_extra, seal, verifying
from pirl.checkpoints.export_folder import check_asset_id, write_texts
from pirl.checkpoints.file_items import FilesHandler, FilesSave
from pirl.checkpoints.lighten import can_be_resumed, drop_train_state
from pirl.checkpoints.ocdbt import read_json
from pirl.checkpoints.ownership import foreign_in_step
from pirl.checkpoints.quiet import quieten_orbax, stop_metrics_leak
from pirl.checkpoints.restore import check_types, restore_tree
from pirl.checkpoints.run_directory import (
    METADATA_FILE,
    complete_steps,
    io_errors,
    lock_run,
    reason_of,
)
from pirl.checkpoints.run_metadata import as_json, finite_metrics
from pirl.checkpoints.split import join_state, keeps_policy, split_state
from pirl.checkpoints.weights import load_openpi, openpi_leaves
from pirl.data.normalize import NormStats, save_norm_stats
from pirl.errors import CheckpointError, PirlError
from pirl.files import json_text, sync, write_text
from pirl.models.params import flatten, nest
from pirl.names import ASSETS_ITEM, PARAMS_ITEM, TRAIN_STATE_ITEM
from pirl.parallel.distributed import barrier, is_main
from pirl.training.config import CheckpointConfig

EXTRA_ITEM, EXTRA_FILE = "extra", "extra.json"
_UNFINISHED = "[0-9]*.orbax-checkpoint-tmp*"
_DELETED = ".[0-9]*.deleted"


class Checkpoints:
    """The checkpoints of one run. With several processes every process makes one and calls it alike."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        *,
        run: Mapping[str, Any] | None = None,
        norm_stats: Mapping[str, Mapping[str, NormStats]] | None = None,
        read_only: bool = False,
    ) -> None:
        """`run` is what `run_metadata` says; `norm_stats` go into every checkpoint, by OpenPI's asset id.

        One process (or group of processes) at a time may write into a run; what an interrupted save or deletion left
        behind is removed first. `read_only` looks at a run, also while it is being trained, and changes nothing.
        """
        quieten_orbax()
        stop_metrics_leak()
        self.directory = Path(directory).expanduser().absolute()
        self.config = config
        self._run = as_json(dict(run or {}))
        self._norm_stats = {check_asset_id(name): dict(stats) for name, stats in (norm_stats or {}).items()}
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pirl-checkpoints")
        self._known: set[int] = set()
        self._saving: int | None = None
        self._sealing, self._began = 0, 0.0
        self.seconds: float | None = None
        """How long the latest one took to get onto the disk; known to process 0."""
        arrays = {
            item: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
            for item in (PARAMS_ITEM, TRAIN_STATE_ITEM)
        }
        files = {item: FilesHandler() for item in (ASSETS_ITEM, EXTRA_ITEM)}
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**arrays, **files),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        self._read_only = read_only
        self._lock: FileLock | None = None
        if not read_only:
            with io_errors(f"{self.directory} cannot be used for checkpoints"):
                self.directory.mkdir(parents=True, exist_ok=True)
                if is_main():
                    self._lock = lock_run(self.directory)
                    self._clean()
                    for step in self.all_steps():
                        self._unmark(step)
                    write_text(self.directory / METADATA_FILE, json_text(self._run))
            barrier("checkpoints.open")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Is it time to save?"""
        return step > 0 and step % self.config.save_interval == 0

    def all_steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return max(self.all_steps(), default=None)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> bool:
        """Start to write a checkpoint; returns once the arrays are copied, so the state may be donated at once.

        The one before is finished first, and its errors are raised here. `extra` is any tree of JSON values (that of
        process 0 is kept). `weights` are those to act with, where they are not the policy's (`Agent.served`). A step
        this run has saved or restored is not written again: False, see `amend`.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened for reading", hint="open it without read_only to save")
        self.wait()
        if step in self._known:
            return False
        if is_main() and any(self.directory.glob(_UNFINISHED)):
            self._clean()  # a save was interrupted
        folder = self.directory / str(step)
        if folder.exists():
            raise CheckpointError(
                f"{folder} exists already and is not of this run's making",
                hint="the run went on from an earlier step: move the later steps away, or choose another exp_name",
            )
        state = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), state)
        served, rest = split_state(state, keep_policy=weights is not None)
        served = served if weights is None else dict(weights)
        metadata = {**self._run, "step": step, "metrics": finite_metrics(metrics or {})}
        texts = {METADATA_FILE: json_text(metadata), EXTRA_FILE: extra_text(as_json(dict(extra or {})))}
        items = {
            PARAMS_ITEM: ocp.args.PyTreeSave(
                {PARAMS_ITEM: nest({f"{path}/value": leaf for path, leaf in flatten(served).items()})}
            ),
            TRAIN_STATE_ITEM: ocp.args.PyTreeSave(rest),
            ASSETS_ITEM: FilesSave(self._write_assets),
            EXTRA_ITEM: FilesSave(lambda target: write_texts(target, texts)),
        }
        self._sealing, self._began = step, time.monotonic()
        with self._save_errors(step):
            self._checkpointer.save(
                folder,
                args=ocp.args.Composite(**items),
                custom_metadata={"written_by": f"pirl {__version__}"},
            )
        self._saving = step
        if not self.config.async_save:
            self.wait()
        return True

    def amend(self, step: int, extra: Mapping[str, Any]) -> None:
        """Another `extra` for a step that is there, for what went on since without a change of the state."""
        self.wait()
        file = self.directory / str(self._existing(step)) / EXTRA_ITEM / EXTRA_FILE
        if is_main():
            with io_errors(f"{file} cannot be written"):
                write_text(file, extra_text(as_json(dict(extra))))

    def wait(self) -> None:
        """Until what was begun is on disk. Raises what went wrong there."""
        step = self._saving
        if step is None:
            return
        with self._save_errors(step):
            self._checkpointer.wait_until_finished()
        self._saving = None
        self._known.add(step)
        if is_main():
            self._unmark(step)
            sync(self.directory)
            self._delete_old()

    def close(self) -> None:
        """Finish what was begun."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            self._sweeper.shutdown()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def restore(self, reference: TrainState, step: int | None = None) -> TrainState:
        """The state as it was saved, bit by bit, in the shardings of the reference (a tree of ShapeDtypeStructs).

        Names, shapes and types must agree; the mesh may be another one. None: the latest. A step that is not as it was
        written is refused.
        """
        self.wait()
        step = self._existing(step)
        folder = self.directory / str(step)
        if reason := damage(folder, contents=False):  # before gigabytes are read
            raise damaged_step(folder, reason)
        if not can_be_resumed(folder):
            raise CheckpointError(
                f"{folder} holds weights only (checkpoint.save params)",
                hint=f"start a new run from them: --exp-name NAME --init-weights {folder}",
            )
        keep_policy = keeps_policy(folder)
        like_weights, like_rest = split_state(reference, keep_policy=keep_policy)
        weights: dict[str, Any] = {}
        with verifying(folder):
            if not keep_policy:
                check_types(openpi_leaves(folder / PARAMS_ITEM)[0], flatten(like_weights), folder)
                weights = load_openpi(folder, like_weights, allow_missing="(?!)", verify=False)
            rest = restore_tree(folder / TRAIN_STATE_ITEM, like_rest)
        self._known.add(step)
        return join_state(reference, weights, rest)

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """The `extra` that was passed to `save`."""
        folder = self.directory / str(self._existing(step))
        try:
            return read_extra(folder)
        except CheckpointError as error:
            raise damaged_step(folder, error.message) from None

    def extras(self) -> Iterator[dict[str, Any]]:
        """That of every complete step that can be gone on from."""
        for step in filter(lambda step: can_be_resumed(self.directory / str(step)), self.all_steps()):
            with suppress(CheckpointError):  # a damaged one is reported when it is used
                yield read_extra(self.directory / str(step))

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Configuration, versions and metrics of a checkpoint; empty for one that OpenPI wrote."""
        folder = self.directory / str(self._existing(step))
        file = folder / EXTRA_ITEM / METADATA_FILE
        try:
            return read_json(file) if file.exists() else {}
        except CheckpointError as error:
            raise damaged_step(folder, error.message) from None

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"{self.directory} holds {wanted}",
                hint=f"complete steps: {', '.join(map(str, steps)) or 'none; is the exp_name right?'}",
            )
        return step

    def _seal(self) -> None:
        """Runs in the background, on process 0, once all items are written and before the step gets its name."""
        for folder in self.directory.glob(_UNFINISHED):
            if folder.name.split(".")[0] == str(self._sealing):
                seal(folder)
        self.seconds = time.monotonic() - self._began

    def _unmark(self, step: int) -> None:
        """Orbax 0.12 marks finished folders with a file that names their path; OpenPI's has none."""
        for marker in (self.directory / str(step)).rglob("commit_success.txt"):
            marker.unlink()

    def _delete_old(self) -> None:
        steps = self.all_steps()
        scores: dict[int, float] = {}
        if best := self.config.keep_best:
            for step in steps:
                with suppress(CheckpointError):
                    if (score := self.metadata(step).get("metrics", {}).get(best.metric)) is not None:
                        scores[step] = score
        for step in set(steps) - steps_to_keep(steps, scores, self.config):
            if foreign_in_step(self.directory / str(step)):
                continue  # somebody keeps files of their own there
            with io_errors(f"step {step} of {self.directory} cannot be deleted"):
                os.rename(self.directory / str(step), self.directory / f".{step}.deleted")
        for step in self.all_steps()[:-1] if self.config.save == "params" else []:
            with suppress(CheckpointError), io_errors(f"step {step} of {self.directory} cannot be made smaller"):
                drop_train_state(self.directory / str(step))
        self._sweep(_DELETED)

    def _clean(self) -> None:
        self._sweep(_UNFINISHED)
        self._sweep(_DELETED)
        self._sweeper.submit(lambda: None).result()  # a save may take the name of what is being removed

    def _sweep(self, pattern: str) -> None:
        """Remove folders in the background: gigabytes take a file system seconds."""
        for folder in self.directory.glob(pattern):
            self._sweeper.submit(shutil.rmtree, folder, ignore_errors=True)

    def _write_assets(self, target: Path) -> None:
        for asset_id, stats in self._norm_stats.items():
            save_norm_stats(target / asset_id, stats)

    @contextmanager
    def _save_errors(self, step: int) -> Iterator[None]:
        """Turn Orbax's write errors into one, and remove the half-written folder."""
        try:
            yield
        except Exception as error:
            self._saving = None
            if is_main():
                self._clean()
                time.sleep(0.5)  # other threads of the failed save may still be writing, and make folders as they do
                self._clean()
            if isinstance(error, PirlError):
                raise
            raise CheckpointError(
                f"step {step} could not be saved to {self.directory}: {reason_of(error)}",
                hint=f"is the disk full ({_free(self.directory)} free) or read-only? "
                f"Complete steps are untouched: {', '.join(map(str, self.all_steps())) or 'none'}",
            ) from error


def steps_to_keep(steps: list[int], scores: Mapping[int, float], config: CheckpointConfig) -> set[int]:
    """The newest, those on the period, and the best."""
    keep = set(sorted(steps)[-config.keep_last :])
    if config.keep_period is not None:
        keep |= {step for step in steps if step % config.keep_period == 0}
    if best := config.keep_best:
        sign = 1 if best.mode == "max" else -1
        ranked = sorted((sign * score, step) for step, score in scores.items() if step in set(steps))
        keep |= {step for _, step in ranked[-best.count :]}
    return keep


def _free(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 1e9:.1f} GB"
    except OSError:
        return "unknown space"
