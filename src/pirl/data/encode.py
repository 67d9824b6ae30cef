"""Encoding images: write an mp4 frame by frame, append an mp4 to another without re-encoding, write PNG.

Videos follow LeRobot's defaults: AV1, yuv420p, every second frame a key frame, so that reading one frame decodes at
most two.
"""

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from warnings import warn

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from pirl.errors import DataError, PirlWarning

PIXEL_FORMAT = "yuv420p"


@dataclass(frozen=True, kw_only=True)
class VideoEncoding:
    """An FFmpeg encoder and its options."""

    encoder: str = "libsvtav1"
    """FFmpeg's name of the encoder; the PyAV wheel must include it."""
    options: Mapping[str, str] = field(default_factory=lambda: {"g": "2", "crf": "30", "preset": "12"})
    """Options passed to the encoder. B-frames are not supported: appending relies on pts == dts."""


AV1 = VideoEncoding()
H264 = VideoEncoding(encoder="libx264", options={"g": "2", "crf": "23", "preset": "veryfast", "bf": "0"})


def choose_encoding(codec: str | VideoEncoding) -> VideoEncoding:
    """The encoding for "av1" or "h264". AV1 falls back to H.264 with a warning if PyAV lacks SVT-AV1."""
    if isinstance(codec, VideoEncoding):
        wanted = codec
    elif codec in ("av1", "h264"):
        wanted = AV1 if codec == "av1" else H264
    else:
        raise DataError(f"unknown video codec {codec!r}", hint='use "av1", "h264" or a VideoEncoding')
    if can_encode(wanted.encoder):
        return wanted
    if codec == "av1" and can_encode(H264.encoder):
        warn(f"this PyAV has no {AV1.encoder}; videos are written as H.264 instead", PirlWarning, stacklevel=3)
        return H264
    raise DataError(
        f"the video encoder {wanted.encoder!r} is not in this PyAV ({av.__version__})",
        hint='pip install --only-binary av "av>=14", or store images as PNG with dtype "image"',
    )


def can_encode(encoder: str) -> bool:
    """Whether PyAV has this encoder."""
    try:
        return bool(av.Codec(encoder, "w").is_encoder)
    except (av.FFmpegError, ValueError):  # PyAV's error for an unknown codec is a ValueError
        return False


class EpisodeVideo:
    """Writes one mp4, frame n at time n/fps. Only the encoder's look-ahead is in memory, not the episode."""

    def __init__(self, path: Path, *, fps: int, height: int, width: int, encoding: VideoEncoding) -> None:
        # SVT-AV1 prints a page of settings per encoder to stderr unless told otherwise.
        os.environ.setdefault("SVT_LOG", "1")
        self._frames, self._closed = 0, False
        self._time_base = Fraction(1, fps)
        self._container = av.open(str(path), "w", format="mp4")
        stream: Any = self._container.add_stream(encoding.encoder, rate=fps, options=dict(encoding.options))
        stream.width, stream.height, stream.pix_fmt = width, height, PIXEL_FORMAT
        self._stream = stream
        try:
            stream.codec_context.open()
        except av.FFmpegError as error:
            self._container.close()
            raise DataError(
                f"the encoder {encoding.encoder} refused {height}x{width} pictures at {fps} fps: {error.strerror}",
                hint="H.264 needs even heights and widths; check the options of the encoding",
            ) from error

    def write(self, frame: UInt8[np.ndarray, "h w 3"]) -> None:
        """Encode the next frame."""
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture.pts, picture.time_base = self._frames, self._time_base
        self._frames += 1
        self._container.mux(self._stream.encode(picture))

    def close(self) -> None:
        """Flush the encoder and finish the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()


def append_video(existing: Path, episode: Path, target: Path, *, fps: int) -> int:
    """Write `target` = `existing` + `episode` by copying packets; returns the frame at which the episode starts."""
    with av.open(str(target), "w", format="mp4") as output:
        stream: Any = None
        first_frame = frames = 0
        for source in (existing, episode):
            with av.open(str(source)) as container:
                video = container.streams.video[0]
                if stream is None:
                    stream = output.add_stream_from_template(video, opaque=True)  # no encoder is needed
                first_frame = frames
                ticks = _ticks_per_frame(video, fps)
                shift = first_frame * ticks
                for packet in container.demux(video):
                    if packet.pts is None or packet.dts is None:  # the empty packet at the end of a stream
                        continue
                    packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                    frames = max(frames, packet.pts // ticks + 1)
                    output.mux(packet)
    return first_frame


def can_append(existing: Path, episode: Path, *, fps: int) -> bool:
    """Whether both files have the same codec parameters, so that one decoder can play their concatenation."""
    return _decoder_setup(existing, fps) == _decoder_setup(episode, fps)


def _decoder_setup(path: Path, fps: int) -> tuple[Any, ...]:
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        codec = video.codec_context
        exact = (1 / (video.time_base or 1) / fps) % 1 == 0
        return codec.name, codec.width, codec.height, codec.pix_fmt, codec.extradata, exact


def _ticks_per_frame(video: Any, fps: int) -> int:
    return int(1 / video.time_base / fps)


def video_info(path: Path) -> dict[str, Any]:
    """A camera's entry in LeRobot's info.json, read from a finished file."""
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        rate = video.average_rate or video.base_rate or 0
        return {
            "video.height": video.height,
            "video.width": video.width,
            "video.codec": video.codec.canonical_name,
            "video.pix_fmt": video.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": int(rate),
            "video.channels": 3,
            "has_audio": bool(container.streams.audio),
        }


def encode_png(frame: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Encode as PNG, at the fastest compression level because recording waits for it."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
