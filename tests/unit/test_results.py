"""From a group's keys to rollouts: chunks joined to arrays of one length."""

from __future__ import annotations

from typing import Any

import numpy as np

from producer.contract.codec import pack, pack_ids
from producer.contract.keys import QueueKeys
from producer.contract.messages import Chunk
from producer.contract.states import State
from producer.results import build_group, build_rollout, group_commands

GROUP = {
    b"job": pack(
        {
            "prompt": None,
            "params": {"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            "metadata": pack({"answer": 42}, "x"),
        },
        "x",
    ),
    b"prompt_ids": pack_ids(np.array([1, 2, 3], np.int32)),
}


def fields(**changes: Any) -> dict[bytes, bytes]:
    values = {
        "state": "finished", "group": "g", "index": 1, "attempts": 3, "crashes": 1,
        "interruptions": 1, "recomputed_tokens": 9, "finish_reason": "stop", "error": "",
        "text": "ü", "enqueued_at": 1500, "started_at": 2500, "finished_at": 3500,
    }  # fmt: skip
    return {k.encode(): str(v).encode() for k, v in (values | changes).items()}


def chunk(version: int, count: int, worker: str = "w", attempt: int = 1, **more: str) -> bytes:
    ids = np.arange(count, dtype=np.int32)
    return Chunk(version, worker, attempt, ids, ids.astype(np.float32), **more).to_wire()


def test_chunks_become_arrays_of_one_length() -> None:
    r = build_rollout("g/1", GROUP, fields(), [chunk(1, 2), chunk(1, 1), chunk(3, 2)])

    assert r.response_ids.tolist() == [0, 1, 0, 0, 1]
    assert r.response_logprobs.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert r.versions.tolist() == [1, 1, 1, 3, 3]
    assert r.response_mask.tolist() == [1] * 5
    assert (r.param_version_start, r.param_version_end) == (1, 3)
    arrays = (r.response_ids, r.versions, r.response_mask, r.prompt_ids)
    assert {a.dtype for a in arrays} == {np.dtype("int32")}
    assert r.response_logprobs.dtype == np.float32


def test_segments_are_runs_of_one_version_of_one_attempt() -> None:
    chunks = [
        chunk(1, 2),
        chunk(1, 3),
        chunk(1, 1, attempt=2),
        chunk(2, 1, attempt=2),
        chunk(2, 1, attempt=3, worker="v"),
        chunk(2, 1, attempt=3, worker="v"),
    ]

    r = build_rollout("g/1", GROUP, fields(), chunks)

    assert [(s.version, s.tokens, s.worker, s.attempt) for s in r.segments] == [
        (1, 5, "w", 1), (1, 1, "w", 2), (2, 1, "w", 2), (2, 2, "v", 3),
    ]  # fmt: skip


def test_what_the_hash_says_is_read() -> None:
    r = build_rollout("g/1", GROUP, fields(stop_reason='"end"'), [chunk(1, 1)])

    assert (r.id, r.group_id, r.index, r.state) == ("g/1", "g", 1, State.FINISHED)
    assert (r.attempts, r.crashes, r.interruptions, r.recomputed_tokens) == (3, 1, 1, 9)
    assert (r.finish_reason, r.stop_reason, r.text) == ("stop", "end", "ü")
    assert (r.enqueued_at, r.started_at, r.finished_at) == (1.5, 2.5, 3.5)
    assert (r.temperature, r.top_p, r.top_k) == (0.5, 0.9, 7)
    assert (r.metadata, r.prompt_ids.tolist()) == ({"answer": 42}, [1, 2, 3])
    assert build_rollout("g/1", GROUP, fields(stop_reason="7"), []).stop_reason == 7


def test_no_token_has_no_version() -> None:
    r = build_rollout("g/1", GROUP, fields(state="cancelled", finish_reason="cancelled"), [])

    assert (r.param_version_start, r.param_version_end, r.segments) == (-1, -1, ())
    assert (len(r.response_ids), len(r.versions), len(r.response_mask)) == (0, 0, 0)
    assert r.is_cancel
    assert r.logprobs_mode == "processed_logprobs"


def test_a_cancelled_sample_keeps_its_mask() -> None:
    r = build_rollout("g/1", GROUP, fields(state="cancelled"), [chunk(1, 3)])

    assert r.response_mask.tolist() == [1, 1, 1]


def test_the_mode_of_the_logprobs_is_the_chunks() -> None:
    r = build_rollout("g/1", GROUP, fields(), [chunk(1, 1, logprobs_mode="raw_logprobs")])

    assert r.logprobs_mode == "raw_logprobs"


def test_arrays_are_views_of_what_came_in() -> None:
    """One chunk is not copied; several are joined once."""
    r = build_rollout("g/1", GROUP, fields(), [chunk(1, 1000)])

    assert not r.prompt_ids.flags.owndata
    assert r.response_ids.nbytes == 4000


def test_a_group_keeps_the_order_of_its_members() -> None:
    replies = [GROUP]
    for index in range(3):
        replies += [fields(index=index), [chunk(index, 1)]]  # type: ignore[list-item]

    group = build_group("1-1", "g", replies)

    assert [r.index for r in group.rollouts] == [0, 1, 2]
    assert [r.id for r in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert (group.id, group.entry, group.metadata) == ("g", "1-1", {"answer": 42})
    assert group.prompt_ids.tolist() == [1, 2, 3]
    assert group.trainable


def test_one_bad_member_makes_a_group_untrainable() -> None:
    for state in ("failed", "cancelled", "stale", "dead"):
        replies: list[Any] = [GROUP, fields(index=0), [], fields(index=1, state=state), []]
        assert not build_group("1-1", "g", replies).trainable


def test_what_cannot_be_read_is_a_failed_member_without_tokens() -> None:
    """Case 33: never an exception, never half a response."""
    torn = [
        build_rollout("g/1", GROUP, fields(), [chunk(1, 2), b"\x80\x04N."]),
        build_rollout("g/1", {**GROUP, b"job": b"\xc1"}, fields(), [chunk(1, 2)]),
        build_rollout("g/1", {**GROUP, b"prompt_ids": b"\1"}, fields(), [chunk(1, 2)]),
        build_rollout("g/1", {}, fields(), []),
    ]

    for r in torn:
        assert (r.state, r.finish_reason) == (State.FAILED, "error")
        assert "g/1" in r.error
        assert len(r.response_ids) == len(r.versions) == 0


def test_the_reads_of_a_group_are_its_hash_and_two_keys_a_member() -> None:
    keys = QueueKeys("q")

    assert group_commands(keys, "g", 2) == [
        ("HGETALL", keys.group("g")),
        ("HGETALL", keys.sample("g/0")),
        ("LRANGE", keys.chunks("g/0"), "0", "-1"),
        ("HGETALL", keys.sample("g/1")),
        ("LRANGE", keys.chunks("g/1"), "0", "-1"),
    ]
