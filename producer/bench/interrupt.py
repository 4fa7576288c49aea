"""`rollq bench interrupt`: hand back everything in flight, and claim it again.

Through the scripts that a worker sends at a weight update, with the partial responses read back.
"""

from __future__ import annotations

import secrets
import statistics
import time
from typing import Any

import numpy as np

from producer.bench.fleet_load import claiming
from producer.client import RolloutClient
from producer.contract.connection import Queue, split
from producer.contract.messages import Chunk, Claim
from producer.contract.sampling import SamplingParams
from producer.pipeline import read_all

_ROUNDS = 5


def measure(url: str, samples: int, tokens: int) -> dict[str, float]:
    """Milliseconds, medians over 5 rounds."""
    name = f"bench-{secrets.token_hex(3)}"
    queue = Queue(url, name)
    with RolloutClient(url, name) as client:
        queue.open()
        client.submit([[1, 2, 3]] * samples, SamplingParams(max_tokens=2 * tokens))
        held = _claim(queue, samples)
        data = Chunk(
            0, "bench", 1, np.ones(tokens, np.int32), np.zeros(tokens, np.float32)
        ).to_wire()
        items: list[Any] = [(c.id, c.lease_token, 0, tokens, 0, data) for c in held]
        for piece in split(items):
            queue.call("checkpoint", piece, worker="bench")
        released, claimed = [], []
        for _ in range(_ROUNDS):
            at = [time.perf_counter()]
            ends: list[Any] = [(c.id, c.lease_token, tokens) for c in held]
            queue.call_many(
                [("release", {"worker": "bench", "reason": "update"}, p) for p in split(ends)]
            )
            at.append(time.perf_counter())
            held = _claim(queue, samples)
            chunks = read_all(queue, [("LRANGE", queue.keys.chunks(c.id), "0", "-1") for c in held])
            at.append(time.perf_counter())
            if len(held) != samples or any(len(c) != 1 for c in chunks):
                raise AssertionError(f"{len(held)} of {samples} samples came back")
            released.append(1000 * (at[1] - at[0]))
            claimed.append(1000 * (at[2] - at[1]))
    queue.close()
    return {
        "release_ms": statistics.median(released),
        "claim_ms": statistics.median(claimed),
        "interrupt_ms": statistics.median(a + b for a, b in zip(released, claimed, strict=True)),
    }


def _claim(queue: Queue, samples: int) -> list[Claim]:
    held: list[Claim] = []
    while len(held) < samples:
        scalars = claiming("bench", 0, samples - len(held), len(held))
        _, _, headers, _, jobs = queue.call("claim", (), **scalars)
        if not headers:
            break
        held += Claim.from_reply(headers, jobs)
    return held
