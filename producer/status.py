"""What a pool looks like at one moment: read off the structures, O(1) a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from producer.contract.keys import QueueKeys

Command = tuple[str, ...]

#: of a worker's hash
_FIELDS = (
    "version",
    "loading",
    "state",
    "in_flight",
    "tokens_per_second",
    "last_error",
)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as it last described itself."""

    name: str
    version: int
    loading: int
    state: str
    in_flight: int
    tokens_per_second: float
    last_error: str


@dataclass(frozen=True, slots=True)
class Status:
    """Counts of samples (`ready`, `leased`, `dead`), of closed groups that wait for their rewards
    (`grading`) and of closed groups that are not acked (`results`).

    `current` and `last_good` are weight versions; `weights` is the whole hash; `stats` are
    counters that only grow; `config` holds the queue's limits, and is empty where there is no
    such queue.
    """

    ready: int
    leased: int
    dead: int
    results: int
    current: int
    last_good: int
    workers: tuple[WorkerStatus, ...]
    stats: dict[str, int]
    weights: dict[str, str]
    config: dict[str, str]
    grading: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all workers, as they last said."""
        return sum(w.tokens_per_second for w in self.workers)

    def of_version(self, version: int, field: str) -> str:
        """What the hash `weights` says of a version, such as its `state`, `step` or `error`."""
        return self.weights.get(f"{version}:{field}", "")


def status_commands(keys: QueueKeys) -> list[Command]:
    return [
        ("ZCARD", keys["ready"]),
        ("ZCARD", keys["leases"]),
        ("ZCARD", keys["dead"]),
        ("ZCARD", keys["grading"]),
        ("XLEN", keys["results"]),
        ("HGETALL", keys["weights"]),
        ("HGETALL", keys["stats"]),
        ("HGETALL", keys["config"]),
        ("ZRANGE", keys["workers"], "0", "-1"),
    ]


def worker_commands(keys: QueueKeys, names: Sequence[bytes]) -> list[Command]:
    """What is shown of each: a third of what it says, and a waiting client looks often."""
    return [("HMGET", keys.worker(name.decode()), *_FIELDS) for name in names]


def build_status(replies: Sequence[Any], workers: Sequence[Any]) -> Status:
    """Out of the replies to both command lists."""
    ready, leased, dead, grading, results, weights, stats, config, names = replies
    level = texts(weights)
    return Status(
        ready=ready,
        leased=leased,
        dead=dead,
        grading=grading,
        results=results,
        current=int(level.get("current", 0)),
        last_good=int(level.get("last_good", 0)),
        workers=tuple(
            _worker(name.decode(), dict(zip(_FIELDS, values, strict=True)))
            for name, values in zip(names, workers, strict=True)
            if any(value is not None for value in values)
        ),
        stats={name: int(value) for name, value in texts(stats).items()},
        weights=level,
        config=texts(config),
    )


def texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}


def _worker(name: str, fields: dict[str, bytes | None]) -> WorkerStatus:
    return WorkerStatus(
        name=name,
        version=int(fields["version"] or -1),
        loading=int(fields["loading"] or -1),
        state=(fields["state"] or b"?").decode(),
        in_flight=int(fields["in_flight"] or 0),
        tokens_per_second=float(fields["tokens_per_second"] or 0.0),
        last_error=(fields["last_error"] or b"").decode("utf-8", "replace"),
    )
