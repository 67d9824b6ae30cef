"""Checkpoints of a run: OpenPI's folders, saved asynchronously and atomically.

<run>/<step>/params        the weights to act with (the EMA if there is one), as OpenPI reads them
<run>/<step>/assets        norm_stats.json for each robot
<run>/<step>/train_state   everything else needed to resume bit-exactly. Repeats the weights only if the acting weights
                           are not the trained ones (a condition merged into a bias)
<run>/<step>/extra         metadata.json (configuration, versions, metrics) and extra.json (data position, seed, ...)

With `checkpoint.save params` only the newest step keeps its train_state.

Orbax writes a step to a temporary folder and renames it; old steps are renamed before they are deleted. So every folder
named by a number is complete, however a process ended.
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
from pirl.checkpoints.quiet import quieten_orbax, stop_leaks
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
    """The checkpoints of one run. In a multi-process job every process creates one and makes the same calls."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        *,
        run: Mapping[str, Any] | None = None,
        norm_stats: Mapping[str, Mapping[str, NormStats]] | None = None,
        read_only: bool = False,
    ) -> None:
        """Open a run's folder. `run` comes from `run_metadata`; `norm_stats`, by asset id, go into every checkpoint.

        Locks the run for one job (one or several processes) and removes leftovers of interrupted saves and deletions.
        `read_only` changes nothing and also works while the run is being trained.
        """
        quieten_orbax()
        stop_leaks()
        self.directory = Path(directory).expanduser().absolute()
        self.config = config
        self._run = as_json(dict(run or {}))
        self._norm_stats = {check_asset_id(name): dict(stats) for name, stats in (norm_stats or {}).items()}
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pirl-checkpoints")
        self._known: set[int] = set()
        self._saving: int | None = None
        self._sealing, self._began = 0, 0.0
        self.seconds: float | None = None
        """Duration of the latest save until it was on disk; set on process 0 only."""
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
        """Whether a checkpoint is due at this step."""
        return step > 0 and step % self.config.save_interval == 0

    def all_steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest step with a complete checkpoint, or None."""
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
        """Start an asynchronous save. Returns once the arrays are copied, so the caller may donate the state.

        Waits for the previous save and re-raises its errors. `extra` is any tree of JSON values (process 0's is
        stored). `weights` are the acting weights, if they differ from the policy's (`Agent.served`). Returns False
        without writing for a step that this run has already saved or restored; see `amend`.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened for reading", hint="open it without read_only to save")
        self.wait()
        if step in self._known:
            return False
        if is_main() and any(self.directory.glob(_UNFINISHED)):
            self._clean()  # after an interrupted save
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
        """Replace the `extra` of an existing step, for progress since then that did not change the state."""
        self.wait()
        file = self.directory / str(self._existing(step)) / EXTRA_ITEM / EXTRA_FILE
        if is_main():
            with io_errors(f"{file} cannot be written"):
                write_text(file, extra_text(as_json(dict(extra))))

    def wait(self) -> None:
        """Block until the pending save is on disk; re-raises its error."""
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
        """Wait for the pending save and release the run."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            self._sweeper.shutdown()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def restore(self, reference: TrainState, step: int | None = None) -> TrainState:
        """Restore a state bit-exactly, in the shardings of the reference (a tree of ShapeDtypeStructs).

        Names, shapes and dtypes must match; the mesh may differ. step=None: the latest. Raises for a damaged step.
        """
        self.wait()
        step = self._existing(step)
        folder = self.directory / str(step)
        if reason := damage(folder, contents=False):  # before reading gigabytes
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
        """`extra` of every complete, resumable step; skips damaged ones."""
        for step in filter(lambda step: can_be_resumed(self.directory / str(step)), self.all_steps()):
            with suppress(CheckpointError):  # restoring it will report the damage
                yield read_extra(self.directory / str(step))

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Configuration, versions and metrics of a checkpoint; empty for OpenPI's."""
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
        """Write checksums. Called in the background on process 0, after all items are written and before the rename."""
        for folder in self.directory.glob(_UNFINISHED):
            if folder.name.split(".")[0] == str(self._sealing):
                seal(folder)
        self.seconds = time.monotonic() - self._began

    def _unmark(self, step: int) -> None:
        """Remove Orbax 0.12's marker files, which OpenPI's checkpoints do not have."""
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
                continue  # the user keeps files there
            with io_errors(f"step {step} of {self.directory} cannot be deleted"):
                os.rename(self.directory / str(step), self.directory / f".{step}.deleted")
        for step in self.all_steps()[:-1] if self.config.save == "params" else []:
            with suppress(CheckpointError), io_errors(f"step {step} of {self.directory} cannot be made smaller"):
                drop_train_state(self.directory / str(step))
        self._sweep(_DELETED)

    def _clean(self) -> None:
        self._sweep(_UNFINISHED)
        self._sweep(_DELETED)
        self._sweeper.submit(lambda: None).result()  # wait: the next save may reuse a name

    def _sweep(self, pattern: str) -> None:
        """Delete folders in the background, since gigabytes take seconds."""
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
                time.sleep(0.5)  # other threads of the failed save may still be writing and creating folders
                self._clean()
            if isinstance(error, PirlError):
                raise
            raise CheckpointError(
                f"step {step} could not be saved to {self.directory}: {reason_of(error)}",
                hint=f"is the disk full ({_free(self.directory)} free) or read-only? "
                f"Complete steps are untouched: {', '.join(map(str, self.all_steps())) or 'none'}",
            ) from error


def steps_to_keep(steps: list[int], scores: Mapping[int, float], config: CheckpointConfig) -> set[int]:
    """The union of the newest, periodic and best steps that `config` keeps."""
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
