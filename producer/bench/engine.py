"""`rollq bench engine`: what the pool takes from a real vLLM.

The same prompts, of mixed lengths, in turn: through the pool (this process is the trainer, Redis
is between, and a worker with vLLM) and through the worker's own `AsyncLLM` past the pool, with
the same parameters (`workers/bench/engine.py`, a process that this one starts). Between the two
ways nothing differs but the pool. Which goes first alternates.

A way's time is from the first submit to the last ack, or from the first request to the last
output: what the pool takes to begin (`pool_start_ms`) and to end is in it. While it is the
other's turn the worker looks for samples and beats its heart, some milliseconds a second.

On a GPU's host there are cores that the model does not need. Here model, worker, trainer and
Redis share them, and what any of them takes is taken from the model. So there is also the CPU
time a token of each process: `host` is the worker's Python with vLLM's front end, `loop` the
part of it in the event loop's thread, `core` vLLM's own processes, which compute.
`share_of_bare_steps` is below 1 where the pool's batches are less full: it gives the engine
a new sample only after an old one has ended.
"""

from __future__ import annotations

import json
import random
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import redis

from producer.bench.llama import SHAPES, make_llama
from producer.bench.machine import redis_cpu_seconds
from producer.client import RolloutClient
from producer.contract.errors import EngineError
from producer.contract.sampling import SamplingParams
from producer.processes import log_tail, start_module

_PATIENCE = 120.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_PROMPT_TOKENS = 32
#: samples of one prompt, all of one length
_GROUP = 8
#: groups, and tokens of each sample, that each way begins with, for what happens only once
_WARM_UP = (2, 16)


@dataclass(frozen=True, slots=True)
class Load:
    """Groups of 8 samples a round, tokens of a sample on average, samples at once."""

    groups: int
    tokens: int
    concurrency: int


#: two waves of samples: rounds of 10 and 25 seconds on two cores
LOADS = {"tiny": Load(16, 512, 64), "135m": Load(4, 128, 16)}


@dataclass(frozen=True, slots=True)
class Round:
    """What one way took once; `cpu` in seconds by process."""

    seconds: float
    steps: int
    cpu: Mapping[str, float]
    start_ms: float = 0.0

    @property
    def total_cpu(self) -> float:
        return sum(self.cpu[name] for name in ("host", "core", "trainer", "redis"))


def measure(url: str, size: str, load: Load, rounds: int, threads: int = 0) -> dict[str, float]:
    """Medians over `rounds`; times of CPUs in microseconds a token.

    `threads` are those that the model computes with; 0: as vLLM chooses.

    Raises:
        EngineError: the worker did not start, or ended.
    """
    queue = f"bench-{secrets.token_hex(3)}"
    prompts, lengths = prompts_for(size, load)
    pool, bare = [], []
    with (
        tempfile.TemporaryDirectory() as place,
        redis.Redis.from_url(url) as server,
        RolloutClient(url, queue) as client,
        _worker(Path(place), url, queue, size, load, threads) as worker,
    ):
        worker.await_serving(client)
        ways: list[Callable[[], Round]] = [
            lambda: _round(worker, server, lambda: _through_pool(client, prompts, lengths)),
            lambda: _round(worker, server, lambda: worker.past_pool(prompts, lengths)),
        ]
        few, short = _WARM_UP
        warm = prompts[:few], [short] * len(prompts[:few])
        _through_pool(client, *warm)
        worker.past_pool(*warm)
        for turn in range(rounds):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            taken = {way: ways[way]() for way in order}
            pool.append(taken[0])
            bare.append(taken[1])
    return figures(_GROUP * sum(lengths), pool, bare)


def figures(tokens: int, pool: Sequence[Round], bare: Sequence[Round]) -> dict[str, float]:
    """Of rounds in pairs, each of so many tokens."""
    pairs = list(zip(pool, bare, strict=True))
    shares = [b.seconds / p.seconds for p, b in pairs]
    figures = {
        "pool_tokens_per_second": statistics.median(tokens / r.seconds for r in pool),
        "bare_tokens_per_second": statistics.median(tokens / r.seconds for r in bare),
        "share_of_bare": statistics.median(shares),
        "share_of_bare_least": min(shares),
        "share_of_bare_most": max(shares),
        "share_of_bare_cpu": statistics.median(b.total_cpu / p.total_cpu for p, b in pairs),
        "share_of_bare_steps": statistics.median(b.steps / p.steps for p, b in pairs),
        "share_loop_busy": statistics.median(r.cpu["loop"] / r.seconds for r in pool),
        "pool_start_ms": statistics.median(r.start_ms for r in pool),
    }
    for way, taken, names in (
        ("pool", pool, ("host", "loop", "core", "trainer", "redis")),
        ("bare", bare, ("host", "loop", "core")),
    ):
        for name in names:
            cost = statistics.median(r.cpu[name] for r in taken)
            figures[f"{way}_{name}_cpu_us_per_token"] = 1e6 * cost / tokens
    return figures


