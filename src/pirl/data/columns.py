"""LeRobot features: required contents of a frame, and how columns are stored in parquet.

The parquet schema includes Hugging Face's description besides Arrow's, so that `datasets` can read the files: its
version 3 (used for v2.1) knows "Sequence", version 4 (used for v3.0) knows "List".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped

from pirl.data.schema import NUMERIC, PICTURES, parse_feature
from pirl.errors import DataError

V21: Final = "v2.1"
V30: Final = "v3.0"

STANDARD_FEATURES: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
"""The columns of every LeRobot dataset; the writer adds them."""

_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, kw_only=True)
class Column:
    """One feature of a dataset."""

    key: str
    """Its name, e.g. observation.state."""
    dtype: str
    """A NumPy dtype, `string`, `image` (PNG in the parquet) or `video` (a separate mp4)."""
    shape: tuple[int, ...]
    """Shape of one frame's value. Pictures are always height, width, 3, whichever order info.json lists."""

    @property
    def is_picture(self) -> bool:
        """Whether it is an image or video feature."""
        return self.dtype in PICTURES

    @property
    def is_scalar(self) -> bool:
        """Whether the shape is (1,), which LeRobot stores as a plain scalar."""
        return self.shape == (1,)


def parse_features(features: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of LeRobot's feature dictionary; raises for features the format cannot store."""
    if not features:
        raise DataError(
            "the dataset has no features",
            hint='describe each as in info.json: {"action": {"dtype": "float32", "shape": [14], "names": None}}',
        )
    return tuple(_parse(key, feature) for key, feature in features.items())


def _parse(key: str, feature: Any) -> Column:
    if not key or "/" in key or "\\" in key or not key.strip("."):
        raise DataError(f"feature name {key!r} cannot be stored", hint="use letters, digits, dots and underscores")
    plain = dict(feature) if isinstance(feature, Mapping) else feature
    dtype, shape = (parsed := parse_feature(key, plain, where="the dataset")).dtype, parsed.shape
    known = (*NUMERIC, "string", *PICTURES)
    if dtype not in known:
        raise DataError(f"feature {key!r} has dtype {dtype!r}", hint=f"use one of {', '.join(known)}")
    if dtype in PICTURES:
        if len(shape) == 3 and shape[2] != 3 and shape[0] == 3:  # OpenPI's ALOHA sets list channels first
            shape = (*shape[1:], 3)
        if len(shape) != 3 or shape[2] != 3 or min(shape) < 1:
            raise DataError(f"{dtype} feature {key!r} has shape {shape}", hint="use (height, width, 3)")
    elif not 1 <= len(shape) <= 5 or min(shape) < 1 or (dtype == "string" and shape != (1,)):
        raise DataError(f"{dtype} feature {key!r} has shape {shape}", hint="use (1,) for a scalar, up to five axes")
    return Column(key=key, dtype=dtype, shape=shape)


def check_frame(columns: Sequence[Column], frame: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Validate a frame; returns its values as arrays of the columns' shapes and dtypes (strings unchanged)."""
    keys = [column.key for column in columns]
    missing, unknown = [k for k in keys if k not in frame], [k for k in frame if k not in keys]
    if missing or unknown:
        expected = {column.key: column.shape for column in columns if column.key in missing}
        found = {key: np.shape(frame[key]) for key in unknown}
        raise DataError(
            f"{where}: the frame lacks {expected or 'nothing'} and has the unknown {found or 'nothing'}",
            hint=f"a frame of this dataset holds {', '.join(keys)}; the standard columns are added for you",
        )
    return {column.key: _check_value(column, frame[column.key], where=where) for column in columns}


def _check_value(column: Column, value: Any, *, where: str) -> Shaped[np.ndarray, "*shape"] | str:
    if column.dtype == "string":
        if not isinstance(value, str):
            raise DataError(f"{where}: {column.key!r} is {type(value).__name__}", hint="expected a str")
        return value
    array = np.asarray(value)
    if array.shape != column.shape and not (column.is_scalar and array.shape == ()):
        raise DataError(
            f"{where}: {column.key!r} has shape {array.shape}, expected {column.shape}",
            hint="pictures are (height, width, 3)" if column.is_picture else "one frame at a time, without batch axis",
        )
    dtype = np.dtype("uint8" if column.is_picture else column.dtype)
    if array.dtype != dtype and (column.is_picture or not np.can_cast(array.dtype, dtype, "same_kind")):
        raise DataError(
            f"{where}: {column.key!r} of shape {array.shape} has dtype {array.dtype}, expected {dtype}",
            hint="convert it on purpose: pictures to 0-255 integers, numbers with astype",
        )
    with np.errstate(over="ignore"):
        # Copy numbers: they are kept, and robots reuse one buffer for every step. Images are consumed at once.
        stored = array.astype(dtype, copy=not column.is_picture)
    if dtype.kind == "f" and not np.isfinite(stored).all():
        bad = np.flatnonzero(~np.isfinite(stored.ravel()))
        raise DataError(
            f"{where}: {column.key!r} of shape {array.shape} is not finite at {bad[:8].tolist()}",
            hint="one such value spoils the normalisation of the whole dataset; drop the frame or the episode",
        )
    if dtype.kind in "iu" and array.dtype != dtype and not (stored == array).all():
        raise DataError(f"{where}: {column.key!r} holds {array.tolist()}", hint=f"that does not fit into {dtype}")
    return stored.reshape(()) if column.is_scalar else stored


def make_table(columns: Sequence[Column], values: Mapping[str, Any], *, version: str) -> pa.Table:
    """The episode's rows with Arrow's and Hugging Face's schema; video columns are omitted."""
    stored = [column for column in columns if column.dtype != "video"]
    arrays = [_arrow_array(column, values[column.key], version=version) for column in stored]
    described = {column.key: _huggingface_type(column, version=version) for column in stored}
    schema = pa.schema([(column.key, array.type) for column, array in zip(stored, arrays, strict=True)])
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    return pa.table(arrays, schema=schema.with_metadata(metadata))


def _arrow_array(column: Column, values: Any, *, version: str) -> pa.Array:
    if column.dtype == "string":
        return pa.array(values, pa.string())
    if column.dtype == "image":
        name = "frame_{:06d}.png" if version == V21 else "frame-{:06d}.png"
        return pa.array([{"bytes": png, "path": name.format(i)} for i, png in enumerate(values)], _PICTURE)
    array = np.asarray(values).astype(column.dtype)
    flat: pa.Array = pa.array(array.ravel(), pa.from_numpy_dtype(np.dtype(column.dtype)))
    if column.is_scalar:
        return flat
    if len(column.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, column.shape[0])
    for size in reversed(column.shape):  # `datasets` keeps its ArrayND features as nested lists
        flat = pa.ListArray.from_arrays(np.arange(0, len(flat) + 1, size, dtype=np.int32), flat)
    return flat


def _huggingface_type(column: Column, *, version: str) -> dict[str, Any]:
    if column.dtype == "image":
        return {"_type": "Image"}
    if column.is_scalar:
        return {"dtype": column.dtype, "_type": "Value"}
    if len(column.shape) == 1:
        element = {"dtype": column.dtype, "_type": "Value"}
        return {"feature": element, "length": column.shape[0], "_type": "Sequence" if version == V21 else "List"}
    return {"shape": list(column.shape), "dtype": column.dtype, "_type": f"Array{len(column.shape)}D"}
