"""Plain files as items of an Orbax checkpoint, so that a step is committed atomically with its files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from pirl.parallel.distributed import is_main


class FilesHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """An item of plain files, written by process 0. They are read without Orbax."""

    def save(self, directory: Any, args: "FilesSave") -> None:
        """Write the files."""
        if is_main():
            args.write(Path(directory))

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not needed."""
        raise NotImplementedError("the files of this item are read directly")


@ocp.args.register_with_handler(FilesHandler, for_save=True)
@dataclass
class FilesSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax arguments for saving an item of plain files."""

    write: Callable[[Path], None]
    """Writes the files into the given folder."""


@ocp.args.register_with_handler(FilesHandler, for_restore=True)
@dataclass
class FilesRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax requires a class of restore arguments."""
