"""The process behind `rollq bench engine`: a worker, and the same engine without the pool.

    ROLLQ_REDIS_URL=... python -m workers.bench.engine QUEUE MODEL [VLLM'S FLAGS]

It is an ordinary `Worker` that serves the queue. For each line on stdin, a JSON object with
`prompts` (token ids) and `max_tokens` (one a prompt), it completes them through the worker's
own `AsyncLLM`, past the pool, and answers with a line: how many tokens came, in how many
seconds. So both ways have the same weights, compiled kernels, threads and memory, and only the
pool is between them. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TextIO

from producer.contract.sampling import SamplingParams
from workers.bench import own_stdout
from workers.cli import run_loop
from workers.engines import vllm_bare
from workers.engines.vllm import VllmEngine, engine_args_from_cli
from workers.settings import WorkerSettings
from workers.worker import Worker


def main() -> None:
    queue, model, *flags = sys.argv[1:]
    answers = own_stdout()
    settings = WorkerSettings(url=os.environ["ROLLQ_REDIS_URL"], queue=queue)
    engine = VllmEngine(
        engine_args_from_cli(model, flags),
        checkpoint_tokens=max(1, settings.checkpoint_tokens // 4),
    )
    sys.exit(run_loop(_serve(Worker(settings, engine), engine, answers)))


async def _serve(worker: Worker, engine: VllmEngine, answers: TextIO) -> int:
    working = asyncio.create_task(worker.run())
    answering = asyncio.create_task(_answer(engine, answers))
    await asyncio.wait({working, answering}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        return working.result()
    worker.stop()
    code = await working
    answering.result()
    return code


async def _answer(engine: VllmEngine, answers: TextIO) -> None:
    orders = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while line := await orders.readline():
        order: dict[str, Any] = json.loads(line)
        params = [SamplingParams(max_tokens=m, ignore_eos=True) for m in order["max_tokens"]]
        await vllm_bare.generate(engine, order["prompts"], params)
        answers.write(json.dumps({"steps": engine.progress}) + "\n")


if __name__ == "__main__":
    main()
