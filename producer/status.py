"""What a pool looks like at one moment: read off the structures, O(1) a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from producer.contract.keys import QueueKeys

Command = tuple[str, ...]


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
    return [("HGETALL", keys.worker(name.decode())) for name in names]


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
            _worker(name.decode(), texts(fields))
            for name, fields in zip(names, workers, strict=True)
            if fields
        ),
        stats={name: int(value) for name, value in texts(stats).items()},
        weights=level,
        config=texts(config),
    )


def texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}


def _worker(name: str, fields: dict[str, str]) -> WorkerStatus:
    return WorkerStatus(
        name=name,
        version=int(fields.get("version", -1)),
        loading=int(fields.get("loading") or -1),
        state=fields.get("state", "?"),
        in_flight=int(fields.get("in_flight", 0)),
        tokens_per_second=float(fields.get("tokens_per_second", 0.0)),
        last_error=fields.get("last_error", ""),
    )
