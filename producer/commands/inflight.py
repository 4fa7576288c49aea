"""A bounded look at samples in flight: how old their first tokens are, which groups are slowest.

It reads at most LOOKED_AT of those with workers, the ones whose leases end first, and the
first FIRST_WAITING of those that wait, where what was handed back stands: so it costs the same
for a pool of any size, in three round trips, and is a sample where there are more. Used by
`rollq top`; a user with read access alone may do it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from producer.contract.keys import split_sample_id
from producer.contract.states import State
from producer.pipeline import read_all

if TYPE_CHECKING:
    from producer.contract.connection import Queue

LOOKED_AT = 256
FIRST_WAITING = 32
SLOWEST = 16

_FIELDS = ("state", "tokens", "version_first", "enqueued_at", "started_at")


@dataclass(frozen=True, slots=True)
class SlowGroup:
    """`running_s` since its first member here was first claimed; `tokens` of the longest one."""

    id: str
    running_s: float
    size: int
    ended: int
    tokens: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """Of `looked_at` samples with workers.

    Attributes:
        staleness: versions that the first token is behind the pool's -> samples.
        no_tokens: samples without a token yet.
        slowest: those that run for longest first.
        oldest_waiting_s: since the first sample that waits was enqueued; None if none waits.
    """

    looked_at: int
    staleness: dict[int, int]
    no_tokens: int
    slowest: tuple[SlowGroup, ...]
    oldest_waiting_s: float | None


def look(queue: Queue, current: int) -> InFlight:
    """`current`: the pool's weight version."""
    keys = queue.keys
    leased, waiting, info = read_all(
        queue,
        [
            ("ZRANGE", keys["leases"], "0", str(LOOKED_AT - 1)),
            ("ZRANGE", keys["ready"], "0", str(FIRST_WAITING - 1)),
            ("INFO", "server"),
        ],
    )
    now = int(info.get("server_time_usec", time.time() * 1e6)) / 1e6
    ids = [s.decode() for s in (*leased, *waiting)]
    found = read_all(queue, [("HMGET", keys.sample(s), *_FIELDS) for s in ids])
    samples = [
        dict(zip(("id", *_FIELDS), (sid, *values), strict=True))
        for sid, values in zip(ids, found, strict=True)
        if values[0]
    ]
    held = [s for s in samples if s["state"] == State.LEASED.encode()]
    waits = [s for s in samples if s["state"] == State.READY.encode()]
    first = [int(s["version_first"] or -1) for s in held]
    return InFlight(
        looked_at=len(held),
        staleness=dict(sorted(Counter(max(0, current - v) for v in first if v >= 0).items())),
        no_tokens=sum(v < 0 for v in first),
        slowest=_slowest(queue, [*held, *waits], now),
        oldest_waiting_s=now - int(waits[0]["enqueued_at"]) / 1000 if waits else None,
    )


def _slowest(queue: Queue, samples: Sequence[dict[str, Any]], now: float) -> tuple[SlowGroup, ...]:
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        if sample["started_at"]:
            members[split_sample_id(sample["id"])[0]].append(sample)
    started = {g: min(int(s["started_at"]) for s in found) for g, found in members.items()}
    slow = sorted(started, key=lambda g: started[g])[:SLOWEST]
    sizes = read_all(queue, [("HMGET", queue.keys.group(g), "size", "ended") for g in slow])
    return tuple(
        SlowGroup(
            id=group,
            running_s=now - started[group] / 1000,
            size=int(size),
            ended=int(ended),
            tokens=max(int(s["tokens"] or 0) for s in members[group]),
        )
        for group, (size, ended) in zip(slow, sizes, strict=True)
        if size is not None
    )
