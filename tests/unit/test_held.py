"""A held sample: what was made becomes chunks, and what is missing is sent again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.connection import AsyncQueue
from producer.contract.messages import Chunk, Claim
from producer.contract.sampling import SamplingParams
from tests.fuzz import search
from tests.waiting import DEADLINE_S
from workers.engines.protocol import EngineOutput
from workers.held import Held, Outcome
from workers.settings import WorkerSettings
from workers.state import WorkerState


def held(attempt: int = 1) -> Held:
    return Held(
        claim=Claim("g/0", f"{attempt}:x", "g", 0, attempt, 0, 0, 0, b"", b""),
        params=SamplingParams(),
        prompt_ids=np.array([1], np.int32),
        worker="w",
        logprobs_mode="processed_logprobs",
        budget=100,
    )


def output(first: int, *runs: tuple[int, int]) -> EngineOutput:
    """Tokens first, first + 1, ... in runs of (version, tokens)."""
    ids = np.arange(first, first + sum(n for _, n in runs), dtype=np.int32)
    return EngineOutput(ids, -ids.astype(np.float32), runs)


def contents(h: Held) -> list[tuple[int, int, list[int]]]:
    return [(p.offset, p.chunk.version, p.chunk.token_ids.tolist()) for p in h.pieces]


def test_outputs_join_to_one_chunk_a_version() -> None:
    h = held()
    h.add_output(output(0, (1, 2)))
    h.add_output(output(2, (1, 1), (2, 2)))
    h.add_output(output(5, (2, 1)))

    assert (h.made, h.fresh, contents(h)) == (6, 6, [])
    assert h.response_ids().tolist() == [0, 1, 2, 3, 4, 5]
    assert contents(h) == [(0, 1, [0, 1, 2]), (3, 2, [3, 4, 5])]


def test_an_output_without_tokens_leaves_no_chunk() -> None:
    h = held()
    h.add_output(output(0))

    assert h.response_ids().tolist() == []
    assert h.pieces == []
    assert not h.due(1, 0.0)


def test_a_resumed_sample_goes_on_after_what_was_stored() -> None:
    first = held()
    first.add_output(output(0, (1, 3)))
    first.seal()
    second = held(attempt=2)
    second.add_stored(first.pieces[0].chunk, first.pieces[0].data)

    assert (second.made, second.stored, second.fresh) == (3, 3, 0)
    assert second.unstored() == []
    second.add_output(output(3, (2, 2)))
    second.seal()

    assert contents(second) == [(0, 1, [0, 1, 2]), (3, 2, [3, 4])]
    assert [p.offset for p in second.unstored()] == [3]
    assert [p.chunk.attempt for p in second.pieces] == [1, 2]


def test_everything_can_be_sent_again_from_any_chunk() -> None:
    h = held()
    for first in (0, 2, 4):
        h.add_output(output(first, (1, 2)))
        h.seal()

    for stored, missing in [(6, []), (4, [4]), (2, [2, 4]), (0, [0, 2, 4])]:
        h.stored = stored
        assert [p.offset for p in h.unstored()] == missing


@pytest.mark.parametrize(
    ("tokens", "seconds", "due"), [(3, 60.0, True), (4, 60.0, False), (4, 0.0, True)]
)
def test_a_checkpoint_is_due_by_tokens_or_by_age(tokens: int, seconds: float, due: bool) -> None:
    h = held()
    h.add_output(output(0, (1, 3)))

    assert h.due(tokens, seconds) is due


def test_age_counts_from_the_oldest_unsealed_token() -> None:
    h = held()
    h.add_output(output(0, (1, 1)))
    first = time.monotonic()
    h.add_output(output(1, (1, 1)))
    waited = time.monotonic() - first

    assert h.due(100, waited)
    h.seal()
    h.stored = 2
    assert not h.due(100, 0.0)


def test_the_end_and_what_redis_lost_are_always_due() -> None:
    h = held()
    assert not h.due(1, 0.0)
    h.outcome = Outcome("release", "update")
    assert h.due(100, 100.0)
    h.outcome = None
    h.add_output(output(0, (1, 2)))
    h.seal()
    assert h.due(100, 100.0)
    h.stored = 2
    assert not h.due(100, 100.0)


def test_a_long_run_is_cut_into_chunks_that_a_payload_can_carry() -> None:
    """Case 33: Redis was away for long, or checkpoints are rare."""
    h = held()
    h.add_output(output(0, (1, 1_000_000)))

    h.seal()

    assert len(h.pieces) > 1
    assert max(len(p.data) for p in h.pieces) < 1 << 20
    assert [p.offset for p in h.pieces[1:]] == [p.end for p in h.pieces[:-1]]
    assert (h.response_ids() == np.arange(1_000_000)).all()


RUNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3)


@search(100)
@given(st.lists(st.tuples(RUNS, st.booleans())))
def test_chunks_hold_every_token_once_in_order_under_its_version(
    outputs: list[tuple[list[tuple[int, int]], bool]],
) -> None:
    h, versions = held(), []
    for runs, seal in outputs:
        h.add_output(output(h.made, *runs))
        versions += [v for v, n in runs for _ in range(n)]
        if seal:
            h.seal()

    assert h.response_ids().tolist() == list(range(h.made))
    assert [p.chunk.version for p in h.pieces for _ in p.chunk.token_ids] == versions
    stored = [Chunk.from_wire(p.data, "x") for p in h.pieces]
    assert [c.token_ids.tolist() for c in stored] == [p.chunk.token_ids.tolist() for p in h.pieces]
    assert all((c.logprobs == -c.token_ids).all() for c in stored)


# in the worker's hands


def state() -> WorkerState:
    engine: Any = None
    return WorkerState(WorkerSettings("unix:///nowhere"), AsyncQueue("unix:///nowhere"), engine)


async def test_an_answer_to_an_earlier_attempt_leaves_the_next_one_alone() -> None:
    """The sample was released and claimed again before the release's reply came in."""
    s = state()
    first, second = held(1), held(2)
    s.held["g/0"] = first
    s.held["g/0"] = second

    s.drop(first)
    assert s.held == {"g/0": second}
    s.lose(first)
    assert s.held == {"g/0": second}
    assert not second.lost
    s.drop(second)
    assert s.held == {}


