"""The workers of `rollq bench update`; started by `producer/bench/update.py`.

    python -m workers.bench.update QUEUE WEIGHTS_DIR SAMPLES sim NAME...
    python -m workers.bench.update QUEUE WEIGHTS_DIR SAMPLES vllm MODEL PARTS ROUNDS

ROLLQ_REDIS_URL says where Redis is. Ordinary `Worker`s, several in one event loop where they are
simulated. For each update of each a JSON line on stdout says when its engine had stopped and when
it went on, by the clock that Redis on this machine has, too, and how long it stood still. The end
of stdin ends them.

With vLLM it is PARTS workers one after the other, on one engine, each ended by a line on stdin;
before the first, between them and after the last the bare sequence pause, load, resume is done
ROUNDS times, and a line says how long the engine stood still for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from workers.bench import own_stdout
from workers.cli import run_loop
from workers.engines.sim import SimEngine, SimSettings
from workers.settings import WorkerSettings
from workers.worker import Worker

#: slow enough that the machine is not busy making tokens; a load lasts until others have stopped
_SIM = SimSettings(token_rate=20, stream_interval=4, max_model_len=1 << 16, load_seconds=0.2)


async def main(queue: str, weights_dir: str, samples: str, kind: str, *rest: str) -> None:
    held = int(samples)

    def settings(name: str) -> WorkerSettings:
        url = os.environ["ROLLQ_REDIS_URL"]
        return WorkerSettings(url, queue, name, Path(weights_dir), max_samples=held)

    if kind == "sim":
        engines = [SimEngine(_SIM) for _ in rest]
        for name, simulated in zip(rest, engines, strict=True):
            _watch(name, simulated)
        names = zip(rest, engines, strict=True)
        await _serve([Worker(settings(name), engine) for name, engine in names])
        return
    from workers.engines import vllm_bare

    model, parts, rounds = rest
    engine, shutdown = await vllm_bare.outlives_its_worker(model)
    pause, load, resume = engine.pause, engine.load, engine.resume
    for part in range(int(parts) + 1):
        for _ in range(int(rounds)):
            _say(bare_ms=1000 * await vllm_bare.update(engine, model, held))
        if part < int(parts):
            name = f"vllm-{part}"
            _watch(name, engine)
            await _serve([Worker(settings(name), engine)])
            engine.pause, engine.load, engine.resume = pause, load, resume
            await resume()  # its worker has left it paused
    await shutdown()


def _watch(name: str, engine: Any) -> None:
    """Have an engine say when it stops and goes on for an update."""
    pause, load, resume = engine.pause, engine.load, engine.resume
    began = stopped = 0.0
    loaded = 0

    async def timed_pause(mode: str) -> None:
        nonlocal began, stopped
        began = time.time()
        await pause(mode)
        stopped = time.time()

    async def noted_load(directory: Path, version: int) -> float:
        nonlocal loaded
        loaded = version
        return float(await load(directory, version))

    async def told_resume() -> None:
        await resume()
        now = time.time()
        idle = 1000 * (now - began)
        _say(worker=name, version=loaded, stopped=stopped, serving=now, idle_ms=idle)

    engine.pause, engine.load, engine.resume = timed_pause, noted_load, told_resume


async def _serve(workers: list[Worker]) -> None:
    """Until a line on stdin or its end, or the end of a worker, which is a failure."""
    working = [asyncio.create_task(worker.run()) for worker in workers]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.readline))
    await asyncio.wait({*working, ended}, return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        worker.stop()
    codes = await asyncio.gather(*working)
    if any(codes) or not ended.done():
        os._exit(1)  # the log says why; a thread still reads stdin


def _say(**words: object) -> None:
    _answers.write(json.dumps(words) + "\n")


if __name__ == "__main__":
    _answers = own_stdout()
    run_loop(main(*sys.argv[1:]))
