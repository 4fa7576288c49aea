"""A weight update by vLLM's own calls: what `rollq bench update --engine vllm` compares with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from producer.contract.sampling import SamplingParams
from workers.engines.protocol import EngineRequest
from workers.engines.vllm import VllmEngine, engine_args_from_cli

_FLAGS = ["--dtype", "float32", "--max-model-len", "192"]


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


async def bare_update(engine: Any, directory: str, requests: int) -> float:
    """Seconds in which the engine makes no token for pause, load and resume, with so many
    requests running."""
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
