"""Load a checkpoint from disk as a policy that acts in environments.

The configuration comes from the step folder (`extra/metadata.json`) or its run (`config.yaml`); for OpenPI weights the
caller gives it. Norm stats are always the checkpoint's own, because its weights were trained in those units. From the
training state only the groups that acting needs are read, such as a critic for best-of-N.
"""

import difflib
import math
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pirl import trust
from pirl.agents.agent import Agent, TrainState
from pirl.build import build_agent
from pirl.checkpoints.fetch import fetch
from pirl.checkpoints.ocdbt import read_json
from pirl.checkpoints.restore import restore_part
from pirl.checkpoints.run import EXTRA_ITEM
from pirl.checkpoints.run_directory import METADATA_FILE, complete_steps
from pirl.checkpoints.weights import check_finite, kind_of, load
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict, read_yaml
from pirl.data.assets import assets_beside, choose_asset, named_asset
from pirl.data.transforms import Transform
from pirl.errors import CheckpointError, ConfigError
from pirl.models.params import Params
from pirl.models.policy import Preparing
from pirl.names import ASSETS_ITEM, CONFIG_FILE, PARAMS_ITEM, TRAIN_STATE_ITEM
from pirl.parallel.sharding import make_mesh, sharded_shapes
from pirl.rollout.policy import ChunkPolicy, WithWeights
from pirl.training.build import build_chunk_policy, build_transform
from pirl.training.config import KeepBest
from pirl.training.ending import best_step


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint located on disk with its configuration; nothing is loaded yet."""

    folder: Path
    """The step's folder (for PyTorch weights, their folder or file)."""
    config: RLTrainConfig
    """The configuration it was trained with, or is to be used with."""
    metadata: Mapping[str, Any]
    """Contents of its metadata file: versions, time, metrics; empty for OpenPI checkpoints."""

    @property
    def step(self) -> int | None:
        """The training step, if the folder is named after one."""
        return int(self.folder.name) if self.folder.name.isdecimal() else None

    @property
    def run(self) -> Path | None:
        """The run's folder, if the checkpoint lies in a pirl run."""
        run = self.folder.parent
        return run if self.step is not None and (run / METADATA_FILE).is_file() else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Acting(WithWeights):
    """A loaded checkpoint."""

    found: Found
    """Its location and configuration."""

    def use(self, seed: int) -> ChunkPolicy:
        """The policy with these weights; `seed` determines its noise."""
        return self.policy.use(self.state, jax.random.key(seed))


def open_checkpoint(
    location: str | os.PathLike[str],
    *,
    best: bool = False,
    config: RLTrainConfig | None = None,
    change: Callable[[RLTrainConfig], RLTrainConfig] = lambda config: config,
) -> Acting:
    """Find a checkpoint, apply `change` to its configuration (environment, candidates, ...), and load it."""
    found = find_checkpoint(location, best=best, config=config)
    return load_acting(replace(found, config=change(found.config)))


def find_checkpoint(
    location: str | os.PathLike[str], *, best: bool = False, config: RLTrainConfig | None = None
) -> Found:
    """The checkpoint at a path or address: a step folder, or a run folder's latest (or `best`) step.

    `config` overrides the checkpoint's own; a checkpoint that stores none needs it.
    """
    path = fetch(_spelled(location))
    steps = complete_steps(path)
    if best and not steps:
        raise CheckpointError(
            f"{path} is not the folder of a run, so there is no best of its steps", hint="give the run's folder"
        )
    if best:
        path = path / str(_best_step(path, steps, config))
    elif steps:
        path = path / str(steps[-1])
    elif path.name == PARAMS_ITEM and kind_of(path) == "openpi":
        path = path.parent
    kind_of(path)  # raises if there are no weights
    metadata = _metadata(path)
    return Found(folder=path, config=config or _own_config(path, metadata), metadata=metadata)


def load_acting(found: Found) -> Acting:
    """Load weights and norm stats onto all devices of this process."""
    config = found.config
    agent, transform = build_agent(config), checkpoint_transform(found.folder, config)
    policy = build_chunk_policy(config, agent, transform, best_of=config.rollout.best_of)
    mesh = acting_mesh(config)
    params = load_groups(found, agent, mesh, agent.acting_groups(config.rollout.best_of))
    model = agent.policy
    if mesh.size == 1 and isinstance(model, Preparing):
        # Acting weights never change: transform them for inference once instead of at every plan.
        params["policy"] = jax.jit(model.for_inference)(params["policy"])
    return Acting(found=found, state=TrainState(step=jnp.zeros((), jnp.int32), params=params), policy=policy)


