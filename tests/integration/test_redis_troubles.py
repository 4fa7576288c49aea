"""Redis away, mute, loading, back with an older state, full, read-only, a replica without its
master, or asking for another password.

Nobody loses a sample, nobody is blamed for a crash, and every group is delivered once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from producer.contract import url
from producer.contract.connection import AsyncQueue
from producer.contract.errors import RedisUnavailable
from producer.contract.keys import QueueKeys
from producer.contract.scripts import SCRIPTS
from producer.contract.url import PASSWORD_FILE
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.chaos.proxy import Proxy
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import DEADLINE_S, async_wait_until


@pytest.fixture
def server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One that forgets nothing but what a test takes away."""
    with start_embedded(tmp_path / "redis", prefer=server_kind, appendfsync="always") as server:
        yield server


@pytest.fixture
async def pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {})
    yield pool
    await pool.close()


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def cut_everybody(admin: redis.Redis) -> None:
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def test_a_full_redis_refuses_a_commit_that_is_made_later(
    pool: Pool, admin: redis.Redis
) -> None:
    """Case 28."""
    engine = StepEngine(lambda r: 3)
    await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    admin.config_set("maxmemory", 1)

    engine.allow(5)
    await async_wait_until(lambda: engine.ended, "the engine is through")
    assert pool.client.status().leased == 1
    admin.config_set("maxmemory", 0)
    rollout = await pool.one()

    assert (len(rollout.response_ids), rollout.attempts, rollout.crashes) == (8, 1, 0)


async def test_a_worker_that_was_cut_off_hears_of_a_publication(
    pool: Pool, admin: redis.Redis
) -> None:
    """Case 29."""
    engine = StepEngine()
    worker = await pool.start(engine, name="a")
    cut_everybody(admin)
    version = pool.publish()
    cut_everybody(admin)

    await pool.serving(version, worker)
    pool.submit()
    rollout = await pool.one()

    assert set(rollout.versions.tolist()) == {version}


async def test_cancelled_reads_leave_the_connections_in_step(server: EmbeddedServer) -> None:
    """Case 30."""
    queue = AsyncQueue(server.url, "q", patience=DEADLINE_S)
    await queue.open()
    stream = queue.keys["updates"]
    for _ in range(100):
        read = asyncio.create_task(queue.redis.xread({stream: "$"}, block=5000))
        await asyncio.sleep(0)
        while not read.done():  # Python 3.11 swallows one that comes with a success
            read.cancel()
            await asyncio.sleep(0)
        assert read.cancelled()

    answers = await asyncio.gather(*(queue.redis.echo(f"{i}") for i in range(50)))

    assert answers == [b"%d" % i for i in range(50)]
    await queue.close()


