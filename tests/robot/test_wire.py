"""The wire format against bytes of OpenPI's own client, and against messages of strangers."""

import struct
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_data import TRANSFORMS
from pirl.errors import WireError
from pirl.robot.wire import Limits, pack, unpack

OBSERVATION = {
    "observation/state": np.arange(8, dtype=np.float32),
    "images": {"cam_high": np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)},
    "prompt": "pick up the cube",
    "pirl/episode": 3,
}


def openpi_array(array: np.ndarray) -> bytes:
    """The bytes of an array, written out from the specification: a map of four, with bytes as keys."""
    data, name = array.tobytes(), array.dtype.str.encode()
    shape = b"".join(bytes([size]) for size in array.shape)
    return (
        b"\x84\xc4\x0b__ndarray__\xc3"
        + b"\xc4\x04data\xc4" + bytes([len(data)]) + data
        + b"\xc4\x05dtype" + bytes([0xA0 + len(name)]) + name
        + b"\xc4\x05shape" + bytes([0x90 + array.ndim]) + shape
    )  # fmt: skip


def test_a_message_of_openpis_client_is_read_and_written_to_the_byte() -> None:
    message = (TRANSFORMS / "msgpack_obs.bin").read_bytes()
    found = unpack(message)
    with np.load(TRANSFORMS / "msgpack_obs.npz") as expected:
        arrays = {key: value for key, value in found.items() if isinstance(value, np.ndarray)}
        assert len(arrays) > 0
        for key, value in arrays.items():
            np.testing.assert_array_equal(value, expected[key])
            assert value.dtype == expected[key].dtype
    assert pack(found) == message


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i2"),
        np.array(2.5),
        np.zeros((0, 3), np.uint8),
        np.array([True, False]),
        np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        np.arange(12, dtype=np.uint8)[::3],
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array([1, 2], "<M8[ns]"),
        np.array([0.5], np.float16),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_arrays_have_openpis_bytes_and_come_back_read_only(array: np.ndarray) -> None:
    message = pack(array)
    assert message == openpi_array(array)
    found = unpack(message)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert not found.flags.writeable


@pytest.mark.parametrize("scalar", [np.float32(0.1), np.int64(-3), np.bool_(True), np.uint8(7), np.float16(2)])
def test_scalars_keep_their_type(scalar: np.generic) -> None:
    expected = {b"__npgeneric__": True, b"data": scalar.item(), b"dtype": scalar.dtype.str}
    assert pack(scalar) == msgpack.packb(expected)
    found = unpack(pack(scalar))
    assert found == scalar
    assert found.dtype == scalar.dtype


def test_the_rest_is_plain_msgpack() -> None:
    found = unpack(pack(OBSERVATION | {"tuple": (1, None, True), "float": np.float64(0.5)}))
    assert found["tuple"] == [1, None, True]
    assert found["float"] == 0.5
    assert found["prompt"] == "pick up the cube"
    assert found["images"]["cam_high"].shape == (2, 3, 3)


@pytest.mark.parametrize("dtype", ["complex64", "object", "V4", [("a", "f4")]])
def test_what_openpi_refuses_is_not_sent(dtype: object) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        pack({"x": np.zeros(2, dtype)})


@pytest.mark.parametrize("value", [{1: 2, "x": {3, 4}}, {"x": object()}, {"x": 2**70}])
def test_what_msgpack_cannot_hold_is_said(value: object) -> None:
    with pytest.raises(WireError, match="cannot hold"):
        pack(value)


def array_map(**changes: object) -> bytes:
    whole = {"__ndarray__": True, "data": bytes(24), "dtype": "<f4", "shape": [2, 3]} | changes
    return msgpack.packb({key.encode(): value for key, value in whole.items() if value is not ...})