def _round(worker: _Worker, server: redis.Redis, way: Callable[[], float]) -> Round:
    steps, before, started = worker.steps(), _cpu(worker.pid, server), time.perf_counter()
    start_ms = way()
    seconds, after = time.perf_counter() - started, _cpu(worker.pid, server)
    cpu = {name: after[name] - before[name] for name in after}
    return Round(seconds, worker.steps() - steps, cpu, start_ms)


def prompts_for(size: str, load: Load) -> tuple[list[list[int]], list[int]]:
    """A prompt for each group, and how many tokens to make of each: 0.5 to 1.5 of the average."""
    chance = random.Random(0)
    vocabulary = SHAPES[size]["vocab_size"]
    groups = range(load.groups)
    prompts = [[chance.randrange(3, vocabulary) for _ in range(_PROMPT_TOKENS)] for _ in groups]
    return prompts, [max(1, round(load.tokens * chance.uniform(0.5, 1.5))) for _ in groups]


def _through_pool(
    client: RolloutClient, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> float:
    """Milliseconds from the first submit to the first claim, by Redis's clock."""
    for prompt, length in zip(prompts, lengths, strict=True):
        client.submit([prompt], SamplingParams(n=_GROUP, max_tokens=length, ignore_eos=True))
    made, groups = 0, 0
    submitted, claimed = [], []
    while groups < len(prompts):
        batch = client.batch(1, timeout=_PATIENCE)
        for rollout in (r for group in batch for r in group.rollouts):
            made += len(rollout.response_ids)
            submitted.append(rollout.enqueued_at)
            claimed.append(rollout.started_at)
        groups += len(batch)
        batch.ack()
    if made != _GROUP * sum(lengths):
        raise EngineError(f"{made} tokens of {_GROUP * sum(lengths)} came through the pool")
    return 1000 * (min(claimed) - min(submitted))


def _cpu(pid: int, server: redis.Redis) -> dict[str, float]:
    """CPU seconds so far."""
    import psutil

    worker = psutil.Process(pid)
    [loop] = [t for t in worker.threads() if t.id == pid]
    return {
        "host": _seconds(worker.cpu_times()),
        "loop": loop.user_time + loop.system_time,
        "core": sum(_seconds(child.cpu_times()) for child in worker.children(recursive=True)),
        "trainer": time.process_time(),
        "redis": redis_cpu_seconds(server),
    }


def _seconds(times: Any) -> float:
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class _Worker:
    """The process of `workers/bench/engine.py`."""

    process: subprocess.Popen[bytes]
    orders: IO[bytes]
    answers: IO[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def await_serving(self, client: RolloutClient) -> None:
        while not any(w.state == "serving" for w in client.status().workers):
            if self.process.poll() is not None:
                self._raise_ended()
            time.sleep(_LOOK_SECONDS)

    def past_pool(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> float:
        """Have groups completed; nothing is waited for before it begins."""
        self._ask(
            [p for p in prompts for _ in range(_GROUP)], [n for n in lengths for _ in range(_GROUP)]
        )
        return 0.0

    def steps(self) -> int:
        """That vLLM has made so far."""
        return self._ask([], [])

    def _ask(self, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> int:
        order = {"prompts": prompts, "max_tokens": max_tokens}
        self.orders.write(json.dumps(order).encode() + b"\n")
        self.orders.flush()
        answer = self.answers.readline()
        if not answer:
            self._raise_ended()
        return int(json.loads(answer)["steps"])

    def _raise_ended(self) -> NoReturn:
        self.process.wait(_END_SECONDS)
        raise EngineError(f"the worker ended; its log ends:\n{log_tail(self.log)}")


@contextmanager
def _worker(
    place: Path, url: str, queue: str, size: str, load: Load, threads: int
) -> Iterator[_Worker]:
    longest = _PROMPT_TOKENS + 2 * load.tokens
    make_llama(place, size, longest)
    log = place / "worker.log"
    environment = {"ROLLQ_REDIS_URL": url}  # not an argument: it may hold a password
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    flags = ["--load-format", "dummy", "--max-num-seqs", str(load.concurrency)]
    process = start_module("workers.bench.engine", [queue, str(place), *flags], environment, log)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _Worker(process, process.stdin, process.stdout, log)
    finally:
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
