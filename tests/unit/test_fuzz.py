"""Every decoder of bytes from Redis or from disk, fed with what no rollq wrote.

Arbitrary bytes and mutated valid ones: nothing but an error of ours comes out, and whatever
length they claim, memory stays within a small multiple of what a payload may have.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from producer.contract.codec import MAX_PAYLOAD, MAX_VALUES, pack, unpack, unpack_ids
from producer.contract.errors import InvalidPayload, RollqError
from producer.contract.manifest import MANIFEST, Manifest, confined
from producer.contract.messages import MAX_REASON, Chunk, Claim, Job, read_job
from producer.contract.sampling import SamplingParams
from producer.contract.states import State
from producer.contract.url import connect, connect_async, redact
from producer.results import build_group, build_rollout
from tests.fuzz import search

JOB = Job(
    "g",
    SamplingParams(n=2, stop=("###",), seed=7),
    prompt=[{"role": "user", "content": "héllo"}],
    metadata={"answer": [1, 2.5, None, b"x"]},
).to_item()[-2]
CHUNK = Chunk(1, "w", 1, np.arange(5, dtype=np.int32), np.zeros(5, np.float32)).to_wire()
MANIFEST_TEXT = json.dumps(
    {"format": 1, "files": {"a.safetensors": {"bytes": 3, "digest": "0" * 32}}}
).encode()

assert isinstance(JOB, bytes)

#: bytes that claim more than there is, end too early, or nest
MARKS = [
    *(bytes([mark]) + b"\xff" * 4 for mark in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)),
    *(b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc7\xff\x01", b"\xc1", b"\xd4\x01", b"\x91" * 600),
    *(b"\x81\xa1a" * 300, b"[" * 2000, b'{"a":' * 500, b"1e999", b"NaN", b"\\ud800", b"\\u0000"),
    b"-1",
]


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes with up to four pieces cut out, doubled, flipped or put in."""
    data = valid
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        to = draw(st.integers(at, min(len(data), at + 8)))
        put = draw(st.sampled_from(MARKS) | st.binary(max_size=4) | st.just(data[at:to] * 2))
        data = data[:at] + put + data[to:]
    return data


def anything(valid: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=200) | mutated(valid) | st.just(valid)


def peak_of(decode: Callable[[], Any]) -> int:
    """Bytes that decoding took at most; only an error of ours may come out of it."""
    tracemalloc.start()
    try:
        with suppress(RollqError):
            decode()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def harmless(decode: Callable[[], Any]) -> None:
    assert peak_of(decode) < 4_000_000


@search(300)
@given(anything(JOB))
def test_a_job(data: bytes) -> None:
    harmless(lambda: read_job(data, "g"))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = list(SamplingParams.__dataclass_fields__)


@search(150)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), PLAIN), PLAIN, PLAIN)
def test_a_job_that_is_sound_msgpack(params: Any, prompt: Any, metadata: Any) -> None:
    wire = {"prompt": prompt, "params": params, "metadata": msgpack.packb(metadata)}
    harmless(lambda: read_job(msgpack.packb(wire), "g"))


@search(300)
@given(anything(CHUNK))
def test_a_chunk(data: bytes) -> None:
    harmless(lambda: Chunk.from_wire(data, "g/0"))


@search(100)
@given(st.binary(max_size=100))
def test_prompt_ids(data: bytes) -> None:
    harmless(lambda: unpack_ids(data, "g"))


HEADER = [b"g/0", b"1:x", *[b"0"] * 4]


