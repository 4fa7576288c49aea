"""The asyncio client: the loop runs while it waits, and what is cancelled loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from producer import AsyncRolloutClient, Batch, InvalidSample, RollqError, SamplingParams
from producer.client import RolloutClient
from producer.contract.errors import RedisUnavailable, ResultsTimeout
from producer.contract.states import State
from producer.steps import Steps
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver
from tests.integration.pool import QUEUE, Pool, proved_group
from tests.integration.stepper import StepEngine, sample_of
from tests.waiting import DEADLINE_S, async_wait_until

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[AsyncRolloutClient]:
    async with AsyncRolloutClient(
        pool.url, QUEUE, weights_dir=pool.weights_dir, patience=DEADLINE_S
    ) as opened:
        yield opened


def waiting_for(*groups: str) -> StepEngine:
    """An engine in which these groups make 3 tokens and wait."""
    return StepEngine(lambda r: 3 if sample_of(r.request_id).split("/")[0] in groups else None)


async def read_by_trainer(driver: Driver, count: int) -> None:
    """Wait until the trainer has read so many closed groups, and not acked them."""
    await async_wait_until(
        lambda: driver.redis.xpending(driver.keys["results"], "trainer")["pending"] == count,
        f"{count} groups are read",
    )


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel it; it ends although what it waited for does not come."""
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
    assert done
    assert task.cancelled()


# what a trainer does


async def test_a_trainers_loop(pool: Pool, client: AsyncRolloutClient) -> None:
    worker = await pool.start(StepEngine())
    ids = await client.submit([[1, 2, 3]] * 5, SamplingParams(n=2, max_tokens=8))
    taken = []
    async for batch in client.batches(2, timeout=DEADLINE_S):
        taken += [proved_group(g).id for g in batch]
        version = await client.publish_weights(pool.files(), step=len(taken))
        await client.wait_for_version(version, timeout=DEADLINE_S)

    assert sorted(taken) == sorted(ids)
    assert worker.state.version == 3
    status = await client.status()
    assert (status.results, status.current) == (0, 3)
    assert (await client.config())["max_ready"] == "100000"


async def test_a_batch_is_acked_by_hand(pool: Pool, client: AsyncRolloutClient) -> None:
    await pool.start(StepEngine())
    await client.submit([[1, 2, 3]] * 2, PARAMS)

    batch = await client.batch(2, timeout=DEADLINE_S)
    assert (await client.status()).results == 2
    assert await batch.ack() == 2
    assert (await client.status()).results == 0
    assert batch.to_padded(pad_token_id=0)["response_ids"].shape == (2, 8)


async def test_generate_and_batches_at_once_get_each_their_own(
    pool: Pool, client: AsyncRolloutClient
) -> None:
    mine = [f"m{i}" for i in range(8)]
    engine = waiting_for(*mine)
    await pool.start(engine)
    await client.submit([[1, 2, 3]] * 3, PARAMS, ids=["a", "b", "c"])
    seen: list[int] = []

    def told(closed: int, groups: int | None) -> None:
        asyncio.get_running_loop()
        seen.append(closed)

    async def others() -> list[str]:
        return [g.id async for batch in client.batches(1) for g in batch]

    taking = asyncio.create_task(others())
    generating = asyncio.create_task(
        client.generate([[1, 2, 3]] * 8, PARAMS, ids=mine, progress=told)
    )
    await pool.in_engine(engine, 8)
    # One at a time, so that either might be the one that reads it.
    for closed, group in enumerate(mine, 1):
        engine.allow(5, f"{group}/0")
        await async_wait_until(lambda: seen[-1:] == [closed], f"{closed} told, in this loop")  # noqa: B023

    assert [proved_group(g).id for g in await generating] == mine
    assert sorted(await taking) == ["a", "b", "c"]
    await async_wait_until(lambda: pool.client.status().results == 0, "all are acked")


async def test_rollouts_and_partials_are_iterated(pool: Pool, client: AsyncRolloutClient) -> None:
    engine = waiting_for("g0")
    await pool.start(engine)
    await client.submit([[1, 2, 3]] * 2, PARAMS, ids=["g0", "g1"])

    async for rollout in client.partials(every=0.01):
        if rollout.id == "g0/0" and len(rollout.response_ids) == 3:
            engine.allow(5)
    assert (await client.peek("g0/0") or rollout).state is State.FINISHED
    got = [r.id async for r in client.rollouts()]

    assert sorted(got) == ["g0/0", "g1/0"]
    assert (await client.status()).results == 0


async def test_cancel_takes_filters(pool: Pool, client: AsyncRolloutClient) -> None:
    await client.submit([[1, 2, 3]] * 3, PARAMS, ids=["a", "b", "c"])

    assert await client.cancel(["a"]) == 1
    assert await client.cancel(where=lambda r: r.group_id == "b") == 1
    assert await client.cancel(older_than=0) == 1
    assert (await client.status()).ready == 0


