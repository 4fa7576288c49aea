"""What a resume preserves, on real vLLM: each row of the README's table.

One engine of a model whose next tokens are known, a worker in this process, a real Redis.
Samples are cut at chosen points and compared with what vLLM gives of itself.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import redis
from numpy.typing import NDArray

from producer import Rollout, SamplingParams
from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample
from producer.contract.messages import Chunk
from producer.server import EmbeddedServer, start_embedded
from tests.crafted import EOS, ids_of, make_bigram
from tests.integration.contract import Driver
from tests.integration.pool import QUEUE, Pool
from tests.integration.stepper import sample_of
from workers import generate, resume
from workers.engines.protocol import EngineOutput, EngineRequest
from workers.engines.vllm import VllmEngine, engine_args_from_cli

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    # What vLLM and torch warn of is theirs.
    pytest.mark.filterwarnings("ignore"),
]

DEADLINE = 300.0
MAX_MODEL_LEN = 256
FACE, ACUTE = "\N{GRINNING FACE}".encode(), "é".encode()
#: what the model says, over and over, with EOS between
SAYS = [b"He", b"ll", b"o ", *(bytes([b]) for b in FACE), b" w", b"or", b"ld", b"!"]
SAYS += [*(bytes([b]) for b in ACUTE), b" E", b"ND", b"."]
TEXT = "Hello \N{GRINNING FACE} world!é END."
#: the two states of a chain with known chances; b"\n" begins the text
COINS = [b"A", b"B"]
TOKENS = [*SAYS, *COINS, b"\n"]
CHANCES = np.array([[0.2, 0.8], [0.75, 0.25]])
#: full of what the stop strings below look for
PROMPT = [1, *ids_of(TOKENS, *SAYS[2:], *SAYS, b"\n")]
FLAGS = [
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "128"),
    *("--block-size", "32", "--seed", "1"),
]


def _table() -> NDArray[np.float64]:
    """Logits of the next token by the last one."""
    size = 3 + len(TOKENS)
    logits = np.random.default_rng(5).normal(0.0, 1.5, (size, size))
    ids = ids_of(TOKENS, *SAYS)
    for last, following in zip([*ids_of(TOKENS, b"\n"), *ids], [*ids, EOS], strict=True):
        logits[last, following] = 12.0
    # Also where EOS is not allowed yet.
    logits[[ids[-1], EOS], ids[0]] = 10.0
    coins = ids_of(TOKENS, *COINS)
    logits[coins] = -100.0
    logits[np.ix_(coins, coins)] = np.log(CHANCES)
    return logits


class Cutting:
    """An engine whose attempts end with an abort after as many tokens as `cuts` says."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.cuts: dict[str, list[int]] = {}
        self.requests: list[EngineRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def start(self) -> None:
        """It runs."""

    async def shutdown(self) -> None:
        """Others use it after this worker."""

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        cuts = self.cuts.get(sample_of(request.request_id))
        if not cuts:
            return await self.engine.add(request)
        most = min(cuts.pop(0), request.params.max_tokens or 0)
        if most == 0:
            return _cut(None)
        least = min(most, request.params.min_tokens)
        params = dataclasses.replace(request.params, max_tokens=most, min_tokens=least)
        return _cut(await self.engine.add(dataclasses.replace(request, params=params)))


async def _cut(outputs: AsyncIterator[EngineOutput] | None) -> AsyncIterator[EngineOutput]:
    if outputs is None:
        none = np.empty(0, np.int32)
        yield EngineOutput(none, none.astype(np.float32), (), "abort")
        return
    async for output in outputs:
        cut = output.finish_reason == "length"
        yield dataclasses.replace(output, finish_reason="abort") if cut else output


@dataclasses.dataclass
class Bench:
    """A pool whose one worker cuts its samples, and vLLM beside it."""

    pool: Pool
    engine: Cutting
    driver: Driver

    async def run(
        self, prompt: Sequence[int], params: SamplingParams, plans: Sequence[Sequence[int]]
    ) -> list[Rollout]:
        """A sample for each plan, interrupted after so many tokens of each of its attempts."""
        self.engine.cuts = {f"g{i}/0": list(plan) for i, plan in enumerate(plans)}
        ids = self.pool.client.submit(
            [list(prompt)] * len(plans), params, ids=[f"g{i}" for i in range(len(plans))]
        )
        return await self.collect(ids)

    async def collect(self, ids: Sequence[str]) -> list[Rollout]:
        """The only members of these groups."""
        batch = await self.pool.batch(len(ids), timeout=DEADLINE)
        batch.ack()
        groups = {g.id: g.rollouts for g in batch}
        return [groups[i][0] for i in ids]

    async def bare(self, prompt: Sequence[int], **params: Any) -> Any:
        """The completion of vLLM's own request."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as VllmParams

        asked = VllmParams(logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        llm = self.engine.engine._llm
        async for output in llm.generate(tokens_input(list(prompt)), asked, "bare"):
            last = output
        return last.outputs[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    directory = tmp_path_factory.mktemp("bigram")
    make_bigram(directory, TOKENS, _table())
    engine = VllmEngine(engine_args_from_cli(str(directory), FLAGS), checkpoint_tokens=4)
    await engine.start()
    sockets = engine._llm.engine_core.resources.ctx
    yield engine
    await engine.shutdown()
    sockets.term()
    gc.collect()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with start_embedded(tmp_path_factory.mktemp("redis"), appendonly=False) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def idle(engine: VllmEngine, server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Bench]:
    """Without a worker yet."""
    with redis.Redis.from_url(server.url) as connection:
        connection.flushall()
    pool = Pool(server.url, tmp_path, {})
    queue = Queue(server.url, QUEUE, patience=5.0)
    queue.open()
    yield Bench(pool, Cutting(engine), Driver(queue))
    await pool.close()
    queue.close()
    assert engine.dead is None
    await engine.resume()


@pytest_asyncio.fixture(loop_scope="module")
async def bench(idle: Bench) -> Bench:
    await idle.pool.start(idle.engine)
    return idle


def token(text: bytes) -> int:
    return ids_of(TOKENS, text)[0]


#: what is asked, and how vLLM's own request ends: reason, stop reason, tokens, text
CASES: dict[str, tuple[dict[str, Any], tuple[str, int | str | None, int, str]]] = {
    "max_tokens": ({"max_tokens": 5}, ("length", None, 5, "Hello ")),
    "max_tokens past EOS": (
        {"max_tokens": 20, "ignore_eos": True},
        ("length", None, 20, f"{TEXT}Hello "),
    ),
    "special tokens": (
        {"max_tokens": 19, "ignore_eos": True, "skip_special_tokens": False},
        ("length", None, 19, f"{TEXT}</s>Hell"),
    ),
    "EOS": ({}, ("stop", None, 17, TEXT)),
    "EOS in the text": (
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        ("stop", None, 17, f"{TEXT}</s>"),
    ),
    "EOS not in the text": ({"skip_special_tokens": False}, ("stop", None, 17, TEXT)),
    "min_tokens": ({"min_tokens": 17}, ("stop", None, 33, TEXT * 2)),
    "min_tokens reached": ({"min_tokens": 16}, ("stop", None, 17, TEXT)),
    "stop id": (
        {"stop_token_ids": [token(b"ld")]},
        ("stop", token(b"ld"), 10, TEXT[: TEXT.index("ld")]),
    ),
    "stop id in the text": (
        {"stop_token_ids": [token(b"ld")], "include_stop_str_in_output": True},
        ("stop", token(b"ld"), 10, TEXT[: TEXT.index("!")]),
    ),
    "half a character is a stop id": (
        {"stop_token_ids": [token(FACE[2:3])], "include_stop_str_in_output": True},
        ("stop", token(FACE[2:3]), 6, "Hello "),
    ),
    "stop string": ({"stop": [f"o {TEXT[6]} w"]}, ("stop", f"o {TEXT[6]} w", 8, "Hell")),
    "stop string in the text": (
        {"stop": [f"o {TEXT[6]} w"], "include_stop_str_in_output": True},
        ("stop", f"o {TEXT[6]} w", 8, TEXT[:9]),
    ),
    "stop in the middle of a token": ({"stop": ["el"]}, ("stop", "el", 2, "H")),
    "stop in the middle of a token, in the text": (
        {"stop": ["el"], "include_stop_str_in_output": True},
        ("stop", "el", 2, "Hel"),
    ),
    "stop at a character of four tokens": ({"stop": [TEXT[6]]}, ("stop", TEXT[6], 7, "Hello ")),
    "stop after one of two": ({"stop": ["!é"]}, ("stop", "!é", 13, TEXT[:13])),
    "of overlapping stops the first to end": (
        {"stop": ["lo \N{GRINNING FACE} wor", "o \N{GRINNING FACE}", "world", "zzz"]},
        ("stop", "o \N{GRINNING FACE}", 7, "Hell"),
    ),
    "of two that end together the first named": (
        {"stop": ["ND", "END"]},
        ("stop", "ND", 15, TEXT[:-3]),
    ),
    "a stop that never comes": ({"stop": ["hello", "ENDE"]}, ("stop", None, 17, TEXT)),
    "a stop longer than the text": ({"stop": [TEXT * 3]}, ("stop", None, 17, TEXT)),
    "a stop over EOS": (
        {"stop": ["END.Hello"], "ignore_eos": True},
        ("stop", "END.Hello", 20, TEXT[:-4]),
    ),
    "a stop that EOS completes": (
        {"stop": [".</s>"], "skip_special_tokens": False, "include_stop_str_in_output": True},
        ("stop", ".</s>", 17, f"{TEXT}</s>"),
    ),
    "a stop at the last token": (
        {"stop": ["world"], "max_tokens": 10},
        ("stop", "world", 10, TEXT[:8]),
    ),
    "a stop before min_tokens": (
        {"stop": ["world!"], "min_tokens": 11, "ignore_eos": True},
        ("stop", "world!", 28, TEXT + TEXT[:8]),
    ),
    "a stop after min_tokens": (
        {"stop": ["world!"], "min_tokens": 10},
        ("stop", "world!", 11, TEXT[:8]),
    ),
    "a stop that began before min_tokens": (
        {"stop": ["Hello"], "min_tokens": 2},
        ("stop", "Hello", 3, ""),
    ),
    "a stop id before min_tokens": (
        {"stop_token_ids": [token(b"ll")], "min_tokens": 6, "max_tokens": 12},
        ("", None, -1, ""),
    ),
    "repetition penalty": ({"repetition_penalty": 2.5, "max_tokens": 30}, ("", None, -1, "")),
}


@pytest.mark.parametrize("name", CASES)
async def test_an_interrupted_sample_equals_that_of_bare_vllm(bench: Bench, name: str) -> None:
    """Cut after each of its tokens: also at none, inside a character, in a stop string.

    Cases 2, 9 and 11: what was cut at its last token has ended, and what was cut before its
    first one leaves nothing behind.
    """
    fields, expected = CASES[name]
    asked = {"temperature": 0.0, "max_tokens": 60, **fields}
    bare = await bench.bare(PROMPT, **asked)
    whole = len(bare.token_ids)
    if expected[2] >= 0:
        assert (bare.finish_reason, bare.stop_reason, whole) == expected[:3]
        assert expected[3] in ("", bare.text)
    plans = [[cut] for cut in range(whole + 1)]
    plans += [[1] * whole, [0, 0, 2, 0, 3], [whole // 2, 0, 1], [whole - 1, 1]]

    rollouts = await bench.run(PROMPT, SamplingParams(**asked), plans)

    for plan, r in zip(plans, rollouts, strict=True):
        assert r.response_ids.tolist() == bare.token_ids, plan
        assert (r.finish_reason, r.stop_reason) == (bare.finish_reason, bare.stop_reason), plan
        assert r.text == bare.text, plan
        assert len(r.response_logprobs) == len(r.versions) == len(r.response_mask) == whole
        logprobs = [next(iter(p.values())).logprob for p in bare.logprobs]
        np.testing.assert_allclose(r.response_logprobs, logprobs, atol=1e-4)
        assert all(s.tokens for s in r.segments)
        assert r.interruptions == sum(sum(plan[: i + 1]) < whole for i in range(len(plan)))


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "EOS", "stop id", "stop string", "a stop at the last token", "special tokens"],
)
async def test_an_end_that_was_lost_is_found_again(idle: Bench, name: str) -> None:
    """Case 9: the worker died between its last tokens and the report of the end."""
    asked = {"temperature": 0.0, "max_tokens": 60, **CASES[name][0]}
    bare = await idle.bare(PROMPT, **asked)
    (group,) = idle.pool.client.submit([PROMPT], SamplingParams(**asked))
    claim = idle.driver.claim_one()
    ids = np.array(bare.token_ids, np.int32)
    chunk = Chunk(0, "w", 1, ids, np.zeros(len(ids), np.float32)).to_wire()
    item = (claim.id, claim.lease_token, 0, len(ids), 0, chunk)
    idle.driver.queue.call("checkpoint", [item], worker="w")
    idle.driver.crash(claim)

    await idle.pool.start(idle.engine)
    (rollout,) = await idle.collect([group])

    assert idle.engine.requests == []
    assert rollout.response_ids.tolist() == bare.token_ids
    assert (rollout.finish_reason, rollout.stop_reason) == (bare.finish_reason, bare.stop_reason)
    assert (rollout.text, rollout.crashes) == (bare.text, 1)


async def test_what_one_step_makes_beyond_a_stop_is_dropped(engine: VllmEngine) -> None:
    """As with speculative decoding: vLLM gives several tokens, the stop is among them."""
    ids = ids_of(TOKENS, *SAYS)
    for stop, params, kept in [
        (f"o {TEXT[6]}", {}, 7),
        ("He", {"include_stop_str_in_output": True}, 16 + 1),
        ("He", {"min_tokens": 30}, 32 + 1),
        ("zzz", {}, 48),
    ]:
        params = SamplingParams(stop=(stop,), max_tokens=None, **params)
        rest = dataclasses.replace(params, min_tokens=max(0, params.min_tokens - 4))
        asked = EngineRequest("x", np.array([*PROMPT, *ids[:4]], np.int32), rest, done=4)
        read = engine._texts.read(asked)

        assert read.update((ids * 3)[4:], False) == (None if kept == 48 else stop)
        assert read.output_token_ids == (ids * 3)[4:kept]
        assert read.num_output_tokens() == kept - 4


async def test_an_attempt_sends_the_very_ids_and_asks_for_the_rest(bench: Bench) -> None:
    """Cases 1, 3 and 7: the text encodes to other ids, and half a character to none."""
    params = SamplingParams(temperature=0.0, max_tokens=16, min_tokens=9)

    (rollout,) = await bench.run(PROMPT, params, [[3, 2, 6]])

    ids = rollout.response_ids.tolist()
    assert (await bench.engine.encode(rollout.text)).tolist() != ids
    asked = [(r.done, r.params.max_tokens, r.params.min_tokens) for r in bench.engine.requests]
    assert asked == [(0, 16, 9), (3, 13, 6), (5, 11, 4), (11, 5, 0)]
    for request in bench.engine.requests:
        assert request.prompt_ids.tolist() == [*PROMPT, *ids[: request.done]]


async def test_the_models_length_bounds_all_attempts_together(bench: Bench) -> None:
    """Case 4."""
    prompt = [1] * (MAX_MODEL_LEN - 5) + ids_of(TOKENS, b"\n")

    (rollout,) = await bench.run(prompt, SamplingParams(temperature=0.0, max_tokens=8), [[3]])

    assert [r.params.max_tokens for r in bench.engine.requests] == [4, 1]
    assert (rollout.finish_reason, rollout.error, rollout.text) == ("length", "", "Hello ")
    assert rollout.response_ids.tolist() == ids_of(TOKENS, *SAYS[:4])


async def test_a_seed_gives_the_same_tokens_for_the_same_interruptions(bench: Bench) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=40, seed=7)
    prompt = [1, token(b"A")]

    async def run(cut: int) -> list[list[int]]:
        bench.engine.cuts = {f"g{cut}-{i}/{m}": [cut] for i in range(2) for m in range(2)}
        ids = bench.pool.client.submit([prompt] * 2, params, ids=[f"g{cut}-{i}" for i in range(2)])
        batch = await bench.pool.batch(2, timeout=DEADLINE)
        batch.ack()
        groups = {g.id: [r.response_ids.tolist() for r in g.rollouts] for g in batch}
        assert groups[ids[0]] == groups[ids[1]]
        return groups[ids[0]]

    whole, early, late = await run(40), await run(10), await run(20)

    for member in range(2):
        assert early[member][:10] == late[member][:10] == whole[member][:10]
        assert late[member][10:20] == whole[member][10:20] != early[member][10:20]
        # With the first seed again, the tokens of the second attempt would be the first ones.
        assert late[member][20:] != whole[member][:20]
    assert whole[0] != whole[1]


async def test_what_keeps_a_state_is_refused_or_starts_again(bench: Bench) -> None:
    """Case 5."""
    asked = {"temperature": 0.0, "max_tokens": 30, "frequency_penalty": 2.0}
    with pytest.raises(InvalidSample, match="frequency_penalty"):
        bench.pool.client.submit([PROMPT], SamplingParams(**asked))
    bare = await bench.bare(PROMPT, **asked)
    bench.engine.cuts = {"g0/0": [11, 0, 5]}
    ids = bench.pool.client.submit(
        [PROMPT], SamplingParams(**asked), ids=["g0"], allow_restart=True
    )

    (rollout,) = await bench.collect(ids)

    assert rollout.response_ids.tolist() == bare.token_ids
    assert [len(r.prompt_ids) for r in bench.engine.requests] == [len(PROMPT)] * 4
    assert bench.pool.client.status().stats["wasted_tokens"] == 11 + 5


async def test_what_only_vllm_can_judge_fails_its_sample_alone(bench: Bench) -> None:
    beyond = 3 + len(TOKENS)
    bad = {
        "too hot": ({"temperature": 3.0}, r"temperature must be in \[0, 2\]"),
        "no such id": ({"stop_token_ids": [beyond]}, f"{beyond}.*stop_token_ids"),
        "no such prompt": ({}, f"prompt id {beyond} is outside the vocabulary"),
    }
    good = bench.pool.client.submit([PROMPT], SamplingParams(temperature=0.0, max_tokens=60))
    ids = []
    for name, (fields, _) in bad.items():
        prompt = [beyond] if name == "no such prompt" else PROMPT
        ids += bench.pool.client.submit([prompt], SamplingParams(**fields))

    rollouts = await bench.collect([*good, *ids])

    assert (rollouts[0].finish_reason, rollouts[0].text) == ("stop", TEXT)
    for (_, says), r in zip(bad.values(), rollouts[1:], strict=True):
        assert (r.finish_reason, r.attempts, len(r.response_ids)) == ("error", 1, 0)
        assert re.search(says, r.error), r.error
        assert r.error.count("vLLM refuses") <= 1


# The distribution

TOSSES = 4


@pytest.fixture
def drop_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token before a seam does not reach the engine."""

    def request(
        request_id: str, ids: NDArray[np.int32], params: SamplingParams, done: int
    ) -> EngineRequest:
        kept = ids[:-1] if done else ids
        return EngineRequest(request_id, kept, params, max(0, done - 1))

    monkeypatch.setattr(generate, "EngineRequest", request)


@pytest.fixture
def replay_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt draws the same random numbers as the one before."""
    seed_of = resume._seed
    monkeypatch.setattr(resume, "_seed", lambda seed, index, done: seed_of(seed, index, 0))


async def toss(bench: Bench, samples: int, *, cut: bool, seed: int) -> NDArray[np.int64]:
    """How often each sequence of tosses came: counts [2 ** TOSSES]."""
    numbers = np.random.default_rng(seed)
    bench.engine.cuts = {}
    if cut:
        plans = numbers.integers(0, TOSSES, (samples, 2)).tolist()
        bench.engine.cuts = {f"g{seed}/{i}": plan for i, plan in enumerate(plans)}
    params = SamplingParams(n=samples, temperature=1.0, max_tokens=TOSSES, seed=seed)
    bench.pool.client.submit([[1, token(b"A")]], params, ids=[f"g{seed}"])
    batch = await bench.pool.batch(1, timeout=DEADLINE)
    batch.ack()
    tosses = np.array([r.response_ids for r in batch[0].rollouts]) - token(b"A")
    assert tosses.shape == (samples, TOSSES)
    assert any(r.interruptions for r in batch[0].rollouts) == cut
    return np.bincount(tosses @ (1 << np.arange(TOSSES)), minlength=1 << TOSSES)


def expected_shares() -> NDArray[np.float64]:
    """Of each sequence, by the table of the model."""
    shares = []
    for sequence in range(1 << TOSSES):
        faces = [0, *((sequence >> i) & 1 for i in range(TOSSES))]
        shares.append(np.prod([CHANCES[a, b] for a, b in pairwise(faces)]))
    return np.array(shares)


def chi_square(statistic: float, freedom: int) -> float:
    """The chance of so large a statistic or a larger one."""
    import torch

    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit(counts: NDArray[np.int64]) -> float:
    """p that the counts are of the known distribution: Pearson's test, rare ones as one."""
    expected = expected_shares() * counts.sum()
    rare = expected < 5
    expected, counts = (np.append(a[~rare], a[rare].sum()) for a in (expected, counts))
    return chi_square(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def alike(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """p that two counts are of one distribution (Pearson's test of homogeneity)."""
    share = (a + b) / (a.sum() + b.sum())
    expected = np.stack([share * a.sum(), share * b.sum()])
    statistic = ((np.stack([a, b]) - expected) ** 2 / expected).sum()
    return chi_square(float(statistic), len(a) - 1)


async def test_interruptions_do_not_change_the_distribution(bench: Bench) -> None:
    whole = await toss(bench, 1500, cut=False, seed=1)
    parts = await toss(bench, 1500, cut=True, seed=2)

    assert (expected_shares() * 1500).min() > 2
    assert fit(whole) > 0.05
    assert fit(parts) > 0.05
    assert alike(whole, parts) > 0.05


@pytest.mark.parametrize("broken", ["drop_a_token", "replay_the_seed"])
async def test_a_broken_resume_does_change_it(
    bench: Bench, broken: str, request: pytest.FixtureRequest
) -> None:
    """So the test above can tell."""
    request.getfixturevalue(broken)

    assert fit(await toss(bench, 500, cut=True, seed=3)) < 1e-6