async def test_only_samples_with_a_request_and_no_end_are_in_the_engine() -> None:
    s = state()
    for name in ("waits", "runs", "ended"):
        s.held[name] = held()
    s.held["runs"].request_id = s.held["ended"].request_id = "r"
    s.held["ended"].outcome = Outcome("finish", "stop")

    assert s.in_engine() == [s.held["runs"]]
    assert s.held["runs"].waits_for_token
    s.held["runs"].add_output(output(0, (1, 1)))
    assert not s.held["runs"].waits_for_token


async def test_until_gives_up_at_its_time_and_sees_what_moved() -> None:
    s = state()

    assert not await s.until(lambda: False, 0.01)
    assert await s.until(lambda: True, 0.0)
    s.held["g/0"] = held()
    waiting = asyncio.create_task(s.until(lambda: not s.held, DEADLINE_S))
    await asyncio.sleep(0)
    s.drop(s.held["g/0"])
    assert await waiting


def test_the_first_reason_to_give_up_counts() -> None:
    s = state()
    s.give_up("the engine died")
    s.give_up("and then this")

    assert (s.failure, s.last_error) == ("the engine died", "the engine died")
    assert s.stop.is_set()


def test_only_a_change_of_the_level_wakes_the_updater() -> None:
    s = state()
    s.notice(0, 0)
    assert not s.level_changed.is_set()
    s.notice(2, 1)
    assert (s.current, s.last_good) == (2, 1)
    assert s.level_changed.is_set()
