"""The simulated engine: the contract of engines, and what it can be told to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from producer.contract.digest import file_digest
from producer.contract.errors import EngineDead, InvalidSample, WeightLoadError
from producer.contract.manifest import Manifest
from tests.engine_contract import *  # noqa: F403 - its tests
from tests.engine_contract import (
    CHECKPOINT_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    Made,
    collect,
    long_request,
    request,
    run,
    start,
)
from tests.waiting import async_wait_until
from workers.engines import sim
from workers.engines.sim import SimEngine, SimSettings
from workers.engines.sim_batch import Batch
from workers.engines.sim_model import HashModel, completed, replay

ROOT = Path(__file__).parents[2]
MakeEngine = Callable[..., Awaitable[SimEngine]]
GOLDEN_TOKENS = [234, 166, 47, 259]
GOLDEN_LOGPROBS = [-3.8666717, -0.34334233, -3.2794361, -1.7410309]
SETTINGS = {
    "vocab_size": 512,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "kv_cache_tokens": 1024,
    "stream_interval": CHECKPOINT_TOKENS,
    "mean_tokens": 40.0,
    "token_rate": 1000.0,
}


def publish(directory: Path) -> Path:
    """What a trainer leaves behind, for an engine that looks at names and sizes."""
    directory.mkdir(parents=True)
    file = directory / "model.safetensors"
    file.write_bytes(b"weights")
    Manifest({file.name: (7, file_digest(file))}).write(directory)
    return directory


class SimBench:
    def __init__(self, engine: SimEngine, directory: Path) -> None:
        self.engine = engine
        self.version = 0
        self._directory = directory

    async def load_other(self) -> int:
        await self.engine.load(self._directory, self.version + 1)
        self.version += 1
        return self.version

    def greedy(self, prompt_ids: Sequence[int], made: Made) -> tuple[list[int], list[float]]:
        model = self.engine.settings.model()
        return replay(model, prompt_ids, made.versions, temperature=0.0)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimBench]:
    # Else it makes up, in one burst, for what a busy machine kept it from, and a request has
    # ended before its test has its turn.
    monkeypatch.setattr(sim, "_CATCH_UP_SECONDS", 0.002)
    engine = SimEngine(SimSettings(**SETTINGS))
    await engine.start()
    yield SimBench(engine, publish(tmp_path / "weights"))
    await engine.shutdown()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return publish(tmp_path / "weights")


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Start engines with other settings; they are shut down at the end."""
    engines = []

    async def make(**settings: object) -> SimEngine:
        engines.append(SimEngine(SimSettings(**{**SETTINGS, **settings})))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.shutdown()


# The model


def test_of_several_stop_strings_the_first_to_end_counts() -> None:
    assert completed(b"xabcd", 4, ["bcd", "abc", "ab", "b"]) == ("ab", 3)
    assert completed(b"xabcd", 4, ["zz", "abcd", "bcd"]) == ("abcd", 5)
    assert completed(b"xabcd", 2, ["ab", "x"]) is None
    assert completed(b"xabcd", 0, ["cd"]) is None


def test_tokens_are_the_same_on_every_machine() -> None:
    tokens, logprobs = replay(HashModel(512), [5, 6, 7], [0, 0, 1, 1], seed=3)

    assert tokens == GOLDEN_TOKENS
    np.testing.assert_allclose(logprobs, GOLDEN_LOGPROBS, rtol=1e-6)


@pytest.mark.parametrize(
    ("prompt", "versions", "seed"),
    [
        ([5, 6, 8], [0] * 20, 3),
        ([6, 5, 7], [0] * 20, 3),
        ([5, 6, 7, 7], [0] * 20, 3),
        ([5, 6], [0] * 20, 3),
        ([5, 6, 7], [1] * 20, 3),
        ([5, 6, 7], [0] * 20, 4),
    ],
)
def test_any_change_of_prefix_version_or_seed_changes_what_follows(
    prompt: list[int], versions: list[int], seed: int
) -> None:
    model = HashModel(512)

    usual, _ = replay(model, [5, 6, 7], [0] * 20, seed=3)
    changed, _ = replay(model, prompt, versions, seed=seed)

    assert sum(a == b for a, b in zip(usual, changed, strict=True)) < 4


