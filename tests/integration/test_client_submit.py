"""What a trainer may submit, what is refused and how, and what happens when the queue is full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from producer import SamplingParams
from producer.contract.errors import IdConflict, InvalidSample, QueueFull
from tests.integration.conftest import OpenPool
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until

PARAMS = SamplingParams(max_tokens=8)


def test_ids_come_back_in_order_and_name_the_groups(pool: Pool) -> None:
    made = pool.client.submit([[1], [2]], PARAMS)

    assert len(set(made)) == 2
    assert pool.client.submit([[1], [2]], PARAMS, ids=["b", "a"]) == ["b", "a"]
    assert pool.client.status().ready == 4


def test_one_text_is_one_prompt(pool: Pool) -> None:
    assert len(pool.client.submit("a text", PARAMS)) == 1


async def test_metadata_and_rows_come_back_untouched(pool: Pool) -> None:
    await pool.start(StepEngine())
    rows = [
        {"prompt_ids": np.array([1, 2]), "answer": {"x": [1, 2.5, None, "ü"]}},
        {"prompt": "hi"},
        {"messages": [{"role": "user", "content": "hi"}], "id": 7},
    ]
    pool.client.submit(rows, PARAMS, ids=["a", "b", "c"])
    pool.client.submit([[1]], PARAMS, ids=["d"], metadata=[[1, "two"]])

    metadata = {g.id: g.metadata for g in await pool.groups(4)}

    assert metadata == {
        "a": {"answer": {"x": [1, 2.5, None, "ü"]}},
        "b": None,
        "c": {"id": 7},
        "d": [1, "two"],
    }


def test_a_list_with_one_bad_prompt_enqueues_nothing(pool: Pool) -> None:
    many = SamplingParams(n=1000, max_tokens=8)
    with pytest.raises(InvalidSample, match="prompt 2: token id -1"):
        pool.client.submit([[1], [2], [-1]], many)

    assert pool.client.status().ready == 0


def test_an_iterable_is_read_as_it_is_sent(open_pool: OpenPool) -> None:
    pool = open_pool(max_ready=2)
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in range(100):
            read.append(i)
            yield [i]

    with pytest.raises(QueueFull):
        pool.client.submit(prompts(), PARAMS, block=False)
    assert len(read) < 10


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
    ids=lambda p: str(p)[:20].encode("ascii", "replace").decode(),
)
def test_a_bad_parameter_is_refused_by_name(params: dict[str, object], name: str) -> None:
    """Case 33."""
    with pytest.raises(InvalidSample, match=name):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_a_group_larger_than_the_queue_is_refused(open_pool: OpenPool) -> None:
    pool = open_pool(max_ready=3)

    with pytest.raises(InvalidSample, match="n=4 samples, more than the queue's max_ready=3"):
        pool.submit(n=4)


def test_a_job_over_the_size_limit_is_refused(pool: Pool) -> None:
    with pytest.raises(InvalidSample, match=r"group big has .* bytes, allowed are"):
        pool.client.submit(["x" * (4 << 20)], PARAMS, ids=["big"])
    with pytest.raises(InvalidSample, match="metadata of group big"):
        pool.client.submit([[1]], PARAMS, ids=["big"], metadata=[b"x" * (5 << 20)])


async def test_numpy_values_work(pool: Pool) -> None:
    """Case 33."""
    await pool.start(StepEngine())
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        max_tokens=np.int32(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
    )
    pool.client.submit(np.array([[1, 2, 3], [4, 5, 6]]), params, metadata=[np.float32(0.5), None])

    first, second = sorted(await pool.groups(2), key=lambda g: int(g.prompt_ids[0]))

    assert [len(r.response_ids) for g in (first, second) for r in g.rollouts] == [5] * 4
    assert first.metadata == 0.5
    assert first.rollouts[0].temperature == 0.5


# once


async def test_the_same_job_again_changes_nothing_at_any_time(pool: Pool) -> None:
    pool.submit(2)
    pool.submit(2)
    assert pool.client.status().ready == 2
    worker = await pool.start(StepEngine())
    await async_wait_until(lambda: pool.client.status().results == 2, "both are closed")
    pool.submit(2)
    await pool.groups(2)
    pool.submit(2)
    await worker.drain()

    status = pool.client.status()
    assert (status.ready, status.leased, status.results) == (0, 0, 0)
    assert status.stats["groups_enqueued"] == 2


async def test_another_job_under_the_same_id_is_a_conflict(pool: Pool) -> None:
    pool.submit()

    with pytest.raises(IdConflict, match=r"g0 .*another job"):
        pool.submit(max_tokens=9)
    await pool.start(StepEngine())
    await pool.one()
    with pytest.raises(IdConflict, match="g0"):
        pool.client.submit([[1, 2, 4]], PARAMS, ids=["g0"])


# backpressure


def test_a_full_queue_is_refused_and_says_how_far_it_came(open_pool: OpenPool) -> None:
    """Case 27."""
    pool = open_pool(max_ready=10)
    ids = [f"g{i}" for i in range(25)]

    with pytest.raises(QueueFull, match=r"max_ready=10 .* 10 groups were enqueued.* is g10"):
        pool.client.submit([[1]] * 25, PARAMS, ids=ids, block=False)

    assert pool.client.status().ready == 10


async def test_a_full_queue_blocks_until_workers_make_room(open_pool: OpenPool) -> None:
    """Case 27."""
    pool = open_pool(max_ready=10)
    trainer = pool.new_client()
    submitting = asyncio.create_task(asyncio.to_thread(trainer.submit, [[1, 2]] * 25, PARAMS))
    await async_wait_until(lambda: pool.client.status().ready == 10, "it is full")
    assert not submitting.done()

    await pool.start(StepEngine())
    ids = await submitting
    groups = await pool.groups(25)

    assert [g.id for g in groups] == ids
    assert pool.client.status().stats["groups_enqueued"] == 25


async def test_full_results_stop_the_start_of_new_groups_only(open_pool: OpenPool) -> None:
    """Case 27: the group that is half done still closes."""
    pool = open_pool(max_results=1)
    first = await pool.start(StepEngine(lambda r: 3 if r.request_id.startswith("g1/1") else None))
    pool.submit(2, n=2)
    await pool.made(3, "g1/1")
    await pool.made(8, "g0/0", "g0/1", "g1/0")
    await async_wait_until(lambda: pool.client.status().results == 1, "g0 is closed")
    pool.client.submit([[1, 2, 3]], PARAMS, ids=["new"])

    await first.drain()
    await pool.start(StepEngine())
    await async_wait_until(lambda: pool.client.status().results == 2, "the group closes")
    assert pool.client.status().ready == 1
    assert [(await pool.groups())[0].id for _ in range(3)] == ["g0", "g1", "new"]


def test_a_batch_that_could_never_close_is_refused(open_pool: OpenPool) -> None:
    pool = open_pool(max_results=3)

    with pytest.raises(InvalidSample, match=r"groups=4 .* max_results=3"):
        pool.client.batch(4)
