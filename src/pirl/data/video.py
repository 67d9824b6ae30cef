"""Images of an episode: decoded in one sequential pass and resized to the model's size, without the letterbox.

Frames are counted, never matched by time: float timestamps drift in long files, frame numbers do not. If a video or
parquet file does not hold exactly the promised frames, this raises instead of returning images of other moments.
"""

import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import chain
from typing import Any, Literal

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import UInt8
from PIL import Image

from pirl.data import journal
from pirl.data.lerobot import DatasetMeta, EpisodeMeta
from pirl.data.reading import DAMAGE, open_parquet
from pirl.data.resize import content_size, pad, resize_exact
from pirl.data.schema import INFO_FILE, inside
from pirl.errors import DataError

Resize = Literal["fast", "exact"]
"""`exact`: OpenPI's PIL bilinear. `fast`: swscale's bilinear on full-resolution planes, at half the cost; scaling the
subsampled planes directly would be cheaper still, but off by several grey levels."""

# PyAV 17 gives every scaler a thread per core. Here episodes run in parallel instead.
_ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}
_PNG = b"\x89PNG\r\n\x1a\n"
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # convertible to RGB without losing content
_BACK_OFF = 250  # frames; far more than a group of pictures of any LeRobot encoder


def frame_size(meta: DatasetMeta, camera: str, size: int | None, *, letterbox: bool = False) -> tuple[int, int]:
    """Height and width of the frames `read_frames` returns."""
    height, width = meta.camera(camera).frame_size
    if size is None:
        return height, width
    return (size, size) if letterbox else content_size(height, width, (size, size))


def read_frames(
    meta: DatasetMeta,
    episode: EpisodeMeta,
    camera: str,
    *,
    size: int | None,
    method: Resize = "fast",
    letterbox: bool = False,
) -> UInt8[np.ndarray, "T h w 3"]:
    """All frames of one camera of one episode, resized to fit a square of `size` (None: original size).

    The device adds the black borders; `letterbox` stores them instead, for cameras of different aspect ratios that
    share a batch. PNG images always use the exact method, since decoding them dominates the cost.
    """
    feature = meta.camera(camera)
    content = frame_size(meta, camera, size)
    if feature.dtype == "image":
        pictures = (resize_exact(image, content) for image in _images(meta, episode, camera))
    else:
        convert = _converter(feature.frame_size, content, method)
        pictures = (convert(frame) for frame in _video_frames(meta, episode, camera))
    height, width = frame_size(meta, camera, size, letterbox=letterbox)
    out = np.empty((episode.length, height, width, 3), dtype=np.uint8)
    for target, picture in zip(out, pictures, strict=True):
        target[...] = pad(picture, (height, width))
    return out


def _converter(
    source: tuple[int, int], target: tuple[int, int], method: Resize
) -> Callable[[av.VideoFrame], np.ndarray]:
    """A function from decoded frames to RGB at the target size, with scalers set up once per episode."""
    full, small = VideoReformatter(), VideoReformatter()

    def rgb(frame: av.VideoFrame) -> np.ndarray:
        return full.reformat(frame, format="rgb24", **_ONE_THREAD).to_ndarray()

    def fast(frame: av.VideoFrame) -> np.ndarray:
        planes = full.reformat(frame, format="gbrp", **_ONE_THREAD)  # full resolution in every channel before scaling
        scaled = small.reformat(planes, target[1], target[0], "rgb24", interpolation="BILINEAR", **_ONE_THREAD)
        return scaled.to_ndarray()

    if source == target:
        return rgb
    return fast if method == "fast" else lambda frame: resize_exact(rgb(frame), target)


