"""Redis comes back from before an ack: what was taken is neither made nor delivered again."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from producer import RolloutClient, RolloutGroup, SamplingParams, inbox
from producer.contract.connection import Queue
from producer.contract.errors import ResultsTimeout
from producer.contract.messages import Claim
from producer.inbox import SETTLE_SECONDS, Entry
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration import contract
from tests.integration.contract import Driver, job
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import DEADLINE_S, async_wait_until

DIGEST = str(job("g", 2).to_item()[2])


# the script, at each stage in which a group may come back


def ready(driver: Driver) -> list[Claim]:
    driver.enqueue(job("g", 2))
    return []


def leased(driver: Driver) -> list[Claim]:
    ready(driver)
    held = driver.claim()
    driver.generate(held[0], 3)
    return held


def half_closed(driver: Driver) -> list[Claim]:
    held = leased(driver)
    driver.complete(held[0])
    driver.send(contract.release(held[1], 0))
    return held


def unread(driver: Driver) -> list[Claim]:
    held = leased(driver)
    for c in held:
        driver.complete(c)
    return held


def read_by_another(driver: Driver) -> list[Claim]:
    held = unread(driver)
    driver.read("t1")
    return held


def read_by_itself(driver: Driver) -> list[Claim]:
    held = unread(driver)
    driver.read("t0")
    return held


STAGES = [ready, leased, half_closed, unread, read_by_another, read_by_itself]


@pytest.mark.parametrize("build", STAGES, ids=lambda b: b.__name__)
def test_what_came_back_of_a_taken_group_is_removed(
    driver: Driver, build: Callable[[Driver], list[Claim]]
) -> None:
    held = build(driver)

    assert driver.send(contract.restate("g", DIGEST)) == 1
    assert driver.send(contract.restate("g", DIGEST)) == 1, "sent twice"

    assert (driver.ready(), driver.leases(), driver.claim()) == ([], {}, [])
    assert (driver.group(), driver.sample("g/0"), driver.chunks("g/1")) == ({}, {}, [])
    entries = 1 if build is unread else 0
    assert driver.redis.xlen(driver.keys["results"]) == entries
    assert driver.redis.xpending(driver.keys["results"], "trainer")["pending"] == 0
    for c in held:
        assert driver.send(contract.checkpoint(c, 3, 1)) == contract.LOST
        assert driver.send(contract.renew(c)) == contract.LOST
    assert driver.enqueue(job("g", 2), job("g", 3)) == ["done", "conflict"]
    stats = driver.stats()
    assert stats["groups_acked"] == stats["groups_closed"] == stats["groups_enqueued"]
    ended = sum(stats.get(s, 0) for s in ("finished", "restated"))
    assert ended == stats["samples_enqueued"]


def test_a_group_that_redis_does_not_know_any_more_is_known_as_taken(driver: Driver) -> None:
    assert driver.send(contract.restate("g", DIGEST)) == 1
    assert driver.enqueue(job("g", 2)) == ["done"]
    assert driver.send(contract.restate("g", DIGEST, "t1")) == 0, "the first that said so has it"


def test_an_unread_entry_stays_so_that_redis_can_still_count_the_lag(driver: Driver) -> None:
    unread(driver)
    driver.send(contract.restate("g", DIGEST))
    (group,) = driver.redis.xinfo_groups(driver.keys["results"])
    assert group.get("lag", 1) == 1

    ((entry, name),) = driver.read("t1")
    assert driver.send(contract.ack(entry, name, "t1")) == 0
    assert driver.redis.xlen(driver.keys["results"]) == 0


def test_what_another_trainer_was_given_is_not_taken_by_a_late_ack(driver: Driver) -> None:
    """Without an ack that was answered: as where its groups were adopted."""
    read_by_another(driver)
    before = driver.dump()

    assert driver.send(contract.restate("g", DIGEST, "t0", acked=False)) == 0
    assert driver.dump().keys() - before.keys() <= {driver.keys["config"]}
    assert driver.results() == [("g", ["finished", "finished"])]


def test_another_job_under_the_same_id_is_left_alone(driver: Driver) -> None:
    ready(driver)
    assert driver.send(contract.restate("g", "of another job")) == 0
    assert driver.ready() == ["g/0", "g/1"]


# clients, and a Redis that is killed and comes back older


@pytest.fixture
def server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with start_embedded(tmp_path / "redis", prefer=server_kind, appendfsync="always") as server:
        yield server


@pytest.fixture
async def pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {"lease_ms": 10_000})
    yield pool
    await pool.close()


class Snapshot:
    """The data of a server at one moment, to which it can be sent back."""

    def __init__(self, server: EmbeddedServer, to: Path) -> None:
        self._server, self._copy = server, to
        ignored = shutil.ignore_patterns("*.sock", "*.log")
        shutil.copytree(server.directory, to, ignore=ignored)

    def restore(self) -> None:
        self._server.kill()
        for path in self._server.directory.iterdir():
            if path.name != "server.log":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self._copy, self._server.directory, dirs_exist_ok=True)
        self._server.start()


async def waiting_in_vain(client: RolloutClient, seconds: float) -> None:
    """A trainer that has taken its share and waits for more."""
    with pytest.raises(ResultsTimeout):
        await asyncio.to_thread(client.batch, 1, follow=True, timeout=seconds)


async def test_a_group_that_one_trainer_acked_never_comes_to_another(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    """It was closed and unread when the snapshot was taken; both trainers wait meanwhile."""
    await pool.start(StepEngine(), name="a")
    ids = pool.submit(6)
    await async_wait_until(lambda: pool.client.status().results == 6, "all are closed")
    one, two = pool.new_client(consumer="1"), pool.new_client(consumer="2")
    before = Snapshot(server, tmp_path / "before")
    taken = await asyncio.to_thread(one.batch, 3)
    assert taken.ack() == 3

    before.restore()
    more, rest = await asyncio.gather(
        asyncio.to_thread(one.batch, 1), asyncio.to_thread(two.batch, 2)
    )

    assert sorted(g.id for g in [*taken, *more, *rest]) == ids
    assert (more.ack(), rest.ack()) == (1, 2)
    status = pool.client.status()
    assert (status.results, status.stats["groups_acked"]) == (0, 6)


async def test_a_trainer_that_starts_after_the_restore_waits_for_the_others(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    await pool.start(StepEngine(), name="a")
    pool.submit(2)
    one = pool.new_client(consumer="1")
    await async_wait_until(lambda: pool.client.status().results == 2, "all are closed")
    before = Snapshot(server, tmp_path / "before")
    taken = await asyncio.to_thread(one.batch, 1)
    taken.ack()

    before.restore()
    fresh = pool.new_client(consumer="2")
    reading = asyncio.create_task(asyncio.to_thread(fresh.batch, 1))
    await waiting_in_vain(one, 0.1)
    rest = await reading

    assert [g.id for g in taken] != [g.id for g in rest]


async def test_a_trainer_that_is_cut_off_for_a_while_is_waited_for(
    pool: Pool, server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the shortest wait: it is on the list, and has not said what it took."""
    monkeypatch.setattr(inbox, "SETTLE_SECONDS", (SETTLE_SECONDS[0], 10 * DEADLINE_S))
    await pool.start(StepEngine(), name="a")
    pool.submit(2)
    one, two = pool.new_client(consumer="1"), pool.new_client(consumer="2")
    await async_wait_until(lambda: pool.client.status().results == 2, "all are closed")
    before = Snapshot(server, tmp_path / "before")
    taken = await asyncio.to_thread(one.batch, 1)
    taken.ack()

    before.restore()
    reading = asyncio.create_task(asyncio.to_thread(two.batch, 1))
    until = time.monotonic() + SETTLE_SECONDS[0] + 1.0
    await async_wait_until(lambda: time.monotonic() > until, "the shortest wait is over")
    assert not reading.done()
    pool.client._tend()
    one._tend()
    rest = await reading

    assert sorted(g.id for g in [*taken, *rest]) == ["g0", "g1"]