HOSTILE = {
    "nothing": b"",
    "two values": b"\x01\x02",
    "text that is no UTF-8": b"\xa2\xff\xfe",
    "an unused first byte": b"\xc1",
    "an extension": msgpack.packb(msgpack.ExtType(5, b"abc")),
    "a time": msgpack.packb(msgpack.Timestamp(1, 2)),
    "numbers as keys": msgpack.packb({1: 2}),
    "a list as a key": b"\x81\x91\x01\x02",
    "a list longer than the message": b"\xdd\xff\xff\xff\xff",
    "a map longer than the message": b"\xdf\xff\xff\xff\xff",
    "bytes longer than the message": b"\xc6\xff\xff\xff\xff",
    "a million levels": b"\x91" * 1_000_000,
    "a million empty maps": b"\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000,
    "a thousand lists of a thousand": b"\xdc\x03\xe8" + (b"\xdc\x03\xe8" + b"\xc0" * 1000) * 1000,
    "too few bytes": array_map(shape=[2, 4]),
    "too many bytes": array_map(shape=[2, 2]),
    "a negative size": array_map(shape=[-2, -3]),
    "a fractional size": array_map(shape=[2.0, 3]),
    "a truth as a size": array_map(data=bytes(4), shape=[True]),
    "a shape that is a number": array_map(shape=6),
    "an axis beyond all memory": array_map(data=b"", shape=[0, 2**63]),
    "sizes whose product overflows": array_map(data=b"", shape=[2**32, 2**32]),
    "too many axes": array_map(data=bytes(4), shape=[1] * 100),
    "no shape": array_map(shape=...),
    "no dtype": array_map(dtype=...),
    "another key": array_map(extra=1),
    "data that is text": array_map(data="x" * 24),
    "objects": array_map(dtype="|O", data=bytes(48)),
    "complex numbers": array_map(dtype="<c8", data=bytes(48)),
    "records": array_map(dtype="|V4"),
    "several types": array_map(dtype="<f4,<f4"),
    "a type with axes": array_map(dtype="(3,)<f4"),
    "a type that is a list": array_map(dtype=[["a", "<f4"]]),
    "a type that numpy lacks": array_map(dtype="<f3"),
    "a unit of time that is none": array_map(dtype="<M8[lightyear]", data=bytes(48)),
    "a scalar of nothing": msgpack.packb({b"__npgeneric__": True, b"dtype": "<f4"}),
    "a scalar that is a list": msgpack.packb({b"__npgeneric__": True, b"data": [1, 2], b"dtype": "<f4"}),
    "a scalar too large": msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
    "a scalar of text as a number": msgpack.packb({b"__npgeneric__": True, b"data": "9" * 99, b"dtype": "<i8"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_messages_are_refused_with_a_reason(name: str) -> None:
    for message in (HOSTILE[name], b"\x81\xa1x" + HOSTILE[name]):
        with pytest.raises(WireError) as caught:
            unpack(message)
        assert caught.value.hint
        assert len(str(caught.value)) < 400


def test_limits_hold() -> None:
    message = pack(OBSERVATION)
    assert unpack(message, Limits(max_bytes=len(message), max_depth=4, max_values=50))
    with pytest.raises(WireError, match=f"at most {len(message) - 1}"):
        unpack(message, Limits(max_bytes=len(message) - 1))
    with pytest.raises(WireError, match="more than 3 levels"):
        unpack(message, Limits(max_depth=3))
    with pytest.raises(WireError, match="more than 7 values"):
        unpack(message, Limits(max_values=7))


def test_every_message_that_is_cut_short_is_refused() -> None:
    message = pack(OBSERVATION)
    for end in range(len(message)):
        with pytest.raises(WireError):
            unpack(message[:end])


@given(st.data())
def test_damaged_messages_are_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    message = bytearray(pack(OBSERVATION))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        unpack(bytes(message))


@given(st.binary(max_size=60))
def test_noise_is_read_or_refused_and_nothing_else(message: bytes) -> None:
    with suppress(WireError):
        unpack(message)
