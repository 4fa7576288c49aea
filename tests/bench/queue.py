"""What the queue itself costs, without any engine: `make bench`.

One process takes samples the whole way, submit -> claim -> checkpoint and finish -> results ->
ack, through the product's own client and scripts. In the same run a plain pipeline writes and
reads the same bytes: the floor. Only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from typing import Any

import numpy as np
import redis

from producer import RolloutClient, SamplingParams
from producer.contract.connection import Queue
from producer.contract.messages import Chunk, Claim
from producer.server import redis_at

_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", help="URL; an embedded server by default")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1000, help="response tokens a sample")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with redis_at(options.redis) as url:
        figures = measure(url, options.samples, options.tokens)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{options.samples} samples of {options.tokens} tokens, one process")
    for name, value in figures.items():
        print(f"  {name:28} {value:12,.2f}")


def measure(url: str, samples: int, tokens: int) -> dict[str, float]:
    queue_name = f"bench-{secrets.token_hex(3)}"
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 32000, tokens, dtype=np.int32)
    logprobs = -rng.random(tokens, dtype=np.float32)
    with RolloutClient(url, queue_name) as client, redis.Redis.from_url(url) as server:
        queue = Queue(url, queue_name)
        queue.open()
        _whole_way(client, queue, ids, logprobs, _BATCH)  # loads the scripts
        before = _server(server)
        started = time.perf_counter()
        for _ in range(samples // _BATCH):
            _whole_way(client, queue, ids, logprobs, _BATCH)
        seconds = time.perf_counter() - started
        after = _server(server)
        floor = _floor(server, queue_name, Chunk(0, "w", 1, ids, logprobs).to_wire(), samples)
        queue.close()
    done = samples // _BATCH * _BATCH
    return {
        "samples_per_second": done / seconds,
        "share_of_floor": (done / seconds) / floor,
        "redis_cpu_us_per_sample": (after["cpu"] - before["cpu"]) * 1e6 / done,
        "calls_per_sample": (after["calls"] - before["calls"]) / done,
        "bytes_per_token": len(Chunk(0, "w", 1, ids, logprobs).to_wire()) / tokens,
    }


def _whole_way(client: RolloutClient, queue: Queue, ids: Any, logprobs: Any, n: int) -> None:
    """`n` samples, in groups of 8, from submit to ack."""
    params = SamplingParams(n=8, max_tokens=len(ids))
    client.submit([[1, 2, 3]] * (n // 8), params)
    _, _, headers, _ = queue.call(
        "claim",
        worker="bench",
        request=secrets.token_hex(8),
        version=0,
        limit=n,
        held=0,
        share=0,
        suspects=1,
        alone=1,
        room=2**40,
        reserve=256,
    )
    claims = [Claim.from_wire(h) for h in headers]
    data = Chunk(0, "bench", 1, ids, logprobs).to_wire()
    queue.call_many(
        [
            (
                "checkpoint",
                {"worker": "bench"},
                [(c.id, c.lease_token, 0, len(ids), 0, data) for c in claims],
            ),
            (
                "finish",
                {"worker": "bench"},
                [(c.id, c.lease_token, len(ids), "length", "", "") for c in claims],
            ),
        ]
    )
    client.batch(n // 8, timeout=60).ack()


def _floor(server: redis.Redis, prefix: str, data: bytes, samples: int) -> float:
    """Samples a second of a plain pipeline that writes, reads and deletes the same bytes."""
    started = time.perf_counter()
    for start in range(0, samples, _BATCH):
        keys = [f"{prefix}:{i}" for i in range(start, min(start + _BATCH, samples))]
        for command in ("SET", "GET", "UNLINK"):
            pipe = server.pipeline(transaction=False)
            for key in keys:
                pipe.execute_command(command, key, *([data] if command == "SET" else []))
            pipe.execute()
    return samples / (time.perf_counter() - started)


def _server(server: redis.Redis) -> dict[str, float]:
    cpu = server.info("cpu")
    commands = server.info("commandstats")
    calls = sum(c["calls"] for name, c in commands.items() if name.startswith("cmdstat_evalsha"))
    return {"cpu": cpu["used_cpu_user"] + cpu["used_cpu_sys"], "calls": calls}


if __name__ == "__main__":
    main()
