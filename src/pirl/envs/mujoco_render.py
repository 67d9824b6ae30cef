"""Shared rendering of the MuJoCo simulators: choosing a GL backend, and rendering cheaply.

Without a graphics card, shadow maps and multisampling cost five to ten times what the scene itself does, so a
simulator offers the choice: `fast` leaves them out, which is cheap but not what released checkpoints were trained on.
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
"""Debian's names of the libraries that render without a display."""


def choose_gl(
    environ: Mapping[str, str] = os.environ, *, platform: str = sys.platform, gpu: bool | None = None
) -> str | None:
    """The value `MUJOCO_GL` should have, or None where the user's, or MuJoCo's own, choice is right.

    MuJoCo opens a window's context unless told otherwise, which fails on a machine without a display. There a graphics
    card renders through EGL, and the processor through OSMesa (EGL would find no device, or fall back silently).
    """
    if environ.get("MUJOCO_GL") or platform != "linux" or environ.get("DISPLAY"):
        return None
    if gpu is None:
        gpu = bool(glob("/dev/nvidia[0-9]*") or glob("/dev/dri/renderD*"))
    return "egl" if gpu else "osmesa"


def load(module: str, *, extra: str, why: str) -> ModuleType:
    """Import a module of a simulator that is an extra, having chosen how to render: MuJoCo reads it on import only."""
    if (gl := choose_gl()) is not None:
        os.environ.setdefault("MUJOCO_GL", gl)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError((error.name or module).partition(".")[0], extra, why) from None
    except Exception as error:  # PyOpenGL fails in many ways where the library it binds is absent
        raise _no_gl(error) from error


class Pictures:
    """Renders one model's cameras. Made when the first picture is asked for: most steps need none."""

    def __init__(self, model: Any, size: tuple[int, int], *, fast: bool) -> None:
        """Get ready to render `model` at `size` (height, width); `fast` changes how the model looks from now on."""
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
        """Free the GL context; left to the interpreter's exit, it comes too late and complains.

        It is made current first: what it holds is named by numbers that other contexts use too.
        """
        if (context := getattr(self._renderer, "_gl_context", None)) is not None:
            context.make_current()
        self._renderer.close()


def plain(model: Any) -> None:
    """Take shadows, reflections and multisampling from a model; a renderer made before keeps them."""
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
