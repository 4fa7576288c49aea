"""Fencing, seen from the workers: who lost a lease changes nothing, and who holds one loses no
token, also when Redis came back with less than it had."""

from __future__ import annotations

from producer.contract.states import State
from tests.integration.conftest import OpenPool
from tests.integration.contract import Driver
from tests.integration.pool import Pool, proved
from tests.integration.stepper import StepEngine, attempts, sample_of
from tests.waiting import async_wait_until


async def taken_from(pool: Pool, driver: Driver, engine: StepEngine) -> None:
    """A sample with 3 tokens whose worker did not renew its lease in time."""
    await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    driver.expire("g0/0")
    assert driver.reap() == 1


async def test_a_late_final_is_refused(pool: Pool, driver: Driver) -> None:
    """Case 24: A stalls, B finishes, then A comes with its own end."""
    late, engine = StepEngine(lambda r: 3), StepEngine()
    late.max_num_seqs = 1  # it does not take the sample back itself
    await taken_from(pool, driver, late)
    await pool.start(engine, name="b")
    await async_wait_until(lambda: pool.client.status().results, "B has finished it")
    before = driver.dump()

    late.allow(5)
    await async_wait_until(lambda: late.ended, "A has all its tokens")
    a = pool.workers["a"]
    await async_wait_until(lambda: not a.state.held, "A is told")

    for key in ("sample", "chunks"):
        assert driver.dump()[driver.keys[key] + "g0/0"] == before[driver.keys[key] + "g0/0"]
    rollout = await pool.one()
    assert [(s.worker, s.tokens) for s in rollout.segments] == [("a", 3), ("b", 5)]
    assert driver.stats()["finished"] == 1


async def test_a_late_partial_is_refused_and_its_engine_stops(pool: Pool, driver: Driver) -> None:
    """Case 24: B is still at it when A reports on."""
    late, engine = StepEngine(lambda r: 3), StepEngine(lambda r: 2)
    late.max_num_seqs = 1
    await taken_from(pool, driver, late)
    await pool.start(engine, name="b")
    await pool.made(5)

    late.allow(1)
    await async_wait_until(lambda: late.ended == [("g0/0", "abort")], "A's engine is told")
    engine.allow(3)
    rollout = await pool.one()

    assert [(s.worker, s.tokens) for s in rollout.segments] == [("a", 3), ("b", 5)]
    assert len(late.requests) == 1


async def test_a_worker_that_takes_its_own_sample_back_ends_the_old_request(
    pool: Pool, driver: Driver
) -> None:
    engine = StepEngine(attempts(3))
    await taken_from(pool, driver, engine)

    rollout = await pool.one()

    assert engine.ended == [("g0/0", "abort"), ("g0/0", "length")]
    assert [(s.attempt, s.tokens) for s in rollout.segments] == [(1, 3), (2, 5)]
    assert (rollout.crashes, rollout.attempts) == (1, 2)


async def test_workers_take_back_what_a_dead_one_held(open_pool: OpenPool, driver: Driver) -> None:
    """No client waits, so it is the workers that look for it."""
    pool = open_pool(lease_ms=4000)
    pool.submit()
    driver.generate(driver.claim_one("gone"), 3)

    await pool.start(StepEngine(), name="b")

    await async_wait_until(lambda: driver.results() == [("g0", ["finished"])], "it is finished")
    assert driver.sample("g0/0")["crashes"] == "1"


async def test_chunks_that_redis_lost_are_sent_again(pool: Pool, driver: Driver) -> None:
    """It came back without its last second, which held two chunks of this attempt."""
    engine = StepEngine(lambda r: 1)
    await pool.start(engine)
    pool.submit()
    for made in (1, 2, 3, 4):
        await pool.made(made)
        engine.allow(1)
    await pool.made(5)
    driver.redis.rpop(driver.keys.chunks("g0/0"), 2)
    driver.redis.hset(driver.keys.sample("g0/0"), "tokens", 3)

    engine.allow(1)
    await pool.made(6)
    engine.allow(2)
    rollout = await pool.one()

    assert (rollout.state, rollout.attempts) == (State.FINISHED, 1)
    assert len(rollout.response_ids) == 8


async def test_chunks_that_redis_lost_are_sent_again_before_the_end(
    pool: Pool, driver: Driver
) -> None:
    engine = StepEngine(lambda r: 5)
    await pool.start(engine)
    pool.submit()
    await pool.made(5)
    driver.redis.delete(driver.keys.chunks("g0/0"))
    driver.redis.hset(driver.keys.sample("g0/0"), "tokens", 0)

    engine.allow(3)
    rollout = await pool.one()

    assert [(s.attempt, s.tokens) for s in rollout.segments] == [(1, 8)]


async def test_chunks_that_redis_lost_are_sent_again_before_a_hand_back(
    pool: Pool, driver: Driver
) -> None:
    worker = await pool.start(StepEngine(lambda r: 5), name="a")
    pool.submit()
    await pool.made(5)
    driver.redis.delete(driver.keys.chunks("g0/0"))
    driver.redis.hset(driver.keys.sample("g0/0"), "tokens", 0)

    await worker.drain()
    assert len(driver.tokens("g0/0")) == 5
    await pool.start(StepEngine(), name="b")
    rollout = await pool.one()

    assert [(s.worker, s.tokens) for s in rollout.segments] == [("a", 5), ("b", 3)]


async def test_a_worker_holds_one_at_a_time_that_crashed_twice(pool: Pool, driver: Driver) -> None:
    """With nothing new beside it, so that the next crash blames the right one."""
    pool.submit(5)
    for _ in range(2):
        driver.crash(*driver.claim(limit=3, suspects=3))
    engine = StepEngine(lambda r: 1)
    worker = await pool.start(engine)
    await pool.in_engine(engine, 1)

    assert [h.claim.crashes for h in worker.state.held.values()] == [2]
    assert sample_of(engine.requests[0].request_id) == "g0/0"
    engine.plan = lambda r: None
    engine.allow(8)
    groups = await pool.groups(5)

    assert sorted(g.rollouts[0].crashes for g in groups) == [0, 0, 2, 2, 2]


async def test_claims_stay_within_the_cache_and_the_sequences(pool: Pool) -> None:
    """What is held takes prompt + made + what is reserved for it."""
    engine = StepEngine(lambda r: 1)
    engine.kv_cache_tokens = 1000
    worker = await pool.start(engine, reserve_tokens=97)
    pool.submit(20, max_tokens=200)
    await pool.in_engine(engine, 9)  # of 100 tokens each, in 900

    assert len(worker.state.held) == 9
    engine.allow(9)  # grows what is held, and makes no room
    await pool.made(10, *[f"g{i}/0" for i in range(9)])
    assert len(worker.state.held) == 9
    engine.plan = lambda r: None
    engine.allow(200)
    groups = await pool.groups(20)

    assert all(proved(g.rollouts[0]).attempts == 1 for g in groups)


async def test_max_samples_bounds_what_is_held(pool: Pool) -> None:
    engine = StepEngine(lambda r: 1)
    worker = await pool.start(engine, max_samples=2)
    pool.submit(5)
    await pool.in_engine(engine, 2)

    engine.allow(7, "g0/0")
    await pool.in_engine(engine, 2)
    assert sorted(worker.state.held) == ["g1/0", "g2/0"]
    engine.plan = lambda r: None
    engine.allow(8)
    await pool.groups(5)
