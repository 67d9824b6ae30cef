"""A dataset's info.json, parsed and validated in one place: types, shapes, paths, sizes.

The file is untrusted. Parsed fields have the right types, every path stays inside the dataset, and errors name the
offending field.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Any, NoReturn

from pirl.errors import DataError

VERSIONS = ("v2.0", "v2.1", "v3.0")
INFO_FILE = "meta/info.json"
NUMERIC = (
    "bool",
    *(f"float{bits}" for bits in (16, 32, 64)),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
"""The numeric dtypes a dataset may declare."""
PICTURES = ("video", "image")
_MEANT = ("bool", "complex", "double", "float", "int", "str", "uint")  # prefixes: dtypes like `float8` are refused
_MAX_DIGITS = 20  # width limit of a number in a file name; format specs have none
_MAX_COUNT = 2**53  # beyond any dataset, and still exact as a float


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One declared feature of a dataset."""

    dtype: str
    """`video`, `image`, `string`, or a NumPy name such as `float32`; others (`language`) are not read."""
    shape: tuple[int, ...]
    """Shape of one row. (1,) is stored and read as a scalar."""
    names: tuple[str, ...] = ()
    """Names of the entries (or of a picture's axes), if the dataset has them."""
    depth: bool = False
    """Whether it is a depth map; those are not read."""

    @property
    def is_camera(self) -> bool:
        """Whether a policy can use it as an image."""
        return self.dtype in PICTURES and len(self.shape) == 3 and not self.depth

    @property
    def is_number(self) -> bool:
        """Whether it is numeric or boolean."""
        return self.dtype in NUMERIC

    @property
    def is_column(self) -> bool:
        """Whether it is low-dimensional, hence kept in memory as an array."""
        return self.dtype == "string" or self.is_number

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of a camera. LeRobot writes H,W,C; older datasets declare C,H,W."""
        channels_first = self.names[0].startswith("c") if len(self.names) == 3 else self.shape[2] not in (1, 3)
        height, width = self.shape[1:] if channels_first else self.shape[:2]
        return height, width


@dataclass(frozen=True, kw_only=True)
class Info:
    """The validated info.json."""

    file: Path
    """Its path."""
    version: str
    """One of VERSIONS."""
    fps: int | float
    """Frames per second."""
    robot: str
    """Robot type, as declared; may be empty."""
    features: Mapping[str, Feature]
    """Features by key."""
    chunks_size: int
    """v2.0 and v2.1: episodes per folder."""
    data_path: str
    """Template of the files with rows."""
    video_path: str | None
    """Template of the video files."""
    totals: Mapping[str, int]
    """Declared numbers of episodes and frames, if any."""

    @property
    def videos(self) -> tuple[str, ...]:
        """Keys of the features stored as videos."""
        return tuple(key for key, feature in self.features.items() if feature.dtype == "video")

    def data(self, **place: int) -> Path:
        """The parquet file at `place`, relative to the dataset."""
        return _fill(self.file, "data_path", self.data_path, place)

    def video(self, key: str, **place: int) -> Path:
        """A camera's video file at `place`, relative to the dataset."""
        return _fill(self.file, "video_path", self.video_path or "", {**place, "video_key": key})


def parse_info(file: Path, info: Any) -> Info:
    """Validate the content of info.json."""
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if version not in VERSIONS:
        raise DataError(
            f"{file}: codebase_version is {_short(version)}, known are {', '.join(VERSIONS)}",
            hint="convert the dataset with LeRobot's own converter",
        )
    fps, robot, declared = info.get("fps"), info.get("robot_type"), info.get("features")
    if type(fps) not in (int, float) or not 0 < fps < _MAX_COUNT:
        _refuse(file, "fps", fps, "a positive number of frames a second")
    if robot is not None and not isinstance(robot, str):
        _refuse(file, "robot_type", robot, "text, or null")
    if not isinstance(declared, dict):
        _refuse(file, "features", declared, "an object with one entry per feature")
    features = {key: parse_feature(key, value, where=str(file)) for key, value in declared.items()}
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    numbers = ("chunk_index", "file_index") if version == "v3.0" else ("episode_chunk", "episode_index")
    wanted = numbers if version == "v3.0" else numbers[1:]
    _check_template(file, "data_path", info.get("data_path"), known=numbers, wanted=wanted)
    if videos:
        also = ("video_key",)
        path = info.get("video_path")
        _check_template(file, "video_path", path, known=(*numbers, *also), wanted=(*wanted, *also))
    counts = {name: info[name] for name in ("total_episodes", "total_frames") if name in info}
    for name, value in counts.items():
        count(value, what=name, where=str(file))
    return Info(
        file=file,
        version=version,
        fps=fps,
        robot=robot or "",
        features=features,
        chunks_size=count(
            info.get("chunks_size", 1000 if version == "v3.0" else None),
            what="chunks_size",
            where=str(file),
            least=1,
        ),
        data_path=info["data_path"],
        video_path=info["video_path"] if videos else None,
        totals=counts,
    )


