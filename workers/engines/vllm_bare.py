"""The engine without the pool: what `rollq bench engine` and `bench update` compare with.

`generate` and `update` drive the `AsyncLLM` of a started `VllmEngine` as one would who has no
pool.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from producer.contract.errors import EngineDead
from producer.contract.sampling import SamplingParams
from workers.engines.protocol import EngineRequest
from workers.engines.vllm import VllmEngine, engine_args_from_cli
from workers.engines.vllm_text import vllm_params

_FLAGS = ["--dtype", "float32", "--max-model-len", "192"]


async def generate(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> int:
    """Complete each prompt under its own parameters; returns how many tokens came.

    All are given to vLLM at once, with the very parameters that the adapter sends, and tokens
    and logprobs stay as vLLM gives them.

    Raises:
        EngineDead: a request did not end as asked for.
    """
    from vllm.inputs import tokens_input

    llm = engine.llm

    async def one(prompt: Sequence[int], asked: SamplingParams) -> int:
        tokens, logprobs = [], []
        name = f"bare-{secrets.token_hex(8)}"
        async for output in llm.generate(tokens_input(list(prompt)), vllm_params(asked), name):
            [completion] = output.outputs
            tokens += completion.token_ids
            logprobs += completion.logprobs.logprobs
        if len(tokens) != asked.max_tokens or len(logprobs) != len(tokens):
            raise EngineDead(f"{len(tokens)} tokens of {asked.max_tokens} came without the pool")
        return len(tokens)

    return sum(await asyncio.gather(*map(one, prompts, params)))


async def outlives_its_worker(model: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """A started engine that a worker neither starts nor ends, and what ends it."""
    engine: Any = VllmEngine(engine_args_from_cli(model, _FLAGS), checkpoint_tokens=4)
    await engine.start()
    shutdown = engine.shutdown

    async def start() -> None:
        await engine.llm.update_weight_version("0")

    async def not_yet() -> None:
        """Its worker has ended."""

    engine.start, engine.shutdown = start, not_yet
    return engine, shutdown


async def update(engine: Any, directory: str, requests: int) -> float:
    """Seconds in which the engine makes no token for pause, load and resume by vLLM's own calls,
    with so many requests running."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    llm = engine.llm
    params = SamplingParams(temperature=1.0, max_tokens=180, ignore_eos=True)
    prompt = np.array([1, 5, 20, 7], np.int32)
    running: set[int] = set()
    all_run = asyncio.Event()

    async def consume(number: int) -> None:
        async for _ in await engine.add(EngineRequest(f"bare-{number}", prompt, params)):
            running.add(number)
            if len(running) == requests:
                all_run.set()

    tasks = [asyncio.create_task(consume(number)) for number in range(requests)]
    await all_run.wait()
    begun = time.monotonic()
    await llm.pause_generation(mode="abort")
    await llm.start_weight_update()
    files = {"directory": directory}
    await llm.update_weights(WeightTransferUpdateRequest(update_info=files))
    await llm.finish_weight_update("0")
    await llm.resume_generation()
    took = time.monotonic() - begun
    await asyncio.gather(*tasks)
    return took
