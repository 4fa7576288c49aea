"""Bytes on the wire: exact, small, without a copy, and safe against hostile ones."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.codec import (
    MAX_PAYLOAD,
    pack,
    pack_ids,
    pack_own,
    unpack,
    unpack_ids,
    unpack_record,
)
from producer.contract.errors import InvalidPayload, InvalidSample
from tests.fuzz import search

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@search(200)
@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert unpack(pack(value, "value"), "value") == value


def test_arrays_are_views_of_received_bytes() -> None:
    ids = np.array([1, -2, 2**31 - 1], np.int32)
    logprobs = np.array([-0.5, -np.inf, 0.0], np.float32)
    data = pack({"t": ids, "l": logprobs}, "chunk")

    back = unpack(data, "chunk")

    for name, sent in (("t", ids), ("l", logprobs)):
        assert back[name].dtype == sent.dtype
        assert np.array_equal(back[name], sent)
        assert isinstance(back[name].base, bytes)
        assert np.shares_memory(back[name], np.frombuffer(back[name].base, np.uint8))
        assert not back[name].flags.writeable


def test_ids_of_a_prompt_are_views_of_their_bytes() -> None:
    ids = np.arange(5, dtype=np.int32)
    data = pack_ids(ids)

    back = unpack_ids(data, "prompt")

    assert np.shares_memory(back, np.frombuffer(data, np.uint8))
    assert np.array_equal(back, ids)
    assert data == b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"


def test_a_token_with_its_logprob_takes_eight_bytes() -> None:
    tokens = 1000
    data = pack([np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)], "arrays")

    assert 8 * tokens < len(data) < 8 * tokens + 12


def test_a_record_is_a_flat_map_of_few_fields() -> None:
    record = {"v": 1, "t": np.ones(3, np.int32)}
    back = unpack_record(pack_own(record, "x"), "x")
    assert (back["v"], back["t"].tolist()) == (1, [1, 1, 1])
    assert pack_own(record, "x") == pack(record, "x")

    for hostile in ({"v": [1]}, {"v": {"w": 1}}, {"v": {}}, dict.fromkeys("abcdefghijklmnopq", 1)):
        with pytest.raises(InvalidPayload, match=r"^chunk of g/0 is not a rollq payload"):
            unpack_record(pack(hostile, "x"), "chunk of g/0")
    for claim in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1v\xc6\xff\xff\xff\xff",
    ):
        with pytest.raises(InvalidPayload):
            unpack_record(claim, "x")
    with pytest.raises(InvalidPayload, match="allowed are"):
        unpack_record(bytes(MAX_PAYLOAD + 1), "x")


def test_the_order_of_bytes_is_little_whatever_the_array_says() -> None:
    strided = np.arange(10, dtype=np.int32)[::2]

    assert np.array_equal(unpack(pack(strided, "x"), "x"), strided)
    assert pack_ids(np.array([1], ">i4")) == b"\1\0\0\0"


def test_numpy_values_are_plain_values() -> None:
    value = {"a": np.int64(5), "b": np.float32(0.5), "c": np.bool_(True), "d": np.str_("x")}

    assert unpack(pack(value, "value"), "value") == {"a": 5, "b": 0.5, "c": True, "d": "x"}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\ud800": 1},
        {1: "an integer as a key"},
        {(1, 2): "a tuple as a key"},
        {None: 1},
        nested(2000),
        np.zeros((2, 2), np.int32),
        np.zeros(2, np.int64),
        np.array(5),
        np.datetime64("2026-01-01"),
        np.longdouble(1),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_carried_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidSample, match="metadata of g"):
        pack(value, "metadata of g")


def test_a_payload_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(InvalidSample, match=rf"job of g has \d+ bytes, allowed are {MAX_PAYLOAD}"):
        pack(b"x" * MAX_PAYLOAD, "job of g")
    with pytest.raises(InvalidPayload, match=f"allowed are {MAX_PAYLOAD}"):
        unpack(b"\xc0" * (MAX_PAYLOAD + 1), "job of g")
    assert len(unpack(pack(b"x" * (MAX_PAYLOAD - 5), "job"), "job")) == MAX_PAYLOAD - 5


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_bytes_are_refused_and_never_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps(Bomb(tmp_path / "ran"), protocol)

    with pytest.raises(InvalidPayload, match="chunk"):
        unpack(data, "chunk")
    carried = pack(data, "metadata")
    assert unpack(carried, "metadata") == data
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0\xc0",
        b"\xd9\x05abc",
        b"\xa1\xff",
        b"\x81\x01\x02",
        b"\x81\x90\x02",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 5000 + b"\xc0",
        msgpack.packb(msgpack.ExtType(1, b"abc")),
        msgpack.packb(msgpack.ExtType(3, b"abcd")),
        b"\xc7\x03\xffabc",
    ],
    ids=lambda d: repr(d[:8]),
)
def test_bytes_that_are_no_payload_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(InvalidPayload, match="chunk of g/0"):
        unpack(data, "chunk of g/0")


HOSTILE = {
    "nested lists that claim four million entries each": (
        f"((b'\\xdd' + ({MAX_PAYLOAD} - 6000).to_bytes(4, 'big')) * 1000"
        f" + b'\\xc0' * {MAX_PAYLOAD})[:{MAX_PAYLOAD}]"
    ),
    "four million empty lists": (
        f"b'\\xdd' + ({MAX_PAYLOAD} - 5).to_bytes(4, 'big') + b'\\x90' * ({MAX_PAYLOAD} - 5)"
    ),
    "a map of duplicate keys": (
        f"b'\\xdf' + ({MAX_PAYLOAD} // 2 - 3).to_bytes(4, 'big')"
        f" + b'\\xa0\\xc0' * ({MAX_PAYLOAD} // 2 - 3)"
    ),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_payload_costs_little_time_and_memory(payload: str) -> None:
    code = f"""
import resource
from producer.contract import codec
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
try:
    codec.unpack({payload}, "chunk")
except codec.InvalidPayload:
    pass
# Not ru_maxrss: a child begins with that of the process it was forked from.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak, resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    kilobytes, seconds = map(float, done.stdout.split())
    assert kilobytes < 200_000
    assert seconds < 10


@search(1500)
@given(st.binary(max_size=400))
def test_random_bytes_are_a_payload_or_refused(data: bytes) -> None:
    with suppress(InvalidPayload):
        unpack(data, "chunk")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ids_that_are_cut_off_are_refused(size: int) -> None:
    with pytest.raises(InvalidPayload, match=rf"prompt of g has {size} bytes"):
        unpack_ids(b"x" * size, "prompt of g")