def _video_frames(meta: DatasetMeta, episode: EpisodeMeta, camera: str) -> Iterator[av.VideoFrame]:
    """The episode's frames in order: one seek, then sequential decoding. Raises for missing or extra frames."""
    span = episode.cameras[camera]
    where = f"{span.path}: episode {episode.index}"
    number, end = span.first, span.first + episode.length
    try:
        with journal.opened(meta.root, span.path, lambda path: av.open(str(path))) as container:
            stream = container.streams.video[0]
            if getattr(stream, "codec_context", None) is None:  # PyAV does not know the track's codec
                raise ValueError("its codec is not known")
            stream.codec_context.thread_count = 1
            if meta.version != "v3.0" and stream.frames > episode.length:
                raise DataError(
                    f"{where}: {stream.frames} frames in the video, but the episode's length is {episode.length}",
                    hint="which rows the frames belong to is unclear: export the episode again, or remove it",
                )
            for found, frame in _frames_from(container, stream, span.first, meta.fps):
                if found != number:
                    raise DataError(
                        f"{where}: found frame {found} of the file at {meta.fps} fps, expected frame {number}",
                        hint=f"the video ({stream.average_rate} fps) lacks frames, or fps in {INFO_FILE} is wrong",
                    )
                _check_size(frame.height, frame.width, meta, camera, where)
                yield frame
                number += 1
                if number == end:
                    return
    except (av.FFmpegError, IndexError, OSError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise DataError(
            f"{where}: cannot be decoded from frame {number} on ({error})",
            hint="the video is damaged or incomplete: download it again, or remove the episode",
        ) from error
    raise DataError(
        f"{where}: the video ends before frame {number}, expected frames {span.first} to {end - 1}",
        hint="the video is cut off or lacks frames: download it again, or remove the episode",
    )


def _frames_from(
    container: InputContainer, stream: VideoStream, first: int, fps: int | float
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Frames from number `first` on, with their numbers.

    Seeking follows decoding order, so with open groups of pictures it can land just after the wanted frame. Then retry
    from further back, and finally from the beginning of the file.
    """
    base = stream.time_base
    rate = Fraction(base.numerator, base.denominator) * Fraction(fps) if base else Fraction(0)
    for start in dict.fromkeys((first, max(first - _BACK_OFF, 0), 0)):
        container.seek(int(start / rate), stream=stream, backward=True)
        numbered = ((round((frame.pts or 0) * rate), frame) for frame in container.decode(stream))
        head = next(numbered, None)
        if head is not None and (head[0] <= first or start == 0):
            yield from (pair for pair in chain([head], numbered) if pair[0] >= first)
            return


def stored_pictures(meta: DatasetMeta, episode: EpisodeMeta, camera: str) -> list[bytes]:
    """The episode's encoded images (PNG) of an image feature."""
    return [_stored(meta, cell) for cell in _cells(meta, episode, camera)]


def _stored(meta: DatasetMeta, cell: Mapping[str, Any]) -> bytes:
    """The bytes in a cell, or of the file it references."""
    if cell["bytes"] is not None:
        return bytes(cell["bytes"])
    if not inside(cell["path"]):
        raise ValueError(f"the path {cell['path']!r} leads out of the dataset")
    return (meta.root / cell["path"]).read_bytes()


def _images(meta: DatasetMeta, episode: EpisodeMeta, camera: str) -> Iterator[np.ndarray]:
    """The episode's images from the parquet file's `struct<bytes, path>` column."""
    where = f"{episode.data.path}: episode {episode.index}"
    number = 0
    try:
        for cell in _cells(meta, episode, camera):
            stored = _stored(meta, cell)
            _check_png(stored)
            with Image.open(io.BytesIO(stored)) as picture:
                _check_size(picture.height, picture.width, meta, camera, where)  # before decoding a huge image
                if picture.mode not in _MODES:
                    raise ValueError(f"it is {picture.mode}, expected 8-bit colours")
                image = np.asarray(picture.convert("RGB"))
            yield image
            number += 1
    except (*DAMAGE, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: picture {number} of {camera} cannot be read ({type(error).__name__}: {error})",
            hint="the file is damaged: download or export it again",
        ) from error


def _check_png(content: bytes) -> None:
    """Verify the checksums of a PNG file's chunks, which Pillow does not when decoding."""
    place = len(_PNG)
    while content.startswith(_PNG) and place < len(content):
        end = place + 12 + int.from_bytes(content[place : place + 4], "big")
        if zlib.crc32(content[place + 4 : end - 4]) != int.from_bytes(content[end - 4 : end], "big"):
            raise ValueError(f"the checksum at byte {place} is wrong")
        place = end


def _cells(meta: DatasetMeta, episode: EpisodeMeta, camera: str) -> Iterator[Mapping[str, Any]]:
    """The episode's rows of one image column; reads only the row groups that contain them."""
    with journal.opened(meta.root, episode.data.path, open_parquet) as file:
        group_start = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            begin = max(episode.data.first - group_start, 0)
            end = min(episode.data.first + episode.length - group_start, rows)
            if begin < end:
                yield from (
                    file.read_row_group(group, columns=[camera]).column(camera).slice(begin, end - begin).to_pylist()
                )
            group_start += rows


def _check_size(height: int, width: int, meta: DatasetMeta, camera: str, where: str) -> None:
    if (height, width) != (expected := meta.features[camera].frame_size):
        raise DataError(
            f"{where}: a frame of {camera} is {height}x{width}, expected {expected[0]}x{expected[1]} ({INFO_FILE})",
            hint=f"correct the shape in {INFO_FILE}, or export the dataset again",
        )
