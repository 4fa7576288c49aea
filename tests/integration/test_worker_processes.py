"""Worker processes that are killed, told to stop, or stand still: nothing lost, nothing twice."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from producer import RolloutGroup, SamplingParams
from producer.server import Prefer
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver
from tests.integration.pool import Pool, Processes
from tests.integration.stepper import StepEngine
from tests.servers import require_server
from tests.waiting import async_wait_until
from workers.engines.sim import SimEngine, SimSettings
from workers.worker import EXIT_FAILED, EXIT_OK, EXIT_STOOD_STILL


@pytest.fixture(scope="session")
def server_kind() -> Prefer:
    """One server: what is tried here are processes, and that takes a while."""
    return "path" if shutil.which("redis-server") else require_server("valkey")


@pytest.fixture
def pool(open_pool: OpenPool) -> Pool:
    """On a busy machine a loop may stand for seconds; a worker ends when it does for half a lease.
    The leases of a killed one are made to be `over`."""
    return open_pool(lease_ms=20_000)


@pytest.fixture
def start(pool: Pool) -> Iterator[Processes]:
    start = Processes(pool)
    yield start
    start.close()


async def leased(driver: Driver, count: int) -> None:
    await async_wait_until(lambda: len(driver.leases()) == count, f"{count} are leased")


def held_by(driver: Driver, name: str) -> list[str]:
    return [s for s in driver.leases() if driver.sample(s).get("worker") == name]


def over(driver: Driver, *names: str) -> None:
    """The leases of these workers are over now, and not only in a while."""
    for name in names:
        if held := held_by(driver, name):
            driver.expire(*held)


def tokens(driver: Driver, *samples: str) -> list[int]:
    return [int(driver.sample(s)["tokens"]) for s in samples]


# killed


async def test_nothing_is_lost_or_doubled_by_kills_at_any_point(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Case 23: after the claim, after a partial, and before the commit; 100 samples."""
    groups = pool.submit(100)
    start("claimed", stepping=True, tokens=0, max_samples=4)
    start("partial", stepping=True, tokens=3, max_samples=4)
    doomed = start("commit", stepping=True, die="decode", max_samples=4)

    await async_wait_until(
        lambda: (
            len(held_by(driver, "claimed")) == 4
            and tokens(driver, *held_by(driver, "partial")) == [3] * 4
        ),
        "both hold four samples",
    )
    for process in start.started[:2]:
        process.send(signal.SIGKILL)
    assert [p.ended() for p in start.started] == [-signal.SIGKILL] * 3
    assert "Traceback" not in doomed.log()
    over(driver, "claimed", "partial", "commit")
    await pool.start(StepEngine(), name="healthy")
    closed = await pool.groups(100)

    assert sorted(g.id for g in closed) == sorted(groups)
    rollouts = [g.rollouts[0] for g in closed]
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert Counter(r.crashes for r in rollouts) == {0: 88, 1: 12}
    resumed = [tuple((s.worker, s.tokens) for s in r.segments) for r in rollouts if r.crashes]
    assert resumed.count((("partial", 3), ("healthy", 5))) == 4
    # "commit" had made all tokens: they were stored, or not yet.
    assert {*resumed} - {(("healthy", 8),), (("commit", 8),)} == {(("partial", 3), ("healthy", 5))}
    assert (driver.ready(), driver.leases(), len(await pool.batch(1))) == ([], {}, 0)
    assert driver.stats()["crashes"] == 12


