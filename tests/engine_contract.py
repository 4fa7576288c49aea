"""What every engine must do, whichever it is; `test_sim_engine` and `test_vllm_engine` run it.

A module that imports these tests has a fixture `bench`: an engine that runs, of at most 8
sequences and a small KV cache, with two sets of weights and something that knows what
greedy sampling gives under each.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import numpy as np
import pytest

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams
from tests.waiting import async_wait_until
from workers.engines.protocol import Engine, EngineOutput, EngineRequest, Response, Stop

#: Set in both engines under test.
MAX_NUM_SEQS = 8
CHECKPOINT_TOKENS = 4
MAX_MODEL_LEN = 512
#: Generous: nothing here takes longer but on a machine that is busy with other things.
DEADLINE = 120.0

_ids = count()


@dataclass
class Made:
    """All outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "nothing comes after the last output"
        assert len(output.token_ids) == len(output.logprobs)
        assert sum(n for _, n in output.versions) == len(output.token_ids)
        assert all(n > 0 for _, n in output.versions)
        assert output.token_ids.dtype == np.int32
        assert output.logprobs.dtype == np.float32
        self.token_ids += output.token_ids.tolist()
        self.logprobs += output.logprobs.tolist()
        self.versions += [version for version, n in output.versions for _ in range(n)]
        self.sizes.append(len(output.token_ids))
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class Bench(Protocol):
    engine: Engine

    version: int
    """What the engine serves now."""

    async def load_other(self) -> int:
        """Load the set of weights that is not in use, as a new version; the engine is paused."""

    def greedy(self, prompt_ids: Sequence[int], made: Made) -> tuple[list[int], list[float]]:
        """What greedy sampling gives after the prompt and each beginning of the response,
        under the version that the token is labelled with."""


def request(ids: Sequence[int], **params: Any) -> EngineRequest:
    """Greedy and of up to 100 tokens unless it says otherwise."""
    params = {"temperature": 0.0, "max_tokens": 100, **params}
    return EngineRequest(f"r{next(_ids)}", np.array(ids, np.int32), SamplingParams(**params))


def long_request(ids: Sequence[int] = (5, 6, 7), tokens: int = 400) -> EngineRequest:
    return request(ids, ignore_eos=True, max_tokens=tokens)


async def collect(stream: AsyncIterator[EngineOutput], made: Made | None = None) -> Made:
    made = made if made is not None else Made()
    async with asyncio.timeout(DEADLINE):
        async for output in stream:
            made.add(output)
    assert made.finish_reason in ("stop", "length", "abort")
    return made


async def run(engine: Engine, asked: EngineRequest) -> Made:
    return await collect(await engine.add(asked))


async def text_of(engine: Engine, ids: Sequence[int], **params: Any) -> str:
    """Text of a response to a short prompt."""
    return await engine.text_of(response((5, 6, 7), ids, **params))


def response(prompt_ids: Sequence[int], ids: Sequence[int], **params: Any) -> Response:
    return Response(
        np.array(prompt_ids, np.int32), np.array(ids, np.int32), SamplingParams(**params)
    )


async def start(engine: Engine, asked: EngineRequest, tokens: int = 1) -> tuple[Any, Made]:
    """Add a request and wait until it made some tokens."""
    stream, made = await engine.add(asked), Made()
    async with asyncio.timeout(DEADLINE):
        while len(made.token_ids) < tokens:
            made.add(await anext(stream))
    return stream, made


async def interrupted(bench: Bench, asked: EngineRequest, at: Sequence[int]) -> Made:
    """Abort whenever so many tokens more are there, and go on with prompt + response."""
    whole, rest = Made(), asked
    for tokens in (*at, None):
        if tokens is None:
            last = await run(bench.engine, rest)
        else:
            stream, last = await start(bench.engine, rest, tokens)
            await bench.engine.pause("abort")
            await collect(stream, last)
            await bench.engine.resume()
        whole.token_ids += last.token_ids
        whole.logprobs += last.logprobs
        whole.versions += last.versions
        whole.finish_reason, whole.stop_reason = last.finish_reason, last.stop_reason
        left = (asked.params.max_tokens or 0) - len(whole.token_ids)
        if last.finish_reason != "abort" or left == 0:
            break
        rest = request(
            [*asked.prompt_ids.tolist(), *whole.token_ids],
            ignore_eos=asked.params.ignore_eos,
            max_tokens=left,
        )
    return whole