def test_the_seed_does_not_matter_at_temperature_0() -> None:
    model = HashModel(512)

    one, _ = replay(model, [5, 6], [0] * 20, seed=1, temperature=0.0)
    other, _ = replay(model, [5, 6], [0] * 20, seed=2, temperature=0.0)

    assert one == other


async def test_lengths_have_the_mean_that_was_set(make_engine: MakeEngine) -> None:
    engine = await make_engine(mean_tokens=40.0, token_rate=0.0, max_num_seqs=64)

    made = await asyncio.gather(
        *(run(engine, request([i, j], max_tokens=500)) for i in range(4, 24) for j in range(4, 24))
    )

    assert 34 < np.mean([len(m.token_ids) for m in made]) < 46


def test_ids_of_a_small_vocabulary_have_no_text() -> None:
    with pytest.raises(InvalidSample, match="vocab_size=60"):
        asyncio.run(SimEngine(SimSettings(vocab_size=60)).encode("x"))


# Settings


def test_settings_are_read_from_a_command_line() -> None:
    settings = SimSettings.parse("token_rate=50, max_num_seqs=4,fail_versions=3+5,crash_id=9")

    assert settings == SimSettings(
        token_rate=50.0, max_num_seqs=4, fail_versions=(3, 5), crash_id=9
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speed=3", "token_rate"),
        ("token_rate", "token_rate"),
        ("max_num_seqs=many", "'many' is not a number"),
        ("max_num_seqs=0", "at least 1"),
        ("max_model_len=100,kv_cache_tokens=99", "cannot hold one sequence"),
        ("token_rate=5,step_seconds=0.1", "both say"),
        ("sample_seconds=0.1", "needs step_seconds"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SimSettings.parse(text)


# Time


async def test_the_token_rate_is_not_exceeded(make_engine: MakeEngine) -> None:
    engine = await make_engine(token_rate=500.0)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    await run(engine, long_request(tokens=100))

    assert loop.time() - begin > 0.19


async def test_prompts_take_their_time_one_after_the_other(make_engine: MakeEngine) -> None:
    engine = await make_engine(prefill_rate=1000.0, token_rate=0.0)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    await asyncio.gather(*(run(engine, long_request([4 + i] * 100, tokens=2)) for i in range(3)))

    assert loop.time() - begin > 0.29


def test_a_step_takes_as_long_as_its_sequences_and_new_prompts_say() -> None:
    """And after a load all prefixes are computed again, with the tokens made so far."""
    batch = Batch(SimSettings(step_seconds=1.0, sample_seconds=0.5, prefill_rate=10.0))
    batch.add(long_request([5] * 20), None)
    assert batch.begin(0.0) == 1.0 + 0.5 + 2.0
    batch.add(long_request([6] * 10), None)
    outputs = batch.step(3.5)  # without the one that came meanwhile
    assert outputs is not None
    assert len(outputs) == 1
    assert batch.begin(3.5) == 1.0 + 2 * 0.5 + 1.0
    batch.step(6.5)
    assert batch.begin(6.5) == 1.0 + 2 * 0.5

    batch.set_version(1)

    assert batch.begin(7.5) == 1.0 + 2 * 0.5 + (22 + 11) / 10


async def test_steps_are_not_faster_than_they_were_set(make_engine: MakeEngine) -> None:
    times = {"step_seconds": 0.002, "sample_seconds": 0.001, "prefill_rate": 1000.0}
    engine = await make_engine(token_rate=0.0, **times)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    made = await asyncio.gather(
        *(run(engine, long_request([4 + i] * 50, tokens=50)) for i in range(2))
    )

    assert [len(m.token_ids) for m in made] == [50, 50]
    assert loop.time() - begin > 0.29  # 50 steps of 4 ms, 100 tokens of prompts


async def test_at_full_speed_the_loop_still_runs(make_engine: MakeEngine) -> None:
    engine = await make_engine(token_rate=0.0)
    running = asyncio.gather(
        *(run(engine, long_request([4 + i, 5], tokens=100)) for i in range(100))
    )
    # Of this thread's own time: another process may have any gap.
    gaps, last = [], time.thread_time()
    while not running.done():
        await asyncio.sleep(0)
        gaps.append(time.thread_time() - last)
        last = time.thread_time()

    assert len(gaps) > 10
    assert np.median(gaps) < 0.02


# Capacity


async def test_no_more_runs_than_the_cache_holds(make_engine: MakeEngine) -> None:
    engine = await make_engine(token_rate=1e-9)  # it steps below, and not by itself
    batch = engine._batch
    running = asyncio.gather(
        *(run(engine, long_request([4 + i, 5], tokens=400)) for i in range(MAX_NUM_SEQS))
    )
    cached, preempted = [], False
    while not running.done():
        engine._step()
        await asyncio.sleep(0)
        cached.append(batch._cached())
        preempted |= any(r.row < 0 and r.tokens.size for r in batch.live.values())

    assert 900 < max(cached) <= 1024
    assert preempted


# Loads


async def test_a_load_takes_its_time_and_nothing_steps(
    make_engine: MakeEngine, weights: Path
) -> None:
    engine = await make_engine(load_seconds=0.2)
    stream, made = await start(engine, long_request())
    await engine.pause("keep")
    begin, progress = asyncio.get_running_loop().time(), engine.progress

    await engine.load(weights, 1)

    assert asyncio.get_running_loop().time() - begin >= 0.2
    assert engine.progress == progress
    await stream.aclose()
    assert made.token_ids


@pytest.mark.parametrize("fault", ["set to fail", "no manifest", "truncated", "no directory"])
async def test_a_failed_load_leaves_an_engine_that_only_aborts(
    make_engine: MakeEngine, weights: Path, fault: str
) -> None:
    engine = await make_engine(fail_versions=(7,) if fault == "set to fail" else ())
    stream, made = await start(engine, long_request(), 9)
    await engine.pause("keep")
    if fault == "no manifest":
        (weights / "rollq-manifest.json").unlink()
    elif fault == "truncated":
        (weights / "model.safetensors").write_bytes(b"we")
    elif fault == "no directory":
        weights = weights / "none"

    with pytest.raises(WeightLoadError, match=f"version 7 did not load from {weights}"):
        await engine.load(weights, 7)

    assert engine.dead is not None
    with pytest.raises(EngineDead):
        await engine.add(request([5]))
    with pytest.raises(EngineDead):
        await engine.resume()
    await engine.abort(["of no one"])
    for asked in list(engine._batch.live):
        await engine.abort([asked])
    await collect(stream, made)
    assert made.finish_reason == "abort"
    assert (
        made.token_ids
        == replay(engine.settings.model(), [5, 6, 7], made.versions, temperature=0.0)[0]
    )


async def test_weights_do_not_load_while_it_steps(make_engine: MakeEngine, weights: Path) -> None:
    engine = await make_engine()

    with pytest.raises(WeightLoadError, match="pause first"):
        await engine.load(weights, 1)


# Faults


async def test_late_outputs_come_after_the_pause(make_engine: MakeEngine) -> None:
    engine = await make_engine(late_seconds=0.1)
    stream, made = await start(engine, long_request())
    await engine.pause("abort")
    reader = asyncio.ensure_future(collect(stream, made))
    await asyncio.sleep(0)

    assert not reader.done()
    await reader
    assert made.finish_reason == "abort"
    assert (
        made.token_ids
        == replay(engine.settings.model(), [5, 6, 7], made.versions, temperature=0.0)[0]
    )


async def test_a_late_add_runs_after_the_resume(make_engine: MakeEngine, weights: Path) -> None:
    engine = await make_engine(add_seconds=0.05)
    adding = asyncio.ensure_future(engine.add(long_request(tokens=5)))
    await asyncio.sleep(0)
    await engine.pause("abort")
    await engine.load(weights, 1)
    stream = await adding
    await engine.resume()

    made = await collect(stream)

    assert (made.finish_reason, set(made.versions)) == ("length", {1})


async def test_a_poisoned_prompt_kills_the_engine_under_all_requests(
    make_engine: MakeEngine,
) -> None:
    engine = await make_engine(crash_id=300)
    neighbour, made = await start(engine, long_request())
    poisoned = await engine.add(long_request([5, 300, 6]))

    with pytest.raises(EngineDead, match="set to crash"):
        await collect(poisoned)
    with pytest.raises(EngineDead, match="set to crash"):
        await collect(neighbour, made)
    assert "set to crash" in (engine.dead or "")
    with pytest.raises(EngineDead):
        await engine.pause("abort")
    await engine.abort(["r1"])


async def test_a_poisonous_id_is_never_made(make_engine: MakeEngine) -> None:
    """Else an innocent sample would kill the engine at its resume."""
    engine = await make_engine(vocab_size=12, crash_id=9, hang_id=10, kill_id=11)

    made = await run(engine, long_request(tokens=400))

    assert set(made.token_ids) <= {2, 3, 4, 5, 6, 7, 8}


async def test_a_hung_engine_neither_steps_nor_answers(make_engine: MakeEngine) -> None:
    engine = await make_engine(hang_id=301)
    neighbour, made = await start(engine, long_request())
    await engine.add(long_request([5, 301]))
    await async_wait_until(lambda: not engine._work.is_set(), "the hang")
    progress = engine.progress
    pausing = asyncio.ensure_future(engine.pause("abort"))

    done, _ = await asyncio.wait([pausing], timeout=0.1)

    assert not done
    assert engine.progress == progress
    assert engine.dead is None
    await engine.shutdown()
    with pytest.raises(EngineDead):
        await pausing
    with pytest.raises(EngineDead):
        await collect(neighbour, made)


def test_a_prompt_can_kill_the_process() -> None:
    code = """
import asyncio
from tests.engine_contract import long_request, run
from workers.engines import sim
from workers.engines.sim import SimEngine, SimSettings
from workers.engines.sim_batch import Batch

async def main():
    engine = SimEngine(SimSettings(kill_id=302))
    await engine.start()
    await run(engine, long_request([302]))

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -9


async def test_crash_on_command(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    stream, made = await start(engine, long_request())

    engine.crash("pulled the plug")

    with pytest.raises(EngineDead, match="pulled the plug"):
        await collect(stream, made)


async def test_a_shutdown_ends_what_runs_and_can_be_repeated(make_engine: MakeEngine) -> None:
    engine = await make_engine(late_seconds=60.0)
    stream, made = await start(engine, long_request())
    late, late_made = await start(engine, long_request())
    await engine.abort([r.request.request_id for r in engine._batch.live.values()][1:])

    await engine.shutdown()
    await engine.shutdown()

    for ended, so_far in ((stream, made), (late, late_made)):
        with pytest.raises(EngineDead, match="shut down"):
            await collect(ended, so_far)


async def test_an_engine_that_was_not_started_is_dead() -> None:
    with pytest.raises(EngineDead, match="not started"):
        await SimEngine().add(request([5]))


async def test_a_request_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    asked = long_request()
    stream = await engine.add(asked)

    with pytest.raises(InvalidSample, match="in use"):
        await engine.add(asked)
    await stream.aclose()
