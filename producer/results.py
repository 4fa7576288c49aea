"""From a closed group's keys to rollouts: the only place that joins chunks.

The chunks are the only truth about response tokens; the sample's hash says how it ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.codec import unpack_ids
from producer.contract.errors import InvalidPayload, InvalidSample
from producer.contract.keys import QueueKeys, sample_id, split_sample_id
from producer.contract.messages import (
    LOGPROBS_MODE,
    Chunk,
    Messages,
    Rollout,
    RolloutGroup,
    Segment,
    read_job,
)
from producer.contract.rewards import read_rewards
from producer.contract.sampling import SamplingParams
from producer.contract.states import State

Fields = dict[bytes, bytes]
Command = tuple[str, ...]

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)


def group_commands(keys: QueueKeys, group_id: str, size: int) -> list[Command]:
    """The reads that `build_group` needs, to be sent in one pipeline."""
    commands: list[Command] = [("HGETALL", keys.group(group_id))]
    for index in range(size):
        commands += sample_commands(keys, sample_id(group_id, index))
    return commands


def sample_commands(keys: QueueKeys, sid: str) -> list[Command]:
    return [("HGETALL", keys.sample(sid)), ("LRANGE", keys.chunks(sid), "0", "-1")]


def build_group(entry: str, group_id: str, replies: Sequence[Any]) -> RolloutGroup:
    """A group out of the replies to `group_commands`. Raises InvalidPayload."""
    asked = _read_asked(group_id, replies[0])
    group: Fields = replies[0]
    members = (len(replies) - 1) // 2
    reward_error = _text(group.get(b"reward_error"))
    rewards: list[Any] = [None] * members
    try:
        if data := group.get(b"rewards"):
            rewards = read_rewards(data, members, group_id)
    except InvalidPayload as reason:
        reward_error = str(reason)
    rollouts = tuple(
        _rollout(sample_id(group_id, i), asked, fields, chunks, reward)
        for i, (fields, chunks, reward) in enumerate(
            zip(replies[1::2], replies[2::2], rewards, strict=True)
        )
    )
    return RolloutGroup(
        id=group_id,
        rollouts=rollouts,
        prompt_ids=asked.prompt_ids,
        metadata=asked.metadata,
        reward_error=reward_error,
        traceparent=_text(group.get(b"traceparent")),
        entry=entry,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the members of a group have in common; `error` if it could not be read."""

    params: SamplingParams
    metadata: Any
    prompt: str | Messages | None
    prompt_ids: NDArray[np.int32]
    error: str = ""


def _read_asked(group_id: str, group: Fields) -> _Asked:
    """Out of the hash of a group, or of a dead-lettered sample."""
    try:
        prompt, params, metadata = read_job(group.get(b"job", b""), group_id)
        ids = unpack_ids(group.get(b"prompt_ids", b""), f"prompt of {group_id}")
    except (InvalidPayload, InvalidSample) as reason:
        return _Asked(SamplingParams(), None, None, _NO_IDS, str(reason))
    return _Asked(params, metadata, prompt, ids)


def build_rollout(sid: str, group: Fields, fields: Fields, raw: Sequence[bytes]) -> Rollout:
    """A rollout, finished or in the making.

    One that cannot be read is an error, neither the end of its trainer nor taken for a result.
    """
    return _rollout(sid, _read_asked(sid, group), fields, raw)


def _rollout(
    sid: str, asked: _Asked, fields: Fields, raw: Sequence[bytes], reward: Any = None
) -> Rollout:
    try:
        return _joined(sid, asked, fields, raw, reward)
    except (ValueError, ArithmeticError, RecursionError):
        reason = f"the fields of {sid} are not those of a sample"
    return _joined(sid, replace(asked, error=reason), {}, (), reward)


def _joined(sid: str, asked: _Asked, fields: Fields, raw: Sequence[bytes], reward: Any) -> Rollout:
    unreadable = asked.error
    chunks: list[Chunk] = []
    if not unreadable:
        try:
            chunks = [Chunk.from_wire(data, sid) for data in raw]
        except (InvalidPayload, InvalidSample) as reason:
            unreadable = str(reason)
    if unreadable:
        fields = {**fields, b"state": b"failed", b"finish_reason": b"error"}
    get = fields.get
    group_id, index = split_sample_id(sid)
    params = asked.params
    response_ids = np.concatenate([c.token_ids for c in chunks]) if chunks else _NO_IDS
    return Rollout(
        id=sid,
        group_id=group_id,
        index=index or 0,
        state=State(_text(get(b"state"))),
        finish_reason=_text(get(b"finish_reason")),
        stop_reason=_stop_reason(get(b"stop_reason")),
        error=unreadable or _text(get(b"error")),
        text=_text(get(b"text")),
        prompt_ids=asked.prompt_ids,
        response_ids=response_ids,
        response_mask=np.ones(len(response_ids), np.int32),
        response_logprobs=(
            np.concatenate([c.logprobs for c in chunks]) if chunks else _NO_LOGPROBS
        ),
        versions=_versions(chunks),
        segments=_segments(chunks),
        attempts=int(get(b"attempts") or 0),
        interruptions=int(get(b"interruptions") or 0),
        crashes=int(get(b"crashes") or 0),
        recomputed_tokens=int(get(b"recomputed_tokens") or 0),
        logprobs_mode=chunks[0].logprobs_mode if chunks else LOGPROBS_MODE,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        enqueued_at=_seconds(get(b"enqueued_at")),
        started_at=_seconds(get(b"started_at")),
        finished_at=_seconds(get(b"finished_at")),
        metadata=asked.metadata,
        prompt=asked.prompt,
        reward=reward,
    )


def _versions(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    if len({c.version for c in chunks}) == 1:
        tokens = sum(len(c.token_ids) for c in chunks)
        return np.full(tokens, chunks[0].version, np.int32)
    counts = [len(c.token_ids) for c in chunks]
    return np.repeat(np.array([c.version for c in chunks], np.int32), counts)


def _segments(chunks: Sequence[Chunk]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for c in chunks:
        tokens = len(c.token_ids)
        last = segments[-1] if segments else None
        if last and (last.version, last.worker, last.attempt) == (c.version, c.worker, c.attempt):
            tokens += segments.pop().tokens
        segments.append(Segment(c.version, tokens, c.worker, c.attempt))
    return tuple(segments)


def _text(value: bytes | None) -> str:
    return value.decode("utf-8", "replace") if value else ""


def _seconds(value: bytes | None) -> float:
    return int(value) / 1000 if value else 0.0


def _stop_reason(value: bytes | None) -> int | str | None:
    reason = json.loads(value) if value else None
    if not isinstance(reason, int | str | None):
        raise ValueError
    return reason