@search(200)
@given(st.lists(st.binary(max_size=9) | st.integers() | st.none(), max_size=7), st.data())
@example([10**12], None)
def test_the_header_of_a_claim(wire: list[Any], data: Any) -> None:
    header, job = list(HEADER), [b"g", b"", b""]
    if data is not None and wire:
        place = data.draw(st.integers(0, 8))
        [header, job][place // 6][place % 6] = wire[0]
    elif wire:
        job[1] = wire[0]
    harmless(lambda: Claim.from_reply([wire], [job]))
    harmless(lambda: Claim.from_reply([header], [job]))
    with suppress(RollqError):
        [claim] = Claim.from_reply([header], [job])
        assert isinstance(claim.job, bytes)


NAMES = [
    *(b"state", b"group", b"index", b"attempts", b"crashes", b"interruptions", b"tokens"),
    *(b"recomputed_tokens", b"enqueued_at", b"started_at", b"finished_at", b"finish_reason"),
    *(b"stop_reason", b"text", b"error"),
]
VALUES = st.binary(max_size=20) | st.sampled_from(
    [b"1", b"finished", b"9" * 400, b"9" * 5000, b"[" * 3000, b'{"a":1}', b"1.5", b"\xff"]
)


@search(300)
@given(st.dictionaries(st.sampled_from(NAMES) | st.binary(max_size=3), VALUES), anything(CHUNK))
def test_a_rollout(fields: dict[bytes, bytes], chunk: bytes) -> None:
    """Not even an error: what cannot be read is a member that failed, in its place."""
    group = {b"job": JOB, b"prompt_ids": b""}
    rollout = build_rollout("g/1", group, {b"state": b"finished", **fields}, [chunk])

    assert rollout.state in State
    if rollout.finish_reason == "error" and b"finish_reason" not in fields:
        assert (rollout.state, rollout.error != "") == (State.FAILED, True)
    assert build_group("e", "g", [group, fields, [chunk]]).rollouts[0].id == "g/0"


@search(300)
@given(anything(MANIFEST_TEXT))
@example(MANIFEST_TEXT.replace(b"3", b"1e999"))
@example(MANIFEST_TEXT.replace(b"a.safe", b"\\u0000.safe"))
@example(MANIFEST_TEXT.replace(b"a.safe", b"\\ud800.safe"))
@example(MANIFEST_TEXT.replace(b"a.safe", b"a" * 300 + b".safe"))
@example(MANIFEST_TEXT.replace(b"a.safe", b"..\\/a.safe"))
def test_a_manifest(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    directory = tmp_path_factory.getbasetemp()
    (directory / MANIFEST).write_bytes(data)

    harmless(lambda: Manifest.read(directory).verify(directory))


@search(300)
@given(st.text(max_size=30) | st.sampled_from(["..", "a/../..", "\0", "/", "~", "a" * 5000]))
def test_a_path_of_a_publication(path: str) -> None:
    root = Path(__file__).parent

    with suppress(RollqError):
        assert confined(root, path).is_relative_to(root)


PIECES = st.sampled_from(
    [
        *("redis", "rediss", "unix", "redis+sentinel", "://", ":", "@", "/", "?", "#", "&", "="),
        *("[", "]", "[::1]", ",", "host", "6379", "password", "db", "ssl_cert_reqs", "%", "%00"),
        *("none", "main", "\u2100", "\0", " ", "ssl_min_version", "protocol", "ssl_ca_certs"),
    ]
)


@search(200)
@given(st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join), st.booleans())
def test_a_url(text: str, has_scheme: bool) -> None:
    url = f"redis://{text}" if has_scheme else text
    assert isinstance(redact(url), str)
    with suppress(RollqError):
        connect(url, lambda: None)
    with suppress(RollqError):
        connect_async(url)


@search(300)
@given(st.text("ab:/?#[]@,&=%1\u2100 ", max_size=12))
def test_a_password_that_was_not_encoded(text: str) -> None:
    """Wherever it ends for a parser of URLs, nobody reads it; whole words of it, at least."""
    for url in (f"redis://:{text}hunter2@host:1/0", f"redis://:hunter2{text}@host:1/0"):
        assert "hunter2" not in redact(url)


# as large as a payload may be


def filled(piece: bytes) -> bytes:
    """A list that begins with `piece`, over and over, as large as a payload may be."""
    count = (MAX_PAYLOAD - 5) // len(piece)
    return b"\xdd" + count.to_bytes(4, "big") + piece * count


def within(piece: bytes) -> bytes:
    """The same in lists of a thousand, none of which has too many values."""
    inner = b"\xdc\x03\xe8" + piece * 1000
    return filled(inner)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: filled(b"\x90"),
    "empty lists in lists": lambda: within(b"\x90"),
    "empty maps in lists": lambda: within(b"\x80"),
    "maps in lists": lambda: within(b"\x86" + b"".join(b"\xa1%c\xc0" % c for c in b"abcdef")),
    "pairs": lambda: within(b"\x92\xc0\xc0"),
    "floats in lists": lambda: within(b"\xcb" + b"\1" * 8),
    "texts in lists": lambda: within(b"\xa3\xe2\x82\xac"),
    "empty arrays in lists": lambda: within(b"\xc7\x00\x01"),
    "arrays of one": lambda: within(b"\xd6\x01abcd"),
    "claims within claims": lambda: (b"\xdd\x00\x03\xff\xff" * 500).ljust(MAX_PAYLOAD, b"\xc0"),
    "maps within maps": lambda: (b"\xdf\x00\x01\xff\xff\xa0" * 500).ljust(MAX_PAYLOAD, b"\xc0"),
    "lists within lists": lambda: b"\x91" * MAX_PAYLOAD,
    "a text of two widths": lambda: msgpack.packb("😀" + "a" * (MAX_PAYLOAD - 9)),
    "many keys": lambda: msgpack.packb({str(i): None for i in range(MAX_PAYLOAD // 8)}),
    "one array": lambda: msgpack.packb(msgpack.ExtType(1, bytes(MAX_PAYLOAD - 8))),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_payload_takes_a_few_times_its_limit_at_most(make: Callable[[], bytes]) -> None:
    data = make()
    assert len(data) <= MAX_PAYLOAD
    assert peak_of(lambda: unpack(data, "x")) < 12 * MAX_PAYLOAD


def test_parameters_take_no_arrays() -> None:
    """Each id of it would be made an object."""
    ids = msgpack.ExtType(1, bytes(4_000_000))
    wire = {"prompt": None, "params": {"stop_token_ids": ids}, "metadata": b"\xc0"}
    data = msgpack.packb(wire)
    assert peak_of(lambda: read_job(data, "x")) < 4 * MAX_PAYLOAD


def test_as_many_values_as_are_allowed() -> None:
    assert len(unpack(pack([None] * (MAX_VALUES - 1), "x"), "x")) == MAX_VALUES - 1
    for many in ([None] * MAX_VALUES, [[None] * (MAX_VALUES // 2)] * 2):
        with pytest.raises(InvalidPayload, match="x is not a rollq payload"):
            unpack(msgpack.packb(many), "x")


def test_a_refusal_is_short_whatever_it_quotes() -> None:
    long = "x" * 10**6
    deep = b"\x91" * 1000 + b"\xc0"  # Python cannot even quote it
    for params in (
        *(msgpack.packb(p) for p in ({"n": long}, {long: 1}, {"stop": [[long]]})),
        b"\x81\xa1n" + deep,
    ):
        wire = b"\x83" + b"\xa6prompt\xc0" + b"\xa8metadata\xc4\x01\xc0" + b"\xa6params" + params
        with pytest.raises(RollqError) as refused:
            read_job(wire, "x")
        assert len(str(refused.value)) <= MAX_REASON


def test_a_manifest_takes_a_few_times_its_limit_at_most(tmp_path: Path) -> None:
    limit = 1024 * 1024
    for piece in (b"[],", b"{},", b'"",', b"1.5,", b'{"a":0},', b'{"files":'):
        (tmp_path / MANIFEST).write_bytes((b"[" + piece * (limit // len(piece) + 1))[:limit])
        assert peak_of(lambda: Manifest.read(tmp_path)) < 40 * limit
