"""What weight updates cost a pool under load: `python -m tests.bench.updates`.

Two workers on one machine, a publication again and again with `max_updating` 1. It shows the
pool's tokens in every second, which must never be 0, and how long an engine stood still for an
update. With real vLLM (the default) that is compared with the bare sequence pause, load, resume
on the same engine under the same load, half of it measured before and half after; only their
ratio means anything. `--engine sim` has loads of `--load-seconds` and no such comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from producer import RolloutClient, SamplingParams
from producer.server import start_embedded
from tests.waiting import async_wait_until
from workers.engines.protocol import Engine, EngineRequest
from workers.settings import WorkerSettings
from workers.state import UpdateTimes
from workers.worker import Worker

_QUEUE = "bench"
_PARTS = ("close", "pause", "load", "reset", "resume")
#: seconds between two looks at the pool
_LOOK = 0.02
_ANY_LENGTH = SamplingParams(temperature=1.0, max_tokens=1500, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "sim"], default="vllm")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="held by each worker")
    parser.add_argument("--load-seconds", type=float, default=2.0, help="of a simulated load")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(_measure(options, Path(directory)))
    print(json.dumps(figures) if options.json else _table(figures))


def _table(figures: dict[str, Any]) -> str:
    seconds = figures["tokens_in_each_second"]
    lines = [
        f"{figures['updates']} updates of 2 workers in {figures['seconds']:.1f} s",
        f"  tokens in each second  min {min(seconds)}, median {statistics.median(seconds):.0f}",
        f"    {' '.join(map(str, seconds))}",
        f"  least in any 1 s       {figures['least_in_any_second']}",
        f"  longest without any    {figures['longest_gap_ms']:.0f} ms",
        f"  both stood still       {figures['both_stood_still_ms']:.0f} ms",
        "  an update, ms (median) "
        + ", ".join(f"{k} {v:.1f}" for k, v in figures["parts"].items()),
    ]
    if "bare_parts" in figures:
        bare = figures["bare_parts"]
        lines.append(
            "  bare, ms (median)      " + ", ".join(f"{k} {v:.1f}" for k, v in bare.items())
        )
        lines.append(f"  idle / bare            {figures['ratio']:.3f} of the medians")
    return "\n".join(lines)


async def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with start_embedded(directory / "redis", appendonly=False) as server:
        weights = directory / "weights"
        with RolloutClient(server.url, _QUEUE, weights_dir=weights) as client:
            pool = _VllmPool if options.engine == "vllm" else _SimPool
            return await pool(options, directory, server.url, client).run()


class _Pool:
    """Two workers in this process, so that their tokens can be counted as they come."""

    def __init__(
        self, options: argparse.Namespace, directory: Path, url: str, client: RolloutClient
    ) -> None:
        self.options = options
        self.directory = directory
        self.url = url
        self.client = client
        self.versions = itertools.count(1)
        self.workers: list[Worker] = []

    def make_weights(self) -> Any:
        raise NotImplementedError

    @asynccontextmanager
    async def worker(self, name: str, engine: Engine) -> AsyncIterator[Worker]:
        settings = WorkerSettings(
            url=self.url,
            queue=_QUEUE,
            name=name,
            weights_dir=self.directory / "weights",
            checkpoint_tokens=16,
            max_samples=self.options.samples,
        )
        worker = Worker(settings, engine)
        task = asyncio.create_task(worker.run())
        self.workers.append(worker)
        await async_wait_until(lambda: worker.state.phase == "serving", f"{name} serves", 300)
        yield worker
        self.workers.remove(worker)
        worker.stop()
        await task

    async def load_up(self, *workers: Worker) -> None:
        samples = self.options.samples
        await async_wait_until(
            lambda: all(
                len(w.state.in_engine()) >= samples // 2 and w.state.tokens for w in workers
            ),
            "all have samples",
            120,
        )

    def submit(self, count: int) -> None:
        self.client.submit([[1, 5, 20, 7]] * count, _ANY_LENGTH)

    async def updates(self, *workers: Worker) -> dict[str, Any]:
        await self.load_up(*workers)
        watch = _Watch(workers)
        watching = asyncio.create_task(watch.run())
        times: list[UpdateTimes] = []
        for _ in range(self.options.updates):
            if self.client.status().ready < 4 * self.options.samples:
                self.submit(16 * self.options.samples)
            version = await asyncio.to_thread(
                self.client.publish_weights, self.make_weights(), force=True, max_updating=1
            )
            for worker in workers:
                await async_wait_until(
                    lambda w=worker, v=version: w.state.version == v and w.state.phase == "serving",
                    f"version {version}",
                    120,
                )
                assert worker.state.update_times is not None
                times.append(worker.state.update_times)
        watch.stop = True
        await watching
        return {
            "updates": self.options.updates,
            **watch.figures(),
            "parts": _medians(times),
        }

    async def run(self) -> dict[str, Any]:
        raise NotImplementedError


class _SimPool(_Pool):
    def make_weights(self) -> Path:
        directory = self.directory / "files"
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").write_bytes(b"weights %d" % next(self.versions))
        return directory

    async def run(self) -> dict[str, Any]:
        from workers.engines.sim import SimEngine, SimSettings

        self.submit(16 * self.options.samples)
        how = SimSettings(token_rate=50, load_seconds=self.options.load_seconds, stream_interval=4)
        async with self.worker("a", SimEngine(how)) as a, self.worker("b", SimEngine(how)) as b:
            return await self.updates(a, b)


class _VllmPool(_Pool):
    def make_weights(self) -> Any:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        return self.model

    async def run(self) -> dict[str, Any]:
        from tests.tiny import make_llama

        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self.model = make_llama(self.directory / "model")
        files = self.directory / "bare"
        files.mkdir()
        self.model.save_pretrained(files)
        a, b = self.engine(), self.engine()
        await a.begin()
        await b.begin()
        self.submit(16 * self.options.samples)
        try:
            async with self.worker("b", b) as second:
                await self.load_up(second)
                rounds = self.options.updates // 2
                bare = [await self.bare(a, files) for _ in range(rounds)]
                async with self.worker("a", a) as first:
                    figures = await self.updates(first, second)
                await a.resume()  # its worker has left it paused
                bare += [await self.bare(a, files) for _ in range(rounds)]
        finally:
            await a.end()
            await b.end()
        figures["bare_parts"] = _medians(bare)
        figures["ratio"] = figures["parts"]["idle"] / figures["bare_parts"]["idle"]
        return figures

    def engine(self) -> Any:
        from workers.engines.vllm import VllmEngine, engine_args_from_cli

        class Kept(VllmEngine):
            """Outlives its worker."""

            begin = VllmEngine.start
            end = VllmEngine.shutdown

            async def start(self) -> None:
                await self._llm.update_weight_version("0")

            async def shutdown(self) -> None:
                """Not yet."""

        flags = ["--dtype", "float32", "--max-model-len", "2048"]
        return Kept(engine_args_from_cli(str(self.directory / "model"), flags), checkpoint_tokens=4)

    async def bare(self, engine: Any, files: Path) -> UpdateTimes:
        """vLLM's own calls, with as many requests running as a worker has."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = engine._llm
        started: set[str] = set()

        async def consume(request: EngineRequest) -> None:
            async for output in await engine.add(request):
                if len(output.token_ids):
                    started.add(request.request_id)

        tasks = [
            asyncio.create_task(
                consume(EngineRequest(f"bare-{i}", np.array([1, 5, 20, 7], np.int32), _ANY_LENGTH))
            )
            for i in range(self.options.samples)
        ]
        await async_wait_until(lambda: len(started) == len(tasks), "all run", 60)
        begun = time.monotonic()
        await llm.pause_generation(mode="abort")
        paused = time.monotonic()
        await llm.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"directory": str(files)})
        await llm.update_weights(update)
        await llm.finish_weight_update("0")
        loaded = time.monotonic()
        await llm.resume_generation()
        ended = time.monotonic()
        await asyncio.gather(*tasks)
        return UpdateTimes(pause=paused - begun, load=loaded - paused, resume=ended - loaded)