def assert_greedy(bench: Bench, prompt_ids: Sequence[int], made: Made) -> None:
    """Every token and logprob is what the weights of its label give at its place."""
    token_ids, logprobs = bench.greedy(prompt_ids, made)
    assert made.token_ids == token_ids
    np.testing.assert_allclose(made.logprobs, logprobs, atol=2e-3)


# Outputs


async def test_outputs_hold_every_token_once_with_its_logprob_and_version(bench: Bench) -> None:
    made = await run(bench.engine, long_request(tokens=50))

    assert len(made.token_ids) == 50
    assert made.finish_reason == "length"
    assert set(made.versions) == {bench.version}
    assert_greedy(bench, (5, 6, 7), made)


async def test_the_first_token_comes_at_once_and_then_whole_chunks(bench: Bench) -> None:
    made = await run(bench.engine, long_request(tokens=1 + 3 * CHECKPOINT_TOKENS))

    assert made.sizes[0] == 1
    assert all(size % CHECKPOINT_TOKENS == 0 for size in made.sizes[1:])


async def test_progress_grows_while_it_steps(bench: Bench) -> None:
    stream, _ = await start(bench.engine, long_request())
    before = bench.engine.progress

    await async_wait_until(lambda: bench.engine.progress > before, "a further step")
    await stream.aclose()


# Reasons


async def test_eos_ends_a_sample_with_stop(bench: Bench) -> None:
    for first in range(4, 60):
        made = await run(bench.engine, request([first, 5, 6]))
        if made.finish_reason == "stop":
            break

    assert made.finish_reason == "stop"
    assert made.stop_reason is None
    assert made.token_ids[-1] == 2, "EOS is the last of the ids"
    assert 2 not in made.token_ids[:-1]


async def test_a_stop_id_ends_a_sample_and_is_named(bench: Bench) -> None:
    free = await run(bench.engine, long_request(tokens=30))
    stop = free.token_ids[12]

    made = await run(
        bench.engine, request((5, 6, 7), ignore_eos=True, max_tokens=30, stop_token_ids=(stop,))
    )

    assert made.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (made.finish_reason, made.stop_reason) == ("stop", stop)


async def stopping_place(engine: Engine, free: Made, tokens: int = 2) -> tuple[str, int]:
    """A text of a few tokens in a response, and how many there are when it comes first."""
    for length in range(12, 100):
        stop, before, text = [
            await text_of(engine, ids)
            for ids in (
                free.token_ids[length - tokens : length],
                free.token_ids[: length - 1],
                free.token_ids[:length],
            )
        ]
        if len(stop) > 1 and stop not in before and text.endswith(stop) and "\ufffd" not in stop:
            return stop, length
    pytest.fail(f"no {tokens} tokens in a row will do")


async def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(bench: Bench) -> None:
    free = await run(bench.engine, long_request(tokens=100))
    stop, length = await stopping_place(bench.engine, free)

    made = await run(
        bench.engine, request((5, 6, 7), ignore_eos=True, max_tokens=100, stop=(stop,))
    )

    assert (made.finish_reason, made.stop_reason) == ("stop", stop)
    assert made.token_ids == free.token_ids[:length]


