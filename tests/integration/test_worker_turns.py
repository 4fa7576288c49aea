"""Rolling updates: some of a pool load while the others generate, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator

import pytest

from producer import SamplingParams, WeightsRejected
from tests.integration.contract import Driver, heartbeat
from tests.integration.pool import Pool, Processes, Running
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until
from workers import turns
from workers.worker import EXIT_FAILED


async def two(pool: Pool, tokens: int = 3) -> tuple[list[StepEngine], list[Running]]:
    """Workers a and b, each with a sample of which it makes so many tokens and then waits."""
    engines = [StepEngine(lambda r: tokens) for _ in "ab"]
    for engine in engines:
        engine.load_gate.clear()
    workers = []
    for i, engine in enumerate(engines):
        name = "ab"[i]
        workers.append(await pool.start(engine, name=name, max_samples=1, first_token_seconds=60))
        pool.client.submit([[1, 2, 3]], SamplingParams(max_tokens=8), ids=[f"g{i}"])
        await pool.made(tokens, f"g{i}/0")
    await all_say_that_they_serve(pool)
    return engines, workers


async def all_say_that_they_serve(pool: Pool) -> None:
    """A heartbeat may have been on its way as they came to."""
    await async_wait_until(
        lambda: [w.state for w in pool.client.status().workers] == ["serving"] * len(pool.workers),
        "all say that they serve",
    )


async def first_and_other(workers: list[Running]) -> tuple[Running, Running]:
    """The one that loads, and the one that waits for its turn, its files verified."""
    await async_wait_until(
        lambda: sum(w.state.phase == "updating" for w in workers) == 1, "one loads"
    )
    first, other = sorted(workers, key=lambda w: w.state.phase != "updating")
    return first, other


async def waits(driver: Driver, worker: Running) -> None:
    name = worker.state.settings.name
    await async_wait_until(
        lambda: driver.redis.zscore(driver.keys["line"], name) is not None,
        f"{name} waits for its turn",
    )


async def test_one_loads_while_the_other_generates(pool: Pool, driver: Driver) -> None:
    """By default half of two; what the first hands back, the other may take."""
    engines, workers = await two(pool)
    pool.publish()
    first, other = await first_and_other(workers)
    await waits(driver, other)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}

    assert (other.state.phase, mine[other].paused, mine[first].paused) == ("serving", [], ["abort"])
    mine[other].plan = lambda r: None
    mine[other].allow(5)
    rollouts = {g.id: g.rollouts[0] for g in await pool.groups(2)}
    assert {s.version for r in rollouts.values() for s in r.segments} == {0}
    assert {r.segments[-1].worker for r in rollouts.values()} == {other.state.settings.name}

    for engine in engines:
        engine.load_gate.set()
    await pool.serving(1, *workers)
    await async_wait_until(
        lambda: driver.redis.exists(driver.keys["turns"]) == 0, "all turns are given back"
    )
    assert [e.loads for e in engines] == [[1], [1]]


async def test_all_at_once_if_asked_for(pool: Pool) -> None:
    engines, workers = await two(pool)

    pool.publish(max_updating=1.0)
    await async_wait_until(
        lambda: all(w.state.phase == "updating" for w in workers), "both have stopped"
    )
    for engine in engines:
        engine.plan = lambda r: None
        engine.load_gate.set()
    await pool.serving(1, *workers)
    await pool.groups(2)


@pytest.mark.parametrize("policy", ["requeue", "keep", "finish"])
async def test_each_has_its_turn_whatever_the_policy(
    pool: Pool, driver: Driver, policy: str
) -> None:
    engines, workers = await two(pool)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}
    pool.publish(policy=policy, deadline_s=60)
    first, other = await first_and_other(workers)
    await waits(driver, other)
    for engine in engines:
        engine.plan = lambda r: None
        engine.load_gate.set()

    # To finish, the first one needs its own sample's end; the other generates on.
    if policy == "finish":
        assert mine[first].paused == []
        mine[first].allow(5)
    await async_wait_until(lambda: first.state.version == 1, "the first one has loaded")
    if policy == "keep":
        assert other.state.phase == "serving", "the first one has not made a token again"
        mine[first].allow(5)
    if policy == "finish":
        await async_wait_until(lambda: other.state.phase == "updating", "it is the other's turn")
        mine[other].allow(5)
    if policy == "keep":
        await async_wait_until(lambda: other.state.version == 1, "the other has loaded")
        mine[other].allow(5)
    await pool.serving(1, *workers)
    groups = await pool.groups(2)

    runs = [[(s.version, s.tokens) for s in g.rollouts[0].segments] for g in groups]
    assert runs == [[(0, 8)] if policy == "finish" else [(0, 3), (1, 5)]] * 2
    assert sum(g.rollouts[0].interruptions for g in groups) == (2 if policy == "requeue" else 0)


async def test_the_next_one_stops_only_when_the_first_one_generates_again(
    pool: Pool, driver: Driver
) -> None:
    engines, workers = await two(pool)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}
    pool.publish()
    first, other = await first_and_other(workers)
    await waits(driver, other)
    mine[first].plan = lambda r: 0  # its first token takes long
    mine[first].load_gate.set()
    await pool.serving(1, first)
    await pool.in_engine(mine[first], 1)

    assert other.state.phase == "serving"
    await waits(driver, other)
    mine[first].plan = mine[other].plan = lambda r: None
    mine[other].load_gate.set()
    mine[first].allow(5)
    await pool.serving(1, other)
    await pool.groups(2)


async def test_the_next_one_is_told(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not find out by itself."""
    monkeypatch.setattr(turns, "_ASK_AGAIN", 600.0)
    engines, workers = await two(pool)
    for engine in engines:
        engine.load_gate.set()

    pool.publish()

    await pool.serving(1, *workers)
    for engine in engines:
        await pool.in_engine(engine, 1)
        engine.allow(5)
    await pool.groups(2)