def acting_mesh(config: RLTrainConfig) -> jax.sharding.Mesh:
    """A mesh over all devices; fsdp shrinks to a divisor of their number, so any machine can act."""
    return make_mesh(math.gcd(config.mesh.size, jax.device_count()))


def load_groups(found: Found, agent: Agent, mesh: jax.sharding.Mesh, groups: Set[str]) -> dict[str, Params]:
    """Weights of the policy and of the other `groups`: EMA weights where there are any. Raises if not finite."""
    folder, shapes = found.folder, sharded_shapes(mesh, jax.eval_shape(agent.init, jax.random.key(0)))
    params = {"policy": load(folder, shapes.policy), **_other_weights(folder, shapes, groups)}
    for group, weights in params.items():
        check_finite(weights, source=f"{folder}, {group}")
    return params


def _spelled(location: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The location; raises "did you mean" if it does not exist but a sibling has a similar name."""
    path = Path(location).expanduser()
    beside = [] if path.exists() or not path.parent.is_dir() else [child.name for child in path.parent.iterdir()]
    if near := difflib.get_close_matches(path.name, beside):
        raise CheckpointError(f"there is no {path}", hint=f"did you mean: {', '.join(near)}")
    return location


def _metadata(folder: Path) -> dict[str, Any]:
    file = folder / EXTRA_ITEM / METADATA_FILE
    return read_json(file) if file.is_file() else {}


def _own_config(folder: Path, metadata: Mapping[str, Any]) -> RLTrainConfig:
    """The configuration stored in the step's metadata, or else in its run's folder."""
    file = folder.parent / CONFIG_FILE
    if "config" in metadata:
        source, data = folder / EXTRA_ITEM / METADATA_FILE, metadata["config"]
    elif file.is_file():
        source, data = file, read_yaml(file)
    else:
        raise CheckpointError(
            f"{folder} does not say how it was trained: there is neither {EXTRA_ITEM}/{METADATA_FILE} in it nor "
            f"{CONFIG_FILE} beside it",
            hint="name a recipe or YAML file with its model, robot and environment: --recipe NAME",
        )
    trust.check(data, source=source)
    try:
        return from_dict(RLTrainConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from error


def _best_step(run: Path, steps: list[int], config: RLTrainConfig | None) -> int:
    """The step with the best value of `checkpoint.keep_best.metric`; the latest of equals."""
    found = {step: _metadata(run / str(step)) for step in steps}
    rule = (config or _own_config(run / str(steps[-1]), found[steps[-1]])).checkpoint.keep_best or KeepBest()
    best = best_step({step: metadata.get("metrics") or {} for step, metadata in found.items()}, rule)
    if best is None:
        raise CheckpointError(
            f"no step of {run} was saved with {rule.metric} ({len(steps)} steps)",
            hint="make checkpoint.save_interval a multiple of evaluation.interval; or name a step's folder",
        )
    return best


def checkpoint_transform(folder: Path, config: RLTrainConfig) -> Transform:
    """The training transform with the checkpoint's norm stats."""
    assets = (folder if folder.is_dir() else folder.parent) / ASSETS_ITEM
    found, named = assets_beside(folder), named_asset(config.data, config.robot)
    if (chosen := choose_asset(found, named)) is None:
        raise CheckpointError(
            f"{assets} holds the statistics of {', '.join(found) or 'nothing'}, and the configuration names {named!r}",
            hint="say whose to use: --data.asset-id NAME" if found else "copy those it was trained with to there",
        )
    return build_transform(replace(config, data=replace(config.data, assets_dir=str(assets), asset_id=chosen)))


def _other_weights(folder: Path, shapes: TrainState, needed: Set[str]) -> dict[str, Params]:
    """Weights of groups besides the policy (EMA where there is one), read without the rest of the training state."""
    groups = {name: shapes.params[name] for name in sorted(needed) if name in shapes.params}
    if not groups:
        return {}
    item = folder / TRAIN_STATE_ITEM
    if not item.is_dir():
        without = "; or act without a critic: --best-of 1" if set(groups) == {"critic"} else ""
        raise CheckpointError(
            f"{folder} holds no {TRAIN_STATE_ITEM}, and with it no {' or '.join(groups)}",
            hint=f"take a checkpoint of the run itself, not an export{without}",
        )
    reference: dict[str, Params] = {"ema": {}, "groups": {}}
    for name, leaves in groups.items():
        reference["ema" if name in shapes.ema else "groups"][name] = leaves
    restored = restore_part(item, {kind: tree for kind, tree in reference.items() if tree})
    return restored.get("ema", {}) | restored.get("groups", {})
