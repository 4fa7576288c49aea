"""Jobs and chunks: what goes in comes out, and what is no such message is refused by name."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.codec import MAX_PAYLOAD, pack
from producer.contract.errors import InvalidPayload, InvalidSample
from producer.contract.messages import UNBOUNDED, Chunk, Claim, Job, read_job
from producer.contract.sampling import SamplingParams
from producer.contract.scripts import SCRIPTS
from producer.contract.states import StalenessPolicy
from tests.fuzz import search

JOB = Job(
    "g",
    SamplingParams(n=4, max_tokens=100, stop=("###",)),
    prompt_ids=np.array([1, 2, 3], np.int32),
    metadata={"answer": 42, "nested": [1.5, None, "ä", b"raw"]},
)
CHUNK = Chunk(
    7, "worker-1", 3, np.array([5, 6, 7], np.int32), np.array([-0.5, -1.0, -np.inf], np.float32)
)


def fields(job: Job) -> dict[str, Any]:
    return dict(zip(SCRIPTS["enqueue"].item, job.to_item(), strict=True))


# jobs


def test_a_job_comes_back() -> None:
    item = fields(JOB)

    assert item["group"] == "g"
    assert item["size"] == 4
    assert item["prompt_ids"] == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert item["prompt_tokens"] == 3
    assert item["max_tokens"] == 100
    assert (item["max_staleness"], item["staleness_policy"], item["restart"]) == ("", "allow", 0)
    assert read_job(item["job"], "g") == (None, JOB.params, JOB.metadata)
    assert JOB.sample_ids == ["g/0", "g/1", "g/2", "g/3"]


@pytest.mark.parametrize("prompt", ["Once upon a time", [{"role": "user", "content": "héllo"}]])
def test_a_text_or_chat_travels_as_it_is(prompt: Any) -> None:
    item = fields(replace(JOB, prompt=prompt, prompt_ids=None))

    assert read_job(item["job"], "g")[0] == prompt
    assert item["prompt_ids"] == b""
    assert item["prompt_tokens"] > 0


def test_what_the_scripts_need_to_know_is_beside_the_payload() -> None:
    params = SamplingParams(max_tokens=None, frequency_penalty=0.5)
    item = fields(
        replace(JOB, params=params, max_staleness=0, staleness_policy=StalenessPolicy.DROP)
    )

    assert item["max_tokens"] == UNBOUNDED
    assert (item["max_staleness"], item["staleness_policy"], item["restart"]) == (0, "drop", 1)


def test_the_digest_tells_two_jobs_apart() -> None:
    others = [
        replace(JOB, prompt_ids=np.array([1, 2, 4], np.int32)),
        replace(JOB, params=replace(JOB.params, n=5)),
        replace(JOB, params=replace(JOB.params, temperature=0.5)),
        replace(JOB, metadata=None),
        replace(JOB, max_staleness=3),
        replace(JOB, max_staleness=3, staleness_policy=StalenessPolicy.DROP),
        replace(JOB, prompt="x", prompt_ids=None),
        replace(JOB, prompt="y", prompt_ids=None),
    ]
    digests = {fields(job)["digest"] for job in [JOB, *others]}

    assert len(digests) == 1 + len(others)
    assert fields(replace(JOB, group_id="other"))["digest"] in digests


def test_a_job_takes_four_bytes_a_prompt_token() -> None:
    short = replace(JOB, prompt_ids=np.zeros(1, np.int32))
    long = replace(JOB, prompt_ids=np.zeros(10_001, np.int32))

    size = [sum(len(str(a)) if isinstance(a, int) else len(a) for a in j.to_item())
            for j in (short, long)]  # fmt: skip
    assert size[1] - size[0] <= 40_000 + 4
    assert size[0] < 200


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, metadata=object()),
        replace(JOB, metadata={1: "integer key"}),
        replace(JOB, metadata="\ud800"),
        replace(JOB, metadata=2**64),
        replace(JOB, metadata=b"x" * MAX_PAYLOAD),
        replace(JOB, metadata=b"x" * (MAX_PAYLOAD - 20)),
        replace(JOB, prompt="x" * MAX_PAYLOAD, prompt_ids=None),
        replace(JOB, prompt=[{"role": "user", "content": "\udfff"}], prompt_ids=None),
        replace(JOB, prompt=[{"role": "user", "content": object()}], prompt_ids=None),
        replace(JOB, prompt_ids=np.zeros(MAX_PAYLOAD // 4 + 1, np.int32)),
        replace(JOB, prompt_ids=np.zeros(600_000, np.int32), metadata=b"x" * 2_000_000),
    ],
    ids=range(11),
)
def test_a_job_that_cannot_travel_is_refused_by_its_name(job: Job) -> None:
    with pytest.raises(InvalidSample, match="group g"):
        job.to_item()


@pytest.mark.parametrize(
    "wire",
    [
        None,
        5,
        [],
        "text",
        {},
        np.zeros(3, np.int32),
        {"prompt": None, "params": {}},
        {"prompt": None, "params": [], "metadata": b"\xc0"},
        {"prompt": None, "params": {}, "metadata": None},
        {"prompt": None, "params": {}, "metadata": b"\xc1"},
        {"prompt": 5, "params": {}, "metadata": b"\xc0"},
        {"prompt": {"role": "user"}, "params": {}, "metadata": b"\xc0"},
    ],
    ids=range(12),
)
def test_what_is_no_job_is_refused_by_its_name(wire: Any) -> None:
    with pytest.raises(InvalidPayload, match="g/0"):
        read_job(pack(wire, "wire"), "g/0")


def test_a_parameter_of_a_newer_rollq_is_refused_by_its_name() -> None:
    wire = {"prompt": None, "params": {"top_n_sigma": 1}, "metadata": b"\xc0"}
    with pytest.raises(InvalidSample, match="top_n_sigma"):
        read_job(pack(wire, "wire"), "g/0")


# chunks


@pytest.mark.parametrize("chunk", [CHUNK, replace(CHUNK, logprobs_mode="raw_logprobs")])
def test_a_chunk_comes_back(chunk: Chunk) -> None:
    back = Chunk.from_wire(chunk.to_wire(), "g/0")

    assert (back.version, back.worker, back.attempt) == (7, "worker-1", 3)
    assert back.logprobs_mode == chunk.logprobs_mode
    assert np.array_equal(back.token_ids, chunk.token_ids)
    assert np.array_equal(back.logprobs, chunk.logprobs)
    assert isinstance(back.token_ids.base, bytes)
    assert isinstance(back.logprobs.base, bytes)


@pytest.mark.parametrize("tokens", [1, 16, 64, 1024])
def test_a_chunk_takes_eight_bytes_a_token(tokens: int) -> None:
    chunk = replace(
        CHUNK, token_ids=np.full(tokens, 10**6, np.int32), logprobs=np.zeros(tokens, np.float32)
    )
    assert len(chunk.to_wire()) <= 8 * tokens + 40


def wire_chunk(**changes: Any) -> bytes:
    wire: dict[str, Any] = {"v": 7, "w": "w", "a": 1, "t": CHUNK.token_ids, "l": CHUNK.logprobs}
    wire.update(changes)
    return pack({k: v for k, v in wire.items() if v is not ...}, "chunk")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not msgpack",
        pack(None, "x"),
        pack([], "x"),
        pack("v", "x"),
        pack(np.zeros(3, np.int32), "x"),
        pickle.dumps(CHUNK),
        wire_chunk(v=...),
        wire_chunk(l=...),
        wire_chunk(v="7"),
        wire_chunk(v=-1),
        wire_chunk(v=2**31),
        wire_chunk(w=b"w"),
        wire_chunk(a=None),
        wire_chunk(m=5),
        wire_chunk(t=[1, 2, 3]),
        wire_chunk(t=CHUNK.logprobs),
        wire_chunk(l=CHUNK.token_ids),
        wire_chunk(t=CHUNK.token_ids[:2]),
        wire_chunk(t=CHUNK.token_ids[:0], l=CHUNK.logprobs[:0]),
        wire_chunk(x=b"x" * (MAX_PAYLOAD - 100)) + b"x" * 200,
    ],
    ids=range(21),
)
def test_what_is_no_chunk_is_refused_by_its_name(data: bytes) -> None:
    with pytest.raises(InvalidPayload, match="chunk of g/0"):
        Chunk.from_wire(data, "g/0")


def test_a_chunk_over_the_limit_is_refused() -> None:
    tokens = MAX_PAYLOAD // 8
    huge = replace(
        CHUNK, token_ids=np.zeros(tokens, np.int32), logprobs=np.zeros(tokens, np.float32)
    )
    with pytest.raises(InvalidSample, match=r"chunk has \d+ bytes"):
        huge.to_wire()


# hostile bytes

leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.text(max_size=4) | st.binary(max_size=9)
    | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(lambda v: np.array(v, np.int32))
    | st.lists(st.floats(width=32), max_size=3).map(lambda v: np.array(v, np.float32))
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=5,
)
near_chunks = st.fixed_dictionaries({k: values for k in "vwatl"}, optional={"m": values})
near_jobs = st.fixed_dictionaries(
    {
        "prompt": values,
        "params": st.dictionaries(st.sampled_from(["n", "stop", "seed", "top_p"]), values) | values,
        "metadata": st.binary(max_size=9) | values,
    }
)
mutations = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)


def mutated(data: bytes, changes: list[tuple[int, int]], length: int | None) -> bytes:
    raw = bytearray(data)
    for at, byte in changes:
        raw[at % len(raw)] = byte
    return bytes(raw[:length])


def reads_or_refuses(data: bytes) -> None:
    with suppress(InvalidPayload):
        chunk = Chunk.from_wire(data, "g/0")
        assert 0 < len(chunk.token_ids) == len(chunk.logprobs)
        np.array([chunk.version], np.int32)
    with suppress(InvalidPayload, InvalidSample):
        prompt, params, _ = read_job(data, "g/0")
        assert prompt is None or isinstance(prompt, str | list)
        assert isinstance(params, SamplingParams)


@search(300)
@given(near_chunks | values)
def test_what_is_almost_a_chunk_is_read_or_refused(wire: Any) -> None:
    reads_or_refuses(pack(wire, "wire"))


@search(300)
@given(near_jobs)
def test_what_is_almost_a_job_is_read_or_refused(wire: Any) -> None:
    reads_or_refuses(pack(wire, "wire"))


@search(400)
@given(
    st.sampled_from([CHUNK.to_wire(), fields(JOB)["job"]]),
    mutations,
    st.none() | st.integers(0, 80),
)
def test_a_damaged_message_is_read_or_refused(
    data: bytes, changes: list[tuple[int, int]], length: int | None
) -> None:
    reads_or_refuses(mutated(data, changes, length))


def test_a_claim_is_read_by_position() -> None:
    headers = [[b"g/1", b"3:abc", 3, 1, 2, 40], [b"g/0", b"1:abc", 1, 0, 0, 0]]
    jobs = [[b"h", b"", b""], [b"g", b"job", b"\1\0\0\0"]]

    assert Claim.from_reply(headers, jobs) == [
        Claim("g/1", "3:abc", "g", 1, 3, 1, 2, 40, b"job", b"\1\0\0\0"),
        Claim("g/0", "1:abc", "g", 0, 1, 0, 0, 0, b"job", b"\1\0\0\0"),
    ]


def test_a_payload_of_another_encoder_is_the_same_payload() -> None:
    packed = msgpack.packb({"v": 1, "w": "w", "a": 1, "t": msgpack.ExtType(1, b"\1\0\0\0"),
                            "l": msgpack.ExtType(2, b"\0\0\0\xbf")})  # fmt: skip
    chunk = Chunk.from_wire(packed, "g/0")

    assert (chunk.token_ids.tolist(), chunk.logprobs.tolist()) == ([1], [-0.5])
