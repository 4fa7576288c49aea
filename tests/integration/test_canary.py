"""Pickles planted in every key and field that the trainer's side reads are never run.

The worker's side is in `test_worker_payloads.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

from click.testing import CliRunner

from producer.cli import main
from producer.contract.errors import RollqError
from tests.integration import contract
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver, job
from tests.integration.pool import Pool


class Bomb:
    """Leaves a directory where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def populate(driver: Driver) -> None:
    """Samples waiting, held with tokens, closed, graded and dead; a worker and a publication."""
    driver.send(contract.heartbeat("w"))
    driver.enqueue(job("dead"))
    for _ in range(3):
        driver.crash(driver.claim_one())
    driver.enqueue(job("graded", reward="m:f"))
    driver.complete(driver.claim_one())
    digest = driver.group("graded")["digest"]
    driver.send(contract.grade("graded", digest))
    driver.send(contract.graded("graded", digest, 1, [1.0]))
    driver.enqueue(job("closed", prompt="text"), job("held"), job("waits"))
    closed = driver.claim_one()
    driver.send(contract.prompt(closed, [1, 2]))
    driver.complete(closed)
    driver.generate(driver.claim_one(), 3)
    driver.send(contract.publish())


def places(driver: Driver) -> Iterator[tuple[str, str, bytes]]:
    """Type, key and field of everything that is stored."""
    for key, (content, _) in driver.dump().items():
        if isinstance(content, dict):
            yield from (("hash", key, field) for field in content)
        elif ":chunks:" in key:
            yield "list", key, b""
        elif key.endswith((":results", ":updates")):
            yield "stream", key, b""
        elif ":done:" in key or ":request:" in key:
            yield "string", key, b""


def plant(driver: Driver, kind: str, key: str, field: bytes, data: bytes) -> None:
    redis = driver.redis
    if kind == "hash":
        redis.hset(key, field, data)
    elif kind == "list":
        redis.lset(key, 0, data)
    elif kind == "stream":
        redis.xadd(key, {"group": data, "size": 1, "version": data})
    else:
        redis.set(key, data, keepttl=True)


async def read_everything(pool: Pool, driver: Driver) -> None:
    """Each reader by itself; what it reads may be refused, with any error but a crash."""
    client = pool.client
    target = ["dead", "--redis", pool.url, "--queue", "q"]
    readers: list[Callable[[], object]] = [
        client.status,
        client.config,
        lambda: client.peek("held/0"),
        lambda: client.batch(4, timeout=0.05),
        lambda: client.submit([[7]], ids=["new"]),
        lambda: client.cancel(["waits"]),
        lambda: CliRunner().invoke(main, [*target, "list"]),
        lambda: CliRunner().invoke(main, [*target, "show", "dead/0"]),
    ]
    for reader in readers:
        with contextlib.suppress(RollqError, ValueError):
            await asyncio.to_thread(reader)


async def test_no_planted_pickle_is_run(
    open_pool: OpenPool, driver: Driver, tmp_path: Path
) -> None:
    pool = open_pool(lease_ms=200)  # short waits for results that are not there
    ran = tmp_path / "ran"
    data = pickle.dumps(Bomb(ran))
    pickle.loads(data)  # noqa: S301 - the canary sings when it is unpickled
    ran.rmdir()

    populate(driver)
    planted = list(places(driver))
    assert len(planted) > 60
    for kind, key, field in planted:
        driver.redis.flushall()
        driver.queue.open()
        populate(driver)
        plant(driver, kind, key, field, data)
        await read_everything(pool, driver)
        assert not ran.exists(), f"unpickled out of {key} {field!r}"
    driver.redis.flushall()
