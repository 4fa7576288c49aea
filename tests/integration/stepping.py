"""A worker process on a `StepEngine`, for the tests that kill one at an exact point.

`python -m tests.integration.stepping --name=... --redis=... --queue=... --weights-dir=...`

Each request makes `--tokens` tokens and waits (-1: all). With `--die=decode` the process ends
itself by SIGKILL after the last token of a sample and before its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from tests.integration.stepper import StepEngine
from workers.engines.protocol import Response
from workers.settings import WorkerSettings
from workers.worker import Worker


class _Doomed(StepEngine):
    async def text_of(self, response: Response) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


async def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--name", "--redis", "--queue"):
        parser.add_argument(name, required=True)
    parser.add_argument("--weights-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=-1)
    parser.add_argument("--max-samples", type=int, default=0)
    parser.add_argument("--die", choices=["decode"])
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    settings = WorkerSettings(
        url=options.redis,
        queue=options.queue,
        name=options.name,
        weights_dir=options.weights_dir,
        max_samples=options.max_samples,
        checkpoint_tokens=1,
    )
    engine = (_Doomed if options.die else StepEngine)(
        lambda request: None if options.tokens < 0 else options.tokens
    )
    return await Worker(settings, engine).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
