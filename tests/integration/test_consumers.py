"""Trainers and workers by name: one that is gone for good, and two with one name."""

from __future__ import annotations

import asyncio
import logging

import pytest

from producer.contract.errors import InvalidSample
from tests.integration import contract
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver, job
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until


async def held_by_rank_3(pool: Pool, groups: int) -> list[str]:
    """Groups that a trainer took before it was gone."""
    await pool.start(StepEngine(), name="a")
    pool.submit(groups)
    gone = pool.new_client(consumer="rank3")
    batch = await asyncio.to_thread(gone.batch, groups)
    gone.close()
    return [g.id for g in batch]


async def test_what_a_gone_trainer_held_can_be_adopted(pool: Pool) -> None:
    ids = await held_by_rank_3(pool, 5)

    assert pool.client.adopt("rank3", force=True) == 5
    groups = await pool.groups(5)

    assert [g.id for g in groups] == ids
    assert pool.client.adopt("rank3", force=True) == 0
    assert pool.client.status().results == 0


async def test_a_live_trainer_keeps_what_it_holds(pool: Pool) -> None:
    await held_by_rank_3(pool, 2)

    with pytest.raises(InvalidSample, match=r"consumer rank3 read \d+ s ago and may live"):
        pool.client.adopt("rank3")
    assert pool.client._inbox.held_by_others() == {"rank3": 2}
    with pytest.raises(InvalidSample, match="is this client"):
        pool.client.adopt("0")
    assert pool.client.adopt("unheard-of") == 0
    await async_wait_until(lambda: pool.client.adopt("rank3", idle=0.001) == 2, "it was idle")


async def test_the_ack_of_an_adopted_group_counts_no_more(pool: Pool) -> None:
    await pool.start(StepEngine(), name="a")
    pool.submit()
    late = pool.new_client(consumer="rank3")
    batch = await asyncio.to_thread(late.batch, 1)
    pool.client.adopt("rank3", force=True)

    assert batch.ack() == 0
    assert len(await pool.groups()) == 1


def test_adopting_takes_pages(driver: Driver) -> None:
    driver.enqueue(*(job(f"g{i}") for i in range(5)))
    for c in driver.claim():
        driver.complete(c)
    driver.read("t0")

    moved = [driver.send(contract.adopt(limit=2))[0] for _ in range(4)]

    assert moved == [2, 2, 1, 0]
    assert len(driver.read("t1", start="0")) == 5


# two with one name


async def test_two_live_trainers_with_one_name_are_told(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(lease_ms=500)
    twin = pool.new_client()

    async def warned() -> bool:
        for client in (pool.client, twin):
            client._tend()
        said = "lives under the same name: consumer '0'; both may be given the same groups"
        return any(said in r.message for r in caplog.records)

    await async_wait_until(warned, "they are told")


async def test_a_trainer_that_starts_again_is_not_taken_for_two(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(lease_ms=500)
    pool.client._tend()
    again = pool.new_client()

    for _ in range(3):
        again._next_reap = 0.0
        again._tend()

    assert "same name" not in caplog.text


async def test_two_live_workers_with_one_name_are_told(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pool = open_pool(lease_ms=500)
    first = await pool.start(StepEngine(), name="w")
    assert "same name" not in caplog.text
    second = await pool.start(StepEngine(), name="w")

    await async_wait_until(lambda: "same name: worker 'w'" in caplog.text, "they are told")
    assert await first.drain() == await second.drain() == 0
