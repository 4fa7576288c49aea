"""Weights that do not load and engines that die: nobody serves what he did not prove, the
samples go on elsewhere, and the reason is told."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from producer import SamplingParams
from producer.contract.errors import EngineDead, WeightsRejected
from producer.contract.manifest import MANIFEST
from tests.integration.contract import Driver, heartbeat, publish
from tests.integration.pool import Pool, Running
from tests.integration.stepper import StepEngine, attempts
from tests.waiting import async_wait_until
from workers.engines.sim import SimEngine, SimSettings
from workers.worker import EXIT_FAILED, EXIT_OK


def published(pool: Pool, version: int) -> Path:
    return pool.weights_dir / pool.client.status().weights[f"{version}:path"]


def last_error(pool: Pool, name: str) -> str:
    return next(w.last_error for w in pool.client.status().workers if w.name == name)


# files


async def test_a_worker_with_a_truncated_file_neither_serves_nor_stops_the_others(
    pool: Pool, tmp_path: Path
) -> None:
    """Case 17."""
    good, bad = StepEngine(lambda r: 2), StepEngine(lambda r: 2)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    pool.submit(4)
    a = await pool.start(good, name="a", max_samples=2)
    await pool.made(2, "g0/0", "g1/0")
    b = await pool.start(bad, name="b", weights_dir=mirror, max_samples=2)
    await pool.made(2, "g2/0", "g3/0")

    # The mirror's copy is there before its notice, and too short.
    path, _ = pool.write()
    shutil.copytree(pool.weights_dir / path, mirror / path)
    file = mirror / path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    good.plan = bad.plan = lambda r: None
    version = pool.client.publish_weights(pool.weights_dir / path)
    await pool.serving(version, a)
    await async_wait_until(lambda: last_error(pool, "b"), "b says what is wrong")
    bad.allow(8)  # what it holds, it may finish under the old weights
    groups = await pool.groups(4)

    assert "model.safetensors has 8 bytes, its manifest says 9" in last_error(pool, "b")
    assert (b.state.version, bad.loads, bad.paused) == (0, [], [])
    assert {v for r in bad.requests for v in [r.request_id]} == {
        r.request_id for r in bad.requests if r.request_id.startswith(("g2", "g3"))
    }
    assert [g.rollouts[0].param_version_end for g in sorted(groups, key=lambda g: g.id)] == [
        1, 1, 0, 0,
    ]  # fmt: skip
    # Mended, it follows.
    shutil.copy(pool.weights_dir / path / "model.safetensors", file)
    await pool.serving(version, b)


async def test_a_manifest_that_is_late_is_waited_for(pool: Pool) -> None:
    """Case 18."""
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)
    path, _ = pool.write()
    manifest = pool.weights_dir / path / MANIFEST
    version = pool.client.publish_weights(pool.weights_dir / path)
    manifest.rename(manifest.with_suffix(".late"))

    # Whether it saw the manifest or not, it serves in the end and only then says so.
    engine.allow(1)
    manifest.with_suffix(".late").rename(manifest)
    await pool.serving(version, worker)
    await pool.one()


async def test_files_that_are_gone_are_never_loaded_and_the_newest_is(
    pool: Pool, driver: Driver
) -> None:
    """Case 18: a manifest without its files; then a publication with them."""
    driver.send(heartbeat("another"))  # so that nothing is given up by all
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)
    path, _ = pool.write()
    (pool.weights_dir / path / "model.safetensors").unlink()

    pool.client.publish_weights(pool.weights_dir / path)
    await async_wait_until(lambda: worker.state.last_error, "it tried")
    assert "model.safetensors cannot be read" in worker.state.last_error
    assert engine.paused == []
    version = pool.publish()
    await pool.serving(version, worker)
    rollout = await pool.one()

    assert engine.loads == [2]
    assert worker.state.last_error == ""
    assert [(s.version, s.tokens) for s in rollout.segments] == [(0, 3), (2, 5)]


async def test_files_that_no_worker_can_read_are_rejected(pool: Pool) -> None:
    """Case 40, before any engine is touched: the pool serves on, the publisher is told."""
    plan = attempts(3)  # of both: either may take the sample up again
    engines = [StepEngine(plan), StepEngine(plan)]
    workers = [await pool.start(e, name=n) for e, n in zip(engines, "ab", strict=True)]
    await async_wait_until(lambda: len(pool.client.status().workers) == 2, "both are known")
    path, _ = pool.write()
    (pool.weights_dir / path / "model.safetensors").unlink()

    version = pool.client.publish_weights(pool.weights_dir / path)
    with pytest.raises(WeightsRejected, match=r"version 1 could not be loaded.*serves 0.*cannot"):
        await asyncio.to_thread(pool.client.wait_for_version, version)
    pool.submit()
    await pool.made(3)
    assert {w.state.version for w in workers} == {0}
    await pool.update(*workers)
    rollout = await pool.one()

    assert [(s.version, s.tokens) for s in rollout.segments] == [(0, 3), (2, 5)]
    assert [e.loads for e in engines] == [[2], [2]]


async def test_a_path_outside_the_weights_directory_is_not_read(pool: Pool, driver: Driver) -> None:
    engine = StepEngine()
    worker = await pool.start(engine)
    outside = pool.files()

    driver.queue.call(
        "publish",
        request="r",
        digest="d",
        path=f"../{outside.name}",
        step=0,
        policy="requeue",
        deadline_ms=0,
        max_updating="50%",
        force=0,
        floor=0,
    )
    await async_wait_until(lambda: worker.state.last_error, "it looked at it")

    assert "leaves the weights directory" in worker.state.last_error
    assert engine.loads == []


async def test_files_that_are_not_those_that_were_published_are_not_loaded(
    pool: Pool, driver: Driver
) -> None:
    """Each fits its manifest, but somebody put other weights in their place."""
    path, digest = pool.write()
    other, _ = pool.write()
    shutil.rmtree(pool.weights_dir / path)
    shutil.copytree(pool.weights_dir / other, pool.weights_dir / path)
    engine = StepEngine()
    worker = await pool.start(engine)

    name, scalars, items = publish(digest=digest)
    driver.send((name, scalars | {"path": path}, items))
    await async_wait_until(lambda: worker.state.last_error, "it looked at it")

    assert f"published was {digest}" in worker.state.last_error
    assert engine.loads == []


# loads


async def test_weights_that_load_nowhere_are_given_up_by_the_pool(pool: Pool) -> None:
    """Case 40: each engine that tried must not serve; others start, at the last good version."""
    engines = [StepEngine(lambda r: 3), StepEngine(lambda r: 3)]
    workers: list[Running] = []
    for engine, name in zip(engines, "ab", strict=True):
        engine.fail_loads.add(2)
        engine.load_gate.clear()
        workers.append(await pool.start(engine, name=name, max_samples=1))
    pool.submit(2)
    await pool.made(3, "g0/0", "g1/0")
    for engine in engines:
        engine.load_gate.set()
    await pool.update(*workers)
    await pool.made(6, "g0/0", "g1/0")

    version = pool.publish()
    assert [await w.ended() for w in workers] == [EXIT_FAILED] * 2
    with pytest.raises(WeightsRejected, match=r"serves 1.*version 2 is set to fail"):
        await asyncio.to_thread(pool.client.wait_for_version, version)
    fresh = await pool.start(StepEngine(), name="c")
    groups = await pool.groups(2)
    await pool.update(fresh)

    assert "loading version 2 failed: version 2 is set to fail" in workers[0].state.failure
    for group in groups:
        assert group.rollouts[0].versions.tolist() == [0] * 3 + [1] * 5
        assert group.rollouts[0].crashes == 0
    assert fresh.state.engine.loads == [1, 3]


async def test_a_load_that_fails_under_frozen_samples_is_not_their_fault(pool: Pool) -> None:
    """Policy keep: three bad publications in a row must not dead-letter what they met."""
    pool.submit()
    for name in "abc":
        engine = StepEngine(attempts(1))
        engine.fail_loads = {1, 2, 3}
        worker = await pool.start(engine, name=name)
        await pool.in_engine(engine, 1)
        pool.publish(policy="keep")
        assert await worker.ended() == EXIT_FAILED
    await pool.start(StepEngine(), name="d")
    rollout = await pool.one()

    assert (rollout.finish_reason, rollout.crashes, rollout.interruptions) == ("length", 0, 3)


async def test_after_good_failed_and_late_updates_samples_finish_or_the_worker_is_gone(
    pool: Pool,
) -> None:
    """Case 19, with a real clock: loads take longer than the updates come."""
    engine = SimEngine(SimSettings(token_rate=400, load_seconds=0.05, fail_versions=(5,)))
    worker = await pool.start(engine, name="a")
    pool.submit(4, max_tokens=300)
    for _ in range(4):
        pool.publish()
        await async_wait_until(lambda: worker.state.phase == "updating", "an update has begun")
    await pool.serving(4, worker)
    pool.publish()
    assert await worker.ended() == EXIT_FAILED
    assert [w.name for w in pool.client.status().workers] == []
    await pool.start(SimEngine(), name="b")
    groups = await pool.groups(4)

    assert {len(g.rollouts[0].response_ids) for g in groups} == {300}
    assert sum(g.rollouts[0].crashes for g in groups) == 0


# engines


async def test_a_worker_that_is_stopped_as_it_starts_ends(pool: Pool) -> None:
    """At whatever its tasks are, over and over."""
    for _ in range(20):
        worker = await pool.start(StepEngine(), name="a")
        assert await worker.drain() == EXIT_OK
    assert pool.client.status().workers == ()


async def test_an_engines_death_hands_its_samples_to_others(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    pool.submit(3)
    await pool.made(3, "g0/0", "g1/0", "g2/0")

    engine.crash("out of memory")
    assert await worker.ended() == EXIT_FAILED
    assert "out of memory" in worker.state.failure
    await pool.start(StepEngine(), name="b")
    groups = await pool.groups(3)

    for group in groups:
        (rollout,) = group.rollouts
        assert [(s.tokens, s.worker) for s in rollout.segments] == [(3, "a"), (5, "b")]
        assert (rollout.crashes, rollout.attempts, rollout.interruptions) == (1, 2, 0)


async def test_a_sample_that_kills_every_engine_is_delivered_as_an_error(pool: Pool) -> None:
    """Its neighbours are not blamed for it."""
    poison = 0
    settings = SimSettings(crash_id=poison, token_rate=200, stream_interval=4)
    pool.client.submit([[3, poison]], SamplingParams(max_tokens=8), ids=["poison"])
    pool.submit(4, max_tokens=64)
    ended = 0
    worker = await pool.start(SimEngine(settings), name="w0")
    batch = asyncio.create_task(pool.groups(5))
    while not batch.done():
        await asyncio.wait({batch, worker.task}, return_when=asyncio.FIRST_COMPLETED)
        if worker.task.done():
            assert worker.task.result() == EXIT_FAILED
            ended += 1
            worker = await pool.start(SimEngine(settings), name=f"w{ended}")
    states = {g.id: g.rollouts[0] for g in batch.result()}

    assert ended == 3
    assert (states["poison"].state, states["poison"].finish_reason) == ("dead", "error")
    assert "died 3 times" in states["poison"].error
    assert "request poison/0-3-" in states["poison"].error
    assert [states[f"g{i}"].state for i in range(4)] == ["finished"] * 4
    assert pool.client.status().dead == 1


async def test_a_tokenizer_that_dies_with_its_engine_loses_no_sample(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3)

    def dies(prompt: object) -> None:
        engine.crash("the engine is gone")
        raise EngineDead("the engine is gone")

    engine.template = dies  # type: ignore[assignment]
    worker = await pool.start(engine, name="a")
    pool.submit(2)
    await pool.made(3, "g0/0", "g1/0")

    pool.client.submit(["text"], SamplingParams(max_tokens=8), ids=["text"])
    assert await worker.ended() == EXIT_FAILED
    assert pool.client.status().leased == 0
    await pool.start(StepEngine(), name="b")
    groups = await pool.groups(3)

    assert {g.rollouts[0].finish_reason for g in groups} == {"length"}


async def test_a_signal_does_not_cut_a_hand_back_short(pool: Pool) -> None:
    """The engine failed, the samples are on their way back, and now the first SIGTERM comes."""
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)

    worker.state.give_up("a failure")
    worker.worker.stop()

    assert await worker.ended() == EXIT_FAILED
    assert pool.client.status().ready == 1
