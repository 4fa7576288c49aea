"""What a chaos run works on: groups and publications, pure functions of the seed.

The trainers make their work from it, also after a restart, and the auditor makes it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from producer import SamplingParams
from workers.engines.sim import SimSettings

QUEUE = "chaos"
TRAINERS = 2
#: groups that are submitted in one call, with the same sampling parameters
SLICE = 16

LIMITS = {
    "lease_ms": 3000,
    "worker_ttl_ms": 3000,
    "max_ready": 2000,
    "max_results": 400,
    # Every second or so a worker dies here: three deaths in a row befall innocents, too.
    "max_crashes": 5,
}
#: tokens after which a worker stores what it made, and what its engine gives out at a time
CHECKPOINT = 16
CRASH_ID, KILL_ID = 300, 301
#: loads of these fail in the engine, on every worker
FAIL_VERSIONS = tuple(range(6, 2000, 17))
SIM = SimSettings(
    vocab_size=512,
    max_model_len=256,
    max_num_seqs=16,
    kv_cache_tokens=1 << 14,
    token_rate=150.0,
    mean_tokens=200.0,
    stream_interval=CHECKPOINT,
    crash_id=CRASH_ID,
    kill_id=KILL_ID,
    fail_versions=FAIL_VERSIONS,
)
SABOTAGE = ("corrupt", "truncated", "manifest")


@dataclass(frozen=True, slots=True)
class Group:
    id: str
    prompt: list[int]
    poison: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """Groups of one trainer that go out together."""

    number: int
    params: SamplingParams
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """`sabotage`: what is done to its files before Redis hears of it; '' for sound weights."""

    number: int
    sabotage: str
    policy: str
    deadline_s: float


@dataclass(frozen=True)
class Work:
    """All of it, for a seed and a share of poison groups."""

    seed: int
    poison: float = 0.01

    @lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the run
    def slice(self, number: int) -> Slice:
        rng = random.Random(f"{self.seed} slice {number}")
        params = SamplingParams(
            n=rng.randint(4, 8),
            temperature=1.0,
            # Some last so long that their holder may lose them while it writes.
            max_tokens=rng.randint(10, 40) if rng.random() < 0.9 else rng.randint(120, 220),
            seed=rng.randrange(1 << 32) if rng.random() < 0.5 else None,
        )
        return Slice(number, params, tuple(self._group(rng, number, i) for i in range(SLICE)))

    def _group(self, rng: random.Random, number: int, index: int) -> Group:
        prompt = [rng.randrange(310, SIM.vocab_size) for _ in range(rng.randint(3, 12))]
        poison = rng.random() < self.poison
        if poison:
            harm = CRASH_ID if rng.random() < 0.7 else KILL_ID
            prompt[rng.randrange(len(prompt))] = harm
        return Group(f"g{number * SLICE + index:06d}", prompt, poison)

    def slice_of(self, group_id: str) -> tuple[Slice, Group]:
        number, index = divmod(int(group_id[1:]), SLICE)
        found = self.slice(number)
        return found, found.groups[index]

    def slices_for(self, samples: int) -> int:
        """How many slices hold at least so many samples."""
        number = total = 0
        while total < samples:
            total += self.slice(number).params.n * SLICE
            number += 1
        return number

    def publication(self, number: int) -> Publication:
        rng = random.Random(f"{self.seed} publication {number}")
        bad = number > 0 and rng.random() < 0.2
        return Publication(
            number,
            rng.choice(SABOTAGE) if bad else "",
            rng.choice(("requeue", "requeue", "keep", "finish")),
            rng.choice((0.2, 1.0)),
        )
