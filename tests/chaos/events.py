"""The schedule of a chaos run: which harm comes next, a pure function of the seed.

Events are drawn from a deck that is shuffled anew when it is used up, so that a short run has
all of them and the numbers of a long one are known before. Whom an event hits is a number that
the director takes modulo the actors of the moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

#: kind -> cards in a deck
DECK = {
    "kill-worker": 12,
    "stop-worker": 5,
    "drain-worker": 4,
    "kill-trainer": 3,
    "cut": 4,
    "delay": 2,
    "hold": 3,
    "drop-reply": 8,
    "kill-redis": 1,
    "restore-redis": 1,
    "kill-clients": 1,
    "flush-scripts": 1,
}


@dataclass(frozen=True, slots=True)
class Event:
    """`who` picks the actor, `much` in [0, 1) is how long or how far; `gap` seconds before it."""

    step: int
    kind: str
    who: int
    much: float
    gap: float


def schedule(seed: int, mean_gap: float) -> Iterator[Event]:
    """Events without end."""
    rng = random.Random(f"{seed} events")
    step = 0
    while True:
        deck = [kind for kind, cards in DECK.items() for _ in range(cards)]
        rng.shuffle(deck)
        for kind in deck:
            gap = mean_gap * rng.uniform(0.5, 1.5)
            yield Event(step, kind, rng.randrange(1 << 16), rng.random(), gap)
            step += 1
