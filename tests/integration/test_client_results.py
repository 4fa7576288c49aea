"""Results: whole groups, in index order, at least once and by id once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from producer import SamplingParams
from producer.contract.errors import InvalidSample, ResultsTimeout
from producer.contract.states import StalenessPolicy, State
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver
from tests.integration.pool import Pool, proved, proved_group
from tests.integration.stepper import StepEngine, sample_of
from tests.proxy import Proxy
from tests.waiting import DEADLINE_S, async_wait_until


def one_index(index: int, tokens: int) -> StepEngine:
    """An engine in which the members of this index make so many tokens and wait."""
    return StepEngine(lambda r: tokens if sample_of(r.request_id).endswith(f"/{index}") else None)


# groups


async def test_members_that_end_in_any_order_come_out_in_index_order(pool: Pool) -> None:
    """Case 26."""
    engine = StepEngine(lambda r: 1)
    await pool.start(engine)
    pool.submit(n=5, max_tokens=4)
    await pool.made(1, *[f"g0/{i}" for i in range(5)])

    for index in (3, 0, 4, 1, 2):
        assert pool.client.status().results == 0
        engine.allow(3, f"g0/{index}")
        await pool.made(4, f"g0/{index}")
    (group,) = await pool.groups()

    assert [sample for sample, _ in engine.ended] == ["g0/3", "g0/0", "g0/4", "g0/1", "g0/2"]
    assert [r.index for r in group.rollouts] == list(range(5))
    assert group.trainable


async def test_a_member_that_errors_closes_its_group_with_one_error(pool: Pool) -> None:
    """Case 26: and never with an invented token or reward."""
    engine = StepEngine()
    engine.refuse["g0/1"] = "this one is too long"
    await pool.start(engine)
    pool.submit(2, n=3)

    groups = {g.id: g for g in await pool.groups(2)}

    assert [r.finish_reason for r in groups["g0"].rollouts] == ["length", "error", "length"]
    failed = groups["g0"].rollouts[1]
    assert (failed.state, failed.error) == (State.FAILED, "this one is too long")
    assert (failed.attempts, len(failed.response_ids), failed.param_version_start) == (1, 0, -1)
    assert not groups["g0"].trainable
    assert groups["g1"].trainable


async def test_a_group_of_every_kind_of_end_closes_once(pool: Pool) -> None:
    """Case 41: finished, failed, cancelled, stale and dead members."""
    plan = {"g0/2": 2, "g0/3": 2, "g0/4": 0}
    engine = StepEngine(lambda r: plan.get(sample_of(r.request_id)))
    engine.refuse["g0/1"] = "refused"
    worker = await pool.start(engine, first_token_seconds=0.05)
    pool.client.submit(
        [[1, 2, 3]],
        SamplingParams(n=8, max_tokens=8),
        ids=["g0"],
        max_staleness=0,
        staleness_policy=StalenessPolicy.DROP,
    )
    await pool.made(2, "g0/2", "g0/3")
    await pool.in_engine(engine, 3)
    pool.client.cancel(["g0/2"])
    await pool.update(worker)  # 3 has a token of version 0, 4 has none
    for crash in range(3):
        await pool.in_engine(engine, 1)
        engine.crash()
        await worker.ended()
        engine = StepEngine(lambda r: plan.get(sample_of(r.request_id)))
        if crash < 2:
            worker = await pool.start(engine, name=f"w{crash}")
    (group,) = await pool.groups()

    assert [str(r.state) for r in group.rollouts] == [
        "finished", "failed", "cancelled", "stale", "dead", "finished", "finished", "finished",
    ]  # fmt: skip
    assert [r.finish_reason for r in group.rollouts[:5]] == [
        "length", "error", "cancelled", "stale", "error",
    ]  # fmt: skip
    assert (await pool.batch()).groups == ()
    assert pool.client.status().stats["groups_closed"] == 1


async def test_times_and_facts_are_those_of_the_sample(pool: Pool) -> None:
    await pool.start(StepEngine(), name="w")
    params = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, top_k=40)
    pool.client.submit([[1, 2, 3]], params)

    rollout = await pool.one()

    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.5, 0.9, 40)
    assert rollout.logprobs_mode == "processed_logprobs"
    assert 0 < rollout.enqueued_at <= rollout.started_at <= rollout.finished_at
    assert rollout.prompt_ids.tolist() == [1, 2, 3]
    kinds = [rollout.response_ids, rollout.response_mask, rollout.versions, rollout.prompt_ids]
    assert {a.dtype for a in kinds} == {np.dtype(np.int32)}
    assert rollout.response_logprobs.dtype == np.float32


async def test_peek_shows_a_sample_as_it_grows(pool: Pool) -> None:
    engine = StepEngine(lambda r: 1)
    worker = await pool.start(engine)
    assert pool.client.peek("g0/0") is None
    pool.submit()

    for made in range(1, 5):
        await pool.made(made)
        rollout = pool.client.peek("g0/0")
        assert rollout is not None
        assert (proved(rollout).state, rollout.finish_reason) == (State.LEASED, "")
        engine.allow(1)
    await worker.drain()
    rollout = pool.client.peek("g0/0")
    assert rollout is not None
    assert (rollout.state, rollout.interruptions) == (State.READY, 1)
    with pytest.raises(InvalidSample, match="'g0' is a group"):
        pool.client.peek("g0")


# batches


async def test_batches_end_when_the_queue_is_empty(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(5)

    sizes = [len(b) for b in await asyncio.to_thread(lambda: list(pool.client.batches(2)))]

    assert sizes == [2, 2, 1]
    assert pool.client.status().results == 0


async def test_a_batch_is_acked_when_the_next_is_asked_for(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(3)
    batches = pool.client.batches(1)

    first = await asyncio.to_thread(next, batches)
    await async_wait_until(lambda: pool.client.status().results == 3, "all are closed")
    second = await asyncio.to_thread(next, batches)
    assert pool.client.status().results == 2
    del batches

    assert first[0].id != second[0].id
    assert len(first[0:1]) == len(first) == 1
    # What it held when it stopped comes again, first.
    again = await asyncio.to_thread(pool.new_client().batch, 2)
    assert again[0].id == second[0].id


async def test_an_unacked_batch_comes_again_to_the_same_consumer_only(pool: Pool) -> None:
    """Case 42: the trainer is killed between reading and acking."""
    await pool.start(StepEngine())
    pool.submit(4)
    trainer, other = pool.new_client(consumer="1"), pool.new_client(consumer="2")
    read = await asyncio.to_thread(trainer.batch, 2)
    trainer.close()
    rest = await asyncio.to_thread(other.batch, 2)

    again = await asyncio.to_thread(pool.new_client(consumer="1").batch, 2)

    assert [g.id for g in again] == [g.id for g in read]
    assert {g.id for g in again} | {g.id for g in rest} == {f"g{i}" for i in range(4)}
    assert [[r.response_ids.tolist() for r in proved_group(g).rollouts] for g in again] == [
        [r.response_ids.tolist() for r in g.rollouts] for g in read
    ]
    assert (again.ack(), read.ack(), rest.ack()) == (2, 2, 2)
    assert pool.client.status().stats["groups_acked"] == 4


async def test_a_read_whose_reply_was_lost_is_read_again(
    pool: Pool, redis_url: str, tmp_path: Path
) -> None:
    """Case 42."""
    await pool.start(StepEngine())
    pool.submit(3)
    await async_wait_until(lambda: pool.client.status().results == 3, "all are closed")
    with Proxy(redis_url, tmp_path) as proxy:
        pool.url = proxy.url
        trainer = pool.new_client()
        first = await asyncio.to_thread(trainer.batch, 1)
        proxy.lose("\r\n>\r\n")
        second = await asyncio.to_thread(trainer.batch, 2)
        assert proxy.lost == 1
        acked = first.ack() + second.ack()
        trainer.close()

    assert {g.id for g in [*first, *second]} == {"g0", "g1", "g2"}
    assert acked == 3


async def test_an_ack_whose_reply_was_lost_counts(
    pool: Pool, redis_url: str, tmp_path: Path
) -> None:
    await pool.start(StepEngine())
    pool.submit(2)
    with Proxy(redis_url, tmp_path) as proxy:
        pool.url = proxy.url
        trainer = pool.new_client()
        batch = await asyncio.to_thread(trainer.batch, 2)
        proxy.lose("\r\ntrainer\r\n$1\r\n0\r\n")
        assert batch.ack() == 2
        assert proxy.lost == 1
        trainer.close()

    status = pool.client.status()
    assert (status.results, status.stats["groups_acked"]) == (0, 2)


async def test_what_closed_before_a_time_out_stays_for_the_next_call(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3 if r.request_id.startswith("g1") else None)
    await pool.start(engine)
    pool.submit(2)
    await pool.made(3, "g1/0")
    await async_wait_until(lambda: pool.client.status().results == 1, "g0 is closed")

    with pytest.raises(ResultsTimeout, match=r"1 of 2 groups closed.*1 are with workers"):
        await pool.batch(2, timeout=0.1)
    engine.allow(5)

    assert [g.id for g in await pool.groups(2)] == ["g0", "g1"]


async def test_manual_acks_may_come_late_and_in_any_order(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(4)
    batches = list(
        await asyncio.to_thread(
            lambda: list(pool.client.batches(1, ack="manual", timeout=DEADLINE_S))
        )
    )

    assert [len(b) for b in batches] == [1, 1, 1, 1]
    assert pool.client.status().results == 4
    assert [b.ack() for b in reversed(batches)] == [1, 1, 1, 1]
    assert [b.ack() for b in batches] == [1, 1, 1, 1]
    assert pool.client.status().results == 0


async def test_a_waiting_client_takes_back_what_a_dead_pool_holds(
    open_pool: OpenPool, driver: Driver
) -> None:
    """Nobody else reaps; what comes back can be resumed, or cancelled as here."""
    pool = open_pool(lease_ms=500)
    pool.submit()
    driver.generate(driver.claim_one("gone"), 3)
    waiting = asyncio.create_task(asyncio.to_thread(pool.new_client().batch, 1))

    await async_wait_until(lambda: driver.ready() == ["g0/0"], "it is taken back")
    pool.client.cancel(["g0"])
    (group,) = await waiting

    assert (group.rollouts[0].crashes, len(group.rollouts[0].response_ids)) == (1, 3)


async def test_an_unreadable_result_is_an_error_and_not_the_trainers_end(
    pool: Pool, driver: Driver
) -> None:
    await pool.start(StepEngine())
    pool.submit(3, n=2)
    await async_wait_until(lambda: pool.client.status().results == 3, "all are closed")
    driver.redis.rpush(driver.keys.chunks("g0/1"), b"\x80\x04N.")
    driver.redis.hset(driver.keys.group("g1"), "prompt_ids", b"\1\2\3")

    groups = {g.id: g for g in await pool.batch(3)}

    assert [str(r.state) for r in groups["g0"].rollouts] == ["finished", "failed"]
    assert "chunk of g0/1 is not a rollq payload" in groups["g0"].rollouts[1].error
    assert [str(r.state) for r in groups["g1"].rollouts] == ["failed", "failed"]
    assert "prompt of g1 has 3 bytes" in groups["g1"].rollouts[0].error
    assert proved_group(groups["g2"]).trainable
