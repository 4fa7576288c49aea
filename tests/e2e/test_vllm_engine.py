"""The vLLM engine: the contract of engines on a real one, its weights, its death.

Three engines are started: one for all that leaves it alive, one without a tokenizer that
takes a faulty load and loses its core, one that cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.errors import EngineDead, EngineError, InvalidSample, WeightLoadError
from tests.engine_contract import *  # noqa: F403 - its tests
from tests.engine_contract import (
    CHECKPOINT_TOKENS,
    DEADLINE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    Made,
    assert_greedy,
    collect,
    long_request,
    request,
    run,
    start,
    text_of,
)
from tests.fuzz import search
from tests.tiny import VOCAB, make_llama
from tests.waiting import async_wait_until, wait_until
from workers.engines.vllm import VllmEngine, engine_args_from_cli

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    # What vLLM and torch warn of is theirs.
    pytest.mark.filterwarnings("ignore"),
]

BATCHED_TOKENS = 64
FLAGS = [
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--block-size", "32"),
    # Room for two sequences of full length, so that eight of them preempt each other.
    *("--num-gpu-blocks-override", "33", "--max-num-batched-tokens", str(BATCHED_TOKENS)),
]


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Directory and model of two sets of weights."""
    root = tmp_path_factory.mktemp("llamas")
    return [(root / str(i), make_llama(root / str(i), seed=i)) for i in range(2)]


class VllmBench:
    def __init__(self, engine: VllmEngine, llamas: list[tuple[Path, Any]]) -> None:
        self.engine = engine
        self.version = 0
        self._llamas = llamas
        self._used = {0: 0}

    async def load_other(self) -> int:
        return await self.load(1 - self._used[self.version])

    async def load(self, which: int) -> int:
        await self.engine.load(self._llamas[which][0], self.version + 1)
        self.version += 1
        self._used[self.version] = which
        return self.version

    def greedy(self, prompt_ids: Sequence[int], made: Made) -> tuple[list[int], list[float]]:
        """By transformers: each token given all before it, under the weights of its label."""
        import torch

        ids = torch.tensor([[*prompt_ids, *made.token_ids]])
        tokens, logprobs = [], []
        with torch.no_grad():
            per_weights = {
                which: torch.log_softmax(self._llamas[which][1](ids).logits[0], -1)
                for which in {self._used[v] for v in made.versions}
            }
        for at, version in enumerate(made.versions, start=len(prompt_ids) - 1):
            row = per_weights[self._used[version]][at]
            tokens.append(int(row.argmax()))
            logprobs.append(float(row[made.token_ids[at - len(prompt_ids) + 1]]))
        return tokens, logprobs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bench(llamas: list[tuple[Path, Any]]) -> AsyncIterator[VllmBench]:
    engine = VllmEngine(
        engine_args_from_cli(str(llamas[0][0]), FLAGS), checkpoint_tokens=CHECKPOINT_TOKENS
    )
    await engine.start()
    yield VllmBench(engine, llamas)
    await shut_down(engine)


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared_bench: VllmBench) -> AsyncIterator[VllmBench]:
    yield shared_bench
    assert shared_bench.engine.dead is None
    await shared_bench.engine.pause("abort")
    await shared_bench.engine.resume()


async def shut_down(engine: VllmEngine) -> None:
    """Shut down and see that nothing is left, also of what vLLM leaves to the collector."""
    sockets = engine._llm.engine_core.resources.ctx
    await engine.shutdown()
    await engine.shutdown()
    assert [c for c in engine._children if alive(c)] == []
    await async_wait_until(
        lambda: not any(t.name == "MPClientEngineMonitor" for t in threading.enumerate()),
        "the end of vLLM's watch over its core",
        DEADLINE,
    )
    sockets.term()
    gc.collect()


def alive(process: psutil.Process | int) -> bool:
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_the_facts_of_the_engine(bench: VllmBench, llamas: list[tuple[Path, Any]]) -> None:
    info = bench.engine.info

    assert info.model == str(llamas[0][0])
    assert (info.max_model_len, info.max_num_seqs) == (MAX_MODEL_LEN, MAX_NUM_SEQS)
    assert MAX_MODEL_LEN <= info.kv_cache_tokens < 3 * MAX_MODEL_LEN
    assert (info.vocab_size, info.logprobs_mode) == (VOCAB, "processed_logprobs")


