"""`generate` waits for exactly what it submitted, `rollouts` goes from one to the next, and both
leave to others, and to later, what is not theirs. Progress and reading as it is sent, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from producer import QueueFull, ResultsTaken, ResultsTimeout, RolloutClient, SamplingParams, outbox
from producer.contract.errors import InvalidSample
from tests.integration.conftest import OpenPool
from tests.integration.pool import Pool, proved, proved_group
from tests.integration.stepper import StepEngine, sample_of
from tests.waiting import DEADLINE_S, async_wait_until

PARAMS = SamplingParams(max_tokens=8)


def waiting_for(*groups: str) -> StepEngine:
    """An engine in which these groups make 3 tokens and wait."""
    return StepEngine(lambda r: 3 if sample_of(r.request_id).split("/")[0] in groups else None)


# generate


async def test_results_come_in_the_order_of_the_prompts(pool: Pool) -> None:
    engine = waiting_for("a", "b", "c")
    await pool.start(engine)
    seen: list[tuple[int, int | None]] = []
    generating = asyncio.create_task(
        asyncio.to_thread(
            pool.client.generate,
            [[1], [2], [3]],
            PARAMS,
            ids=["a", "b", "c"],
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    await pool.in_engine(engine, 3)
    watcher = pool.new_client(consumer="watcher")
    for closed, sample in enumerate(("c/0", "a/0", "b/0"), 1):
        engine.allow(5, sample)
        await async_wait_until(lambda: seen[-1:] == [(closed, 3)], f"{closed} are reported")  # noqa: B023

    batch = await generating

    assert [g.id for g in batch] == ["a", "b", "c"]
    assert [proved(r).prompt_ids.tolist() for r in batch.rollouts] == [[1], [2], [3]]
    assert seen == sorted(seen)
    assert watcher.status().results == 0, "they are acked"


async def test_what_belongs_to_others_comes_with_later_batches(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(3, n=2)
    await async_wait_until(lambda: pool.client.status().results == 3, "others are closed")

    batch = await asyncio.to_thread(pool.client.generate, ["x", "y"], PARAMS)

    assert [g.id for g in batch] != [g.id for g in await pool.groups(3)]
    assert len(batch) == 2
    assert (await pool.batch()).groups == ()
    assert pool.client.status().stats["groups_acked"] == 5


async def test_one_that_is_given_up_leaves_its_groups_to_later_batches(pool: Pool) -> None:
    engine = waiting_for("b")
    await pool.start(engine)
    pool.client.submit([[1], [2]], PARAMS, ids=["a", "b"])
    await async_wait_until(lambda: pool.client.status().results == 1, "a is closed")
    await pool.in_engine(engine, 1)
    with pytest.raises(ResultsTimeout, match=r"1 of 2 groups closed.*1 are with workers"):
        await asyncio.to_thread(
            pool.client.generate, [[1], [2]], PARAMS, ids=["a", "b"], timeout=0.5
        )
    engine.allow(5)

    assert sorted(g.id for g in await pool.groups(2)) == ["a", "b"]


async def test_a_restarted_trainer_gets_what_was_made_before(pool: Pool) -> None:
    engine = waiting_for("b")
    await pool.start(engine)
    first = pool.new_client()
    with pytest.raises(ResultsTimeout):
        await asyncio.to_thread(first.generate, [[1], [2]], PARAMS, ids=["a", "b"], timeout=0.5)
    first.close()
    await pool.in_engine(engine, 1)
    engine.allow(5)

    batch = await asyncio.to_thread(
        pool.new_client().generate, [[1], [2]], PARAMS, ids=["a", "b"], timeout=DEADLINE_S
    )

    assert [g.id for g in batch] == ["a", "b"]
    assert len(engine.requests) == 2, "nothing was made twice"


async def test_what_somebody_else_took_is_an_error_and_not_a_wait(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(2)
    other = pool.new_client(consumer="other")
    taken = await asyncio.to_thread(other.batch, 2)

    def again() -> None:
        prompts = [[1, 2, 3], [1, 2, 3]]
        pool.client.generate(prompts, PARAMS, ids=["g0", "g1"], timeout=DEADLINE_S)

    with pytest.raises(ResultsTaken, match=r"group g0 and 1 more .* 2 by consumer other"):
        await asyncio.to_thread(again)
    taken.ack()
    with pytest.raises(ResultsTaken, match="group g0 and 1 more"):
        await asyncio.to_thread(again)


async def test_results_that_leave_no_room_are_an_error_and_not_a_wait(open_pool: OpenPool) -> None:
    pool = open_pool(max_results=2)
    await pool.start(StepEngine())
    pool.submit(2)
    await async_wait_until(lambda: pool.client.status().results == 2, "both are closed")

    with pytest.raises(QueueFull, match=r"1 groups cannot start: max_results=2"):
        await asyncio.to_thread(pool.client.generate, "x", PARAMS, ids=["new"], timeout=DEADLINE_S)
    with pytest.raises(InvalidSample, match=r"groups=1 and 2 unacked .* max_results=2"):
        pool.client.generate("y", PARAMS)
    assert sorted(g.id for g in await pool.groups(2)) == ["g0", "g1"]
    assert [g.id for g in await pool.groups(1)] == ["new"]


async def test_nor_do_they_hold_up_what_waits_for_room(open_pool: OpenPool) -> None:
    """One of its two prompts fills `max_ready` and may not start."""
    pool = open_pool(max_results=2, max_ready=1)
    await pool.start(StepEngine())
    await asyncio.to_thread(pool.submit, 2)
    await async_wait_until(lambda: pool.client.status().results == 2, "others are closed")

    with pytest.raises(QueueFull, match="groups cannot start: max_results=2"):
        await asyncio.to_thread(
            pool.client.generate,
            [[1], [2]],
            PARAMS,
            ids=["a", "b"],
            timeout=DEADLINE_S,
            progress=False,
        )

    assert {g.id for g in await pool.groups(2)} == {"g0", "g1"}


async def test_no_prompts_are_no_groups(pool: Pool) -> None:
    assert len(pool.client.generate([], PARAMS)) == 0


async def test_a_queue_that_stays_full_is_a_time_out(open_pool: OpenPool) -> None:
    pool = open_pool(max_ready=2)

    with pytest.raises(ResultsTimeout, match="no room for all prompts"):
        pool.client.generate([[1]] * 3, PARAMS, timeout=0.1)


async def test_a_batch_knows_the_pools_version(pool: Pool) -> None:
    worker = await pool.start(StepEngine())
    await pool.update(worker)

    batch = await asyncio.to_thread(pool.client.generate, "x", PARAMS)
    await pool.update(worker)
    pool.submit()
    later = await pool.batch()

    assert (batch.version, later.version) == (1, 2)
    assert batch.to_padded(pad_token_id=0)["staleness"].max() == 0


# rollouts


def first(client: RolloutClient, count: int) -> list[str]:
    """Ids of the first rollouts; then the iterator is left."""
    rollouts = client.rollouts(timeout=DEADLINE_S)
    ids = [next(rollouts).id for _ in range(count)]
    del rollouts
    return ids


async def test_rollouts_come_group_by_group_until_there_are_no_more(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(3, n=2)

    rollouts = await asyncio.to_thread(lambda: list(pool.client.rollouts()))

    assert sorted(r.id for r in rollouts) == [f"g{g}/{i}" for g in range(3) for i in range(2)]
    assert [r.index for r in rollouts] == [0, 1] * 3
    assert [r.group_id for r in rollouts][::2] == [r.group_id for r in rollouts][1::2]
    assert pool.client.status().results == 0


async def test_only_a_group_that_was_left_behind_is_acked(pool: Pool) -> None:
    await pool.start(StepEngine())
    pool.submit(3, n=2)
    await async_wait_until(lambda: pool.client.status().results == 3, "all are closed")

    whole = await asyncio.to_thread(first, pool.client, 2)
    assert pool.client.status().results == 3
    again = await asyncio.to_thread(first, pool.client, 3)
    assert pool.client.status().results == 2

    assert again[:2] == whole
    rest = await pool.groups(2)
    assert rest[0].id == again[2].split("/")[0]
    assert [proved_group(g).trainable for g in rest] == [True, True]


# submit


async def test_progress_is_told_while_the_queue_is_full(open_pool: OpenPool) -> None:
    pool = open_pool(max_ready=4)
    seen: list[tuple[int, int | None]] = []
    trainer = pool.new_client()
    prompts = [[1, 2]] * 10
    submitting = asyncio.create_task(
        asyncio.to_thread(
            trainer.submit, prompts, PARAMS, progress=lambda d, t: seen.append((d, t))
        )
    )
    await async_wait_until(lambda: seen and seen[-1][0] == 4, "four are in")

    await pool.start(StepEngine())
    ids = await submitting

    assert seen == sorted(seen)
    assert seen[-1] == (len(ids), 10)


def test_the_size_of_what_is_read_as_it_goes_is_not_known(pool: Pool) -> None:
    seen: list[tuple[int, int | None]] = []

    pool.client.submit(iter([[1], [2]]), PARAMS, progress=lambda d, t: seen.append((d, t)))
    pool.client.submit(iter([[1], [2]]), PARAMS, progress=True)

    assert seen == [(2, None)]
    with pytest.raises(InvalidSample, match="progress="):
        pool.client.submit([[1]], PARAMS, progress="yes")  # type: ignore[arg-type]


def test_what_is_read_slowly_is_not_kept_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_GATHER_SECONDS", 0.0)
    there: list[int] = []

    def prompts() -> Iterator[list[int]]:
        watcher = pool.new_client(consumer="watcher")
        for i in range(3):
            yield [i]
            there.append(watcher.status().ready)

    pool.client.submit(prompts(), PARAMS)

    assert there == [0, 1, 2]
