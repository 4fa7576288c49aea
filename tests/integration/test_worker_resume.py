"""What a second attempt asks of the engine: the rest of the sample, never more, never again.

Base case: prompt [1, 2, 3], max_tokens 8, weights v1, then v2 and so on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from producer import SamplingParams
from producer.contract.states import State
from tests.integration.contract import Driver
from tests.integration.pool import Pool, Running, proved
from tests.integration.stepper import StepEngine, attempts
from tests.waiting import async_wait_until
from workers.engines import sim_model


async def at_version_1(pool: Pool, engine: StepEngine, **settings: Any) -> Running:
    worker = await pool.start(engine, **settings)
    assert await pool.update(worker) == 1
    return worker


async def test_each_attempt_sends_all_ids_and_asks_for_the_rest(pool: Pool) -> None:
    """Case 1."""
    engine = StepEngine(attempts(3, 2))
    worker = await at_version_1(pool, engine)

    pool.submit()
    await pool.made(3)
    await pool.update(worker)
    await pool.made(5)
    await pool.update(worker)
    rollout = await pool.one()

    assert engine.asked("g0/0") == [(3, 8, 0), (6, 5, 0), (8, 3, 0)]
    assert [r.done for r in engine.requests] == [0, 3, 5]
    assert rollout.versions.tolist() == [1, 1, 1, 2, 2, 3, 3, 3]
    assert [(s.version, s.tokens, s.attempt) for s in rollout.segments] == [
        (1, 3, 1),
        (2, 2, 2),
        (3, 3, 3),
    ]
    assert (rollout.finish_reason, rollout.attempts, rollout.interruptions) == ("length", 3, 2)
    assert rollout.recomputed_tokens == 6 + 8


async def test_a_sample_cut_when_all_is_made_is_complete(pool: Pool) -> None:
    """Case 2: the engine itself ended it with `abort`, after the last token."""
    engine = StepEngine(attempts(7))
    worker = await at_version_1(pool, engine)

    pool.submit()
    await pool.made(7)
    # The last token comes in the tick of the abort, without an end of its own.
    engine.at_pause = lambda: engine.allow(1, ended=False)
    await pool.update(worker)
    engine.at_pause = lambda: None
    rollout = await pool.one()

    assert len(engine.requests) == 1
    assert engine.ended == [("g0/0", "abort")]
    assert (rollout.finish_reason, rollout.interruptions) == ("length", 0)
    assert rollout.versions.tolist() == [1] * 8


async def test_a_sample_whose_tokens_were_all_stored_is_not_sent_again(
    pool: Pool, driver: Driver
) -> None:
    """Case 2: its worker died between the last token and the commit."""
    engine = StepEngine(attempts(8))
    pool.submit()
    driver.crash(driver.generate(driver.claim_one(), 8))

    await pool.start(engine)
    (group,) = await pool.batch()

    assert engine.requests == []
    assert (group.rollouts[0].finish_reason, group.rollouts[0].crashes) == ("length", 1)
    assert group.rollouts[0].response_ids.tolist() == list(range(8))


async def test_a_sample_whose_last_stored_token_stops_it_is_not_sent_again(
    pool: Pool, driver: Driver
) -> None:
    """Case 9: nothing comes after EOS, also where its worker died before it told the end."""
    engine = StepEngine()
    pool.submit()
    driver.crash(driver.generate(driver.claim_one(), sim_model.EOS + 1))

    await pool.start(engine)
    (group,) = await pool.batch()

    assert engine.requests == []
    assert (group.rollouts[0].finish_reason, group.rollouts[0].crashes) == ("stop", 1)
    assert group.rollouts[0].response_ids.tolist() == [0, 1, sim_model.EOS]


@pytest.mark.parametrize(("made", "asks"), [(3, (6, 5, 2)), (6, (9, 2, 0))])
async def test_min_tokens_shrinks_by_what_is_there(
    pool: Pool, made: int, asks: tuple[int, int, int]
) -> None:
    """Case 3."""
    engine = StepEngine(attempts(made))
    worker = await at_version_1(pool, engine)

    pool.submit(min_tokens=5)
    await pool.made(made)
    await pool.update(worker)
    await pool.one()

    assert engine.asked("g0/0") == [(3, 8, 5), asks]


async def test_the_models_length_bounds_all_attempts_together(pool: Pool) -> None:
    """Case 4."""
    engine = StepEngine(attempts(3))
    engine.max_model_len = 10
    worker = await at_version_1(pool, engine)

    pool.client.submit([[1, 2, 3, 4, 5, 6]], SamplingParams(max_tokens=8), ids=["g0"])
    await pool.made(3)
    await pool.update(worker)
    rollout = await pool.one()

    assert engine.asked("g0/0") == [(6, 4, 0), (9, 1, 0)]
    assert (rollout.finish_reason, rollout.error) == ("length", "")
    assert rollout.versions.tolist() == [1, 1, 1, 2]


async def test_without_max_tokens_the_models_length_is_the_bound(pool: Pool) -> None:
    engine = StepEngine(attempts(3))
    engine.max_model_len = 10
    worker = await at_version_1(pool, engine)

    pool.submit(max_tokens=None)
    await pool.made(3)
    await pool.update(worker)
    rollout = await pool.one()

    assert engine.asked("g0/0") == [(3, 7, 0), (6, 4, 0)]
    assert rollout.finish_reason == "length"


async def test_state_that_cannot_be_handed_over_starts_again(pool: Pool) -> None:
    """Case 5; the refusal at submit is a test of the prompts."""
    engine = StepEngine(attempts(3))
    worker = await at_version_1(pool, engine)

    pool.client.submit(
        [[1, 2, 3]],
        SamplingParams(max_tokens=8, frequency_penalty=0.5),
        ids=["g0"],
        allow_restart=True,
    )
    await pool.made(3)
    await pool.update(worker)
    rollout = await pool.one()

    assert engine.asked("g0/0") == [(3, 8, 0), (3, 8, 0)]
    assert rollout.versions.tolist() == [2] * 8
    assert pool.client.status().stats["wasted_tokens"] == 3


async def test_a_chat_prompt_is_tokenized_once(pool: Pool, driver: Driver) -> None:
    """Case 6: the template holds the date, and the first attempt dies without a token."""
    engine = StepEngine(attempts(0))
    days = iter(range(100))
    engine.template = lambda chat: sim_model.encode(f"{next(days)}: {chat[0]['content']}", 512)
    worker = await pool.start(engine)

    pool.client.submit(
        [[{"role": "user", "content": "hello"}]], SamplingParams(n=2, max_tokens=4), ids=["g0"]
    )
    await pool.in_engine(engine, 2)
    engine.crash()
    assert await worker.ended() == 1
    later = StepEngine(attempts())
    later.template = engine.template
    await pool.start(later)
    (group,) = await pool.groups()

    sent = {tuple(r.prompt_ids.tolist()) for r in engine.requests + later.requests}
    assert sent == {tuple(sim_model.encode("0: hello", 512).tolist())}
    assert [r.crashes for r in group.rollouts] == [1, 1]


async def test_two_workers_that_tokenize_one_group_agree(pool: Pool) -> None:
    """Each has a member and its own idea of the date; the first that said it is right."""
    engines = [StepEngine(), StepEngine()]
    for engine, day in zip(engines, ("monday", "tuesday"), strict=True):
        engine.template = partial(lambda day, prompt: sim_model.encode(day, 512), day)
        engine.encode_gate.clear()
        worker = await pool.start(engine, name=day, max_samples=1)
        if day == "monday":
            pool.client.submit(["what day is it?"], SamplingParams(n=2, max_tokens=4))
        await async_wait_until(worker.state.held.copy, "each has one")

    engines[1].encode_gate.set()
    await async_wait_until(lambda: engines[1].requests, "tuesday was first")
    engines[0].encode_gate.set()
    await pool.groups()

    sent = {tuple(r.prompt_ids.tolist()) for e in engines for r in e.requests}
    assert sent == {tuple(sim_model.encode("tuesday", 512).tolist())}


async def test_sampled_ids_are_sent_as_they_were_sampled(pool: Pool) -> None:
    """Case 7: ids above 258 decode to text that encodes to other ids."""
    engine = StepEngine(attempts(16))
    worker = await pool.start(engine)

    pool.submit(max_tokens=32)
    await pool.made(16)
    first = pool.client.peek("g0/0")
    assert first is not None
    await pool.update(worker)
    await pool.one()

    text = sim_model.decode(first.response_ids, skip_special_tokens=True)
    assert sim_model.encode(text, 512).tolist() != first.response_ids.tolist()
    assert engine.requests[1].prompt_ids.tolist() == [1, 2, 3, *first.response_ids.tolist()]


async def test_members_of_one_request_share_nothing(pool: Pool) -> None:
    """Case 8: one member is interrupted, the other's parameters stay as they were."""
    engine = StepEngine(lambda request: 3 if request.request_id.startswith("g0/0") else 0)
    worker = await at_version_1(pool, engine, first_token_seconds=0.05)

    pool.submit(n=2, min_tokens=4)
    await pool.made(3)
    await pool.update(worker)
    await pool.made(6)
    await pool.in_engine(engine, 2)
    engine.plan = lambda request: None
    await pool.update(worker)
    await pool.groups()

    assert engine.asked("g0/0") == [(3, 8, 4), (6, 5, 1), (9, 2, 0)]
    assert engine.asked("g0/1") == [(3, 8, 4), (3, 8, 4), (3, 8, 4)]


