"""What was found where parts meet that were made apart, each as a short run of its own."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration.pool import Pool, Processes
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until
from workers.worker import EXIT_FAILED, EXIT_OK


@pytest.fixture
def server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One that forgets nothing but what a test takes away."""
    with start_embedded(tmp_path / "redis", prefer=server_kind, appendfsync="always") as server:
        yield server


@pytest.fixture
async def own_pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {"lease_ms": 2000})
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
    await async_wait_until(lambda: own_pool.client.status().workers, "it is on the list", 20)

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    assert own_pool.client.status().workers == ()
    assert "Traceback" not in worker.log()


async def test_one_that_waits_for_redis_ends_when_told(
    server: EmbeddedServer, start: Processes
) -> None:
    server.kill()
    worker = start("a")
    await async_wait_until(lambda: "is away since" in worker.log(), "it misses Redis", 20)

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    server.start()


async def test_one_whose_redis_goes_away_while_its_engine_starts_ends_when_told(
    own_pool: Pool, server: EmbeddedServer, start: Processes
) -> None:
    worker = start("a", sim="start_seconds=1")
    await async_wait_until(lambda: own_pool.client.status().workers, "it is on the list", 20)
    server.kill()
    await async_wait_until(lambda: "is away since" in worker.log(), "it misses Redis", 20)

    worker.send(signal.SIGTERM)

    assert worker.ended() == EXIT_OK
    server.start()


async def test_signals_that_come_at_once_are_one(own_pool: Pool, start: Processes) -> None:
    """A scheduler may tell the process and its group."""
    worker = start("a", sim="token_rate=50,late_seconds=0.5")
    own_pool.submit()
    await async_wait_until(lambda: own_pool.client.status().leased == 1, "it holds one", 20)

    worker.send(signal.SIGTERM)
    worker.send(signal.SIGINT)

    assert worker.ended() == EXIT_OK
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
