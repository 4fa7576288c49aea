"""The states of a sample and the words for how it ended."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """A sample is in exactly one of these; all but the first two are terminal."""

    READY = "ready"
    LEASED = "leased"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALE = "stale"
    DEAD = "dead"

    @property
    def terminal(self) -> bool:
        return self not in (State.READY, State.LEASED)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"
    STALE = "stale"


class UpdatePolicy(StrEnum):
    """What a weight update does to the samples in flight."""

    REQUEUE = "requeue"
    KEEP = "keep"
    FINISH = "finish"


class StalenessPolicy(StrEnum):
    """What becomes of a sample whose first token is older than `max_staleness` versions."""

    ALLOW = "allow"
    RESTART = "restart"
    DROP = "drop"


class WeightState(StrEnum):
    """`new` until a worker served it, then `good`; `bad` when no live worker could load it."""

    NEW = "new"
    GOOD = "good"
    BAD = "bad"