# submit


async def prompts_of(*prompts: Any) -> AsyncIterator[Any]:
    for prompt in prompts:
        await asyncio.sleep(0)
        yield prompt


async def test_prompts_may_come_asynchronously(pool: Pool, client: AsyncRolloutClient) -> None:
    await pool.start(StepEngine())
    names = [f"g{i}" for i in range(600)]

    ids = await client.submit(
        prompts_of(*([i % 500] for i in range(600))), PARAMS, ids=names, metadata=range(600)
    )
    groups = [g async for batch in client.batches(100, timeout=DEADLINE_S) for g in batch]

    assert ids == names
    assert {g.id: g.metadata for g in groups} == {f"g{i}": i for i in range(600)}
    assert all(g.prompt_ids.tolist() == [g.metadata % 500] for g in groups)


async def test_prompts_that_come_slowly_are_not_kept_back(
    pool: Pool, client: AsyncRolloutClient
) -> None:
    async def slowly() -> AsyncIterator[list[int]]:
        for i in range(3):
            await async_wait_until(lambda: pool.client.status().ready == i, f"{i} are in")  # noqa: B023
            yield [i]

    assert len(await client.submit(slowly(), PARAMS)) == 3


async def test_what_goes_wrong_with_a_prompt_is_told(
    pool: Pool, client: AsyncRolloutClient
) -> None:
    async def failing() -> AsyncIterator[list[int]]:
        yield [1]
        raise ZeroDivisionError("no more")

    async def later() -> AsyncIterator[list[int]]:
        yield [1]
        await async_wait_until(lambda: pool.client.status().ready == 1, "the first is in")
        yield [-1]

    with pytest.raises(InvalidSample, match="prompt 1: token id -1"):
        await client.submit(later(), PARAMS)
    with pytest.raises(InvalidSample, match="prompt 1: token id -1"):
        await client.submit([[1], [-1]], PARAMS)
    with pytest.raises(InvalidSample, match="ids is a list"):
        await client.submit(prompts_of([1]), PARAMS, ids="ab")
    with pytest.raises(ZeroDivisionError):
        await client.submit(failing(), PARAMS)


async def test_a_full_queue_holds_up_the_submission_and_nothing_else(open_pool: OpenPool) -> None:
    pool = open_pool(max_ready=2, max_results=2)
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in range(20):
            read.append(i)
            yield [i, 2, 3]

    async with AsyncRolloutClient(pool.url, QUEUE) as client:
        submitting = asyncio.create_task(client.submit(prompts(), PARAMS))
        await async_wait_until(lambda: pool.client.status().ready == 2, "it is full")
        assert (await client.status()).ready == 2
        assert len(read) < 10
        await pool.start(StepEngine())
        # With two results unacked nothing starts: it must take while it submits.
        taken = 0
        while taken < 20:
            batch = await client.batch(2, timeout=DEADLINE_S)
            taken += await batch.ack()

        assert len(await submitting) == 20


# cancelled


async def test_a_cancelled_wait_loses_nothing(
    pool: Pool, client: AsyncRolloutClient, driver: Driver
) -> None:
    engine = waiting_for("g1")
    await pool.start(engine)
    await client.submit([[1, 2, 3]] * 2, PARAMS, ids=["g0", "g1"])
    waiting = asyncio.create_task(client.batch(2))
    await read_by_trainer(driver, 1)

    await cancelled(waiting)
    engine.allow(5)

    batch = await client.batch(2, timeout=DEADLINE_S)
    assert [proved_group(g).id for g in batch] == ["g0", "g1"]


async def test_a_cancelled_loop_over_batches_loses_nothing(
    pool: Pool, client: AsyncRolloutClient, driver: Driver
) -> None:
    engine = waiting_for("g2")
    await pool.start(engine)
    taken: list[str] = []

    async def loop() -> None:
        async for batch in client.batches(2):
            taken.extend(g.id for g in batch)

    await client.submit([[1, 2, 3]] * 4, PARAMS, ids=["g0", "g1", "g2", "g3"])
    looping = asyncio.create_task(loop())
    await async_wait_until(lambda: len(taken) == 2, "the first batch is taken")
    # The first is acked, the second waits for its other half.
    await async_wait_until(lambda: pool.client.status().results == 1, "one is left")
    await read_by_trainer(driver, 1)
    await cancelled(looping)
    engine.allow(5)

    rest = await client.batch(2, timeout=DEADLINE_S)
    assert sorted([*taken, *(g.id for g in rest)]) == ["g0", "g1", "g2", "g3"]