class _Watch:
    """Counts the tokens of the workers as they come."""

    def __init__(self, workers: tuple[Worker, ...]) -> None:
        self._workers = workers
        self._seen: list[tuple[float, int]] = []
        self._both_still = 0.0
        self.stop = False

    async def run(self) -> None:
        before = time.monotonic()
        while not self.stop:
            now = time.monotonic()
            self._seen.append((now, sum(w.state.tokens for w in self._workers)))
            if all(w.state.phase == "updating" for w in self._workers):
                self._both_still += now - before
            before = now
            await asyncio.sleep(_LOOK)

    def figures(self) -> dict[str, Any]:
        times = np.array([t for t, _ in self._seen])
        tokens = np.array([n for _, n in self._seen])
        at: Callable[[Any], Any] = lambda t: np.interp(t, times, tokens)  # noqa: E731
        whole = np.arange(times[0], times[-1] - 1, 1.0)
        starts = times[times < times[-1] - 1]
        moved = times[np.flatnonzero(np.diff(tokens)) + 1]
        return {
            "seconds": float(times[-1] - times[0]),
            "tokens_in_each_second": [int(n) for n in at(whole + 1) - at(whole)],
            "least_in_any_second": int((at(starts + 1) - at(starts)).min()),
            "longest_gap_ms": 1000 * float(np.diff(moved).max()),
            "both_stood_still_ms": 1000 * self._both_still,
        }


def _medians(times: list[UpdateTimes]) -> dict[str, float]:
    parts = {"idle": [t.idle for t in times]}
    parts |= {name: [getattr(t, name) for t in times] for name in _PARTS}
    return {name: 1000 * statistics.median(values) for name, values in parts.items()}


if __name__ == "__main__":
    main()
