"""A queue on each real server, with a driver that sends its scripts, or a pool of workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from producer.contract.connection import Queue
from tests.integration.contract import Driver
from tests.integration.pool import Pool
from tests.waiting import DEADLINE_S

OpenDriver = Callable[..., Driver]
OpenPool = Callable[..., Pool]


@pytest.fixture
def open_driver(redis_url: str) -> Iterator[OpenDriver]:
    """Opens drivers of the queue `q`; keyword arguments are its limits."""
    opened: list[Queue] = []

    def open_one(**limits: int) -> Driver:
        queue = Queue(redis_url, "q", limits=limits, patience=DEADLINE_S)
        opened.append(queue)
        queue.open()
        return Driver(queue)

    yield open_one
    for queue in opened:
        queue.close()


@pytest.fixture
def driver(open_driver: OpenDriver) -> Driver:
    return open_driver()


@pytest.fixture
async def open_pool(redis_url: str, tmp_path: Path) -> AsyncIterator[OpenPool]:
    """Opens the pool of the queue `q`; keyword arguments are the queue's limits."""
    opened: list[Pool] = []

    def open_one(**limits: int) -> Pool:
        opened.append(Pool(redis_url, tmp_path, limits))
        return opened[-1]

    yield open_one
    for pool in opened:
        await pool.close()


@pytest.fixture
def pool(open_pool: OpenPool) -> Pool:
    return open_pool()
