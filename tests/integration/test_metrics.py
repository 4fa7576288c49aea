"""Metrics and health: what is served equals what happened and what the structures hold, and is
served also while the event loop stands still."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from producer import SamplingParams
from producer.contract import metrics as names
from producer.contract.errors import InvalidSample
from producer.contract.metrics import POOL, WORKER, Metric
from producer.contract.probes import Probes
from producer.exporter import Exporter
from producer.server import EmbeddedServer
from tests.integration import contract
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver, job
from tests.integration.pool import QUEUE, ROOT, Pool, Process, Processes
from tests.integration.stepper import StepEngine, attempts
from tests.servers import free_port
from tests.waiting import DEADLINE_S, async_wait_until, wait_until
from workers.health import Health
from workers.leases import LeaseThread

Scrape = dict[tuple[str, ...], float]


def get(port: int, path: str) -> tuple[int, str]:
    """Blocks whoever calls it, an event loop too. Status 0: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def parsed(text: str) -> Scrape:
    """(name, label values in the order of the module, and the bucket) -> value"""
    labels = {name: metric.labels for metric in (*WORKER, *POOL) for name in served_as(metric)}
    return {
        (s.name, *(s.labels[label] for label in (*labels[s.name], "le") if label in s.labels)): (
            s.value
        )
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def served_as(metric: Metric) -> list[str]:
    ends = ("_bucket", "_sum", "_count") if metric.buckets else ("",)
    return [f"{metric.name}{end}" for end in ends]


def families(text: str) -> dict[str, tuple[str, str]]:
    return {f.name: (f.type, f.documentation) for f in text_string_to_metric_families(text)}


def described(metrics: tuple[Metric, ...]) -> dict[str, tuple[str, str]]:
    return {m.name.removesuffix("_total"): (m.type, m.help) for m in metrics}


# a worker


async def test_a_worker_shows_what_it_did(pool: Pool, driver: Driver) -> None:
    port = free_port()
    engine = StepEngine(attempts(3))
    engine.refuse["g1/0"] = "too long"
    worker = await pool.start(engine, name="a", metrics_port=port)
    pool.submit(2)
    await pool.made(3, "g0/0")
    await async_wait_until(lambda: driver.stats().get("failed"), "g1 failed")
    version = await pool.update(worker)
    await pool.groups(2)
    await async_wait_until(lambda: not worker.state.held, "both are reported")

    status, text = get(port, "/metrics")
    shown = parsed(text)
    stats = driver.stats()

    assert status == 200
    assert families(text) == described(WORKER)
    assert shown["rollq_worker_info", "q", "a", "step", "0.1.0"] == 1
    assert shown["rollq_worker_samples_total", "length"] == stats["finished"] == 1
    assert shown["rollq_worker_samples_total", "error"] == stats["failed"] == 1
    assert shown["rollq_worker_samples_total", "stop"] == 0
    assert shown["rollq_worker_interruptions_total", "update"] == stats["interrupted_update"] == 1
    assert shown["rollq_worker_interruptions_total", "drain"] == 0
    assert shown[("rollq_worker_tokens_total",)] == stats["tokens"] == 8
    assert shown[("rollq_worker_recomputed_tokens_total",)] == stats["recomputed_tokens"] == 6
    assert shown[("rollq_worker_wasted_tokens_total",)] == 0
    assert shown[("rollq_worker_leases_lost_total",)] == 0
    assert shown["rollq_worker_staleness_versions_bucket", "0.0"] == 0
    assert shown["rollq_worker_staleness_versions_bucket", "1.0"] == 1
    assert shown["rollq_worker_staleness_versions_bucket", "+Inf"] == 1
    assert shown[("rollq_worker_staleness_versions_sum",)] == 1
    assert shown[("rollq_worker_update_idle_seconds_count",)] == 1
    assert 0 < shown[("rollq_worker_update_idle_seconds_sum",)] < 60
    assert shown[("rollq_worker_weight_version",)] == version == 1
    assert shown[("rollq_worker_loading_version",)] == -1
    assert shown[("rollq_worker_in_flight",)] == 0
    assert shown[("rollq_worker_serving",)] == 1
    assert shown[("rollq_worker_kv_cache_tokens",)] == engine.kv_cache_tokens
    assert shown[("rollq_worker_kv_room_tokens",)] == int(0.9 * engine.kv_cache_tokens)
    assert 0 <= shown[("rollq_worker_lease_age_seconds",)] < 30
    assert shown[("rollq_worker_redis_errors_total",)] == 0


async def test_tokens_that_no_rollout_has_are_wasted(open_pool: OpenPool) -> None:
    pool = open_pool(lease_ms=4000)
    port = free_port()
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(
        engine, metrics_port=port, checkpoint_tokens=100, checkpoint_seconds=1000.0
    )
    pool.submit(1)
    await pool.in_engine(engine, 1)
    await async_wait_until(lambda: worker.state.tokens == 3, "three are made")
    shown = parsed(get(port, "/metrics")[1])
    assert shown[("rollq_worker_in_flight",)] == 1
    # the prompt, what was made, and what is expected still
    used = int(0.9 * engine.kv_cache_tokens) - shown[("rollq_worker_kv_room_tokens",)]
    assert used == 3 + 3 + 5
    pool.client.cancel(["g0"])
    await async_wait_until(lambda: not worker.state.held, "the worker heard of it")

    shown = parsed(get(port, "/metrics")[1])
    assert shown[("rollq_worker_leases_lost_total",)] == 1
    assert shown[("rollq_worker_wasted_tokens_total",)] == 3
    await pool.groups(1)


class SlowStart(StepEngine):
    def __init__(self) -> None:
        super().__init__()
        self.loaded = asyncio.Event()

    async def start(self) -> None:
        await self.loaded.wait()


async def test_a_worker_is_ready_while_it_serves(pool: Pool) -> None:
    port = free_port()
    engine = SlowStart()
    starting = asyncio.create_task(pool.start(engine, metrics_port=port))
    await async_wait_until(lambda: get(port, "/readyz")[0], "somebody listens")

    assert get(port, "/readyz") == (503, "starting\n")
    assert get(port, "/livez") == (200, "ok\n")
    assert "rollq_worker_serving 0.0" in get(port, "/metrics")[1]
    engine.loaded.set()
    worker = await starting
    assert get(port, "/readyz") == (200, "ok\n")
    worker.state.stop.set()
    assert get(port, "/readyz") == (503, "draining\n")
    worker.state.free.set()
    await worker.ended()
    assert get(port, "/readyz") == (0, "")


async def test_a_loop_that_stands_still_is_not_live(open_pool: OpenPool) -> None:
    """`get` and `wait_until` block the worker's own loop here."""
    pool = open_pool(lease_ms=1000)
    port = free_port()
    worker = await pool.start(StepEngine(), metrics_port=port, stall_seconds=3.0)
    assert get(port, "/livez") == (200, "ok\n")

    status, words = wait_until(
        lambda: (found := get(port, "/livez"))[0] == 503 and found, "it is not live"
    )

    assert (status, words[:27]) == (503, "the event loop stood still ")
    wait_until(lambda: worker.state.failure, "the lease thread says so, too")
    assert await worker.ended() == 1


async def test_an_engine_that_stands_still_or_is_dead_is_not_live(pool: Pool) -> None:
    engine = StepEngine(lambda r: 1)
    worker = await pool.start(engine)
    pool.submit(1)
    await pool.in_engine(engine, 1)
    leases = LeaseThread(worker.state, lambda reason: None)  # not started: nobody else judges
    health = Health(worker.state, leases, lambda: 0)
    assert health.not_live() == ""

    leases._progressed -= worker.state.settings.stall_seconds + 1
    assert health.not_live().startswith("the engine made no step for ")
    engine.allow(1)
    assert health.not_live() == ""
    engine.dead = "its core is gone"
    assert health.not_live() == "its core is gone"
    engine.dead = None
    leases._queue.close()
    engine.allow(6)
    await pool.groups(1)


async def test_errors_of_redis_are_counted(own_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    pool = Pool(own_server.url, tmp_path / "pool", {})
    port = free_port()
    await pool.start(StepEngine(), metrics_port=port)
    own_server.kill()
    await async_wait_until(
        lambda: parsed(get(port, "/metrics")[1])[("rollq_worker_redis_errors_total",)] > 1,
        "calls fail",
    )
    assert get(port, "/livez") == (200, "ok\n"), "a Redis that is away is no fault of the worker"
    own_server.start()
    await pool.close()


def test_a_port_that_is_taken_is_said(redis_url: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(InvalidSample, match=r"metrics cannot be served on 127\.0\.0\.1"):
            Probes(
                "127.0.0.1", s.getsockname()[1], metrics=bytes, live=lambda: "", ready=lambda: ""
            )


# the pool


@pytest.fixture
def exporter(driver: Driver, redis_url: str) -> Iterator[Exporter]:
    exporter = Exporter(redis_url, [QUEUE])
    yield exporter
    exporter.close()


def busy(driver: Driver) -> None:
    """Three workers; samples waiting, held, dead and of every end; results read and not read."""
    driver.enqueue(job("dead"))
    for _ in range(3):
        driver.crash(driver.claim_one())
    driver.enqueue(*(job(f"g{i}") for i in range(6)), job("graded", reward="m:f"))
    held = driver.claim()
    for c in held[:2]:
        driver.complete(c)
    driver.send(contract.fail(held[2]))
    driver.send(contract.cancel("g3"))
    driver.send(contract.release(driver.generate(held[4], 3), 3))
    driver.complete(held[6])
    driver.claim_one()
    driver.enqueue(*(job(f"waits{i}", 2) for i in range(2)))
    driver.send(contract.publish("p1"))
    driver.send(contract.confirm(1, "a"))
    driver.send(contract.publish("p2"))
    driver.send(contract.confirm(2, "a", "no such file"))
    for worker, version in (("a", 1), ("b", 1), ("c", 0)):
        fields = [("version", version), ("state", "serving"), ("in_flight", 2)]
        fields.append(("tokens_per_second", "10.5"))
        driver.send(("heartbeat", {"worker": worker}, fields))
    driver.redis.xreadgroup("trainer", "0", {driver.keys["results"]: ">"}, count=2)


def test_the_exporter_shows_what_the_structures_hold(driver: Driver, exporter: Exporter) -> None:
    busy(driver)
    driver.redis.hset(driver.keys.sample("waits0/0"), "enqueued_at", driver.now() - 90_000)
    text = exporter.metrics().decode()
    shown = {key: value for key, value in parsed(text).items() if key[1] == QUEUE}
    stats = driver.stats()

    assert families(text) == described(POOL)

    def pool(name: str, *labels: str) -> float:
        return shown[f"rollq_pool_{name}", QUEUE, *labels]

    assert pool("up") == 1
    assert pool("samples_waiting") == len(driver.ready()) == 4
    assert pool("samples_leased") == len(driver.leases()) == 2
    assert pool("samples_dead") == len(driver.dead()) == 1
    assert pool("groups_grading") == 1
    assert pool("results_unacked") == 2
    assert pool("results_unread") == len(driver.results()) - 2 == 3
    assert 90 <= pool("oldest_waiting_seconds") < 120
    assert pool("workers", "1", "serving") == 2
    assert pool("workers", "0", "serving") == 1
    assert pool("in_flight") == 6
    assert pool("tokens_per_second") == 31.5
    assert (pool("weight_version"), pool("last_good_version"), pool("bad_versions")) == (1, 1, 1)
    assert pool("limit", "max_crashes") == 3
    for state in ("finished", "failed", "cancelled", "dead"):
        assert pool("samples_total", state) == stats[state] > 0
    assert pool("samples_total", "stale") == 0
    assert pool("interruptions_total", "update") == stats["interrupted_update"] == 1
    for name in ("samples_enqueued", "crashes", "tokens", "recomputed_tokens", "groups_closed"):
        assert pool(f"{name}_total") == stats[name] > 0
    assert pool("published_total") == stats["published"] == 2
    events = {k[2]: v for k, v in shown.items() if k[0] == "rollq_pool_events_total"}
    assert events["claimed"] == stats["claimed"]
    assert events.keys().isdisjoint({"tokens", "finished", "interrupted_update"})
    told = {key[0] for key in shown if key[0].endswith("_total")}
    assert len(told) == sum(m.type == "counter" for m in POOL)


def test_the_oldest_that_waits_may_be_a_suspect(driver: Driver, exporter: Exporter) -> None:
    driver.enqueue(job("g0"))
    driver.crash(driver.claim_one())
    driver.enqueue(job("g1"))
    for group, seconds in (("g0", 300), ("g1", 5)):
        at = driver.now() - 1000 * seconds
        driver.redis.hset(driver.keys.sample(f"{group}/0"), "enqueued_at", at)
    assert parsed(exporter.metrics().decode())["rollq_pool_oldest_waiting_seconds", QUEUE] >= 300
    assert driver.claim_one().id == "g0/0"
    assert parsed(exporter.metrics().decode())["rollq_pool_oldest_waiting_seconds", QUEUE] < 300


def test_a_queue_that_nobody_has_set_up_is_empty(redis_url: str, driver: Driver) -> None:
    exporter = Exporter(redis_url, ["nowhere", QUEUE])
    shown = parsed(exporter.metrics().decode())
    exporter.close()

    assert shown["rollq_pool_up", "nowhere"] == shown["rollq_pool_up", QUEUE] == 1
    assert shown["rollq_pool_results_unread", "nowhere"] == 0
    assert not driver.redis.exists("rollq:{nowhere}:results")


def test_looking_changes_nothing(driver: Driver, exporter: Exporter) -> None:
    busy(driver)
    before = driver.dump()
    exporter.metrics()
    exporter.not_ready()

    assert driver.dump() == before


def test_the_exporter_outlives_its_redis(own_server: EmbeddedServer) -> None:
    exporter = Exporter(own_server.url, [QUEUE])
    assert exporter.not_ready() == ""
    own_server.kill()

    assert parsed(exporter.metrics().decode()) == {("rollq_pool_up", QUEUE): 0.0}
    assert exporter.not_ready().startswith("Redis at unix://")
    own_server.start()
    assert parsed(exporter.metrics().decode())["rollq_pool_up", QUEUE] == 1
    exporter.close()


# processes


async def test_the_commands_serve_them(pool: Pool, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    start = Processes(pool)
    start("a", metrics_port=ports[0], sim="token_rate=1000")
    options = ("--redis", pool.url, "--queue", QUEUE, "--port", str(ports[1]))
    command = [sys.executable, "-m", "producer.cli", "metrics", *options]
    exporter = Process(command, tmp_path / "exporter.log")
    try:
        await async_wait_until(lambda: get(ports[0], "/readyz")[0] == 200, "worker is ready")
        await async_wait_until(lambda: get(ports[1], "/readyz")[0] == 200, "exporter is ready")
        pool.client.submit([[1, 2, 3]], SamplingParams(n=4, max_tokens=16))
        await pool.batch(1)

        shown = parsed(get(ports[0], "/metrics")[1])
        ends = [shown["rollq_worker_samples_total", reason] for reason in ("stop", "length")]
        assert sum(ends) == 4
        shown = parsed(get(ports[1], "/metrics")[1])
        assert shown["rollq_pool_samples_total", QUEUE, "finished"] == 4
        assert shown["rollq_pool_results_unacked", QUEUE] == 1
        assert get(ports[1], "/livez") == (200, "ok\n")
        assert get(ports[1], "/metric")[0] == 404
        exporter.send(signal.SIGTERM)
        assert exporter.ended() == 0
    finally:
        exporter.close()
        start.close()


def test_every_metric_can_be_listed() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "producer.cli", "metrics", "--list"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for metric in (*WORKER, *POOL):
        assert re.search(rf"^{metric.name}({{.*}})?  {metric.type}\n    ", listed, re.MULTILINE)
        assert metric.help in listed


def test_every_name_is_of_one_metric_and_well_formed() -> None:
    listed = [*WORKER, *POOL]
    data = {v.name for v in vars(names).values() if isinstance(v, Metric)}

    assert data == {m.name for m in listed}
    assert len(listed) == len(data)
    for metric in listed:
        assert re.fullmatch(r"rollq_(worker|pool)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert bool(metric.buckets) == (metric.type == "histogram")
        assert metric.help.endswith(".")


def mentioned() -> dict[str, Any]:
    """Metric names in documents and manifests -> where."""
    files = [ROOT / "README.md", *(ROOT / "deploy").rglob("*.*")]
    return {
        name: path
        for path in files
        if path.is_file() and path.suffix in (".md", ".yml", ".yaml", ".json")
        for name in re.findall(r"\brollq_(?:worker|pool)_\w+", path.read_text())
    }


def test_documents_mention_no_other_metric() -> None:
    shown = {name for m in (*WORKER, *POOL) for name in (m.name, *served_as(m))}

    assert {n: str(p) for n, p in mentioned().items() if n not in shown} == {}
    assert mentioned(), "the walk finds some"
