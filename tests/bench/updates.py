"""What weight updates cost a pool under load: `python -m tests.bench.updates`.

Two worker processes on one machine, a publication again and again with `max_updating` 1. It
shows the pool's tokens in every second, which must never be 0, and how long an engine stood
still for an update. With real vLLM (the default) that is compared with the bare sequence pause,
load, resume on the same engine beside the same other worker, half of it measured before and half
after; only their ratio means anything. `--engine sim` has loads of `--load-seconds` and no such
comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from producer import RolloutClient, SamplingParams
from producer.server import start_embedded
from tests.waiting import async_wait_until, wait_until
from workers.engines.protocol import EngineRequest
from workers.settings import WorkerSettings
from workers.state import UpdateTimes, WorkerState
from workers.worker import Worker

_QUEUE = "bench"
_PARTS = ("close", "pause", "load", "reset", "resume")
#: seconds between two looks at a worker
_LOOK = 0.01
_ANY_LENGTH = SamplingParams(temperature=1.0, max_tokens=1500, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "sim"], default="vllm")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="held by each worker")
    parser.add_argument("--load-seconds", type=float, default=2.0, help="of a simulated load")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options))
        return
    with tempfile.TemporaryDirectory() as directory:
        figures = _measure(options, Path(directory))
    sys.stdout.write((json.dumps(figures) if options.json else _table(figures)) + "\n")


def _table(figures: dict[str, Any]) -> str:
    seconds = figures["tokens_in_each_second"]
    lines = [
        f"{figures['updates']} updates of 2 workers in {figures['seconds']:.1f} s",
        f"  tokens in each second  min {min(seconds)}, median {statistics.median(seconds):.0f}",
        f"    {' '.join(map(str, seconds))}",
        f"  least in any 1 s       {figures['least_in_any_second']}",
        f"  longest without any    {figures['longest_gap_ms']:.0f} ms",
        f"  both stood still       {figures['both_stood_still_ms']:.0f} ms",
        f"  an update, ms          {_row(figures['parts'])}",
    ]
    if "bare_parts" in figures:
        lines.append(f"  bare, ms               {_row(figures['bare_parts'])}")
        least = figures["least_idle_ms"] / figures["least_bare_ms"]
        lines.append(
            f"  idle / bare            {figures['ratio']:.3f} of the medians, {least:.3f} of the "
            f"least ({figures['least_idle_ms']:.1f} and {figures['least_bare_ms']:.1f} ms)"
        )
    return "\n".join(lines)


def _row(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items())


# the trainer


def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    (directory / "weights").mkdir()
    with (
        start_embedded(directory / "redis", appendonly=False) as server,
        RolloutClient(server.url, _QUEUE, weights_dir=directory / "weights") as client,
    ):
        weights = _trained(directory) if options.engine == "vllm" else _pretended(directory)
        next(weights)
        client.submit([[1, 5, 20, 7]] * 16 * options.samples, _ANY_LENGTH)
        with _worker("b", options, directory, server.url):
            wait_until(lambda: _busy(client, "b", options.samples), "b has samples", 300)
            with _worker("a", options, directory, server.url):
                wait_until(lambda: _busy(client, "a", options.samples), "a has samples", 400)
                begun = time.monotonic()
                for _ in range(options.updates):
                    if client.status().ready < 4 * options.samples:
                        client.submit([[1, 5, 20, 7]] * 16 * options.samples, _ANY_LENGTH)
                    client.publish_weights(
                        next(weights), force=True, max_updating=1, wait="all", timeout=120
                    )
                ended = time.monotonic()
    said = [json.loads((directory / f"{name}.json").read_text()) for name in "ab"]
    times = [UpdateTimes(*t) for s in said for t in s["updates"]]
    figures: dict[str, Any] = {
        "updates": options.updates,
        "seconds": ended - begun,
        **_rates([s["seen"] for s in said], begun, ended),
        "parts": _medians(times),
    }
    if bare := [UpdateTimes(*t) for s in said for t in s["bare"]]:
        figures["bare_parts"] = _medians(bare)
        # Of the same engine: only a's sequence was measured bare.
        mine = _medians([UpdateTimes(*t) for t in said[0]["updates"]])
        figures["ratio"] = mine["idle"] / figures["bare_parts"]["idle"]
        least = [min(UpdateTimes(*t).idle for t in said[0][what]) for what in ("updates", "bare")]
        figures["least_idle_ms"], figures["least_bare_ms"] = (1000 * t for t in least)
    return figures


def _trained(directory: Path) -> Iterator[Any]:
    import torch

    from tests.tiny import make_llama

    model = make_llama(directory / "model")
    while True:
        yield model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


def _pretended(directory: Path) -> Iterator[Any]:
    files = directory / "files"
    files.mkdir()
    for number in itertools.count():
        (files / "model.safetensors").write_bytes(b"weights %d" % number)
        yield files


def _busy(client: RolloutClient, name: str, samples: int) -> bool:
    return any(
        w.name == name and w.in_flight >= samples // 2 and w.tokens_per_second > 0
        for w in client.status().workers
    )


@contextmanager
def _worker(
    name: str, options: argparse.Namespace, directory: Path, url: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.bench.updates", "--serve", name, "--url", url]
    for option in ("engine", "updates", "samples", "load_seconds"):
        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    command += ["--directory", str(directory)]
    # vLLM's own words go to a file.
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **quiet}
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        if process.wait(120):
            raise RuntimeError((directory / f"{name}.log").read_text()[-3000:])
    finally:
        process.kill()
        process.wait()


def _rates(seen: list[list[tuple[float, int, bool]]], begun: float, ended: float) -> dict[str, Any]:
    """What both workers made together; tokens count when their output comes."""
    grid = np.arange(begun, ended, _LOOK)
    tokens = np.zeros(len(grid), np.int64)
    still = np.ones(len(grid), np.bool_)
    for series in seen:
        at = np.searchsorted([t for t, _, _ in series], grid, side="right") - 1
        tokens += np.array([n for _, n, _ in series])[at]
        still &= np.array([s for _, _, s in series])[at]
    second = round(1 / _LOOK)
    moved = grid[np.flatnonzero(np.diff(tokens)) + 1]
    return {
        "tokens_in_each_second": np.diff(tokens[::second]).tolist(),
        "least_in_any_second": int((tokens[second:] - tokens[:-second]).min()),
        "longest_gap_ms": 1000 * float(np.diff(moved).max()),
        "both_stood_still_ms": 1000 * _LOOK * int(still.sum()),
    }


def _medians(times: list[UpdateTimes]) -> dict[str, float]:
    parts = {"idle": [t.idle for t in times]}
    parts |= {name: [getattr(t, name) for t in times] for name in _PARTS}
    return {name: 1000 * statistics.median(values) for name, values in parts.items()}


# a worker


async def _serve(options: argparse.Namespace) -> None:
    settings = WorkerSettings(
        url=options.url,
        queue=_QUEUE,
        name=options.serve,
        weights_dir=options.directory / "weights",
        checkpoint_tokens=16,
        max_samples=options.samples,
    )
    bare: list[UpdateTimes] = []
    rounds = options.updates // 2 if options.engine == "vllm" and options.serve == "a" else 0
    engine = _sim(options) if options.engine == "sim" else _vllm(options)
    await engine.begin()
    bare += [await _bare(engine, options) for _ in range(rounds)]
    worker = Worker(settings, engine)
    watch = _Watch(worker.state)
    watching = asyncio.create_task(watch.run())
    code = await worker.run()
    watching.cancel()
    if rounds:
        await engine.resume()  # its worker has left it paused
    bare += [await _bare(engine, options) for _ in range(rounds)]
    await engine.end()
    said = {"seen": watch.seen, "updates": watch.updates, "bare": [_plain(t) for t in bare]}
    (options.directory / f"{options.serve}.json").write_text(json.dumps(said))
    sys.exit(code)


def _sim(options: argparse.Namespace) -> Any:
    from workers.engines.sim import SimEngine, SimSettings

    class Sim(SimEngine):
        async def begin(self) -> None:
            """Its worker starts it."""

        end = begin

    how = {"token_rate": 50, "stream_interval": 4, "load_seconds": options.load_seconds}
    return Sim(SimSettings(**how))


def _vllm(options: argparse.Namespace) -> Any:
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
    model = str(options.directory / "model")
    return Kept(engine_args_from_cli(model, flags), checkpoint_tokens=4)


async def _bare(engine: Any, options: argparse.Namespace) -> UpdateTimes:
    """vLLM's own calls, with as many requests running as a worker has."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    llm = engine._llm
    started: set[str] = set()

    async def consume(request: EngineRequest) -> None:
        async for output in await engine.add(request):
            if len(output.token_ids):
                started.add(request.request_id)

    prompt = np.array([1, 5, 20, 7], np.int32)
    tasks = [
        asyncio.create_task(consume(EngineRequest(f"bare-{i}", prompt, _ANY_LENGTH)))
        for i in range(options.samples)
    ]
    await async_wait_until(lambda: len(started) == len(tasks), "all run", 60)
    begun = time.monotonic()
    await llm.pause_generation(mode="abort")
    paused = time.monotonic()
    await llm.start_weight_update()
    files = {"directory": str(options.directory / "model")}
    await llm.update_weights(WeightTransferUpdateRequest(update_info=files))
    await llm.finish_weight_update("0")
    loaded = time.monotonic()
    await llm.resume_generation()
    ended = time.monotonic()
    await asyncio.gather(*tasks)
    return UpdateTimes(pause=paused - begun, load=loaded - paused, resume=ended - loaded)


class _Watch:
    """What a worker has made, and whether it stood still, as time goes on."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self.seen: list[tuple[float, int, bool]] = []
        self.updates: list[list[float]] = []

    async def run(self) -> None:
        done = 0
        while True:
            state = self._state
            self.seen.append((time.monotonic(), state.tokens, state.phase != "serving"))
            if state.updates > done and state.update_times is not None:
                done = state.updates
                self.updates.append(_plain(state.update_times))
            await asyncio.sleep(_LOOK)


def _plain(times: UpdateTimes) -> list[float]:
    return [getattr(times, name) for name in _PARTS]


if __name__ == "__main__":
    main()
