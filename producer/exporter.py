"""`rollq metrics`: a pool's metrics for Prometheus, read off its structures at each scrape.

Every figure is O(1) or O(workers), except those of one waiting sample, which are O(log n). It
only reads, so the Redis user `monitor` suffices, and several may run.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click
import redis

from producer.contract import metrics as names
from producer.contract.connection import DEFAULTS
from producer.contract.errors import RedisUnavailable
from producer.contract.exposition import Sample, render
from producer.contract.keys import TRAINER_GROUP, QueueKeys
from producer.contract.metrics import Metric
from producer.contract.probes import Probes
from producer.contract.states import WeightState
from producer.contract.url import connect, redact
from producer.status import Status, build_status, status_commands, texts, worker_commands

#: counters of the hash `stats` that have a metric of their own; others are `rollq_pool_events`
_COUNTERS: dict[str, tuple[Metric, tuple[str, ...]]] = {
    "samples_enqueued": (names.POOL_ENQUEUED, ()),
    "crashes": (names.POOL_CRASHES, ()),
    "tokens": (names.POOL_TOKENS, ()),
    "recomputed_tokens": (names.POOL_RECOMPUTED, ()),
    "wasted_tokens": (names.POOL_WASTED, ()),
    "groups_closed": (names.POOL_CLOSED, ()),
    "groups_acked": (names.POOL_ACKED, ()),
    "groups_graded": (names.POOL_GRADED, ()),
    "grading_failed": (names.POOL_GRADING_FAILED, ()),
    "published": (names.POOL_PUBLISHED, ()),
    **{
        state: (names.POOL_SAMPLES, (state,))
        for state in ("finished", "failed", "cancelled", "stale", "dead")
    },
    **{
        f"interrupted_{reason}": (names.POOL_INTERRUPTIONS, (reason,))
        for reason in ("update", "drain", "failure")
    },
}


class Exporter:
    """Reads queues of one Redis. A scrape takes three round trips a queue."""

    def __init__(self, url: str, queues: Sequence[str]) -> None:
        self._url = url
        self._keys = [QueueKeys(queue) for queue in queues]
        self._redis = connect(url, lambda: None)
        self._lock = threading.Lock()  # scrapes come in threads of their own

    def close(self) -> None:
        self._redis.close()

    def metrics(self) -> bytes:
        with self._lock:
            return render(s for keys in self._keys for s in self._queue(keys))

    def not_ready(self) -> str:
        try:
            with self._lock:
                self._redis.ping()
        except redis.RedisError as error:
            return f"Redis at {redact(self._url)}: {error}"
        return ""

    def _queue(self, keys: QueueKeys) -> list[Sample]:
        queue = keys.queue
        try:
            found = list(self._samples(keys))
        except redis.exceptions.NoPermissionError as error:
            raise RedisUnavailable(f"Redis at {redact(self._url)} refused: {error}") from error
        except redis.RedisError:
            return [(names.POOL_UP, (queue,), 0)]
        return [
            (metric, (queue, *labels), value)
            for metric, labels, value in [(names.POOL_UP, (), 1.0), *found]
        ]

    def _samples(self, keys: QueueKeys) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        ready = keys["ready"]
        *replies, config, groups, first, suspect, clock = self._read(
            *status_commands(keys),
            ("HGETALL", keys["config"]),
            ("XINFO GROUPS", keys["results"]),
            ("ZRANGE", ready, "0", "+inf", "BYSCORE", "LIMIT", "0", "1"),
            ("ZRANGE", ready, "-inf", "(0", "BYSCORE", "LIMIT", "0", "1"),
            ("TIME",),
        )
        workers = self._read(*worker_commands(keys, replies[-1]))
        status = build_status(replies, workers)
        waiting = [sid.decode() for found in (first, suspect) for sid in found]
        enqueued = self._read(*[("HMGET", keys.sample(sid), "enqueued_at") for sid in waiting])
        times = [int(at) / 1000 for [at] in enqueued if at]
        # The oldest suspect waits in front of the others, whatever its age.
        now = int(clock[0]) + int(clock[1]) / 1e6
        yield names.POOL_OLDEST, (), max(0.0, now - min(times)) if times else 0.0
        yield from _structures(status, _pending(groups))
        limits = texts(config)
        for limit in DEFAULTS:
            if limit in limits:
                yield names.POOL_LIMIT, (limit,), float(limits[limit])
        yield from _counters(status.stats)

    def _read(self, *commands: tuple[str, ...]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute(raise_on_error=False) if commands else []
        for reply in replies:
            # A queue that nobody has set up has no stream to tell of.
            if isinstance(reply, Exception) and "no such key" not in str(reply).lower():
                raise reply
        return replies


def _structures(status: Status, pending: int) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    yield names.POOL_WAITING, (), status.ready
    yield names.POOL_LEASED, (), status.leased
    yield names.POOL_DEAD, (), status.dead
    yield names.POOL_GRADING, (), status.grading
    # An ack deletes, so what is in the stream is unread or pending.
    yield names.POOL_UNREAD, (), max(0, status.results - pending)
    yield names.POOL_UNACKED, (), pending
    for (version, state), count in Counter((w.version, w.state) for w in status.workers).items():
        yield names.POOL_WORKERS, (str(version), state), count
    yield names.POOL_IN_FLIGHT, (), sum(w.in_flight for w in status.workers)
    yield names.POOL_TOKEN_RATE, (), sum(w.tokens_per_second for w in status.workers)
    yield names.POOL_VERSION, (), status.current
    yield names.POOL_LAST_GOOD, (), status.last_good
    states = [v for name, v in status.weights.items() if name.endswith(":state")]
    yield names.POOL_BAD, (), states.count(WeightState.BAD)


def _counters(stats: dict[str, int]) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    # Those that can be are there from the start, so that a rate sees the first one.
    for name, (metric, labels) in _COUNTERS.items():
        yield metric, labels, stats.get(name, 0)
    for name, value in stats.items():
        if name not in _COUNTERS:
            yield names.POOL_EVENTS, (name,), value


def _pending(groups: Any) -> int:
    if isinstance(groups, Exception):
        return 0
    return sum(int(g["pending"]) for g in groups if g["name"] == TRAINER_GROUP.encode())


@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "ROLLQ"})
@click.option("--redis", "url", default="redis://localhost:6379", envvar="ROLLQ_REDIS_URL")
@click.option(
    "--queue",
    "queues",
    default=("default",),
    envvar="ROLLQ_QUEUE",
    multiple=True,
    help="Give it again for more; in ROLLQ_QUEUE they are separated by spaces.",
)
@click.option("--port", default=9465, envvar="ROLLQ_METRICS_PORT", help="0: any free one.")
@click.option("--host", default="127.0.0.1", envvar="ROLLQ_METRICS_HOST", help="0.0.0.0 for all.")
@click.option(
    "--list", "listing", is_flag=True, help="Show every metric, of workers, too, and end."
)
def metrics(url: str, queues: tuple[str, ...], port: int, host: str, listing: bool) -> None:
    """Serve the metrics of a pool for Prometheus.

    \b
    rollq metrics --redis redis://host:6379 --queue grpo --port 9465
    curl localhost:9465/metrics

    /livez says whether this process answers, /readyz whether it reaches Redis. Ends on SIGTERM.
    """
    if listing:
        for metric in (*names.WORKER, *names.POOL):
            labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
            click.echo(f"{metric.name}{labels}  {metric.type}\n    {metric.help}")
        return
    exporter = Exporter(url, queues)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    probes = Probes(host, port, metrics=exporter.metrics, live=lambda: "", ready=exporter.not_ready)
    probes.start()
    click.echo(f"serving http://{host}:{probes.port}/metrics")
    stop.wait()
    probes.stop()
    exporter.close()