async def test_a_stop_string_may_begin_before_an_interruption(bench: Bench) -> None:
    free = await run(bench.engine, long_request(tokens=100))
    stop, length = await stopping_place(bench.engine, free)

    for done in (length - 1, length - 2, 1):
        asked = request(
            (5, 6, 7, *free.token_ids[:done]), ignore_eos=True, max_tokens=100, stop=(stop,)
        )
        made = await run(bench.engine, dataclasses.replace(asked, done=done))
        assert made.token_ids == free.token_ids[done:length]
        assert (made.finish_reason, made.stop_reason) == ("stop", stop)
    # What begins in the prompt is none.
    longer, end = await stopping_place(bench.engine, free, 3)
    for done, string, last in ((0, stop, length - 1), (1, longer, end - 1)):
        asked = request((5, 6, 7, *free.token_ids[:last]), max_tokens=1, stop=(string,))
        made = await run(bench.engine, dataclasses.replace(asked, done=done))
        assert (made.token_ids, made.finish_reason) == ([free.token_ids[last]], "length")


async def test_a_response_says_what_stops_it_and_its_text(bench: Bench) -> None:
    engine = bench.engine
    free = await run(engine, long_request(tokens=100))
    stop, length = await stopping_place(engine, free)
    ids, last = free.token_ids[:length], free.token_ids[length - 1]
    whole = await text_of(engine, ids)

    async def read(ids: Sequence[int], **params: Any) -> tuple[Stop | None, str]:
        read = response((5, 6, 7), ids, **{"max_tokens": 100, "ignore_eos": True} | params)
        return await engine.stop_of(read), await engine.text_of(read)

    assert await read(ids) == (None, whole)
    assert await read(ids, stop=(stop,)) == (Stop(stop), whole[: -len(stop)])
    assert await read(ids, stop=(stop,), include_stop_str_in_output=True) == (Stop(stop), whole)
    assert await read(ids, stop=(stop,), min_tokens=length) == (None, whole)
    assert (await read(ids[:-1], stop=(stop,)))[0] is None
    assert await read(ids, stop_token_ids=(last,)) == (Stop(last), await text_of(engine, ids[:-1]))
    assert await read([*ids, 2], ignore_eos=False) == (Stop(None), whole)
    assert await engine.text_of(response((5, 6, 7), ())) == ""


async def test_no_eos_before_min_tokens(bench: Bench) -> None:
    made = await run(bench.engine, request((5, 6, 7), min_tokens=60, max_tokens=80))

    assert len(made.token_ids) >= 60


async def test_a_seed_decides_and_differs(bench: Bench) -> None:
    sampled = [
        (
            await run(bench.engine, request((5, 6), temperature=1.0, seed=s, ignore_eos=True))
        ).token_ids
        for s in (1, 1, 2)
    ]

    assert sampled[0] == sampled[1] != sampled[2]


# Aborts


async def test_abort_of_unknown_finished_and_aborted_requests_has_no_effect(bench: Bench) -> None:
    """Case 10."""
    done = request((5, 6, 7), max_tokens=3)
    await run(bench.engine, done)
    bystander, made = await start(bench.engine, long_request(tokens=60))
    aborted = long_request()
    stream, ended = await start(bench.engine, aborted)
    await bench.engine.abort([aborted.request_id])
    await collect(stream, ended)

    await bench.engine.abort([aborted.request_id, done.request_id, "never heard of"])
    await collect(bystander, made)

    assert ended.finish_reason == "abort"
    assert (made.finish_reason, len(made.token_ids)) == ("length", 60)


async def test_four_long_requests_all_abort(bench: Bench) -> None:
    """Case 14."""
    started = [await start(bench.engine, long_request([9, 5 + i])) for i in range(4)]

    async with asyncio.timeout(DEADLINE):
        await bench.engine.pause("abort")
        made = await asyncio.gather(*(collect(stream, made) for stream, made in started))
    await bench.engine.resume()

    assert [m.finish_reason for m in made] == ["abort"] * 4
    for i, m in enumerate(made):
        assert_greedy(bench, [9, 5 + i], m)


async def test_pause_ends_waiting_requests_without_a_token(bench: Bench) -> None:
    running = [await start(bench.engine, long_request([8, 5 + i])) for i in range(MAX_NUM_SEQS)]
    waiting = [await bench.engine.add(long_request([7, 5 + i])) for i in range(3)]

    await bench.engine.pause("abort")
    late = [await collect(stream) for stream in waiting]
    ended = [await collect(stream, made) for stream, made in running]
    await bench.engine.resume()

    assert {m.finish_reason for m in (*late, *ended)} == {"abort"}
    assert [m.token_ids for m in late] == [[], [], []]
    assert all(m.token_ids for m in ended)
    assert len((await run(bench.engine, long_request(tokens=450))).token_ids) == 450


