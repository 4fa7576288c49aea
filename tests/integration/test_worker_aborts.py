"""Samples cut short, by an update or by the trainer, at every point of their way."""

from __future__ import annotations

import asyncio

from producer import SamplingParams
from producer.contract.states import State
from tests.integration.conftest import OpenPool
from tests.integration.pool import Pool, proved
from tests.integration.stepper import StepEngine, SteppedSim, attempts, sample_of
from tests.waiting import async_wait_until
from workers.engines import sim_model
from workers.engines.protocol import EngineRequest
from workers.engines.sim import SimEngine, SimSettings


def planned(**tokens: int) -> StepEngine:
    """An engine that lets each group's samples make so many tokens in every attempt."""
    return StepEngine(lambda r: tokens.get(sample_of(r.request_id).split("/")[0]))


# by an update


async def test_what_ends_in_the_tick_of_the_abort_is_finished(pool: Pool) -> None:
    """Case 9."""
    engine = planned(g0=3)
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)

    engine.at_pause = lambda: engine.end("g0/0", "stop")
    await pool.update(worker)
    rollout = await pool.one()

    assert (rollout.finish_reason, rollout.attempts, rollout.interruptions) == ("stop", 1, 0)
    assert rollout.versions.tolist() == [0, 0, 0]
    assert len(engine.requests) == 1


async def test_a_sample_that_waited_in_the_engine_leaves_no_trace_of_that(pool: Pool) -> None:
    """Case 11: aborted with 0 tokens."""
    engine = planned(g0=0)
    worker = await pool.start(engine, first_token_seconds=0.05)
    await pool.update(worker)
    pool.submit()
    await pool.in_engine(engine, 1)

    engine.plan = lambda request: None
    await pool.update(worker)
    rollout = await pool.one()

    assert engine.asked("g0/0") == [(3, 8, 0), (3, 8, 0)]
    assert [(s.version, s.tokens, s.attempt) for s in rollout.segments] == [(2, 8, 2)]
    assert (rollout.interruptions, rollout.recomputed_tokens) == (1, 0)


async def test_an_update_waits_for_a_sample_on_its_way_into_the_engine(pool: Pool) -> None:
    """Case 12: published between the claim and the engine's admission."""
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    await pool.update(worker)
    engine.add_gate.clear()
    pool.submit()
    await async_wait_until(lambda: engine.requests, "the sample is on its way")

    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "the update has begun")
    assert engine.paused == ["abort"]  # of version 1 only
    engine.add_gate.set()
    rollout = await pool.one()

    assert rollout.versions.tolist() == [1] * 3 + [2] * 5


async def test_a_claimed_sample_stands_at_the_gate_until_the_update_is_through(
    pool: Pool,
) -> None:
    """Case 12: its prompt is tokenized while the update waits for the first token of another."""
    engine = planned(g0=0)
    worker = await pool.start(engine, first_token_seconds=60)
    pool.submit()
    await pool.in_engine(engine, 1)
    engine.encode_gate.clear()
    pool.client.submit(["late"], SamplingParams(max_tokens=4), ids=["late"])
    await async_wait_until(lambda: "late/0" in worker.state.held, "it is claimed")
    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "the update has begun")

    engine.encode_gate.set()
    await async_wait_until(lambda: worker.state.held["late/0"].budget, "it could begin now")
    assert [sample_of(r.request_id) for r in engine.requests] == ["g0/0"]
    engine.plan = lambda request: None
    engine.allow(1)
    groups = {g.id: g.rollouts[0] for g in await pool.groups(2)}

    assert groups["late"].versions.tolist() == [1] * 4
    assert groups["g0"].versions.tolist() == [0] + [1] * 7


async def test_a_preempted_sample_returns_its_tokens_once(pool: Pool) -> None:
    """Case 13: a cache of 64 tokens holds 29 tokens of both, so one waits with what it made."""
    engine = SteppedSim(max_model_len=64, kv_cache_tokens=64, stream_interval=4)
    worker = await pool.start(engine, reserve_tokens=1, checkpoint_tokens=4)
    pool.submit(2, max_tokens=60)
    await engine.in_engine(2)

    def most_made() -> int:
        return max(len(r.response_ids) for i in range(2) if (r := pool.client.peek(f"g{i}/0")))

    engine.steps(40)
    await async_wait_until(lambda: most_made() > 32, "one sample was preempted")
    await pool.update(worker)
    going_on = asyncio.create_task(engine.go_on())
    rollouts = [g.rollouts[0] for g in await pool.groups(2)]
    going_on.cancel()

    assert [r.attempts for r in rollouts] == [2, 2]
    assert [len(r.response_ids) for r in rollouts] == [60, 60]
    assert min(sum(r.versions == 0) for r in rollouts) > 24


