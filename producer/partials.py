"""Samples in the making: what a client submitted and has not acked, as it is now.

Reads are pipelined and bounded: the marks of up to 256 samples, or the tokens of up to 32, in
one round trip. Only the tokens of samples that changed are read. Called by the clients, for
`partials` and for `cancel` with a filter, in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample
from producer.contract.keys import sample_id, split_sample_id
from producer.contract.messages import Rollout
from producer.contract.states import State
from producer.outbox import Outbox
from producer.pipeline import before_ms, pieces, read_all
from producer.results import build_rollout, sample_commands
from producer.steps import Steps, Stream, Wait

_MARKS_A_READ = 256
_SAMPLES_A_READ = 32


@dataclass(frozen=True, slots=True)
class _Mark:
    """What shows that a sample changed; `here` is False while Redis does not know it."""

    id: str
    here: bool
    ended: bool
    tokens: int
    enqueued_ms: int


def watch(
    queue: Queue,
    outbox: Outbox,
    tend: Callable[[], None],
    ids: Iterable[str] | None,
    every: float,
) -> Stream[Rollout]:
    """Each outstanding sample whenever it has more tokens or has ended, until all have."""
    chosen = _chosen(ids)
    shown: dict[str, tuple[int, bool]] = {}
    while True:
        tend()
        samples = _samples(outbox, chosen)
        shown = {sample: shown[sample] for sample in samples if sample in shown}
        going_on = False
        for piece in pieces(samples, _MARKS_A_READ):
            marks = _marks(queue, piece)
            going_on |= any(not m.ended for m in marks)
            changed = [
                m.id for m in marks if m.here and (m.tokens, m.ended) != shown.get(m.id, (0, False))
            ]
            for few in pieces(changed, _SAMPLES_A_READ):
                for rollout in _read(queue, few):
                    shown[rollout.id] = len(rollout.response_ids), rollout.state.terminal
                    yield rollout
                yield Wait()
        if not going_on:
            return
        yield Wait(every)


def matching(
    queue: Queue,
    outbox: Outbox,
    ids: Iterable[str] | None,
    where: Callable[[Rollout], bool] | None,
    older_than: float | None,
) -> Steps[list[str]]:
    """Ids of the outstanding samples that have not ended and that the filters choose."""
    chosen = _chosen(ids)
    found: list[str] = []
    for piece in pieces(_samples(outbox, chosen), _MARKS_A_READ):
        newest = before_ms(queue, older_than or 0.0)
        live = [
            m.id
            for m in _marks(queue, piece)
            if m.here and not m.ended and (older_than is None or m.enqueued_ms <= newest)
        ]
        for few in pieces(live, _SAMPLES_A_READ):
            found += few if where is None else [r.id for r in _read(queue, few) if where(r)]
            yield Wait()
    return found


def _chosen(ids: Iterable[str] | None) -> set[str] | None:
    """Groups and samples to look at; None for all."""
    if isinstance(ids, str):
        raise InvalidSample(f"ids is a list of groups and samples, not the text {ids!r}")
    if ids is None:
        return None
    chosen = set(ids)
    for sid in chosen:
        split_sample_id(sid)
    return chosen


def _samples(outbox: Outbox, chosen: set[str] | None) -> list[str]:
    return [
        sid
        for group, size in outbox.groups()
        for sid in (sample_id(group, index) for index in range(size))
        if chosen is None or group in chosen or sid in chosen
    ]


def _marks(queue: Queue, samples: Sequence[str]) -> list[_Mark]:
    fields = ("state", "tokens", "enqueued_at")
    replies = read_all(queue, [("HMGET", queue.keys.sample(s), *fields) for s in samples])
    return [
        _Mark(
            id=sample,
            here=state is not None,
            ended=state is not None and State(state.decode()).terminal,
            tokens=int(tokens or 0),
            enqueued_ms=int(at or 0),
        )
        for sample, (state, tokens, at) in zip(samples, replies, strict=True)
    ]


def _read(queue: Queue, samples: Sequence[str]) -> Iterator[Rollout]:
    """These samples with their tokens; without those that were acked meanwhile."""
    keys = queue.keys
    groups = {sample: split_sample_id(sample)[0] for sample in samples}
    distinct = list(dict.fromkeys(groups.values()))
    commands: list[tuple[str, ...]] = [("HGETALL", keys.group(g)) for g in distinct]
    for sample in samples:
        commands += sample_commands(keys, sample)
    replies = read_all(queue, commands)
    group_fields: dict[str, Any] = dict(zip(distinct, replies, strict=False))
    own = iter(replies[len(distinct) :])
    for sample, fields, chunks in zip(samples, own, own, strict=True):
        if fields and group_fields[groups[sample]]:
            yield build_rollout(sample, group_fields[groups[sample]], fields, chunks)
