"""Finds LIBERO's package, assets, tasks and initial states without prompts, downloads or torch.

hf-libero assumes an interactive session: its first import asks where to put a configuration file, a missing assets
folder starts a download, and its task list imports torch to read NumPy arrays. Workers can do none of this, so this
module finds everything first and raises errors that name what is missing.
"""

import contextlib
import io
import os
import pickle
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.envs.mujoco_render import choose_gl
from pirl.errors import EnvError
from pirl.files import write_text
from pirl.paths import pirl_home
from pirl.records import Array

ASSETS_VARIABLE = "PIRL_LIBERO_ASSETS"
"""Environment variable with the assets folder, if the configuration has none."""
_PACKAGES = ("mujoco", "robosuite", "bddl", "libero")
PINNED = ("robosuite==1.4.0", "bddl==1.0.1", "hf-libero==0.1.4")
"""Installed without dependencies, because those include LIBERO's training code."""
INSTALL = "python -m pirl.envs.libero_install"
"""The command that sets everything up."""
_ASSET_FOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
)
DOWNLOAD = "from libero.libero.utils.download_utils import download_assets_from_huggingface as d; d()"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a suite."""

    name: str
    """The instruction, followed by the scene if another task of the suite has the same instruction."""
    prompt: str
    """The instruction."""
    bddl: Path
    """The file that defines scene and goal."""
    init_states: Path
    """The file of initial states."""


def prepare(assets: str | None) -> None:
    """Make `import libero` work in this process with these assets; raises if something is missing."""
    check_packages()
    folder = find_assets(assets)
    if (gl := choose_gl()) is not None:
        os.environ["MUJOCO_GL"] = gl  # otherwise robosuite insists on EGL, even without a GPU
    with _config_file():
        libero: Any = import_module("libero.libero")
    if not hasattr(libero, "get_assets_path"):
        raise EnvError("the package libero is not hf-libero", hint="pip install --no-deps hf-libero==0.1.4")
    # hf-libero reads only this variable, not the key `assets` of its configuration file.
    libero._assets_path_cache = str(folder)


def check_packages() -> None:
    """Raise if LIBERO's packages are missing."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise EnvError(
            f"LIBERO needs {', '.join(missing)}, which cannot be imported",
            hint=f"{INSTALL}; or pip install 'pirl[libero]', then pip install --no-deps {' '.join(PINNED)}",
        )


def find_assets(assets: str | None) -> Path:
    """LIBERO's assets folder: as configured, from the environment variable, in the package, or in its cache."""
    named = assets or os.environ.get(ASSETS_VARIABLE)
    package = find_spec("libero")
    inside = [Path(package.origin).parent / "libero" / "assets"] if package and package.origin else []
    places = [Path(named).expanduser()] if named else [*inside, Path("~/.cache/libero/assets").expanduser()]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise EnvError(
            f"LIBERO's assets (meshes, textures, scenes) are not in {' nor in '.join(map(str, places))}",
            hint=f"download them: {INSTALL}; or name their folder: --env.assets PATH, or {ASSETS_VARIABLE}=PATH",
        )
    if missing := [name for name in _ASSET_FOLDERS if not (found / name).is_dir()]:
        raise EnvError(
            f"{found} has no folder {', '.join(missing)}; expected {', '.join(_ASSET_FOLDERS)}",
            hint="name LIBERO's folder `assets` itself, and check that its download is complete",
        )
    return found.resolve()


def load_tasks(suite: str) -> tuple[Task, ...]:
    """The tasks of a suite in LIBERO's order. Call `prepare` first."""
    with _torch_absent(), contextlib.redirect_stdout(io.StringIO()):  # LIBERO prints the task order
        benchmark = import_module("libero.libero.benchmark").get_benchmark(suite)()
        folder = Path(import_module("libero.libero").get_libero_path("init_states"))
        tasks = benchmark.tasks
        bddl = [Path(benchmark.get_task_bddl_file_path(i)).resolve() for i in range(len(tasks))]
    named = Counter(task.language for task in tasks)
    loaded = tuple(
        Task(
            name=task.language if named[task.language] == 1 else f"{task.language} ({_scene(task.name)})",
            prompt=task.language,
            bddl=file,
            init_states=(folder / task.problem_folder / task.init_states_file).resolve(),
        )
        for task, file in zip(tasks, bddl, strict=True)
    )
    for file in (file for task in loaded for file in (task.bddl, task.init_states)):
        if not file.is_file():
            config = import_module("libero.libero").config_file
            raise EnvError(
                f"{file} of suite {suite} is missing", hint=f"{config} defines where LIBERO looks: correct it"
            )
    return loaded


def read_init_states(path: Path) -> Float[Array, "n d"]:
    """The initial states of a task, one per row: time, joint positions, joint velocities.

    The file is a pickle written by torch. Unpickling executes nothing: only the names that NumPy needs to build a
    numeric array are allowed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
    except (OSError, zipfile.BadZipFile, StopIteration, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise EnvError(
            f"{path} cannot be read as initial states: {error or type(error).__name__}",
            hint="expected the file as hf-libero ships it; install it again",
        ) from error
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype.kind != "f" or not len(states):
        what = f"{states.dtype} of shape {states.shape}" if isinstance(states, np.ndarray) else type(states).__name__
        raise EnvError(f"{path} holds {what}, expected rows of numbers", hint="install hf-libero again")
    return np.array(states, np.float64)


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that only allows NumPy arrays."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),  # how old pickles write bytes
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which an array of numbers does not need")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _scene(task: str) -> str:
    """The part of a task's name in capitals: KITCHEN_SCENE3_put_... is set in KITCHEN_SCENE3."""
    return "_".join(word for word in task.split("_") if word.isupper())


@contextlib.contextmanager
def _config_file() -> Iterator[None]:
    """Provide LIBERO's configuration file in our cache if there is none; without it, its import asks for input."""
    if "libero.libero" in sys.modules:
        yield
        return
    theirs = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser()
    if (theirs / "config.yaml").is_file():
        yield
        return
    package = find_spec("libero")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent / "libero"
    ours = pirl_home() / "libero"
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": ours / "datasets", "assets": root / "assets"}
    write_text(ours / "config.yaml", "".join(f"{key}: {path}\n" for key, path in paths.items()))
    before = os.environ.get("LIBERO_CONFIG_PATH")
    os.environ["LIBERO_CONFIG_PATH"] = str(ours)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBERO_CONFIG_PATH"]
        else:
            os.environ["LIBERO_CONFIG_PATH"] = before


@contextlib.contextmanager
def _torch_absent() -> Iterator[None]:
    """Let `import torch` succeed in the block if torch is not installed.

    LIBERO's task list imports it for one function, which `read_init_states` replaces. The empty module is removed
    afterwards, because other libraries test for torch by importing it.
    """
    if "torch" in sys.modules or find_spec("torch") is not None:
        yield
        return
    sys.modules["torch"] = ModuleType("torch")
    try:
        yield
    finally:
        del sys.modules["torch"]