async def test_what_was_made_again_after_an_ack_is_taken_from_its_worker(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    """The snapshot is from before the group was submitted: its trainer offers it again, another
    had taken it. Nobody makes or gets it again."""
    engine = StepEngine()
    await pool.start(engine, name="a")
    one = pool.new_client(consumer="1")
    before = Snapshot(server, tmp_path / "before")
    ids = pool.submit(3)
    taken = await asyncio.to_thread(one.batch, 3)
    taken.ack()

    before.restore()
    waiting = asyncio.create_task(waiting_in_vain(one, 4.0))
    none = await asyncio.to_thread(pool.client.batch, 1)
    await waiting

    assert [g.id for g in taken] == ids
    assert len(none) == 0
    status = pool.client.status()
    assert (status.ready, status.leased, status.results) == (0, 0, 0)


async def test_a_group_that_is_open_again_is_not_shown_before_it_closes(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    """Redis comes back from before it closed, between the reading of its entry and of itself."""
    engine = StepEngine(lambda r: 3)
    await pool.start(engine, name="a")
    pool.submit(1, n=2)
    await pool.made(3, "g0/0", "g0/1")
    before = Snapshot(server, tmp_path / "before")
    engine.allow(5)
    await async_wait_until(lambda: pool.client.status().results == 1, "it is closed")
    fetch = pool.client._inbox.fetch

    def fetch_late(entries: Sequence[Entry]) -> tuple[RolloutGroup, ...]:
        vars(pool.client._inbox)["fetch"] = fetch
        engine.plan = lambda r: None
        before.restore()
        return fetch(entries)

    vars(pool.client._inbox)["fetch"] = fetch_late
    (group,) = await pool.groups()

    assert [str(r.state) for r in group.rollouts] == ["finished", "finished"]
    assert [len(r.response_ids) for r in group.rollouts] == [8, 8]


async def test_a_group_that_is_to_be_graded_again_is_not_shown_without_its_rewards(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    """Redis comes back from before it was graded, when all its members had ended."""
    await pool.start(StepEngine(), name="a")
    pool.client.submit([[1, 2, 3]], SamplingParams(max_tokens=8), ids=["g"], reward="m:f")
    await async_wait_until(lambda: pool.client.status().grading == 1, "it is to be graded")
    grader = Driver(Queue(server.url, "q", patience=DEADLINE_S))

    def grade() -> None:
        digest = grader.group()["digest"]
        assert grader.send(contract.grade("g", digest))[0] == 1
        assert grader.send(contract.graded("g", digest, 1, [0.5])) == 1

    before = Snapshot(server, tmp_path / "before")
    grade()
    fetch = pool.client._inbox.fetch

    def fetch_late(entries: Sequence[Entry]) -> tuple[RolloutGroup, ...]:
        vars(pool.client._inbox)["fetch"] = fetch
        before.restore()
        shown = fetch(entries)
        grade()
        return shown

    vars(pool.client._inbox)["fetch"] = fetch_late
    (group,) = await pool.groups()
    grader.queue.close()

    assert [r.reward for r in group.rollouts] == [0.5]


async def test_an_ack_counts_although_redis_forgot_that_it_was_read(
    pool: Pool, server: EmbeddedServer, tmp_path: Path
) -> None:
    """It was with a worker when the snapshot was taken, and in hand when Redis came back."""
    engine = StepEngine(lambda r: 3)
    await pool.start(engine, name="a")
    pool.submit(1, n=2)
    await pool.made(3, "g0/0", "g0/1")
    before = Snapshot(server, tmp_path / "before")
    engine.allow(5)
    batch = await pool.batch()

    before.restore()

    assert batch.ack() == 1
    assert batch.ack() == 1
    status = pool.client.status()
    assert (status.ready, status.leased, status.results) == (0, 0, 0)
    await async_wait_until(lambda: not pool.workers["a"].state.held, "the worker lets go of it")