async def test_what_arrives_when_nobody_waits_any_more_comes_again(
    pool: Pool, client: AsyncRolloutClient
) -> None:
    """The task is cancelled while the very step that has the batch is under way."""
    await pool.start(StepEngine())
    await client.submit([[1, 2, 3]], PARAMS, ids=["g0"])
    has_it, go_on = threading.Event(), threading.Event()

    def steps(blocking: RolloutClient) -> Steps[Batch]:
        batch = yield from blocking.operations.batch(1, timeout=DEADLINE_S, follow=False)
        has_it.set()
        go_on.wait(DEADLINE_S)
        return batch

    waiting = asyncio.create_task(client._thread.finish(steps))
    await async_wait_until(has_it.is_set, "it has the batch")
    await cancelled(waiting)
    go_on.set()

    assert [g.id for g in await client.batch(1, timeout=DEADLINE_S)] == ["g0"]


async def test_a_generation_that_is_cancelled_leaves_its_groups(
    pool: Pool, client: AsyncRolloutClient, driver: Driver
) -> None:
    engine = waiting_for("b")
    await pool.start(engine)
    generating = asyncio.create_task(client.generate([[1], [2]], PARAMS, ids=["a", "b"]))
    await read_by_trainer(driver, 1)

    await cancelled(generating)
    engine.allow(5)

    assert sorted(g.id for g in await client.batch(2, timeout=DEADLINE_S)) == ["a", "b"]


async def test_rollouts_that_were_not_reached_come_again(
    pool: Pool, client: AsyncRolloutClient
) -> None:
    await pool.start(StepEngine())
    await client.submit([[1, 2, 3]] * 3, SamplingParams(n=2, max_tokens=8), ids=["a", "b", "c"])
    await async_wait_until(lambda: pool.client.status().results == 3, "all are closed")
    seen = []
    rollouts = client.rollouts()
    async for rollout in rollouts:
        seen.append(rollout.id)
        if len(seen) == 3:
            break
    await rollouts.aclose()  # type: ignore[attr-defined]

    rest = [r.id async for r in client.rollouts()]

    assert len(rest) == 4
    assert {*seen, *rest} == {f"{g}/{i}" for g in "abc" for i in (0, 1)}
    assert rest[0] == f"{seen[2][0]}/0", "the group that was not left behind, from its start"


async def test_whatever_waits_can_be_cancelled_and_the_client_goes_on(
    open_pool: OpenPool,
) -> None:
    pool = open_pool(max_ready=1)
    endless: dict[str, Callable[[AsyncRolloutClient], Awaitable[Any]]] = {
        "submit": lambda c: c.submit([[1]] * 3, PARAMS),
        "wait_for_version": lambda c: c.wait_for_version(9, timeout=1000),
        "batch": lambda c: c.batch(1, follow=True),
        "rollouts": lambda c: anext(aiter(c.rollouts(follow=True))),  # type: ignore[arg-type]
        "partials": lambda c: every_partial(c),
    }

    async def every_partial(client: AsyncRolloutClient) -> None:
        async for _ in client.partials():
            """None comes: nobody works."""

    async with AsyncRolloutClient(pool.url, QUEUE) as client:
        waiting = [asyncio.ensure_future(wait(client)) for wait in endless.values()]
        await async_wait_until(lambda: pool.client.status().ready == 1, "it is full")
        assert (await client.status()).ready == 1
        assert not any(task.done() for task in waiting)
        for task in waiting:
            await cancelled(task)
        assert (await client.status()).ready == 1


async def test_time_outs_are_the_blocking_clients(pool: Pool, client: AsyncRolloutClient) -> None:
    await client.submit([[1]], PARAMS)

    with pytest.raises(ResultsTimeout, match=r"0 of 1 groups closed within 0 s; 1 samples wait"):
        await client.batch(1, timeout=0.1)
    with pytest.raises(ResultsTimeout, match="version 3 is not on 1 workers"):
        await client.wait_for_version(3, timeout=0.1)
    with pytest.raises(ResultsTimeout):
        await anext(aiter(client.rollouts(timeout=0.1)))


# open and close


async def test_it_connects_with_its_first_call_and_refuses_the_one_after_its_last(
    pool: Pool,
) -> None:
    client = AsyncRolloutClient(pool.url, QUEUE)
    assert (await client.status()).ready == 0
    await client.close()
    await client.close()

    with pytest.raises(RollqError, match="closed"):
        await client.status()


async def test_what_is_wrong_is_told_on_entry() -> None:
    with pytest.raises(RedisUnavailable, match="did not answer"):
        async with AsyncRolloutClient("redis://127.0.0.1:1/0", patience=0.0):
            pytest.fail("there is nothing")
    with pytest.raises(InvalidSample, match="consumer"):
        async with AsyncRolloutClient("redis://127.0.0.1:1/0", consumer="a b"):
            pytest.fail("that is no name")
