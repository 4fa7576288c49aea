"""`rollq bench queue`: the way of a sample without an engine.

A trainer in this process keeps groups of 8 on the queue and acks what comes back; a worker in
another runs the product's own code with an engine that answers at once. In turn with it, on the
same server and with the same bytes: a plain pipelined queue (the floor), RQ, and the other task
queues that `rollq bench peers` finds.

The pool's three processes need two idle cores and more to be busy at once, the floor's two take
turns on one. So where the machine has other work, the processor time of a sample says more than
the time that passes: it is given for each process, and for the floor's two together.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from producer.bench.machine import redis_cpu_seconds
from producer.bench.peer_environments import compare
from producer.bench.peers import floor, rq_simple_worker
from producer.client import RolloutClient
from producer.contract.keys import QueueKeys
from producer.contract.sampling import SamplingParams
from producer.processes import WorkerProcesses

_GROUP = 8
#: groups on the queue at once, and taken at once
_OUTSTANDING, _TAKEN = 256, 64
_SERVE_SECONDS = 60.0
_SENT = ("evalsha", "hgetall", "lrange", "xreadgroup", "xpending")


def measure(
    url: str, samples: int, tokens: int, rounds: int, peers: bool = False
) -> dict[str, float]:
    """Medians over `rounds`, of the floor the best; rates in samples a second. `peers` leave keys
    behind."""
    queue = f"bench-{secrets.token_hex(3)}"
    ours, floors, costs, floor_costs = [], [], [], []
    with (
        tempfile.TemporaryDirectory() as logs,
        RolloutClient(url, queue) as client,
        redis.Redis.from_url(url) as server,
        WorkerProcesses(Path(logs), nice=0) as workers,
    ):
        environment = {"ROLLQ_NAME": "null", "ROLLQ_REDIS_URL": url}  # it may hold a password
        workers.start("null", ["--engine", "null", "--queue", queue], environment)
        client.wait_for_version(0, timeout=_SERVE_SECONDS)
        worker = int(server.hget(QueueKeys(queue).worker("null"), "pid") or 0)
        _pass_through(client, 512, tokens)  # what is loaded once is loaded now

        def through() -> float:
            return _rate(samples, lambda: _pass_through(client, samples, tokens))

        for _ in range(rounds):
            before = _used(server, worker)
            ours.append(through())
            between = _used(server, worker)
            floors.append(_rate(samples, lambda: floor(server, queue, samples, tokens)))
            after = _used(server, worker)
            costs.append({name: (between[name] - before[name]) / samples for name in before})
            floor_costs.append((after["cpu"] - between["cpu"]) / samples)
        few = min(256, samples)
        rq = _rate(few, lambda: rq_simple_worker(server, few, tokens))
        others = compare(url, samples, 8 * tokens, through) if peers else {}
    cost = {name: statistics.median(c[name] for c in costs) for name in costs[0]}
    # A limit is the fastest that was seen: whether malloc gives the floor's large blocks back to
    # the kernel each time, which halves it, is chance.
    rate, limit = statistics.median(ours), max(floors)
    return {
        "samples_per_second": rate,
        "floor_samples_per_second": limit,
        "rq_samples_per_second": rq,
        "share_of_floor": rate / limit,
        "times_rq": rate / rq,
        "trainer_cpu_us_per_sample": cost["trainer_cpu"] * 1e6,
        "worker_cpu_us_per_sample": cost["worker_cpu"] * 1e6,
        "redis_cpu_us_per_sample": cost["redis_cpu"] * 1e6,
        "cpu_us_per_sample": cost["cpu"] * 1e6,
        "floor_cpu_us_per_sample": min(floor_costs) * 1e6,
        "commands_per_sample": cost["commands"],
        "bytes_per_token": cost["bytes"] / tokens,
        "slow_commands": cost["slow"] * samples,
        **others,
    }


def _pass_through(client: RolloutClient, samples: int, tokens: int) -> None:
    params = SamplingParams(n=_GROUP, max_tokens=tokens)
    groups = samples // _GROUP
    submitted = taken = 0
    while taken < groups:
        more = min(_OUTSTANDING - (submitted - taken), groups - submitted)
        if more:
            client.submit([[1, 2, 3]] * more, params)
            submitted += more
        batch = client.batch(min(_TAKEN, groups - taken), timeout=60)
        for group in batch:
            if any(len(r.response_ids) != tokens for r in group.rollouts):
                raise AssertionError(f"{group.id} is not what was asked for: {group.rollouts[0]}")
        taken += len(batch)
        batch.ack()


def _rate(samples: int, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return samples / (time.perf_counter() - started)


def _used(server: redis.Redis, worker: int) -> dict[str, float]:
    """What the processes have used so far, CPU in seconds; and what the server has done."""
    stats = server.info("stats")
    commands = server.info("commandstats")
    # Of those that no script calls, so each was sent by a client.
    sent = sum(int(commands.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in _SENT)
    own = os.times()
    used = {
        "trainer_cpu": own.user + own.system,
        "worker_cpu": _cpu_seconds(worker),
        "redis_cpu": redis_cpu_seconds(server),
    }
    return {
        **used,
        "cpu": sum(used.values()),
        "commands": float(sent),
        "bytes": float(stats["total_net_input_bytes"]),
        "slow": float(sum(1 for e in server.slowlog_get(128) if e["duration"] >= 10_000)),
    }


def _cpu_seconds(pid: int) -> float:
    """Of a process of this machine; 0 where the kernel has no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    _, _, fields = stat.read_text().rpartition(") ")
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
