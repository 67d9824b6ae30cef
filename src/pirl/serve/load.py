"""Loads a checkpoint into a compiled planner, and reloads it when the checkpoint changes."""

from collections.abc import Callable
from dataclasses import replace

from pirl.config import RLTrainConfig
from pirl.serve.config import ServeConfig
from pirl.serve.novelty import load_novelty
from pirl.serve.planner import Planner
from pirl.serve.safety import NoveltyConfig
from pirl.serve.server import Load
from pirl.training.acting import find_checkpoint, load_acting


def loader(
    location: str,
    serve: ServeConfig,
    *,
    best: bool = False,
    recipe: RLTrainConfig | None = None,
    change: Callable[[RLTrainConfig], RLTrainConfig] = lambda config: config,
    default_prompt: str | None = None,
    novelty: NoveltyConfig | None = None,
) -> Load:
    """A function that loads the checkpoint at `location`, resolved at every call: a run's latest step may change."""

    def load(replaced: Planner | None) -> Planner:
        found = find_checkpoint(location, best=best, config=recipe)
        acting = load_acting(replace(found, config=change(found.config)))
        planner = Planner(
            acting,
            seed=serve.seed,
            batch_sizes=serve.batch_sizes,
            real_time=serve.real_time,
            real_time_limit=serve.real_time_limit,
            default_prompt=default_prompt,
            novelty=None if novelty is None else load_novelty(found.folder, novelty.file),
        )
        return planner.compile(replaced)

    return load
