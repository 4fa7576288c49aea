"""Workers that found nothing are told when there is something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.contract import Driver, heartbeat, job
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until
from workers import worker as worker_module


async def test_an_idle_worker_is_woken_by_a_submit(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it would look again in a minute."""
    monkeypatch.setattr(worker_module, "_IDLE", (120.0, 120.0))
    worker = await pool.start(StepEngine())
    await async_wait_until(lambda: worker.state._found_nothing, "it found nothing")

    pool.submit()

    await pool.one()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_hints_are_understood_in_either_protocol(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.setattr(worker_module, "_IDLE", (120.0, 120.0))
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}protocol={protocol}"
    pool = Pool(url, tmp_path, {})
    worker = await pool.start(StepEngine())
    await pool.update(worker)
    version = await pool.update(worker)  # heard from behind the one before
    pool.submit()

    assert set((await pool.one()).versions.tolist()) == {version}
    await pool.close()


def hints(driver: Driver) -> int:
    return int(driver.redis.xlen(driver.keys["updates"]))


def test_the_first_ready_sample_is_told_and_none_behind_it(driver: Driver) -> None:
    driver.enqueue(job("nobody", 1))
    driver.claim()
    assert hints(driver) == 0, "there is no worker to hear it"

    driver.send(heartbeat())
    driver.enqueue(job("g", 2), job("h"))
    assert hints(driver) == 1
    driver.enqueue(job("i"))
    assert hints(driver) == 1, "those that came before are still there"

    driver.claim()
    driver.enqueue(job("g", 2), job("h"))
    assert hints(driver) == 1, "a repeat brings nothing"
    driver.enqueue(job("j"))
    assert hints(driver) == 2


def test_many_workers_are_not_woken_all_at_once(driver: Driver) -> None:
    for i in range(65):
        driver.send(heartbeat(f"w{i}"))

    driver.enqueue(job("g"))

    assert hints(driver) == 0
