"""Rendering for the MuJoCo simulators: choosing a GL backend, and rendering fast.

Without a GPU, shadow maps and multisampling cost five to ten times as much as the scene itself. Simulators therefore
offer `fast` rendering without them, which differs from what released checkpoints were trained on.
"""

import os
import sys
from collections.abc import Mapping
from glob import glob
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxtyping import UInt8

from pirl.errors import EnvError, MissingExtraError
from pirl.records import Array

SYSTEM_PACKAGES = "libosmesa6 libegl1 libgl1-mesa-dri libgles2"
"""Debian packages for rendering without a display."""


def choose_gl(
    environ: Mapping[str, str] = os.environ, *, platform: str = sys.platform, gpu: bool | None = None
) -> str | None:
    """The value to set `MUJOCO_GL` to, or None to leave the user's or MuJoCo's default choice.

    By default MuJoCo opens a window context, which fails without a display. There a GPU renders through EGL, a CPU
    through OSMesa (EGL would find no device, or fall back silently).
    """
    if environ.get("MUJOCO_GL") or platform != "linux" or environ.get("DISPLAY"):
        return None
    if gpu is None:
        gpu = bool(glob("/dev/nvidia[0-9]*") or glob("/dev/dri/renderD*"))
    return "egl" if gpu else "osmesa"


def load(module: str, *, extra: str, why: str) -> ModuleType:
    """Import a module of an optional simulator, after setting `MUJOCO_GL`, which MuJoCo only reads on import."""
    if (gl := choose_gl()) is not None:
        os.environ.setdefault("MUJOCO_GL", gl)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError((error.name or module).partition(".")[0], extra, why) from None
    except Exception as error:  # PyOpenGL raises various exceptions if the library it binds is missing
        raise _no_gl(error) from error


class Pictures:
    """Renders one model's cameras. Create it for the first image: most steps need none."""

    def __init__(self, model: Any, size: tuple[int, int], *, fast: bool) -> None:
        """Prepare to render `model` at `size` (height, width); `fast` changes the model itself (see `plain`)."""
        import mujoco

        height, width = size
        frame = model.vis.global_
        frame.offheight, frame.offwidth = max(frame.offheight, height), max(frame.offwidth, width)
        if fast:
            plain(model)
        try:
            self._renderer = mujoco.Renderer(model, height, width)
        except Exception as error:  # whatever the GL library raises
            raise _no_gl(error) from error

    def take(self, data: Any, camera: str) -> UInt8[Array, "h w 3"]:
        """A camera's current picture."""
        self._renderer.update_scene(data, camera)
        return self._renderer.render().copy()

    def close(self) -> None:
        """Free the GL context, which raises if left to the interpreter's exit.

        Makes it current first, because its object ids are also valid in other contexts.
        """
        if (context := getattr(self._renderer, "_gl_context", None)) is not None:
            context.make_current()
        self._renderer.close()


def plain(model: Any) -> None:
    """Remove shadows, reflections and multisampling from a model. Existing renderers keep them."""
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0


def _no_gl(error: Exception) -> EnvError:
    chosen = os.environ.get("MUJOCO_GL", "(not set)")
    return EnvError(
        f"MuJoCo cannot render with MUJOCO_GL={chosen}: {type(error).__name__}: {error}",
        hint=f"apt-get install {SYSTEM_PACKAGES}; MUJOCO_GL=osmesa renders on the processor, egl on a graphics card",
    )