def test_a_ctrl_c_for_the_worker_does_not_reach_the_engine(bench: VllmBench) -> None:
    groups = {os.getpgid(child.pid) for child in bench.engine._children}

    assert groups == {bench.engine._children[0].pid}


async def test_a_long_prompt_counts_as_progress(bench: VllmBench) -> None:
    """Computing it takes several steps without a token; the lease thread watches this."""
    before = bench.engine.progress

    await run(bench.engine, request([(7 * i) % 50 + 5 for i in range(500)], max_tokens=1))

    assert bench.engine.progress - before >= 500 // BATCHED_TOKENS


async def test_vllm_keeps_no_statistics_that_nothing_shows(bench: VllmBench) -> None:
    import prometheus_client

    stream, made = await start(bench.engine, long_request())
    [state] = bench.engine.llm.output_processor.request_states.values()
    await bench.engine.pause("abort")
    await collect(stream, made)
    await bench.engine.resume()

    assert made.token_ids
    assert state.stats is None
    counted = [
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name in ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
    ]
    assert counted
    assert sum(counted) == 0


async def test_weights_do_not_load_while_it_steps(
    bench: VllmBench, llamas: list[tuple[Path, Any]]
) -> None:
    with pytest.raises(WeightLoadError, match="pause first"):
        await bench.engine.load(llamas[1][0], 99)


async def test_vllms_own_refusal_is_an_invalid_sample(
    bench: VllmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine, "_check_request", lambda request: None)

    with pytest.raises(InvalidSample, match="vLLM refuses"):
        await bench.engine.add(request([5] * MAX_MODEL_LEN))


async def test_a_request_that_the_core_refuses_for_a_pause_is_handed_back(
    bench: VllmBench,
) -> None:
    """As vLLM 0.33 does when a request arrives after the pause."""
    from vllm.exceptions import RetryableRequestError

    stream, made = await start(bench.engine, long_request())

    stream._queue.put(RetryableRequestError("Generation is paused"))
    await collect(stream, made)

    assert made.finish_reason == "abort"