async def test_one_that_waits_goes_straight_to_the_newest(pool: Pool, driver: Driver) -> None:
    engines, workers = await two(pool)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}
    pool.publish()
    first, other = await first_and_other(workers)
    await waits(driver, other)

    for _ in range(3):
        version = pool.publish()
    await async_wait_until(lambda: other.state.loading == version, "it fetches the newest")
    await waits(driver, other)
    for engine in engines:
        engine.plan = lambda r: None
        engine.load_gate.set()
    await pool.serving(version, *workers)
    await pool.groups(2)

    assert (mine[first].loads, mine[other].loads) == ([1, 4], [4])


async def test_one_that_waits_for_what_turns_bad_goes_on_as_it_was(
    pool: Pool, driver: Driver
) -> None:
    """Another one failed; with the two of them all that live have."""
    engines, workers = await two(pool)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}
    version = pool.publish()
    first, other = await first_and_other(workers)
    await waits(driver, other)
    for worker in workers:
        driver.queue.call(
            "confirm", worker=worker.state.settings.name, version=version, error="will not do"
        )
    await async_wait_until(lambda: other.state.loading == -1, "it gave the version up")

    assert (mine[other].paused, other.state.phase, other.state.version) == ([], "serving", 0)
    assert driver.redis.exists(driver.keys["line"]) == 0
    mine[other].plan = lambda r: None
    mine[other].allow(5)
    mine[first].load_gate.set()
    # It cannot serve what it has loaded, and must start again.
    assert await first.ended() == EXIT_FAILED
    groups = await pool.groups(2)
    assert {v for g in groups for v in g.rollouts[0].versions.tolist()} == {0}
    assert mine[other].loads == []


async def test_one_that_has_nothing_to_do_waits_for_nobody(pool: Pool, driver: Driver) -> None:
    """Its samples ended, and with weights that are not the newest it may claim no others."""
    engines, workers = await two(pool)
    mine = {w: e for w, e in zip(workers, engines, strict=True)}
    pool.publish()
    first, other = await first_and_other(workers)
    await waits(driver, other)
    mine[first].plan = lambda r: 0  # so that it keeps its turn
    mine[first].load_gate.set()
    await pool.serving(1, first)
    await pool.in_engine(mine[first], 1)
    mine[other].load_gate.set()
    assert other.state.phase == "serving"

    mine[other].allow(5)
    await pool.serving(1, other)

    assert mine[first].live, "which still holds its turn"
    mine[first].plan = lambda r: None
    mine[first].allow(5)
    await pool.groups(2)


async def test_one_that_joins_waits_for_nobody(pool: Pool, driver: Driver) -> None:
    engines, workers = await two(pool)
    for engine in engines:
        engine.load_gate.set()
        engine.plan = lambda r: 3 if len(r.prompt_ids) < 6 else 1
    await pool.update(*workers)
    for engine in engines:
        engine.load_gate.clear()
    pool.publish()
    _, other = await first_and_other(workers)
    await waits(driver, other)

    new = await pool.start(StepEngine(), name="new")
    await pool.serving(2, new)

    for engine in engines:
        engine.plan = lambda r: None
        engine.load_gate.set()
    await pool.serving(2, *workers)
    await pool.groups(2)


