"""`rollq bench fleet`: how many workers one Redis serves, and what it costs as they get more.

Workers are played by `fleet_load.py`, which sends what they send; a trainer submits and takes
through the product's own client. Measured is what Redis spends: CPU of its main thread, the one
that saturates. Four parts:

- lengths: one worker through whole responses of each length; how many such workers fill 60% of
  a core.
- growth: fleets of 1 to `workers`, each for the same short time; what one worker costs in each.
- whole: all of the largest fleet at once: memory, everything handed back and claimed again, a
  weight update with its turns, what it costs to look at, a Redis that comes back from away.
- proof: real `rollq worker` processes and as many played ones, at the same work.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import redis

from producer.bench.fleet_load import CHECKPOINT_TOKENS, Fleet
from producer.bench.fleet_trainer import Trainer
from producer.bench.fleet_update import update
from producer.bench.machine import redis_cpu_seconds
from producer.client import RolloutClient
from producer.contract.connection import Queue
from producer.contract.sampling import SamplingParams
from producer.exporter import Exporter
from producer.pipeline import read_status
from producer.processes import WorkerProcesses

Figures = dict[str, float]

#: of its core that a Redis may be busy with a pool all the time: bursts need the rest
BUSY = 0.6
_PROMPT_TOKENS = 256
_TRAINER_SECONDS = 0.25
_LOAD_SECONDS = 2.0
_SIZES = (1, 10, 100)
#: workers by which a Redis is sized; as many as it has calls of at once, and more
_USUAL = 100
#: a rarer checkpoint, in tokens, to show what it saves
_RARELY = 256
#: of the proof: few enough for a small machine to simulate
_WORKERS, _SAMPLES, _RATE, _MEAN_TOKENS, _PROOF_SECONDS = 8, 32, 50.0, 100, 8.0
#: played time is not Redis's: no lease may run out, no worker be forgotten
_LIMITS = {
    "lease_ms": 3_600_000,
    "worker_ttl_ms": 3_600_000,
    "max_ready": 10**7,
    "max_results": 10**7,
    "tombstone_ms": 60_000,
}


@dataclass(frozen=True, slots=True)
class Spent:
    """What Redis has spent: seconds of its main thread, commands that clients sent, bytes."""

    cpu_s: float
    scripts: float
    bytes_in: float
    bytes_out: float
    at: float

    @classmethod
    def of(cls, server: redis.Redis) -> Spent:
        stats = server.info("stats")
        calls = server.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        return cls(
            cpu_s=redis_cpu_seconds(server),
            scripts=float(calls),
            bytes_in=float(stats["total_net_input_bytes"]),
            bytes_out=float(stats["total_net_output_bytes"]),
            at=time.perf_counter(),
        )

    def since(self, before: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Pool:
    """A queue with played workers and a trainer."""

    client: RolloutClient
    queue: Queue
    fleet: Fleet
    trainer: Trainer

    @property
    def spent(self) -> Spent:
        return Spent.of(self.queue.redis)

    def spending(self, work: Callable[[], object]) -> Spent:
        before = self.spent
        work()
        return self.spent.since(before)

    @property
    def memory(self) -> int:
        return int(self.queue.redis.info("memory")["used_memory"])


@contextlib.contextmanager
def open_pool(
    url: str,
    workers: int,
    samples: int,
    rate: float,
    every: int = CHECKPOINT_TOKENS,
    *,
    max_tokens: int = 1 << 20,
    limits: Mapping[str, int] = _LIMITS,
) -> Iterator[Pool]:
    """Of workers that hold nothing yet, and as many prompts as they can take."""
    name = f"bench-{secrets.token_hex(3)}"
    # With a seed a simulated engine makes other tokens for each member of a group.
    params = SamplingParams(n=Trainer.GROUP, max_tokens=max_tokens, seed=1)
    with RolloutClient(url, name, limits=limits) as client:
        queue = Queue(url, name)
        queue.open()
        trainer = Trainer(client, queue, params, _PROMPT_TOKENS)
        fleet = Fleet(queue, workers, samples, rate, every)
        try:
            trainer.submit(workers * samples)
            yield Pool(client, queue, fleet, trainer)
        finally:
            fleet.close()
            trainer.forget(fleet.names)
            queue.close()


def measure(
    url: str,
    workers: int,
    samples: int,
    tokens: int,
    rate: float,
    lengths: Sequence[int],
    *,
    prove: bool = True,
) -> Figures:
    """Figures of a fleet of so many workers and of smaller ones, and `workers_at_*_tokens`.

    Args:
        samples: in flight in each worker. rate: tokens a second of each of them.
        tokens: of the partial responses, when something happens to all workers at once.
        prove: compare played workers with real ones, too.
    """
    figures = proof(url) if prove else {}
    ends = {length: ending(url, length, rate) for length in lengths}
    for length, of_end in ends.items():
        figures |= {f"at_{length}_tokens_{name}": value for name, value in of_end.items()}
    usual: Figures = {}
    costs = []
    for size in sorted({min(size, workers) for size in _SIZES} | {workers}):
        with open_pool(url, size, samples, rate) as pool:
            of_size = generating(pool)
            if size == workers:
                figures |= together(pool, tokens)
        figures |= {f"of_{size}_workers_{name}": value for name, value in of_size.items()}
        costs.append(of_size["redis_cpu_ms_per_worker_second"])
        if size <= _USUAL:
            usual = of_size
    # Of the largest fleet's worker against that of the smallest: above 1 it grows faster.
    figures["times_cost_per_worker"] = costs[-1] / costs[0]
    with open_pool(url, min(_USUAL, workers), samples, rate, _RARELY) as pool:
        rarely = generating(pool)
    for length, of_end in ends.items():
        ends_ms = samples * rate / length * of_end["redis_cpu_ms_per_sample"]
        for name, of_fleet in (("", usual), (f"_checkpoint_{_RARELY}", rarely)):
            spent_ms = of_fleet["redis_cpu_ms_per_worker_second"] + ends_ms
            figures[f"workers_at_{length}_tokens{name}"] = 1000 * BUSY / spent_ms
        # On average half of a response is there.
        kilobytes = samples * of_end["kilobytes_per_sample"] / 2
        figures[f"gigabytes_per_100_workers_at_{length}_tokens"] = kilobytes / 1e4
        out = samples * rate * of_end["bytes_out_per_token"]
        figures[f"megabytes_out_per_second_per_100_workers_at_{length}_tokens"] = out / 1e4
    return figures


def generating(pool: Pool) -> Figures:
    """A fleet that makes tokens, for some seconds of its time; before that, one that idles."""
    fleet = pool.fleet
    workers, seconds = fleet.workers, 4.0 if fleet.workers <= _USUAL else 1.0

    def go(seconds: float) -> None:
        for _ in range(int(seconds * fleet.rate)):
            fleet.step()

    idle = pool.spending(lambda: go(2.0))
    fleet.claim(range(workers))
    fleet.stagger()
    go(0.5)
    spent = pool.spending(lambda: go(seconds))
    tokens = seconds * fleet.rate * fleet.samples * workers
    return {
        "redis_cpu_ms_per_idle_worker_second": 1e3 * idle.cpu_s / 2.0 / workers,
        "redis_cpu_ms_per_worker_second": 1e3 * spent.cpu_s / seconds / workers,
        "redis_cpu_us_per_1000_tokens": 1e9 * spent.cpu_s / tokens,
        "scripts_per_worker_second": spent.scripts / seconds / workers,
        "bytes_in_per_token": spent.bytes_in / tokens,
        "tokens_per_second": tokens / spent.at,
        "share_redis_busy": spent.cpu_s / spent.at,
    }


def ending(url: str, tokens: int, rate: float) -> Figures:
    """What a sample costs beside its checkpoints: from the submission to the ack."""
    workers, samples = 64, 8
    ended = workers * samples
    with open_pool(url, workers, samples, rate) as pool:
        fleet, trainer = pool.fleet, pool.trainer
        empty = pool.memory
        fleet.claim(range(workers))
        for _ in range(max(1, tokens // fleet.every - 1)):
            fleet.store(fleet.every)
        memory = pool.memory - empty
        trainer.submit(ended)

        def end() -> None:
            for slot in range(samples):
                fleet.end(slot)
            trainer.turn(ended)

        spent = pool.spending(end)
        if trainer.samples != ended:
            raise AssertionError(f"{trainer.samples} of {ended} samples came")
    return {
        "redis_cpu_ms_per_sample": 1e3 * spent.cpu_s / ended,
        "scripts_per_sample": spent.scripts / ended,
        "kilobytes_per_sample": memory / ended / 1e3,
        "bytes_out_per_token": spent.bytes_out / (ended * tokens),
    }


def together(pool: Pool, tokens: int) -> Figures:
    """What happens to all workers of a pool at once, with `tokens` more in each sample."""
    fleet, queue = pool.fleet, pool.queue
    everybody, held = range(fleet.workers), fleet.workers * fleet.samples
    for _ in range(max(1, tokens // fleet.every)):
        fleet.store(fleet.every)
    memory = pool.memory
    figures: Figures = {
        "samples_in_flight": held,
        "gigabytes_in_flight": memory / 1e9,
        "kilobytes_in_flight_per_sample": memory / held / 1e3,
    }
    exporter = Exporter(url=queue.url, queues=[queue.keys.queue])

    def come_back() -> None:
        queue.redis.hdel(queue.keys["config"], "last_reap")
        queue.call("reap", limit=256)

    happenings: dict[str, Callable[[], object]] = {
        "interrupt_release": lambda: fleet.release(everybody),
        "interrupt_claim": lambda: fleet.claim(everybody),
        "update": lambda: figures.update(update(fleet, _LOAD_SECONDS)),
        "status": lambda: read_status(queue),
        "metrics": exporter.metrics,
        "back_from_away": come_back,
    }
    for name, happen in happenings.items():
        seen = {entry["id"] for entry in queue.redis.slowlog_get(128)}
        spent = pool.spending(happen)
        figures[f"{name}_ms"] = 1e3 * spent.at
        figures[f"{name}_redis_cpu_ms"] = 1e3 * spent.cpu_s
        slow = [e["duration"] for e in queue.redis.slowlog_get(128) if e["id"] not in seen]
        # 0 where none took as long as Redis calls slow, 10 ms unless set.
        figures[f"{name}_slowest_call_ms"] = max(slow, default=0) / 1e3
    exporter.close()
    return figures


def proof(url: str) -> Figures:
    """Played workers against as many `rollq worker` processes with a simulated engine, each at
    the same work in real time: what Redis does for a token of either, as a ratio."""
    real, played = _real(url), _played(url)
    return {
        "connections_per_real_worker": real.pop("connections"),
        **{f"times_real_{name}": played[name] / real[name] for name in real},
    }


def _real(url: str) -> Figures:
    sim = (
        f"token_rate={_RATE},mean_tokens={_MEAN_TOKENS},max_num_seqs={_SAMPLES},"
        f"max_model_len={16 * _MEAN_TOKENS},kv_cache_tokens={1 << 24}"
    )
    with (
        tempfile.TemporaryDirectory() as logs,
        open_pool(url, 1, 1, _RATE, max_tokens=8 * _MEAN_TOKENS, limits={}) as pool,
        WorkerProcesses(Path(logs), nice=0) as workers,
    ):
        queue, before = pool.queue.keys.queue, _clients(pool)
        for w in range(_WORKERS):
            environment = {"ROLLQ_NAME": f"gpu{w:04}-123456-{w:04x}", "ROLLQ_REDIS_URL": url}
            workers.start(
                f"sim{w}", ["--engine", "sim", "--sim", sim, "--queue", queue], environment
            )
        pool.client.wait_for_version(0, workers=_WORKERS, timeout=60)
        pool.trainer.submit(_WORKERS * _SAMPLES)
        figures = _in_real_time(pool, lambda: None)
        return {"connections": (_clients(pool) - before) / _WORKERS, **figures}


def _clients(pool: Pool) -> int:
    return int(pool.queue.redis.info("clients")["connected_clients"])


def _played(url: str) -> Figures:
    with open_pool(url, _WORKERS, _SAMPLES, _RATE, limits={}) as pool:
        random = np.random.default_rng(3)
        pool.fleet.lengths = lambda n: np.minimum(
            random.geometric(1 / _MEAN_TOKENS, n), 8 * _MEAN_TOKENS
        )
        pool.fleet.claim(range(_WORKERS))
        return _in_real_time(pool, pool.fleet.step)


def _in_real_time(pool: Pool, step: Callable[[], object]) -> Figures:
    """Some seconds to come into its stride, then as many that count; figures are of a token."""
    redis, stats = pool.queue.redis, pool.queue.keys["stats"]
    due, step_s = time.monotonic(), 1 / pool.fleet.rate
    turn = due
    before, stored = pool.spent, 0.0
    for half in range(2):
        if half:
            before, stored = pool.spent, float(redis.hget(stats, "tokens") or 0)
        end = time.monotonic() + _PROOF_SECONDS
        while (now := time.monotonic()) < end:
            while due <= now:
                step()
                due += step_s
            if turn <= now:
                pool.trainer.turn(_WORKERS * _SAMPLES // 4)
                turn = now + _TRAINER_SECONDS
            time.sleep(max(0.0, due - time.monotonic()))
    spent = pool.spent.since(before)
    tokens = float(redis.hget(stats, "tokens") or 0) - stored
    return {
        "cpu": spent.cpu_s / tokens,
        "scripts": spent.scripts / tokens,
        "bytes_in": spent.bytes_in / tokens,
        "bytes_out": spent.bytes_out / tokens,
    }
