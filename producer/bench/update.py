"""`rollq bench update`: from a publication to the last worker that serves it.

Simulated workers (`workers/bench/update.py`, several to a process), each with samples in flight,
are all to stop and load at once. `stopped` is from the script `publish` to the end of generation
in the last of them, `serving` until the last goes on, both by one machine's clock. The files are
small, so reading them costs next to nothing, and a load takes 200 ms. `serving_half` is with the
usual `max_updating`: the second half of the workers stops when the first one serves.

With vLLM: how long the engine stands still for an update, against the bare sequence pause, load,
resume on the same engine with as many requests running, in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producer.client import RolloutClient
from producer.contract.errors import EngineError
from producer.contract.sampling import SamplingParams
from producer.processes import log_tail, start_module

_LONGEST_SECONDS, _END_SECONDS = 300.0, 60.0
_LOOK_SECONDS = 0.02
#: seconds in which the pool generates before the next publication
_STEADY_SECONDS = 0.2
#: publications with the usual `max_updating`, of four with all workers at once
_HALVES = 4
#: of a model so small that more of them would only wait for each other
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: workers one after the other on one vLLM, with the bare sequence between them
_PARTS = 4
_PROMPT = [1, 5, 20, 7]

Line = dict[str, Any]


def measure(url: str, workers: Sequence[int], publications: int, samples: int) -> dict[str, float]:
    """Milliseconds for each number of simulated workers: medians, and the 99th percentile.

    Raises:
        EngineError: a worker ended.
    """
    figures: dict[str, float] = {}
    for count in workers:
        names = [f"sim-{i}" for i in range(count)]
        processes = min(count, os.cpu_count() or 1)
        parts = [["sim", *names[i::processes]] for i in range(processes)]
        stopped, serving, halves = [], [], []
        with _pool(url, samples, parts) as pool:
            pool.submit(count * samples, 1 << 15)
            pool.steady(count * samples)
            for number in range(publications + -(-publications // _HALVES)):
                half = number >= publications
                lines, since = pool.update(count, None if half else 1.0)
                last = 1000 * (max(line["serving"] for line in lines) - since)
                if half:
                    halves.append(last)
                else:
                    serving.append(last)
                    stopped.append(1000 * (max(line["stopped"] for line in lines) - since))
                pool.steady(count * samples)
        figures |= _percentiles(f"workers_{count}_stopped", stopped)
        figures |= _percentiles(f"workers_{count}_serving", serving)
        figures[f"workers_{count}_serving_half_ms"] = statistics.median(halves)
    return figures


def measure_vllm(url: str, publications: int, samples: int) -> dict[str, float]:
    """Milliseconds, medians, in which a real engine made no token for an update."""
    from producer.demo.model import MAX_MODEL_LEN, make_model

    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        make_model(model, seed=0)
        updates, rounds = -(-publications // _PARTS), -(-publications // (_PARTS + 1))
        with _pool(url, samples, [["vllm", str(model), str(_PARTS), str(rounds)]]) as pool:
            idle: list[float] = []
            bare = pool.bare(rounds)
            for _ in range(_PARTS):
                for _ in range(updates):
                    pool.submit(4 * samples, MAX_MODEL_LEN - len(_PROMPT))
                    pool.steady(samples)
                    lines, _ = pool.update(1, None, model)
                    idle += [line["idle_ms"] for line in lines]
                pool.next_part()
                bare += pool.bare(rounds)
            pool.end()
    return {
        "vllm_idle_ms": statistics.median(idle),
        "vllm_bare_ms": statistics.median(bare),
        "times_bare_idle": statistics.median(idle) / statistics.median(bare),
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    values = sorted(values)
    p99 = values[-(-99 * len(values) // 100) - 1]
    return {f"{name}_ms": statistics.median(values), f"{name}_p99_ms": p99}


@dataclass
class _Pool:
    """A client, and processes with the workers of its queue."""

    client: RolloutClient
    processes: list[subprocess.Popen[bytes]]
    log: Path
    files: Path
    lines: queue.Queue[Line]
    readers: list[threading.Thread]
    published: int = 0

    def submit(self, samples: int, tokens: int) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        self.client.submit([_PROMPT] * samples, params)

    def steady(self, samples: int) -> None:
        """Wait until so many samples are in flight, and generated for a while."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while (status := self.client.status()).leased < samples or any(
            w.state != "serving" for w in status.workers
        ):
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(f"{status.leased} of {samples} samples are with workers")
            time.sleep(_LOOK_SECONDS)
        time.sleep(_STEADY_SECONDS)

    def update(
        self, workers: int, most: float | None, files: Path | None = None
    ) -> tuple[list[Line], float]:
        """Publish; what each worker said of it, and when it was published."""
        self.published += 1
        if files is None:
            files = self.files
            (files / "model.safetensors").write_bytes(b"weights %d" % self.published)
        version = self.client.publish_weights(files, max_updating=most, force=True)
        lines = self.said(workers, lambda line: line.get("version") == version)
        published_at = self.client.status().of_version(version, "published_at")
        return lines, int(published_at) / 1000

    def bare(self, rounds: int) -> list[float]:
        """What the bare sequences took, that come before a worker of vLLM and after it."""
        return [line["bare_ms"] for line in self.said(rounds, lambda line: "bare_ms" in line)]

    def said(self, count: int, wanted: Callable[[Line], bool]) -> list[Line]:
        """The next so many lines of this kind; others are skipped."""
        found: list[Line] = []
        deadline = time.monotonic() + _LONGEST_SECONDS
        while len(found) < count:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=1.0)
                if wanted(line):
                    found.append(line)
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(f"{len(found)} of {count} lines came")
        return found

    def check(self) -> None:
        if any(process.poll() for process in self.processes):
            raise EngineError(f"a worker failed; its log ends:\n{log_tail(self.log)}")

    def next_part(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_END_SECONDS)
        self.check()

    def read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put(json.loads(line))
        process.stdout.close()

    def kill(self) -> None:
        """Nothing is left, of vLLM's processes neither."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for reader in self.readers:
            reader.join()


@contextmanager
def _pool(url: str, samples: int, parts: Sequence[Sequence[str]]) -> Iterator[_Pool]:
    """`parts` are the last arguments of each process."""
    name = f"bench-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory() as place:
        weights, files, log = Path(place, "weights"), Path(place, "files"), Path(place, "log")
        weights.mkdir()
        files.mkdir()
        with RolloutClient(url, name, weights_dir=weights) as client:
            pool = _Pool(client, [], log, files, queue.Queue(), [])
            try:
                for part in parts:
                    arguments = [name, str(weights), str(samples), *part]
                    environment = {**_ONE_THREAD, "ROLLQ_REDIS_URL": url}  # it may hold a password
                    pool.processes.append(
                        start_module("workers.bench.update", arguments, environment, log)
                    )
                    reader = threading.Thread(target=pool.read, args=[pool.processes[-1]])
                    reader.start()
                    pool.readers.append(reader)
                yield pool
            finally:
                pool.kill()