async def test_a_seed_is_never_replayed_and_members_differ(pool: Pool) -> None:
    """Same seed, same interruptions: the same tokens, also in another group."""
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine)
    params = SamplingParams(n=2, max_tokens=8, seed=7)
    pool.client.submit([[1, 2, 3]] * 2, params, ids=["g0", "g1"])
    await pool.made(3, "g0/0", "g0/1", "g1/0", "g1/1")
    await pool.update(worker)
    batch = await pool.batch(2)

    g0, g1 = ([proved(r, seeded=True).response_ids.tolist() for r in g.rollouts] for g in batch)
    assert g0 == g1
    assert g0[0] != g0[1]
    seeds = [r.params.seed for r in engine.requests]
    assert len(set(seeds)) == 4
    assert None not in seeds


async def test_a_greedy_sample_interrupted_often_equals_the_uninterrupted_one(pool: Pool) -> None:
    engine = StepEngine(attempts(*[5] * 7))
    worker = await pool.start(engine)

    pool.submit(max_tokens=40, temperature=0.0)
    for made in range(5, 40, 5):
        await pool.made(made)
        await pool.update(worker)
    rollout = await pool.one()

    assert [s.tokens for s in rollout.segments] == [5] * 8
    assert np.all(rollout.versions == np.repeat(np.arange(8), 5))
    assert proved(rollout).state is State.FINISHED
