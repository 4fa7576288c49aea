"""Bytes on the wire: msgpack, with arrays of tokens and logprobs as raw little-endian bytes.

A token with its logprob takes 8 bytes, and decoding makes no object a token: an array is a
view of the bytes that msgpack took out. Sizes are checked before anything is decoded, what is
decoded is counted, and a length that the bytes do not hold is refused before room is made for
it: a hostile payload is refused fast, in a few times MAX_PAYLOAD. Nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidPayload, InvalidSample

#: bytes that one payload may have
MAX_PAYLOAD = 4 * 1024 * 1024
#: values that one may hold in lists and maps; a byte of msgpack can make 70 of Python's memory
MAX_VALUES = 1 << 18
#: fields of a record
MAX_FIELDS = 16

_WIRE_INT32, _WIRE_FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_INT32 = 1
_FLOAT32 = 2
_UNREADABLE = (ValueError, TypeError, MemoryError, msgpack.UnpackException)


def pack(value: Any, what: str) -> bytes:
    """Encode to msgpack; int32 and float32 arrays of one dimension go as raw bytes.

    Raises:
        InvalidSample: `what` holds a type, an integer or a text that msgpack cannot carry,
            is nested too deeply, or is larger than MAX_PAYLOAD or MAX_VALUES.
    """
    data = pack_own(value, what)
    try:
        # msgpack writes maps that it does not read again, such as those with integer keys.
        unpack(data, what)
    except InvalidPayload as error:
        raise InvalidSample(str(error)) from None
    return data


def pack_own(value: Any, what: str) -> bytes:
    """`pack` for what this program made itself, and need not be read back to be sure of it."""
    try:
        data: bytes = msgpack.packb(value, default=_default, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSample(f"{what} cannot be encoded: {error}") from None
    if len(data) > MAX_PAYLOAD:
        raise InvalidSample(f"{what} has {len(data)} bytes, allowed are {MAX_PAYLOAD}")
    return data


def unpack(data: bytes, what: str) -> Any:
    """Decode what `pack` made; arrays are read-only.

    Raises:
        InvalidPayload: `data` is too large or is not such msgpack; `what` is named.
    """
    _check_size(data, what)
    counter = _Counter()
    try:
        _walk(data)
        return msgpack.unpackb(
            data,
            ext_hook=_ext_hook,
            list_hook=counter.count,
            object_hook=counter.count,
            max_array_len=MAX_VALUES,
            max_map_len=MAX_VALUES // 2,
            raw=False,
            strict_map_key=True,
        )
    except _UNREADABLE as error:
        raise _refusal(error, what) from None


def unpack_record(data: bytes, what: str) -> Any:
    """Decode a map of up to MAX_FIELDS fields, none of them a list or a map, so that there is
    nothing to count. Raises like `unpack`."""
    _check_size(data, what)
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_ext_hook,
            object_hook=_flat,
            max_array_len=0,
            max_map_len=MAX_FIELDS,
            raw=False,
            strict_map_key=True,
        )
    except _UNREADABLE as error:
        raise _refusal(error, what) from None


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    if any(type(value) is dict for value in record.values()):
        raise ValueError("a record holds a map")
    return record


def _check_size(data: bytes, what: str) -> None:
    if len(data) > MAX_PAYLOAD:
        raise InvalidPayload(f"{what} has {len(data)} bytes, allowed are {MAX_PAYLOAD}")


def _refusal(error: Exception, what: str) -> InvalidPayload:
    return InvalidPayload(f"{what} is not a rollq payload: {str(error) or type(error).__name__}")


def pack_ids(ids: NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32 bytes, as the field `prompt_ids` holds them."""
    return ids.astype(_WIRE_INT32, copy=False).tobytes()


def unpack_ids(data: bytes, what: str) -> NDArray[np.int32]:
    """A read-only int32 view of such bytes. Raises InvalidPayload."""
    if len(data) % 4:
        raise InvalidPayload(f"{what} has {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype=_WIRE_INT32)


class _Counter:
    """Counts the values of all lists and maps of one payload, as each is complete."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def count(self, container: Any) -> Any:
        self._left -= 1 + len(container) * (2 if isinstance(container, dict) else 1)
        if self._left < 0:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        return container


def _walk(data: bytes) -> None:
    """Raises where a list or map claims more entries than there are bytes; makes no object."""
    unpacker = msgpack.Unpacker(read_size=max(1, len(data)), max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    unpacker.skip()


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        if value.dtype == np.int32:
            return msgpack.ExtType(_INT32, pack_ids(value))
        if value.dtype == np.float32:
            return msgpack.ExtType(_FLOAT32, value.astype(_WIRE_FLOAT32, copy=False).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _ext_hook(code: int, data: bytes) -> Any:
    if code in (_INT32, _FLOAT32) and len(data) % 4 == 0:
        return np.frombuffer(data, dtype=_WIRE_INT32 if code == _INT32 else _WIRE_FLOAT32)
    raise ValueError(f"extension type {code} of {len(data)} bytes is unknown")