@pytest.fixture
def processes(pool: Pool) -> Iterator[Processes]:
    processes = Processes(pool)
    yield processes
    processes.close()


async def test_the_turn_of_one_that_is_killed_goes_on(pool: Pool, processes: Processes) -> None:
    """Its heart beats no more, and so it is off the list."""
    victim = processes("victim", sim="load_seconds=600,token_rate=100")
    await async_wait_until(lambda: status_of(pool, "victim") == "serving", "it serves")
    pool.publish()
    await async_wait_until(lambda: status_of(pool, "victim") == "updating", "it loads")
    engine = StepEngine(lambda r: 3)
    survivor = await pool.start(engine, name="survivor")
    pool.submit()
    await pool.made(3)
    assert engine.loads == []

    victim.send(signal.SIGKILL)
    # Not before: of those that live, some beat late on a busy machine.
    pool.new_client(consumer="1", limits={"worker_ttl_ms": 3000})
    engine.plan = lambda r: None

    await pool.serving(1, survivor)
    await pool.one()


def status_of(pool: Pool, name: str) -> str:
    return next((w.state for w in pool.client.status().workers if w.name == name), "")


# what the publisher is told


async def test_the_publisher_waits_for_all_that_live(pool: Pool) -> None:
    engines, workers = await two(pool)
    for engine in engines:
        engine.plan = lambda r: None
    publishing = asyncio.create_task(asyncio.to_thread(pool.publish, wait="all"))
    await first_and_other(workers)
    assert not publishing.done()
    for engine in engines:
        engine.load_gate.set()

    version = await publishing

    assert [w.state.version for w in workers] == [version] * 2
    await pool.groups(2)


async def test_the_publisher_does_not_wait_for_one_that_leaves(pool: Pool, driver: Driver) -> None:
    worker = await pool.start(StepEngine(), name="a")
    await all_say_that_they_serve(pool)
    driver.send(heartbeat("idle"))
    publishing = asyncio.create_task(asyncio.to_thread(pool.publish, wait="all"))
    await async_wait_until(lambda: worker.state.version == 1, "a serves it")
    assert not publishing.done()

    driver.queue.call("leave", worker="idle")

    assert await publishing == 1


async def test_the_publisher_hears_each_worker_s_reason(pool: Pool) -> None:
    engines = [StepEngine(), StepEngine()]
    workers = [await pool.start(e, name=n) for e, n in zip(engines, "ab", strict=True)]
    await all_say_that_they_serve(pool)
    for engine, words in zip(engines, ("no room", "no such tensor"), strict=True):
        engine.fail_loads = {1: words}
    with pytest.raises(WeightsRejected) as caught:
        await asyncio.to_thread(pool.publish, wait="all")
    for worker in workers:
        assert await worker.ended() == EXIT_FAILED

    assert caught.value.version == 1
    assert caught.value.reasons == {"a": "no room", "b": "no such tensor"}
    assert str(caught.value).startswith("version 1 could not be loaded, the pool serves 0: ")


async def test_the_publisher_hears_who_failed_while_others_serve(pool: Pool) -> None:
    mirror = pool.directory / "mirror"
    shutil.copytree(pool.weights_dir, mirror)
    a = await pool.start(StepEngine(), name="a")
    await pool.start(StepEngine(), name="b", weights_dir=mirror, fetch_seconds=0)
    await all_say_that_they_serve(pool)

    with pytest.raises(WeightsRejected) as caught:
        await asyncio.to_thread(pool.publish, wait="all")
    await pool.serving(1, a)

    path = mirror / pool.client.status().weights["1:path"] / "rollq-manifest.json"
    reason = f"{path} cannot be read: No such file or directory"
    assert caught.value.reasons == {"b": reason}
    assert str(caught.value) == f"version 1 is on 1 workers and 1 could not load it: b: {reason}"
    # Where one is enough, one is enough.
    assert await asyncio.to_thread(pool.publish, wait=1) == 2
    with pytest.raises(WeightsRejected, match="1 could not load it: b: "):
        await asyncio.to_thread(pool.publish, wait=2)
