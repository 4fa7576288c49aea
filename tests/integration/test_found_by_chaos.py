"""What `tests/chaos` found, each as a short run of its own."""

from __future__ import annotations

import asyncio

import pytest
import redis

from producer import SamplingParams
from producer.contract.errors import ResultsTimeout
from producer.contract.manifest import MANIFEST
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver, confirm, heartbeat, leave, publish
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine


async def test_what_redis_lost_is_offered_until_there_is_room(
    open_pool: OpenPool, redis_client: redis.Redis
) -> None:
    """The queue is not at its end while this client's groups still wait to come back to it."""
    pool = open_pool(max_ready=2)
    ids = pool.submit(2)
    redis_client.flushall()
    other = pool.new_client(consumer="1", limits={"max_ready": 2})
    ids += other.submit([[1, 2, 3]] * 2, SamplingParams(max_tokens=8), ids=["x0", "x1"])
    with pytest.raises(ResultsTimeout):
        await asyncio.to_thread(pool.client.batch, 4, timeout=0.1)
    await pool.start(StepEngine(lambda r: None), name="a")

    batch = await pool.batch(4)

    assert sorted(g.id for g in batch) == sorted(ids)


async def test_a_new_worker_serves_the_last_good_version_while_the_newest_does_not_come(
    pool: Pool, driver: Driver
) -> None:
    """Else a broken publication idles every worker that starts, until all have given it up."""
    driver.send(heartbeat("another"))  # so that nothing is given up by all
    first = await pool.start(StepEngine(lambda r: None), name="a")
    good = await pool.update(first)
    await first.drain()
    path, _ = pool.write()
    manifest = pool.weights_dir / path / MANIFEST
    newest = pool.client.publish_weights(pool.weights_dir / path)
    manifest.rename(manifest.with_suffix(".late"))

    worker = await pool.start(StepEngine(lambda r: None), name="b")
    pool.submit()

    assert (await pool.one()).versions.tolist() == [good] * 8
    manifest.with_suffix(".late").rename(manifest)
    await pool.serving(newest, worker)


def test_a_version_that_ends_its_workers_is_bad_although_they_start_again(driver: Driver) -> None:
    """There is always one that has started and not failed yet."""
    driver.send(publish())
    verdicts = []
    for name in ("a-1", "b-1", "a-2", "b-2"):
        driver.send(heartbeat("starts"))
        driver.send(heartbeat(name))
        verdicts.append(driver.send(confirm(1, name, "shapes differ"))[2])
        driver.send(leave(name))

    assert verdicts == [b"new", b"new", b"new", b"bad"]


def test_a_version_that_redis_lost_with_its_publisher_is_not_given_to_other_weights(
    pool: Pool, driver: Driver
) -> None:
    """Some worker may have made tokens under it before it saw that it is gone."""

    def publish_one() -> int:
        return pool.new_client().publish_weights(pool.weights_dir / pool.write()[0])

    assert publish_one() == 1
    before = driver.weights()
    assert publish_one() == 2
    driver.redis.delete(driver.keys["weights"])
    driver.redis.hset(driver.keys["weights"], mapping=before)

    assert publish_one() == 3


def test_versions_of_a_new_queue_start_from_one(
    open_pool: OpenPool, redis_client: redis.Redis
) -> None:
    """Also over the weights of a queue before it that had the same name: else its first samples
    would be many versions old."""
    pool = open_pool()
    assert pool.client.publish_weights(pool.weights_dir / pool.write()[0]) == 1
    redis_client.flushall()

    assert pool.new_client().publish_weights(pool.weights_dir / pool.write()[0]) == 1
