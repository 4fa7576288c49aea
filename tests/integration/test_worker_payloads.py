"""Samples that can never run: each fails alone, once, by name, and its neighbours finish.

What the client refuses is put into the queue past it: other producers may speak the contract.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from producer import SamplingParams
from producer.contract.codec import pack, pack_ids
from producer.contract.messages import Job
from producer.contract.states import State
from tests.integration.contract import Driver
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.waiting import async_wait_until
from workers.engines.sim import SimEngine, SimSettings


def wire(**changes: Any) -> bytes:
    job = {"prompt": None, "params": {"max_tokens": 8}, "metadata": pack(None, "x")}
    return bytes(msgpack.packb(job | changes))


class _Bomb:
    """Unpickled, it would name itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a payload was unpickled",))


#: name -> (job bytes, prompt_ids bytes, what the error says)
HOSTILE: dict[str, tuple[bytes, bytes, str]] = {
    "pickle": (pickle.dumps(_Bomb()), pack_ids(np.array([1], np.int32)), "not a rollq payload"),
    "no msgpack": (b"\xc1\xff\x00", b"", "not a rollq payload"),
    "no job": (bytes(msgpack.packb([1, 2])), b"", "lacks its fields"),
    "wrong types": (wire(params=5), b"", "wrong type"),
    "unknown parameter": (wire(params={"beam": 4}), b"\1\0\0\0", "beam is not supported"),
    "bad parameter": (wire(params={"stop_token_ids": 5}), b"\1\0\0\0", "stop_token_ids"),
    "bad seed": (wire(params={"seed": 2**63}), b"\1\0\0\0", "seed"),
    "half an id": (wire(), b"\1\0\0", "has 3 bytes"),
    "negative id": (wire(), b"\1\0\0\0\xff\xff\xff\xff", "-1"),
    "no prompt at all": (wire(), b"", "prompt is empty"),
    "empty text": (wire(prompt=""), b"", "prompt is empty"),
    "junk messages": (wire(prompt=[1, 2]), b"", "chat message"),
}


async def test_hostile_payloads_fail_alone(pool: Pool, driver: Driver) -> None:
    """Case 33."""
    template = Job("x", SamplingParams(max_tokens=8), prompt_ids=np.array([1, 2], np.int32))
    items = []
    for number, (job, prompt_ids, _) in enumerate(HOSTILE.values()):
        item = list(replace(template, group_id=f"bad{number}").to_item())
        item[-2:] = [job, prompt_ids]
        items.append(item)
    assert driver.queue.call("enqueue", items) == [b"new"] * len(items)
    pool.submit(2)

    worker = await pool.start(SimEngine())
    groups = {g.id: g.rollouts[0] for g in await pool.batch(len(items) + 2)}

    for number, (name, (_, _, says)) in enumerate(HOSTILE.items()):
        rollout = groups[f"bad{number}"]
        assert (name, rollout.state, rollout.finish_reason) == (name, State.FAILED, "error")
        assert says in rollout.error, name
        assert (rollout.attempts, rollout.crashes, len(rollout.response_ids)) == (1, 0, 0)
    assert [groups[f"g{i}"].state for i in range(2)] == ["finished"] * 2
    assert worker.state.failure is None


async def test_chunks_that_are_none_fail_their_sample(pool: Pool, driver: Driver) -> None:
    pool.submit(2)
    held = driver.claim_one()
    driver.send(
        ("checkpoint", {"worker": "w"}, [(held.id, held.lease_token, 0, 3, 0, b"no msgpack")])
    )
    driver.crash(held)

    await pool.start(StepEngine())
    groups = {g.id: g.rollouts[0] for g in await pool.batch(2)}

    assert (groups["g0"].state, groups["g1"].state) == ("failed", "finished")
    assert "chunk of g0/0 is not a rollq payload" in groups["g0"].error


@pytest.mark.parametrize("length", [64, 65, 1000])
async def test_a_prompt_that_fills_the_models_length_fails_by_name(pool: Pool, length: int) -> None:
    """Case 33: also one that is longer than the whole cache."""
    await pool.start(SimEngine(SimSettings(max_model_len=64, kv_cache_tokens=128)))
    pool.client.submit([[5] * length, [5] * 63], SamplingParams(max_tokens=8), ids=["bad", "good"])

    groups = {g.id: g.rollouts[0] for g in await pool.groups(2)}

    assert (groups["bad"].state, groups["bad"].attempts) == (State.FAILED, 1)
    assert f"the prompt has {length} tokens" in groups["bad"].error
    assert "max_model_len" in groups["bad"].error
    assert (groups["good"].finish_reason, len(groups["good"].response_ids)) == ("length", 1)


async def test_an_id_beyond_the_vocabulary_fails_by_name(pool: Pool) -> None:
    """Case 33: only the model knows; other members of a batch go on."""
    await pool.start(SimEngine())
    pool.client.submit([[511], [512], [2**31 - 1]], SamplingParams(max_tokens=2), ids=list("abc"))

    groups = {g.id: g.rollouts[0] for g in await pool.groups(3)}

    assert groups["a"].state == "finished"
    assert "512" in groups["b"].error
    assert str(2**31 - 1) in groups["c"].error


async def test_a_prompt_of_text_that_has_no_tokens_fails_its_group(pool: Pool) -> None:
    engine = StepEngine()
    engine.template = lambda prompt: np.empty(0, np.int32)
    await pool.start(engine)
    pool.client.submit(["zero width"], SamplingParams(n=3, max_tokens=2))
    pool.submit()

    bad, good = sorted(await pool.groups(2), key=lambda g: len(g.prompt_ids))

    assert [r.error for r in bad.rollouts] == ["the prompt has no tokens"] * 3
    assert good.trainable


async def test_a_failure_is_reported_once_through_a_drain(pool: Pool) -> None:
    """The worker is told to stop with a failed and a running sample in its hands."""
    engine = StepEngine(lambda r: 3)
    engine.refuse["g0/0"] = "no"
    worker = await pool.start(engine)
    pool.submit(2)
    await pool.made(3, "g1/0")
    await worker.drain()

    await async_wait_until(lambda: pool.client.status().results == 1, "the failure is there")
    status = pool.client.status()
    assert (status.ready, status.leased, status.stats["failed"]) == (1, 0, 1)
