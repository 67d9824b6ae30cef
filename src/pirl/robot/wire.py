"""OpenPI's wire format: msgpack with NumPy arrays. Strict with untrusted messages.

    array   {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [H, d]}
    scalar  {b"__npgeneric__": true, b"data": number, b"dtype": "<f4"}

Keys are bytes in these two maps only; elsewhere they are text. Arrays arrive read-only, tuples as lists. Messages are
scanned before anything is built from them, to limit nesting and the number of values and to find truncated ones.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from pirl.errors import WireError

REFUSED_KINDS = "VOc"
"""dtype kinds that the format does not allow: records, objects, complex numbers."""
MAX_AXES = 32

_DTYPE = re.compile(r"[<>|=]?(?:[biufSU][0-9]{1,9}|[mM]8(?:\[[0-9A-Za-z]{1,12}\])?)", re.ASCII)
_ARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_SCALAR_KEYS = {b"__npgeneric__", b"data", b"dtype"}
_SCALAR_TYPES: dict[str, tuple[type, ...]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (float, int),
    "S": (bytes,),
    "U": (str,),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a message."""

    max_bytes: int = 64 * 2**20
    """Size of the whole message."""
    max_depth: int = 8
    """Nesting of maps and lists; an array counts as two levels, its map and its shape."""
    max_values: int = 100_000
    """Keys and values of all maps and lists together; an array's data counts as one, however large."""


def pack(value: Any) -> bytes:
    """Encode a value, byte-identical to OpenPI."""
    try:
        packed: bytes = msgpack.packb(value, default=_plain)
        return packed
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"a message cannot hold this: {error}", hint="send arrays, numbers, text, lists and maps with text as keys"
        ) from error


def unpack(data: bytes, limits: Limits | None = None) -> Any:
    """Decode an untrusted message; raises `WireError` with the problem."""
    _scan(data, Limits() if limits is None else limits)
    try:
        return msgpack.unpackb(data, object_hook=_restored)
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # wrong UTF-8, a key that is a number
        raise WireError(f"the message is not msgpack as OpenPI sends it: {error}", hint=_HINT) from error


_HINT = "pack observations with openpi_client.msgpack_numpy or pirl.robot.wire"


def _plain(value: Any) -> Any:
    """msgpack's default encoder: an array or a NumPy scalar as a map."""
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{type(value).__name__}")
    if value.dtype.kind in REFUSED_KINDS:
        raise WireError(f"an array of {value.dtype} cannot be sent", hint="convert it to numbers")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _restored(found: dict[Any, Any]) -> Any:
    """Decode an array or scalar from its map; returns other maps unchanged."""
    if b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" in found:
        return _scalar(found)
    return found


def _array(found: dict[Any, Any]) -> np.ndarray:
    data, shape = found.get(b"data"), found.get(b"shape")
    if set(found) != _ARRAY_KEYS or not isinstance(data, bytes) or not isinstance(shape, list):
        raise WireError(f"an array's map holds {_names(found)}", hint=f"it holds {_names(_ARRAY_KEYS)}; {_HINT}")
    dtype = _dtype(found[b"dtype"])
    if len(shape) > MAX_AXES or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"an array's shape is {str(shape)[:80]}", hint=f"at most {MAX_AXES} sizes of 0 or more")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(
            f"an array of {dtype} and shape {tuple(shape)} comes with {len(data)} bytes, not "
            f"{math.prod(shape) * dtype.itemsize}",
            hint=_HINT,
        )
    try:
        return np.ndarray(buffer=data, dtype=dtype, shape=shape)
    except (ValueError, TypeError, OverflowError) as error:  # a huge axis together with an empty one
        raise WireError(f"an array of {dtype} and shape {str(shape)[:80]} cannot be: {error}", hint=_HINT) from error


def _scalar(found: dict[Any, Any]) -> np.generic:
    if set(found) != _SCALAR_KEYS:
        raise WireError(f"a scalar's map holds {_names(found)}", hint=f"it holds {_names(_SCALAR_KEYS)}; {_HINT}")
    data, dtype = found[b"data"], _dtype(found[b"dtype"])
    if type(data) not in _SCALAR_TYPES.get(dtype.kind, ()):
        raise WireError(f"a scalar of {dtype} comes as {type(data).__name__}", hint=_HINT)
    try:
        scalar: np.generic = dtype.type(data)
        return scalar
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"a scalar of {dtype}: {str(error)[:80]}", hint=_HINT) from error


def _dtype(name: object) -> np.dtype:
    """Parse the dtype name of an array of numbers or text."""
    try:
        if isinstance(name, str) and _DTYPE.fullmatch(name):
            return np.dtype(name)
    except (TypeError, ValueError):
        pass
    raise WireError(
        f"an array's dtype is {repr(name)[:60]}", hint="numbers, booleans and text are sent, as in '<f4' or '|u1'"
    )


def _names(keys: Any) -> str:
    return ", ".join(sorted(repr(key)[:40] for key in keys)[:8])


# The scan: first bytes of msgpack's values (https://github.com/msgpack/msgpack/blob/master/spec.md).
_NUMBERS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_NUMBERS |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_TEXTS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # first byte -> bytes of the length
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def _scan(data: bytes, limits: Limits) -> None:
    """Raise unless the message is exactly one value within the limits. Skips text and array data; builds nothing."""
    size = len(data)
    if size > limits.max_bytes:
        raise WireError(f"a message of {size} bytes", hint=f"at most {limits.max_bytes} are taken")
    at, values, left = 0, 0, [1]  # left: values still to come at each level
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= size:
            raise _cut(size)
        first, at = data[at], at + 1
        items = None
        if first < 0x80 or first >= 0xE0:  # a small number
            continue
        if first < 0xA0:
            items = (first & 0x0F) * (2 if first < 0x90 else 1)
        elif first < 0xC0:
            at += first & 0x1F
        elif first in _NUMBERS:
            at += _NUMBERS[first]
        elif first in _TEXTS:
            width = _TEXTS[first]
            at += width + int.from_bytes(data[at : at + width])
        elif first in _LISTS or first in _MAPS:
            width, each = (_LISTS[first], 1) if first in _LISTS else (_MAPS[first], 2)
            items, at = each * int.from_bytes(data[at : at + width]), at + width
        else:
            raise WireError(f"byte {at - 1} of the message is {first:#x}: no value begins so", hint=_HINT)
        if at > size:
            raise _cut(size)
        if items is not None:
            values += items
            if len(left) > limits.max_depth:
                raise WireError(f"the message nests more than {limits.max_depth} levels", hint="send it flat")
            if values > limits.max_values:
                raise WireError(
                    f"the message has more than {limits.max_values} values", hint="send pictures as arrays, not lists"
                )
            left.append(items)
    if at != size:
        raise WireError(f"the message ends at byte {at} and goes on to {size}", hint="send one value per message")


def _cut(size: int) -> WireError:
    return WireError(f"the message ends early, after {size} bytes", hint=_HINT)