async def test_a_preempted_sample_gives_its_tokens_once(bench: Bench) -> None:
    """Case 13: more tokens are made than the cache holds, so some were sent back with theirs."""
    capacity = bench.engine.info.kv_cache_tokens
    asked = [long_request([11, 5 + i], tokens=480) for i in range(MAX_NUM_SEQS)]
    made = [Made() for _ in asked]
    readers = [
        asyncio.create_task(collect(await bench.engine.add(a), m))
        for a, m in zip(asked, made, strict=True)
    ]
    await async_wait_until(
        lambda: sum(len(m.token_ids) + 2 for m in made) > capacity + CHECKPOINT_TOKENS,
        "more tokens than the cache holds",
        DEADLINE,
    )

    await bench.engine.pause("abort")
    await asyncio.gather(*readers)
    await bench.engine.resume()

    assert any(m.finish_reason == "abort" for m in made)
    for a, m in zip(asked, made, strict=True):
        assert_greedy(bench, a.prompt_ids.tolist(), m)


async def test_preempted_samples_end_as_if_they_had_not_been(bench: Bench) -> None:
    asked = [long_request([15, 5 + i], tokens=250) for i in range(MAX_NUM_SEQS)]
    assert bench.engine.info.kv_cache_tokens < 250 * MAX_NUM_SEQS

    made = await asyncio.gather(*(run(bench.engine, a) for a in asked))

    for a, m in zip(asked, made, strict=True):
        assert (m.finish_reason, len(m.token_ids)) == ("length", 250)
        assert_greedy(bench, a.prompt_ids.tolist(), m)


async def test_closing_the_outputs_ends_the_request(bench: Bench) -> None:
    """Else the engine would be full of requests that nobody reads."""
    for i in range(MAX_NUM_SEQS):
        stream, _ = await start(bench.engine, long_request([12, 5 + i], tokens=500))
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    stream, made = await start(bench.engine, long_request([13, 5], tokens=500))
    reader = asyncio.create_task(collect(stream, made))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    # Eight others at once: each makes a token only if none of those above still runs.
    started = [await start(bench.engine, long_request([14, 5 + i])) for i in range(MAX_NUM_SEQS)]

    for stream, _ in started:
        await stream.aclose()


# Pauses and loads


async def test_a_request_added_while_paused_runs_after_the_resume(bench: Bench) -> None:
    """Case 12."""
    await bench.engine.pause("abort")
    adding = asyncio.ensure_future(run(bench.engine, long_request(tokens=20)))
    await asyncio.sleep(0)
    version = await bench.load_other()
    await bench.engine.resume()
    made = await adding

    assert set(made.versions) == {version}, "no token of the older weights, none labelled so"
    assert made.finish_reason == "length"
    assert_greedy(bench, (5, 6, 7), made)


async def test_greedy_interrupted_equals_uninterrupted(bench: Bench) -> None:
    asked = long_request([21, 22, 23], tokens=60)

    once = await run(bench.engine, asked)
    made = await interrupted(bench, long_request([21, 22, 23], tokens=60), (1, 5, 9, 9))

    assert made.token_ids == once.token_ids
    np.testing.assert_allclose(made.logprobs, once.logprobs, atol=2e-3)
    assert made.finish_reason == "length"


async def test_no_cached_prefix_survives_a_load(bench: Bench) -> None:
    """Case 20: also while another request was running all the time."""
    prompt = [(7 * i) % 50 + 5 for i in range(200)]
    before = await run(bench.engine, request(prompt, ignore_eos=True, max_tokens=20))
    other, other_made = await start(bench.engine, long_request([31, 32], tokens=200))

    await bench.engine.pause("keep")
    version = await bench.load_other()
    await bench.engine.resume()
    after = await run(bench.engine, request(prompt, ignore_eos=True, max_tokens=20))
    await collect(other, other_made)

    assert set(after.versions) == {version}
    assert_greedy(bench, prompt, before)
    assert_greedy(bench, prompt, after)
    assert_greedy(bench, [31, 32], other_made)
    assert len(set(other_made.versions)) == 2