# by the trainer


async def test_a_cancelled_sample_stops_in_the_engine(pool: Pool) -> None:
    engine = planned(g0=3, g1=3)
    await pool.start(engine)
    pool.submit(2)
    await pool.made(3, "g0/0", "g1/0")

    assert pool.client.cancel(["g0"]) == 1
    engine.allow(1, "g0/0")  # its next report tells the worker
    await async_wait_until(lambda: engine.ended, "the engine is told")
    rollout = await pool.one()
    engine.allow(8)
    other = await pool.one()

    assert engine.ended == [("g0/0", "abort"), ("g1/0", "length")]
    assert (rollout.state, rollout.finish_reason, rollout.is_cancel) == (
        State.CANCELLED,
        "cancelled",
        True,
    )
    assert rollout.versions.tolist() == [0] * 3
    assert rollout.error == "cancelled by the trainer"
    assert (other.finish_reason, other.attempts) == ("length", 1)


async def test_a_silent_sample_is_stopped_by_the_next_renewal(open_pool: OpenPool) -> None:
    pool = open_pool(lease_ms=4000)
    engine = planned(g0=3)
    await pool.start(engine)
    pool.submit()
    await pool.made(3)

    pool.client.cancel(["g0/0"])

    # A quarter of the lease time later, without a further token.
    await async_wait_until(lambda: engine.ended == [("g0/0", "abort")], "the engine is told")


async def test_a_cancel_on_the_way_into_the_engine_ends_the_request(open_pool: OpenPool) -> None:
    """Nothing goes on generating that nobody wants."""
    pool = open_pool(lease_ms=4000)
    engine = planned(g0=0)
    worker = await pool.start(engine)
    engine.add_gate.clear()
    pool.submit(1)
    await async_wait_until(lambda: engine.requests, "the sample is on its way")
    pool.client.cancel(["g0"])
    held = worker.state.held["g0/0"]
    await async_wait_until(lambda: held.lost, "the worker knows")

    engine.add_gate.set()

    await async_wait_until(lambda: engine.ended == [("g0/0", "abort")], "the request is ended")


async def test_cancelling_what_is_not_there_or_over_changes_nothing(pool: Pool) -> None:
    """Case 10."""
    engine = planned(g1=3)
    await pool.start(engine)
    pool.submit(2)
    await pool.made(8, "g0/0")
    await pool.made(3, "g1/0")

    assert pool.client.cancel(["g0", "nobody", "nobody/7", "g1/5"]) == 0
    assert pool.client.cancel(["g1"]) == 1
    assert pool.client.cancel(["g1", "g1/0"]) == 0
    groups = await pool.groups(2)

    assert {g.id: g.rollouts[0].finish_reason for g in groups} == {
        "g0": "length",
        "g1": "cancelled",
    }
    assert pool.client.status().stats["cancelled"] == 1


async def test_aborting_what_is_not_there_or_over_changes_nothing() -> None:
    """Case 10, on the engine: finished, unknown, and aborted before."""
    engine = SimEngine(SimSettings(token_rate=50))
    await engine.start()
    ids = sim_model.encode("abc", 512)
    short = await engine.add(EngineRequest("short", ids, SamplingParams(max_tokens=1)))
    assert [o.finish_reason async for o in short] == ["length"]
    long = await engine.add(EngineRequest("long", ids, SamplingParams(max_tokens=100)))

    await engine.abort(["short", "unknown", "long"])
    await engine.abort(["long"])

    assert [o.finish_reason async for o in long][-1] == "abort"
    await engine.shutdown()


async def test_a_group_cancelled_while_it_waits_is_delivered_empty(pool: Pool) -> None:
    pool.submit(n=3)

    assert pool.client.cancel(["g0"]) == 3
    (group,) = await pool.groups()

    assert [r.finish_reason for r in group.rollouts] == ["cancelled"] * 3
    assert not group.trainable
    assert all(proved(r).attempts == 0 for r in group.rollouts)
