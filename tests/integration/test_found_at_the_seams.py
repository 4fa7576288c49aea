"""What was found where parts meet that were made apart, each as a short run of its own."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from producer.contract.keys import QueueKeys
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver
from tests.integration.pool import Pool, Processes
from tests.integration.stepper import StepEngine
from tests.waiting import DEADLINE_S, async_wait_until
from workers.worker import EXIT_FAILED, EXIT_OK


@pytest.fixture
def server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One that forgets nothing but what a test takes away."""
    with start_embedded(tmp_path / "redis", prefer=server_kind, appendfsync="always") as server:
        yield server


@pytest.fixture
async def own_pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {"lease_ms": 10_000})
    yield pool
    await pool.close()


@pytest.fixture
def start(own_pool: Pool) -> Iterator[Processes]:
    start = Processes(own_pool)
    yield start
    start.close()


# told to stop before it serves


async def test_one_whose_engine_starts_ends_when_told(own_pool: Pool, start: Processes) -> None:
    worker = start("a", sim="start_seconds=600")
    await async_wait_until(lambda: own_pool.client.status().workers, "it is on the list")

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    assert own_pool.client.status().workers == ()
    assert "Traceback" not in worker.log()


async def test_one_that_waits_for_redis_ends_when_told(
    server: EmbeddedServer, start: Processes
) -> None:
    server.kill()
    worker = start("a")
    await async_wait_until(lambda: "is away since" in worker.log(), "it misses Redis")

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    server.start()


async def test_one_whose_redis_goes_away_while_its_engine_starts_ends_when_told(
    own_pool: Pool, server: EmbeddedServer, start: Processes
) -> None:
    worker = start("a", sim="start_seconds=1")
    await async_wait_until(lambda: own_pool.client.status().workers, "it is on the list")
    server.kill()
    await async_wait_until(lambda: "is away since" in worker.log(), "it misses Redis")

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    server.start()


async def test_signals_that_come_at_once_are_one(own_pool: Pool, start: Processes) -> None:
    """A scheduler may tell the process and its group."""
    worker = start("a", sim="token_rate=50,late_seconds=0.5")
    own_pool.submit(max_tokens=4000)  # more than it makes in a minute
    await async_wait_until(lambda: own_pool.client.status().leased == 1, "it holds one")

    worker.send(signal.SIGTERM)
    worker.send(signal.SIGINT)

    assert worker.ended() == EXIT_OK
    assert own_pool.client.status().ready == 1


async def test_a_drain_waits_for_what_is_on_its_way_into_the_engine(own_pool: Pool) -> None:
    """vLLM would not take it any more once it stands still, and never end it."""
    engine = StepEngine(lambda r: 3)
    worker = await own_pool.start(engine, name="a")
    engine.add_gate.clear()
    own_pool.submit()
    await async_wait_until(lambda: engine.requests, "it is on its way")
    worker.worker.stop()
    await async_wait_until(lambda: worker.state.phase == "draining", "it drains")
    assert engine.paused == []

    engine.add_gate.set()

    assert await worker.ended() == EXIT_OK
    assert own_pool.client.status().ready == 1


async def test_an_engine_that_fails_at_the_end_and_no_redis_are_waited_for_once(
    own_pool: Pool, server: EmbeddedServer
) -> None:
    """The grace time is for both."""
    engine = StepEngine(lambda r: 3)
    worker = await own_pool.start(engine, name="a", grace_seconds=0.5)
    own_pool.submit()
    await own_pool.made(3)
    server.kill()
    engine.allow(1)
    engine.at_pause = lambda: engine.crash("no pause")

    assert await worker.drain() == EXIT_FAILED
    server.start()


# what trainers read


async def test_a_thousand_entries_of_groups_that_are_gone_are_passed_one_by_one(
    pool: Pool, driver: Driver
) -> None:
    """A Redis that came back with them unread, after their acks were said again."""
    with driver.redis.pipeline(transaction=False) as pipe:
        for i in range(1200):
            fields = {"group": f"gone{i}", "size": 1, "states": "finished"}
            pipe.xadd(driver.keys["results"], fields)
        pipe.execute()
    await pool.start(StepEngine())
    pool.submit()

    assert [g.id for g in await pool.groups(1)] == ["g0"]


async def test_rollouts_need_no_more_room_than_one_group(open_pool: OpenPool) -> None:
    pool = open_pool(max_results=2)
    await pool.start(StepEngine())
    pool.submit(3)

    rollouts = await asyncio.to_thread(lambda: list(pool.client.rollouts(timeout=DEADLINE_S)))

    assert len(rollouts) == 3


async def test_an_id_may_be_used_again_when_its_tombstone_is_gone(
    open_pool: OpenPool, driver: Driver
) -> None:
    """The rows of a data set, in the next epoch."""
    pool = open_pool(tombstone_ms=200)
    await pool.start(StepEngine())
    pool.submit()
    await pool.one()
    await async_wait_until(
        lambda: not driver.redis.exists(driver.keys["done"] + "g0"), "it is gone"
    )

    pool.submit()

    assert (await pool.one()).group_id == "g0"


# what comes back when Redis lost it


async def test_a_worker_sets_an_emptied_queue_up_as_it_was(
    open_pool: OpenPool, redis_client: redis.Redis
) -> None:
    """Before the trainer, who chose its limits, comes back."""
    pool = open_pool(lease_ms=1500, max_ready=7)
    await pool.start(StepEngine())
    config = QueueKeys("q")["config"]

    redis_client.flushall()
    limits = await async_wait_until(lambda: redis_client.hgetall(config), "it is set up again")

    assert (limits[b"max_ready"], limits[b"lease_ms"]) == (b"7", b"1500")


async def test_a_publisher_that_waits_makes_again_what_redis_lost(
    own_pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    engine = StepEngine(lambda r: 3)
    worker = await own_pool.start(engine, name="a")
    first = await own_pool.update(worker)
    own_pool.submit()
    await own_pool.made(3)
    before = tmp_path / "before"
    ignored = shutil.ignore_patterns("*.sock", "*.log")
    shutil.copytree(server.directory, before, ignore=ignored)
    publishing = asyncio.create_task(
        asyncio.to_thread(own_pool.publish, wait="all", policy="finish")
    )
    await async_wait_until(lambda: worker.state.phase == "updating", "it waits for the sample")

    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    shutil.copytree(before, server.directory, dirs_exist_ok=True)
    await asyncio.to_thread(server.start)
    await async_wait_until(lambda: worker.state.current != first + 1, "its version is forgotten")
    engine.allow(5)
    version = await publishing

    assert worker.state.version == version > first + 1
    assert own_pool.client.status().current == version
    await own_pool.one()