async def test_a_vllm_that_would_miss_stop_strings_is_refused(
    bench: VllmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output processor adds requests in a way that is not ours to join."""
    texts = bench.engine._texts
    monkeypatch.setattr(bench.engine._llm.output_processor, "add_request", texts._register)
    asked = dataclasses.replace(request((5, 6, 7), stop=("never",)), done=1)

    with pytest.raises(EngineError, match="a version that rollq supports"):
        await bench.engine.add(asked)

    assert texts.resumed == {}
    assert not bench.engine._llm.output_processor.request_states


async def test_a_pause_does_not_hold_an_add_for_ever(
    bench: VllmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.engine.pause("abort")
    adding = asyncio.ensure_future(bench.engine.add(long_request()))
    await asyncio.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "_dead", "gone meanwhile")
        bench.engine._stepping.set()
        with pytest.raises(EngineDead, match="gone meanwhile"):
            await adding


# Files of weights


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def _cut(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def _rename(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop, "missing model.layers.1.self_attn.k_proj.weight"),
        (_cut, r"wrong shape model.layers.0.mlp.up_proj.weight of shape \(128, 63\)"),
        (_rename, "unknown to the model model.layers.2.mlp.up_proj.weight"),
        (dict.clear, "missing .* more"),
    ],
)
def test_an_incomplete_set_of_tensors_is_refused(
    llamas: list[tuple[Path, Any]], tmp_path: Path, change: Callable[..., None], says: str
) -> None:
    from workers.engines.vllm_weights import check_tensors, safetensors_files, tensor_shapes

    change_tensors(llamas[1][0], tmp_path, change)
    wanted = tensor_shapes(safetensors_files(llamas[0][0]))

    with pytest.raises(ValueError, match=says):
        check_tensors(tensor_shapes(safetensors_files(tmp_path)), wanted, tied=False)
    check_tensors(wanted, wanted, tied=False)


def change_tensors(source: Path, target: Path, change: Callable[..., None]) -> Path:
    from safetensors.torch import load_file, save_file

    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("fault", ["truncated", "header", "empty", "not there", "twice"])
def test_a_faulty_file_is_refused_by_name(
    llamas: list[tuple[Path, Any]], tmp_path: Path, fault: str
) -> None:
    from workers.engines.vllm_weights import safetensors_files, tensor_shapes

    file = tmp_path / "model-00001-of-00001.safetensors"
    content = (llamas[1][0] / "model.safetensors").read_bytes()
    broken = {
        "truncated": content[:-1],
        "header": b"\xff" * 8 + content[8:],
        "empty": b"",
        "twice": content,
    }
    if fault == "not there":
        index = {"weight_map": {"lm_head.weight": file.name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        file.write_bytes(broken[fault])
    if fault == "twice":
        shutil.copy(file, tmp_path / "model-00002-of-00002.safetensors")

    with pytest.raises(ValueError, match=r"model-0000\d-of-0000\d.safetensors"):
        tensor_shapes(safetensors_files(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": [1]}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    from workers.engines.vllm_weights import safetensors_files

    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ValueError):
        safetensors_files(tmp_path)


@search(100)
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1) | st.none())
def test_a_file_with_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, length: int | None
) -> None:
    """Whatever length it claims, and whatever it says of its tensors."""
    from workers.engines.vllm_weights import tensor_shapes

    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    claimed = len(header) if length is None else length
    for text in (header, b'{"t":' + header + b"}"):
        file.write_bytes(claimed.to_bytes(8, "little") + text)
        with contextlib.suppress(ValueError):
            tensor_shapes([file])


def test_tied_embeddings_may_come_with_the_head_or_without(tmp_path: Path) -> None:
    from workers.engines.vllm_weights import check_tensors, safetensors_files, tensor_shapes

    make_llama(tmp_path, tied=True, tokenizer=False)
    without = tensor_shapes(safetensors_files(tmp_path))
    with_head = {**without, "lm_head.weight": (VOCAB, 64)}

    check_tensors(without, with_head, tied=True)
    check_tensors(with_head, without, tied=True)
    with pytest.raises(ValueError, match=r"unknown to the model lm_head\.weight"):
        check_tensors(with_head, without, tied=False)


# Flags


def test_vllms_flags_are_read_and_ours_are_set(llamas: list[tuple[Path, Any]]) -> None:
    model = str(llamas[0][0])

    args = engine_args_from_cli(model, ["--max_model_len", "128", "--seed=3"])

    assert (args.model, args.max_model_len, args.seed) == (model, 128, 3)
    assert args.logprobs_mode == "processed_logprobs"
    assert args.disable_log_stats
    assert engine_args_from_cli(model, ["--logprobs-mode", "raw_logprobs"]).logprobs_mode == (
        "raw_logprobs"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-such-flag", "3"], "--no-such-flag"),
        (["--max-model-le", "3"], "--max-model-le"),
        (["--max-model-len", "long"], "max-model-len"),
        (["--stream-interval", "3"], "--stream-interval is set by rollq"),
        (["--weight_transfer_config.backend=nccl"], "--weight-transfer-config is set by rollq"),
        (["stray"], "stray"),
    ],
)
def test_flags_that_vllm_does_not_know_or_we_own_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        engine_args_from_cli("model", flags)


# Ends


async def test_an_engine_that_cannot_start_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    make_llama(tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    flags = [*FLAGS, "--skip-tokenizer-init"]
    engine = VllmEngine(engine_args_from_cli(str(tmp_path), flags))

    with pytest.raises(EngineError, match=f"vLLM did not start {tmp_path}"):
        await engine.start()
    await engine.shutdown()

    assert engine.dead is not None
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if alive(p) and "resource_tracker" not in " ".join(p.cmdline())] == []


async def test_the_plug_in_must_be_there(
    monkeypatch: pytest.MonkeyPatch, llamas: list[tuple[Path, Any]]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")

    with pytest.raises(EngineError, match="leaves out rollq"):
        await VllmEngine(engine_args_from_cli(str(llamas[0][0]), FLAGS)).start()


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    make_llama(directory, tied=True, tokenizer=False)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare(tied_llama: Path) -> AsyncIterator[VllmEngine]:
    """An engine of tied embeddings without a tokenizer, which the tests below use up in turn."""
    engine = VllmEngine(
        engine_args_from_cli(str(tied_llama), [*FLAGS, "--skip-tokenizer-init"]),
        checkpoint_tokens=CHECKPOINT_TOKENS,
    )
    await engine.start()
    yield engine
    await shut_down(engine)


async def test_without_a_tokenizer_ids_work(bare: VllmEngine) -> None:
    made = await run(bare, long_request(tokens=9))

    assert len(made.token_ids) == 9
    assert await text_of(bare, [5, 6]) == ""
    with pytest.raises(InvalidSample, match="without a tokenizer"):
        await bare.encode("text")
    for text in ({"stop": ("x",)}, {"bad_words": ("x",)}):
        with pytest.raises(InvalidSample, match="tokenizer"):
            await bare.add(request([5], **text))


async def test_tied_embeddings_load_with_the_head_or_without(
    bare: VllmEngine, tied_llama: Path, tmp_path: Path
) -> None:
    """vLLM's reload passes over a head that has no tensor of its own."""
    llamas = [(tied_llama, make_llama(tmp_path / "same", tied=True, tokenizer=False))]
    for i in range(2):
        directory = tmp_path / str(i)
        llamas.append((directory, make_llama(directory, seed=1, tied=True, tokenizer=False)))

    def add_head(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(llamas[2][0], llamas[2][0], add_head)
    tied_bench = VllmBench(bare, llamas)

    made = [await run(bare, long_request(tokens=20))]
    for which in (1, 0, 2, 0):
        await bare.pause("abort")
        await tied_bench.load(which)
        await bare.resume()
        made.append(await run(bare, long_request(tokens=20)))

    for version, m in enumerate(made):
        assert set(m.versions) == {version}
        assert_greedy(tied_bench, (5, 6, 7), m)


async def test_a_missing_tensor_fails_the_load_and_the_engine_only_aborts(
    bare: VllmEngine, tied_llama: Path, tmp_path: Path
) -> None:
    asked = long_request()
    stream, made = await start(bare, asked, 9)
    await bare.pause("keep")
    incomplete = change_tensors(tied_llama, tmp_path, _drop)

    with pytest.raises(WeightLoadError, match=f"{incomplete}.*missing model.layers.1.self_attn.k"):
        await bare.load(incomplete, 9)

    assert "did not load" in (bare.dead or "")
    with pytest.raises(EngineDead):
        await bare.resume()
    with pytest.raises(EngineDead):
        await bare.add(request([5]))
    await bare.abort([asked.request_id])
    await collect(stream, made)
    assert made.finish_reason == "abort"
    assert len(set(made.versions)) == 1
    assert len(made.token_ids) >= 9


async def test_a_killed_core_is_a_dead_engine_under_each_request(
    shared_bench: VllmBench,
) -> None:
    """The last of the module for the shared engine."""
    engine = shared_bench.engine
    started = [await start(engine, long_request([9, 5 + i])) for i in range(3)]

    engine._children[0].send_signal(signal.SIGKILL)

    for stream, made in started:
        with pytest.raises(EngineDead):
            await collect(stream, made)
    assert engine.dead is not None
    for call in (engine.add(request([5])), engine.pause("abort"), engine.resume()):
        with pytest.raises(EngineDead):
            await call
    with pytest.raises(EngineDead):
        await engine.load(Path("anywhere"), 1000)
    await engine.abort(["r1"])


def test_an_engine_core_does_not_outlive_its_killed_owner(tmp_path: Path) -> None:
    """vLLM's does, and keeps the GPU's memory."""
    make_llama(tmp_path, tokenizer=False)
    code = f"""
import asyncio, os, signal
from workers.engines.vllm import VllmEngine, engine_args_from_cli

async def main():
    flags = {[*FLAGS, "--skip-tokenizer-init"]!r}
    engine = VllmEngine(engine_args_from_cli({str(tmp_path)!r}, flags))
    await engine.start()
    print("children", *(c.pid for c in engine._children), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "owner.py"
    script.write_text(code)
    with (tmp_path / "out").open("w") as out:
        owner = subprocess.run(
            [sys.executable, script],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    printed = (tmp_path / "out").read_text()
    line = next(line for line in printed.splitlines() if line.startswith("children"))
    children = [int(pid) for pid in line.split()[1:]]

    assert owner.returncode == -signal.SIGKILL
    assert children
    wait_until(lambda: not any(map(alive, children)), "they have ended, too")