async def test_kept_requests_freeze_and_go_on_with_their_versions(bench: Bench) -> None:
    asked = [long_request([41, 5 + i], tokens=300) for i in range(3)]
    started = [await start(bench.engine, a, 5) for a in asked]
    versions = [bench.version]
    for _ in range(2):
        await bench.engine.pause("keep")
        frozen = bench.engine.progress
        versions.append(await bench.load_other())
        assert bench.engine.progress == frozen
        await bench.engine.resume()
        for stream, made in started:
            async with asyncio.timeout(DEADLINE):
                while versions[-1] not in made.versions:
                    made.add(await anext(stream))
    for stream, made in started:
        await collect(stream, made)

    for a, (_, made) in zip(asked, started, strict=True):
        assert made.finish_reason == "length"
        assert len(made.token_ids) == 300
        assert made.versions == sorted(made.versions)
        assert list(dict.fromkeys(made.versions)) == versions
        assert_greedy(bench, a.prompt_ids.tolist(), made)


async def test_an_abort_in_keep_mode_gives_all_spans(bench: Bench) -> None:
    """One output that nobody read before holds tokens of two versions."""
    stream, made = await start(bench.engine, long_request([51, 52], tokens=450), 5)
    first = bench.version
    await bench.engine.pause("keep")
    second = await bench.load_other()
    await bench.engine.resume()
    other = await run(bench.engine, long_request([53, 54], tokens=30))
    await bench.engine.pause("abort")
    await bench.engine.resume()
    await collect(stream, made)

    assert set(other.versions) == {second}
    assert list(dict.fromkeys(made.versions)) == [first, second]
    assert made.finish_reason == "abort"
    assert_greedy(bench, [51, 52], made)


# Refusals


@pytest.mark.parametrize(
    ("ids", "params", "says"),
    [
        ([], {}, "empty"),
        ([5, -1], {}, "-1"),
        ([5, 100_000], {}, "100000"),
        ([5] * MAX_MODEL_LEN, {"max_tokens": 1}, f"{MAX_MODEL_LEN} tokens"),
        ([5] * (MAX_MODEL_LEN + 9), {"max_tokens": 1}, f"{MAX_MODEL_LEN + 9} tokens"),
        ([5] * 500, {"max_tokens": 13}, "500 tokens and max_tokens=13"),
    ],
)
async def test_a_request_that_can_never_run_fails_alone(
    bench: Bench, ids: list[int], params: dict[str, Any], says: str
) -> None:
    neighbour, made = await start(bench.engine, long_request(tokens=30))

    with pytest.raises(InvalidSample, match=says):
        await bench.engine.add(request(ids, **params))
    await collect(neighbour, made)

    assert made.finish_reason == "length"


async def test_a_request_may_fill_the_model_length(bench: Bench) -> None:
    made = await run(bench.engine, request([5] * 500, ignore_eos=True, max_tokens=12))

    assert (len(made.token_ids), made.finish_reason) == (12, "length")


# Text


async def test_text_and_chat_are_encoded_the_same_way_each_time(bench: Bench) -> None:
    text = "hello you"
    ids = await bench.engine.encode(text)
    chat = await bench.engine.encode([{"role": "user", "content": text}])

    assert ids.dtype == np.int32
    assert await text_of(bench.engine, ids.tolist()) == text
    assert (
        chat.tolist() == (await bench.engine.encode([{"role": "user", "content": text}])).tolist()
    )
    assert "hello you" in await text_of(bench.engine, chat.tolist())


async def test_what_is_no_chat_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidSample):
        await bench.engine.encode([{"rolle": 3}, "x"])  # type: ignore[list-item]
