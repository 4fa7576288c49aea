"""What a worker counts of its own work: plain numbers, changed by the event loop's thread alone."""

from __future__ import annotations

from collections import Counter

from producer.contract import metrics as names
from producer.contract.exposition import Histogram
from workers.held import Held, Outcome


class Meter:
    """Counters of one worker process; they begin at 0 with it."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.interruptions: Counter[str] = Counter()
        self.lost = 0
        self.recomputed_tokens = 0
        self.wasted_tokens = 0
        self.staleness = Histogram(names.WORKER_STALENESS)
        self.update_idle = Histogram(names.WORKER_UPDATES)

    def reported(self, held: Held, outcome: Outcome, current: int) -> None:
        """Redis has taken the outcome of an attempt."""
        if outcome.kind == "release":
            self.interruptions[outcome.reason] += 1
        elif outcome.kind == "fail":
            self.ended["error"] += 1
        elif outcome.kind == "finish":
            self.ended[outcome.reason] += 1
            if held.pieces:
                self.staleness.observe(current - held.pieces[0].chunk.version)

    def lose(self, held: Held) -> None:
        """Its lease is gone, and with it what was not stored."""
        self.lost += 1
        self.wasted_tokens += max(0, held.made - held.stored)