async def test_a_flushed_queue_is_set_up_and_filled_again(
    pool: Pool, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 31: the trainer offers again what it submitted; scripts are loaded again."""
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    ids = pool.submit(4)
    await pool.made(3)
    admin.flushall()
    admin.script_flush()
    engine.plan = lambda r: None

    with caplog.at_level(logging.WARNING):
        started = time.monotonic()
        groups = await pool.groups(4)
        seconds = time.monotonic() - started

    assert sorted(g.id for g in groups) == ids
    assert not worker.task.done()
    assert len(caplog.records) / max(1.0, seconds) < 10


@pytest.mark.parametrize("stale", ["yes", "no"], ids=["READONLY", "MASTERDOWN"])
async def test_a_replica_is_waited_for_until_it_is_a_master(
    pool: Pool, admin: redis.Redis, stale: str
) -> None:
    """Case 32, as in a failover: the master became a replica, which may not even be read.

    A master that becomes one breaks off every blocked read with an error of its own.
    """
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    admin.config_set("replica-serve-stale-data", stale)
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    engine.allow(5)
    await async_wait_until(lambda: engine.ended, "the engine is through")
    await async_wait_until(lambda: refusals(admin) > 3, "the worker was refused")
    admin.execute_command("REPLICAOF", "NO", "ONE")

    rollout = await pool.one()

    assert (len(rollout.response_ids), rollout.attempts, rollout.crashes) == (8, 1, 0)
    assert worker.state.failure is None
    assert not worker.task.done()


def refusals(admin: redis.Redis) -> int:
    """How often a replica refused a write, or for want of its master anything."""
    errors = admin.info("errorstats")
    return sum(errors.get(f"errorstat_{e}", {}).get("count", 0) for e in ("READONLY", "MASTERDOWN"))


async def test_a_redis_that_still_loads_is_waited_for(
    pool: Pool, server: EmbeddedServer, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, it reads its file for a while; to whoever asks it says LOADING."""
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    admin.mset({f"other:{i}": "x" * 100 for i in range(2000)})
    admin.bgrewriteaof()
    await async_wait_until(
        lambda: not admin.info("persistence")["aof_rewrite_in_progress"], "the file is rewritten"
    )
    server.kill()
    engine.allow(5)
    # Microseconds a key, and a look at the clients every so many bytes.
    slow = {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    server._config |= slow

    with caplog.at_level(logging.WARNING):
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await async_wait_until(lambda: "loading" in caplog.text, "somebody was told")
        assert not starting.done()
        rollout = await pool.one()
    await starting

    assert (len(rollout.response_ids), rollout.attempts, rollout.crashes) == (8, 1, 0)
    assert worker.state.failure is None


# the way to it


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    """Links named `trainer` and `worker` in front of the server."""
    proxy = Proxy(server.url.removeprefix("unix://"))
    yield proxy
    proxy.close()


@pytest.fixture
async def far_pool(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pool]:
    """A pool that reaches its server by TCP, through the proxy, and soon finds it mute."""
    monkeypatch.setattr(url, "SOCKET_TIMEOUT", 3.0)  # a BLOCK is 2 s
    (tmp_path / "far").mkdir()
    pool = Pool(
        f"redis://127.0.0.1:{proxy.port('trainer')}", tmp_path / "far", {"lease_ms": 20_000}
    )
    pool.url = f"redis://127.0.0.1:{proxy.port('worker')}"
    yield pool
    await pool.close()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_a_reset_in_the_middle_of_a_reply_costs_nothing(
    far_pool: Pool, proxy: Proxy, share: float
) -> None:
    """In the middle of a claim's, a checkpoint's, a finish's, of a batch's and of an ack's."""
    engine = StepEngine(lambda r: 3)
    worker = await far_pool.start(engine, name="a")
    proxy.drop_reply("worker", SCRIPTS["claim"].sha.encode(), share)
    far_pool.submit(4)
    await far_pool.made(3, "g0/0", "g1/0", "g2/0", "g3/0")
    proxy.drop_reply("worker", SCRIPTS["checkpoint"].sha.encode(), share)
    engine.allow(2)
    await far_pool.made(5, "g0/0", "g1/0", "g2/0", "g3/0")
    proxy.drop_reply("worker", SCRIPTS["finish"].sha.encode(), share)
    proxy.drop_reply("trainer", b"LRANGE", share)
    engine.allow(3)
    batch = await far_pool.batch(4)
    proxy.drop_reply("trainer", SCRIPTS["ack"].sha.encode(), share)
    acked = await asyncio.to_thread(batch.ack)

    assert acked in (0, 4), "a lost reply is asked for again, and then they are gone"
    assert sorted(g.id for g in batch) == ["g0", "g1", "g2", "g3"]
    rollouts = [r for g in batch for r in g.rollouts]
    assert {(len(r.response_ids), r.attempts, r.crashes) for r in rollouts} == {(8, 1, 0)}
    assert len(await far_pool.batch(1)) == 0
    assert worker.state.failure is None


async def test_a_redis_that_never_answers_is_waited_for_and_named(
    far_pool: Pool, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts every connection; the worker generates meanwhile, and both say what is wrong."""
    engine = StepEngine(lambda r: 3)
    worker = await far_pool.start(engine, name="a")
    far_pool.submit()
    await far_pool.made(3)
    with caplog.at_level(logging.WARNING, "rollq"):
        for link in ("trainer", "worker"):
            proxy.hold(link, 8.0)
        engine.allow(5)
        await far_pool.in_engine(engine, 0)
        rollout = await far_pool.one()

    assert (len(rollout.response_ids), rollout.attempts, rollout.crashes) == (8, 1, 0)
    for link, how_long in (("trainer", "for up to 60 s"), ("worker", "until it is back")):
        where = f"Redis at redis://127.0.0.1:{proxy.port(link)}"
        said = [r.getMessage() for r in caplog.records if where in r.getMessage()]
        assert any("is away since" in m and m.endswith(how_long) for m in said), said
        assert any("is back after" in m for m in said), said
    assert worker.state.failure is None


async def test_a_trainers_patience_with_a_mute_redis_ends(far_pool: Pool, proxy: Proxy) -> None:
    far_pool.client._queue.patience = 1.0
    proxy.hold("trainer", 20.0)
    with pytest.raises(
        RedisUnavailable,
        match=rf"127\.0\.0\.1:{proxy.port('trainer')} did not answer for .*can be reached",
    ):
        await asyncio.to_thread(far_pool.client.status)


async def test_a_rotated_password_is_taken_up(
    server: EmbeddedServer,
    admin: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 32: everybody is cut off, and comes back with the new password of the file."""
    secret = tmp_path / "password"
    secret.write_text("one\n")
    monkeypatch.setenv(PASSWORD_FILE, str(secret))
    admin.config_set("requirepass", "one")
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {})
    engine = StepEngine(lambda r: 3)
    await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)

    admin.config_set("requirepass", "two")
    cut_everybody(admin)
    engine.allow(5)
    await async_wait_until(lambda: engine.ended, "the engine is through")
    secret.write_text("two\n")
    rollout = await pool.one()

    assert (len(rollout.response_ids), rollout.attempts, rollout.crashes) == (8, 1, 0)
    await pool.close()
    admin.execute_command("AUTH", "two")


async def test_what_the_last_second_held_is_made_good(
    pool: Pool, server: EmbeddedServer, admin: redis.Redis, tmp_path: Path
) -> None:
    """Case 37: Redis comes back as it was before tokens, a publication and a submit."""
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    first = await pool.update(worker)
    pool.submit()
    await pool.made(3)
    data, before = server.directory, tmp_path / "before"
    shutil.copytree(data, before, ignore=shutil.ignore_patterns("*.sock", "*.log"))

    engine.allow(2)
    await pool.made(5)
    # The sample stays under the lease that Redis will know; one of a later claim would have to
    # run out.
    second = await pool.update(worker, policy="keep")
    late = pool.client.submit([[4, 5]], ids=["late"])
    await pool.made(5)
    server.kill()
    for path in data.iterdir():
        if path.name != "server.log":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(before, data, dirs_exist_ok=True)
    server.start()
    engine.plan = lambda r: None
    engine.allow(3)
    groups = {g.id: g for g in await pool.groups(2)}

    assert sorted(groups) == ["g0", *late]
    third = pool.client.status().current
    assert third > second > first, "the lost publication was made again, as a newer version"
    (rollout,) = groups["g0"].rollouts
    assert len(rollout.response_ids) == 8
    assert rollout.crashes == 0
    assert pool.client.status().results == 0


LEASE_S = 2.0


async def test_nobody_is_blamed_for_a_time_without_redis(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """Case 38: for three lease times."""
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {"lease_ms": int(LEASE_S * 1000)})
    engine = StepEngine(lambda r: 3)
    for name in "ab":
        await pool.start(engine if name == "a" else StepEngine(lambda r: 3), name=name)
    pool.submit(4)
    await pool.made(3, "g0/0", "g1/0", "g2/0", "g3/0")

    server.kill()
    until = time.monotonic() + 3 * LEASE_S
    await async_wait_until(lambda: time.monotonic() > until, "three leases passed")
    await asyncio.to_thread(server.start)
    for running in pool.workers.values():
        running.worker.state.engine.allow(5)  # type: ignore[attr-defined]
    groups = await pool.groups(4)

    assert {(r.attempts, r.crashes) for g in groups for r in g.rollouts} == {(1, 0)}
    with redis.Redis.from_url(server.url) as client:
        stats = client.hgetall(QueueKeys("q")["stats"])
    assert b"reaped" not in stats
    await pool.close()