def parse_feature(key: str, declared: Any, *, where: str) -> Feature:
    """Parse one entry of `features`; raises for malformed entries and unknown numeric dtypes."""
    if not isinstance(declared, dict) or not isinstance(declared.get("dtype"), str):
        raise DataError(
            f"{where}: feature {key!r} is {_short(declared)}",
            hint='expected {"dtype": ..., "shape": ..., "names": ...}, as LeRobot writes it',
        )
    dtype, shape, known = declared["dtype"], declared.get("shape"), (*NUMERIC, "string", *PICTURES)
    if dtype not in known and dtype.startswith(_MEANT):
        raise DataError(f"{where}: feature {key!r} has dtype {dtype!r}", hint=f"use one of {', '.join(known)}")
    if dtype in known:
        _check_shape(key, dtype, shape, where=where)
    names, info = declared.get("names"), declared.get("info") or declared.get("video_info")
    depth = [info.get(name) for name in ("video.is_depth_map", "is_depth_map")] if isinstance(info, dict) else []
    if any(flag is not None and type(flag) is not bool for flag in depth):
        raise DataError(f"{where}: feature {key!r}: is_depth_map is {_short(depth)}", hint="expected true or false")
    return Feature(
        dtype=dtype,
        shape=tuple(shape) if shape is not None and _is_shape(shape) else (),
        names=tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else (),
        depth=any(depth),
    )


def _check_shape(key: str, dtype: str, shape: Any, *, where: str) -> None:
    if not _is_shape(shape):
        found, expected = _short(shape), "a list of positive whole numbers"
    elif dtype in PICTURES and len(shape) != 3:
        found, expected = _short(shape), "height, width and channels"
    elif math.prod(shape) > 2**31:
        found, expected = f"{_short(shape)}, {math.prod(shape)} values a frame", "what a frame can hold"
    else:
        return
    raise DataError(
        f"{where}: feature {key!r} ({dtype}) has shape {found}, expected {expected}",
        hint="correct the shape, or download or export the dataset again",
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and len(shape) <= 8 and all(type(n) is int and 0 < n < 2**31 for n in shape)


def count(value: Any, *, what: str, where: str, least: int = 0) -> int:
    """Return `value`; raises unless it is an integer >= `least`."""
    if type(value) is not int or not least <= value < _MAX_COUNT:
        raise DataError(
            f"{where}: {what} is {_short(value)}, expected a whole number from {least} on",
            hint="download or export the dataset again",
        )
    return value


def _check_template(file: Path, name: str, template: Any, *, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise unless a path template has the wanted fields with plain formats and stays inside the dataset."""
    if not isinstance(template, str):
        _refuse(file, name, template, "a path such as data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
    try:
        parts = [(field, spec, change) for _, field, spec, change in Formatter().parse(template) if field is not None]
    except ValueError as error:
        _refuse(file, name, template, f"a path template ({error})")
    for field, spec, change in parts:
        if field not in known or change is not None or not _is_plain(spec or "", text=field == "video_key"):
            _refuse(file, name, template, f"only {', '.join(known)}, with formats such as :03d")
    if missing := [field for field in wanted if field not in {part[0] for part in parts}]:
        _refuse(file, name, template, f"{{{missing[0]}}} in it, without which several would share a file")
    _fill(file, name, template, {field: "key" if field == "video_key" else 0 for field in known})


def _is_plain(spec: str, *, text: bool) -> bool:
    """Whether a format spec is empty or a decimal width of limited size."""
    digits = spec.removesuffix("d")
    return spec == "" or (not text and (digits == "" or (digits.isdecimal() and int(digits) <= _MAX_DIGITS)))


def _fill(file: Path, name: str, template: str, place: Mapping[str, int | str]) -> Path:
    path = template.format(**place)
    if not inside(path):
        _refuse(file, name, path, "a path inside the dataset")
    return Path(path)


def inside(path: str) -> bool:
    """Whether a relative path stays inside its folder and is a valid file name."""
    parts = PurePosixPath(path).parts
    stored = path.encode("utf-8", "replace")
    named = "\0" not in path and stored.decode() == path and max(map(len, stored.split(b"/"))) < 256
    return bool(parts) and not PurePosixPath(path).is_absolute() and ".." not in parts and named and len(stored) < 4000


def _refuse(file: Path, name: str, value: Any, expected: str) -> NoReturn:
    raise DataError(
        f"{file}: {name} is {_short(value)}, expected {expected}",
        hint=f"correct {name} in {INFO_FILE}, or download or export the dataset again",
    )


def _short(value: Any) -> str:
    """A value's repr for a message, truncated."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_json(text: str, *, where: str) -> Any:
    """Parse untrusted JSON; raises for duplicate keys and too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{where}: cannot be read ({problem})", hint="download or export the file again") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found