async def test_a_long_sample_is_one_delivery_while_its_worker_lives(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Case 24: it runs for two leases, with another worker around that would take it."""
    pool.new_client(consumer="1", limits={"lease_ms": 5000})
    start("a", sim="token_rate=10", checkpoint_tokens=100, checkpoint_seconds=100)
    pool.submit(max_tokens=100)
    await leased(driver, 1)
    start("b")
    rollout = await pool.one()

    assert [(s.worker, s.tokens) for s in rollout.segments] == [("a", 100)]
    assert (rollout.attempts, rollout.crashes) == (1, 0)
    assert rollout.finished_at - rollout.started_at > 9.5


async def test_a_worker_that_froze_and_woke_up_delivers_nothing_late(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Case 24: SIGSTOP for longer than the lease; another one finishes meanwhile."""
    frozen = start("a", sim="token_rate=20,stream_interval=1", checkpoint_tokens=1)
    pool.submit(max_tokens=1500)  # more than it makes in a minute
    await async_wait_until(
        lambda: driver.leases() and tokens(driver, "g0/0")[0] >= 3, "some tokens are stored"
    )
    frozen.send(signal.SIGSTOP)
    over(driver, "a")
    await pool.start(SimEngine(), name="b")
    rollout = await pool.one()
    before = driver.stats()
    # It ends because its loop stood still, or goes on and is refused, as its threads wake up.
    frozen.send(signal.SIGCONT)
    frozen.send(signal.SIGTERM)

    assert frozen.ended() in (EXIT_OK, EXIT_STOOD_STILL)
    assert [s.worker for s in rollout.segments] == ["a", "b"]
    assert driver.stats() == before
    assert driver.chunks("g0/0") == []


# told to stop


async def test_a_stopped_worker_hands_back_every_token(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Case 35."""
    stopped = start("a", stepping=True, tokens=3, max_samples=4)
    pool.submit(4)
    names = [f"g{i}/0" for i in range(4)]
    await leased(driver, 4)
    await async_wait_until(lambda: tokens(driver, *names) == [3] * 4, "3 tokens each are stored")
    pool.client.submit([[1, 2, 3]], SamplingParams(max_tokens=8), ids=["waiting"])

    stopped.send(signal.SIGTERM)

    assert stopped.ended() == EXIT_OK
    assert driver.ready() == [*names, "waiting/0"]
    assert (driver.leases(), pool.client.status().workers) == ({}, ())
    assert tokens(driver, *names, "waiting/0") == [3, 3, 3, 3, 0]
    await pool.start(StepEngine(), name="b")
    groups = {g.id: g.rollouts[0] for g in await pool.groups(5)}
    for name in ("g0", "g1", "g2", "g3"):
        assert [(s.worker, s.tokens) for s in groups[name].segments] == [("a", 3), ("b", 5)]
        assert (groups[name].crashes, groups[name].interruptions) == (0, 1)
    assert driver.stats()["interrupted_drain"] == 4


async def test_a_stopped_worker_loses_nothing_that_a_busy_engine_still_had(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Tokens that were not due for a checkpoint yet go back, too."""
    options = {"checkpoint_tokens": 10_000, "checkpoint_seconds": 1000}
    stopped = start("a", sim="token_rate=20,stream_interval=8", **options)
    pool.submit(4, n=2, max_tokens=1000)

    def made() -> int:
        return int(driver.redis.hget(driver.keys.worker("a"), "tokens") or 0)

    await async_wait_until(lambda: made() > 8 * 16, "it generates")
    assert set(tokens(driver, *driver.leases())) == {0}

    stopped.send(signal.SIGINT)

    assert stopped.ended() == EXIT_OK
    assert len(driver.ready()) == 8
    assert min(tokens(driver, *driver.ready())) > 8
    await pool.start(SimEngine(), name="b")
    groups = await pool.groups(4)
    assert {r.attempts for g in groups for r in g.rollouts} == {2}


async def test_a_later_signal_ends_it_at_once(pool: Pool, driver: Driver, start: Processes) -> None:
    stuck = start("a", sim="token_rate=50,late_seconds=600", grace_seconds=500)
    pool.submit(max_tokens=4000)  # more than it makes in a minute
    await leased(driver, 1)
    stuck.send(signal.SIGTERM)

    def told_again() -> bool:
        stuck.send(signal.SIGTERM)
        return not stuck.running

    await async_wait_until(told_again, "a later one ends it")
    assert "drains" in stuck.log()
    assert stuck.ended() == EXIT_FAILED


# standing still and dying


async def test_a_hung_engine_ends_its_process_and_the_samples_go_elsewhere(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    hung = start("a", sim="token_rate=20,hang_id=0,stream_interval=4", stall_seconds=3)
    pool.submit(3, max_tokens=1500)
    await leased(driver, 3)
    pool.client.submit([[3, 0]], SamplingParams(max_tokens=8), ids=["hangs"])

    assert hung.ended() == EXIT_STOOD_STILL
    assert "the engine made no step for" in hung.log()
    over(driver, "a")
    await pool.start(SimEngine(), name="b")
    groups = await pool.groups(4)

    assert {r.finish_reason for g in groups for r in g.rollouts} == {"length"}
    assert {r.crashes for g in groups for r in g.rollouts} == {1}


async def test_a_dead_engine_ends_its_process_with_the_reason(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    dying = start("a", sim="token_rate=20,crash_id=0,stream_interval=4")
    pool.submit(3, max_tokens=1500)
    await leased(driver, 3)
    pool.client.submit([[3, 0]], SamplingParams(max_tokens=8), ids=["kills"])

    assert dying.ended() == EXIT_FAILED
    assert "a gives up: the engine died" in dying.log().splitlines()[-1]
    assert driver.leases() == {}
    await pool.start(SimEngine(), name="b")
    groups = await pool.groups(4)

    assert {r.finish_reason for g in groups for r in g.rollouts} == {"length"}


async def test_a_pool_under_everything_at_once_equals_one_quiet_engine(
    pool: Pool, driver: Driver, start: Processes
) -> None:
    """Updates of each policy, a kill, a drain and a cancel; each token is what it should be."""
    sim = "token_rate=100,mean_tokens=60,load_seconds=0.05,prefill_rate=20000"
    model = SimSettings(mean_tokens=60).model()
    processes = {n: start(n, sim=sim, checkpoint_tokens=8, max_samples=8) for n in "abc"}
    await async_wait_until(
        lambda: [w.state for w in pool.client.status().workers] == ["serving"] * 3, "all serve"
    )
    # These are in the middle for ten seconds of any engine, whatever the test is late with.
    long = SamplingParams(n=3, max_tokens=1000, ignore_eos=True)
    ids = pool.client.submit([[i, 6] for i in range(4)], long)
    first = f"{ids[0]}/0"
    await async_wait_until(lambda: driver.sample(first)["tokens"] != "0", "it has tokens")
    ids += pool.client.submit([[i, 5] for i in range(20)], SamplingParams(n=3, max_tokens=200))
    pool.client.cancel([f"{ids[-1]}/1"])
    victim = driver.sample(first)["worker"]
    processes[victim].send(signal.SIGKILL)
    assert processes.pop(victim).ended() == -signal.SIGKILL
    over(driver, victim)

    done: list[RolloutGroup] = []
    for step, policy in enumerate(("requeue", "keep", "requeue", "finish")):
        pool.publish(policy=policy, deadline_s=0.2, step=step)
        done += await pool.groups(4, model=model)
        if step == 1:
            drained = processes.popitem()[1]
            drained.send(signal.SIGTERM)
    done += await pool.groups(8, model=model)

    assert sorted(g.id for g in done) == sorted(ids)
    rollouts = [r for g in done for r in g.rollouts]
    assert Counter(r.finish_reason for r in rollouts)["cancelled"] == 1
    assert {r.state for r in rollouts} == {"finished", "cancelled"}
    assert sum(len(set(r.versions)) > 1 for r in rollouts) > 5
    assert sum(r.crashes for r in rollouts) > 0
    assert drained.ended() == EXIT_OK
