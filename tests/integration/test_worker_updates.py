"""Weight updates of a pool: what each token is labelled with, and what becomes of the samples."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from typing import Any

import pytest

from producer import Rollout, RolloutClient, SamplingParams
from producer.contract.connection import AsyncQueue
from producer.contract.errors import ResultsTimeout
from producer.contract.states import UpdatePolicy
from tests.integration.contract import Driver, publish
from tests.integration.pool import QUEUE, Pool
from tests.integration.stepper import StepEngine, SteppedSim, attempts, sample_of
from tests.waiting import async_wait_until
from workers.admission import Admission
from workers.report import Reporter
from workers.settings import WorkerSettings
from workers.state import WorkerState
from workers.updates import Updater


def runs(rollout: Rollout) -> list[tuple[int, int]]:
    return [(s.version, s.tokens) for s in rollout.segments]


# labels


async def test_tokens_between_publication_and_load_carry_the_old_version(pool: Pool) -> None:
    """Case 15: the update waits, here for the first token of another sample."""
    engine = StepEngine(lambda r: 0 if sample_of(r.request_id) == "g1/0" else 2)
    worker = await pool.start(engine, first_token_seconds=60)
    assert await pool.update(worker) == 1
    pool.submit(2)
    await pool.made(2)
    await pool.in_engine(engine, 2)

    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "the update has begun")
    engine.allow(3, "g0/0")
    await pool.made(5)
    engine.plan = lambda r: None
    engine.allow(1, "g1/0")
    rollouts = {g.id: g.rollouts[0] for g in await pool.groups(2)}

    assert runs(rollouts["g0"]) == [(1, 5), (2, 3)]
    assert runs(rollouts["g1"]) == [(1, 1), (2, 7)]


async def test_an_update_every_two_tokens_lets_a_sample_through(pool: Pool) -> None:
    """Case 22: and what was interrupted goes before what never ran."""
    engine = StepEngine(lambda r: 2)
    worker = await pool.start(engine, max_samples=1)
    pool.submit(2)

    for made in (2, 4, 6):
        await pool.made(made)
        await pool.update(worker)
    first = await pool.one()
    await pool.in_engine(engine, 1)
    engine.allow(8)
    await pool.one()

    assert (first.group_id, runs(first)) == ("g0", [(0, 2), (1, 2), (2, 2), (3, 2)])
    assert [sample_of(r.request_id) for r in engine.requests] == ["g0/0"] * 4 + ["g1/0"]


async def test_no_pause_before_every_admitted_sample_has_a_token(pool: Pool) -> None:
    """Case 22: updates that come faster than a first token starve nobody."""
    engine = StepEngine(lambda r: 0)
    worker = await pool.start(engine, first_token_seconds=60)
    pool.submit(max_tokens=3)

    for version in (1, 2, 3):
        await pool.in_engine(engine, 1)
        pool.publish()
        await async_wait_until(lambda: worker.state.phase == "updating", "the update has begun")
        engine.allow(1)
        if version < 3:
            await pool.serving(version, worker)
    rollout = await pool.one()

    assert runs(rollout) == [(0, 1), (1, 1), (2, 1)]


async def test_several_publications_at_once_lead_straight_to_the_newest(pool: Pool) -> None:
    engine = StepEngine()
    engine.load_gate.clear()
    worker = await pool.start(engine)
    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "the first one loads")

    for _ in range(3):
        pool.publish()
    engine.load_gate.set()
    await pool.serving(4, worker)

    assert engine.loads == [1, 4]


# the level


async def test_the_same_weights_again_interrupt_nothing(pool: Pool) -> None:
    """Case 16."""
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    version = pool.publish(b"same")
    await pool.serving(version, worker)
    pool.submit()
    await pool.made(3)

    assert pool.publish(b"same", step=2) == version
    assert pool.client.status().weights["newest"] == str(version)
    engine.allow(5)
    rollout = await pool.one()

    assert (rollout.attempts, runs(rollout)) == (1, [(1, 8)])
    assert engine.loads == [1]


async def test_the_same_weights_become_a_new_version_by_force(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollq")
    engine = StepEngine()
    worker = await pool.start(engine)
    await pool.serving(pool.publish(b"same"), worker)

    assert pool.publish(b"same") == 1
    assert re.search(r"serving version 1 after \d+\.\d\d s \(load \d+\.\d\d s\)", caplog.text)
    assert "the same files as version 1: nothing new; force=True makes" in caplog.text
    caplog.clear()
    assert pool.publish(b"same", force=True) == 2
    await pool.serving(2, worker)

    assert engine.loads == [1, 2]
    assert "nothing new" not in caplog.text


async def test_a_late_notice_changes_nothing(pool: Pool, driver: Driver) -> None:
    """Case 16: notices 3, then a late 2."""
    engine = StepEngine()
    worker = await pool.start(engine)
    for _ in range(3):
        await pool.update(worker)

    driver.redis.xadd(driver.keys["updates"], {"version": "2"})
    worker.state.notice(2, 2)  # a reply that was long on its way
    pool.submit()
    rollout = await pool.one()

    assert runs(rollout) == [(3, 8)]
    assert engine.loads == [1, 2, 3]


async def test_a_trainer_that_starts_again_at_an_earlier_step_is_followed(pool: Pool) -> None:
    """Case 16: the step is a label; the version only grows."""
    engine = StepEngine()
    worker = await pool.start(engine)
    old = pool.files(b"old")
    await pool.serving(pool.client.publish_weights(old, step=10), worker)
    await pool.serving(pool.publish(step=11), worker)

    again = pool.new_client()
    assert again.publish_weights(old, step=10) == 3
    await pool.serving(3, worker)

    assert pool.client.status().weights["3:step"] == "10"


async def test_a_publication_survives_its_lost_notice(pool: Pool, driver: Driver) -> None:
    """The stream is only a hint: the level is told with every reply."""
    worker = await pool.start(StepEngine())
    path = pool.client.publish_weights(pool.files())
    driver.redis.delete(driver.keys["updates"])

    await pool.serving(path, worker)


async def test_a_notice_that_comes_between_two_reads_is_heard(pool: Pool, driver: Driver) -> None:
    queue = AsyncQueue(pool.url, QUEUE)
    state = WorkerState(WorkerSettings(pool.url, QUEUE), queue, StepEngine())
    driver.send(publish())
    listening = asyncio.create_task(Updater(state, Admission(), Reporter(state)).listen())
    try:
        await async_wait_until(lambda: state.current == 1, "it looked")
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        await queue.close()


async def test_a_worker_that_joins_during_a_broadcast_ends_at_the_new_version(pool: Pool) -> None:
    """Case 21: the pool is at 5, 6 is on its way; nothing is labelled 0."""
    old = await pool.start(first := StepEngine(lambda r: 2), name="old")
    for _ in range(5):
        await pool.update(old)
    first.load_gate.clear()
    pool.submit(4)
    await pool.made(2, "g3/0")
    pool.publish()
    await async_wait_until(lambda: old.state.phase == "updating", "6 is on its way")

    second = StepEngine()
    second.load_gate.clear()
    new = await pool.start(second, name="new")
    await async_wait_until(lambda: new.state.phase == "updating", "it loads what is current")
    assert second.requests == []
    second.load_gate.set()
    groups = await pool.groups(4)

    assert (new.state.version, second.loads) == (6, [6])
    assert {v for g in groups for v, _ in runs(g.rollouts[0])} == {5, 6}
    first.load_gate.set()
    await pool.serving(6, old)


# policies


async def test_keep_goes_on_in_place(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)

    await pool.update(worker, policy="keep")
    engine.allow(5)
    rollout = await pool.one()

    assert engine.paused == ["keep"]
    assert runs(rollout) == [(0, 3), (1, 5)]
    assert (rollout.attempts, rollout.interruptions, rollout.recomputed_tokens) == (1, 0, 0)


async def test_keep_labels_each_token_of_one_output_with_its_own_version(pool: Pool) -> None:
    """The simulated engine collects tokens over the update before it gives them out."""
    engine = SteppedSim(stream_interval=64)
    worker = await pool.start(engine)
    pool.submit(max_tokens=50)
    await engine.in_engine(1)
    engine.steps(20)
    await pool.made(1)

    await pool.update(worker, policy=UpdatePolicy.KEEP)
    engine.steps(50)
    rollout = await pool.one()

    assert [v for v, _ in runs(rollout)] == [0, 1]
    assert rollout.attempts == 1


async def test_finish_lets_samples_end_before_the_load(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine)
    pool.submit(2)
    await pool.made(3, "g0/0", "g1/0")

    pool.publish(policy="finish", deadline_s=60)
    await async_wait_until(lambda: worker.state.phase == "updating", "the update has begun")
    pool.client.submit([[7]], SamplingParams(max_tokens=2), ids=["later"])
    engine.allow(5, "g0/0")
    await pool.made(8, "g0/0")
    assert engine.loads == []
    engine.allow(5, "g1/0")
    rollouts = {g.id: g.rollouts[0] for g in await pool.groups(3)}

    assert runs(rollouts["g0"]) == runs(rollouts["g1"]) == [(0, 8)]
    assert runs(rollouts["later"]) == [(1, 2)]


async def test_finish_becomes_requeue_at_its_deadline(pool: Pool) -> None:
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)

    await pool.update(worker, policy="finish", deadline_s=0.05)
    rollout = await pool.one()

    assert (runs(rollout), rollout.interruptions) == ([(0, 3), (1, 5)], 1)


async def test_requeue_hands_back_while_the_weights_load(pool: Pool, driver: Driver) -> None:
    """Another worker goes on with the samples meanwhile."""
    engine = StepEngine(lambda r: 3)
    slow = await pool.start(engine, name="slow")
    pool.submit()
    await pool.made(3)
    engine.load_gate.clear()

    pool.publish()
    await async_wait_until(lambda: driver.ready() == ["g0/0"], "the sample is handed back")
    assert slow.state.phase == "updating"
    await pool.start(StepEngine(), name="fast")
    rollout = await pool.one()

    assert [(s.tokens, s.worker) for s in rollout.segments] == [(3, "slow"), (5, "fast")]
    engine.load_gate.set()


# what the trainer sees of it


async def test_wait_for_version_counts_workers(pool: Pool) -> None:
    engines = [StepEngine(), StepEngine()]
    engines[1].load_gate.clear()
    for engine, name in zip(engines, ("a", "b"), strict=True):
        await pool.start(engine, name=name)
    version = pool.publish(max_updating=1.0)

    await wait_for(pool.client, version)
    with pytest.raises(ResultsTimeout, match=r"not on 2 workers.*b: 0"):
        await wait_for(pool.client, version, workers=2, timeout=0.1)
    engines[1].load_gate.set()
    await wait_for(pool.client, version, workers=2)

    status = pool.client.status()
    assert {w.name: w.version for w in status.workers} == {"a": 1, "b": 1}
    assert (status.current, status.last_good, status.weights["1:state"]) == (1, 1, "good")


async def wait_for(client: RolloutClient, version: int, **options: Any) -> None:
    await asyncio.to_thread(client.wait_for_version, version, **options)


async def test_clean_up_spares_what_a_worker_reads(pool: Pool) -> None:
    """However old it is: the worker said so before it began."""
    engine = StepEngine()
    engine.load_gate.clear()
    worker = await pool.start(engine)
    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "version 1 loads")
    path = pool.weights_dir / pool.client.status().weights["1:path"]
    os.utime(path, (0, 0))

    pool.publish()
    assert path.is_dir()
    engine.load_gate.set()
    await pool.serving(2, worker)

    def removed() -> bool:
        pool.publish()
        return not path.exists()

    # A heartbeat that was on its way may still speak of version 1.
    await async_wait_until(removed, "a publication after that removes it")


async def test_a_trainer_that_reconnects_does_not_bring_old_weights_back(
    pool: Pool, driver: Driver
) -> None:
    """Its publication is so old that Redis forgot it on purpose."""
    pool.publish()
    other = pool.new_client()
    for _ in range(40):
        newest = other.publish_weights(pool.files())
    assert "1:state" not in pool.client.status().weights

    driver.redis.client_kill_filter(_type="normal", skipme=True)
    await pool.batch()

    assert pool.client.status().current == newest
