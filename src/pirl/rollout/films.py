"""Videos of episodes, and a filmstrip with time from left to right.

An evaluation renders only what the policy sees. A film shows every step, larger if the environment can render so: it
replays the episode's actions from its context. If the replay differs (or there is no environment), the film shows the
policy's images.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from pirl.data.encode import EpisodeVideo, VideoEncoding, choose_encoding
from pirl.envs.env import RobotEnv
from pirl.files import replacing
from pirl.records import Array, Rollout

STRIP = "filmstrip.png"
LEAST_SIZE = 160
"""Shortest side in pixels; smaller images are enlarged by repeating pixels."""
GREEN, RED = (40, 160, 70), (205, 50, 50)
_H264 = VideoEncoding(encoder="libx264", options={"crf": "18", "preset": "veryfast"})
_CELL, _BORDER, _GAP, _LINE = 96, 3, 4, 16


@dataclass(frozen=True, kw_only=True)
class Film:
    """The film of one episode."""

    frames: UInt8[Array, "T h w 3"]
    """RGB images over time."""
    fps: int
    """Frames per second."""
    success: bool
    """Whether it succeeded."""
    number: int
    """Number of the episode in the evaluation."""
    caption: str
    """Caption in the filmstrip."""

    @property
    def name(self) -> str:
        """File name without suffix."""
        return f"{'success' if self.success else 'failure'}-{self.number:04d}"


class Highlights:
    """Keeps the first successes and failures by number, in any order of arrival."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[bool, list[Rollout]] = {True: [], False: []}

    def add(self, rollout: Rollout) -> None:
        """Add an episode; drop those no longer among the first."""
        kept = self._kept[bool(rollout.episode.success)]
        kept.append(rollout)
        kept.sort(key=lambda one: one.number)
        del kept[self._count :]

    @property
    def rollouts(self) -> list[Rollout]:
        """Successes, then failures."""
        return [*self._kept[True], *self._kept[False]]


def film(rollout: Rollout, env: RobotEnv | None, *, fps: int) -> Film | None:
    """The film of a rollout; None without images."""
    episode, frames = rollout.episode, None if env is None else _act_again(env, rollout)
    if frames is None:
        frames = _side_by_side(list(rollout.frames.values()))
        fps = max(1, round(fps * len(rollout.frame_steps) / len(episode)))
    if frames is None:
        return None
    end = "success" if episode.success else "failure"
    return Film(
        frames=frames,
        fps=fps,
        success=bool(episode.success),
        number=rollout.number,
        caption=f"{rollout.number}: {episode.task}: {end}, {len(episode)} steps",
    )


def _act_again(env: RobotEnv, rollout: Rollout) -> UInt8[Array, "T h w 3"] | None:
    """Frames of the episode replayed in the environment; None if rewards or success differ from the recording."""
    try:
        env.begin(rollout.context)
        seen = [_picture(env)]
        success = False
        for action, reward in zip(rollout.episode.actions, rollout.episode.rewards, strict=True):
            outcome = env.act(action)
            success = outcome.success
            if np.float32(outcome.reward) != np.float32(reward):
                return None
            seen.append(_picture(env))
    except Exception:  # a simulator may raise anything, and a film must not fail an evaluation
        return None
    same = success == rollout.episode.success and all(picture is not None for picture in seen)
    return np.stack([picture for picture in seen if picture is not None]) if same else None


def _picture(env: RobotEnv) -> UInt8[Array, "h w 3"] | None:
    """The environment's rendered view, or all its cameras side by side."""
    if env.render_mode == "rgb_array":
        drawn: Any = env.render()
        if isinstance(drawn, np.ndarray) and drawn.dtype == np.uint8 and drawn.ndim == 3:
            return drawn
    pictures = [value[None] for value in env.observe().values() if np.ndim(value) == 3]
    joined = _side_by_side(pictures)
    return None if joined is None else joined[0]


def _side_by_side(cameras: Sequence[Array]) -> Array | None:
    """Cameras of equal height side by side; otherwise the first."""
    if not cameras:
        return None
    alike = all(frames.shape[:2] == cameras[0].shape[:2] for frames in cameras)
    return np.concatenate(cameras, axis=2) if alike else cameras[0]


def enlarge(frames: UInt8[Array, "T h w 3"], least: int = LEAST_SIZE) -> UInt8[Array, "T h2 w2 3"]:
    """Repeat pixels until the shorter side has `least`; make sides even, as H.264 requires."""
    factor = max(1, -(-least // min(frames.shape[1:3])))
    large = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    odd = [(0, 0), *((0, side % 2) for side in large.shape[1:3]), (0, 0)]
    return np.pad(large, odd, mode="edge")


def write_video(film: Film, folder: Path) -> Path:
    """Write an mp4 that browsers play; its last frame stays for a second."""
    frames = enlarge(film.frames)
    file = folder / f"{film.name}.mp4"
    with replacing(file) as partial:
        size = {"height": frames.shape[1], "width": frames.shape[2]}
        video = EpisodeVideo(partial, fps=film.fps, encoding=choose_encoding(_H264), **size)
        try:
            for frame in [*frames, *[frames[-1]] * film.fps]:
                video.write(frame)
        finally:
            video.close()
    return file


def write_films(rollouts: Iterable[Rollout], env: RobotEnv | None, folder: Path, *, fps: int) -> list[Path]:
    """Write one video per rollout and a filmstrip; nothing for rollouts without images."""
    films = [found for rollout in rollouts if (found := film(rollout, env, fps=fps)) is not None]
    if films:
        folder.mkdir(parents=True, exist_ok=True)
        write_filmstrip(films, folder / STRIP)
    return [write_video(one, folder) for one in films]


def filmstrip(films: Sequence[Film], *, columns: int = 8) -> Image.Image:
    """One row per film, time from left to right; the border colour shows the outcome."""
    rows = [[_cell(frame, film.success) for frame in _spread(film.frames, columns)] for film in films]
    width = max(sum(cell.width + _GAP for cell in row) for row in rows) + _GAP
    heights = [max(cell.height for cell in row) + _LINE + _GAP for row in rows]
    strip = Image.new("RGB", (width, sum(heights) + _GAP), "white")
    draw = ImageDraw.Draw(strip)
    top = _GAP
    for film, row, height in zip(films, rows, heights, strict=True):
        draw.text((_GAP, top), film.caption, fill=GREEN if film.success else RED)
        left = _GAP
        for cell in row:
            strip.paste(cell, (left, top + _LINE))
            left += cell.width + _GAP
        top += height
    return strip


def write_filmstrip(films: Sequence[Film], file: Path) -> Path:
    """`filmstrip` as a PNG."""
    with replacing(file) as partial:
        filmstrip(films).save(partial, "PNG")
    return file


def _spread(frames: UInt8[Array, "T h w 3"], columns: int) -> Iterable[UInt8[Array, "h w 3"]]:
    """At most `columns` evenly spaced frames, including the first and the last."""
    return frames[np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)]


def _cell(frame: UInt8[Array, "h w 3"], success: bool) -> Image.Image:
    image = Image.fromarray(frame)
    scale = _CELL / image.height
    size = (max(1, round(image.width * scale)), _CELL)
    image = image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
    cell = Image.new("RGB", (size[0] + 2 * _BORDER, size[1] + 2 * _BORDER), GREEN if success else RED)
    cell.paste(image, (_BORDER, _BORDER))
    return cell
