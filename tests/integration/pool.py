"""A pool for tests: a client, workers in this event loop or in processes, made-up weights.

What a test looks at goes through `Pool.client`, as a trainer's would, or through the `driver`.
`proved` checks what must hold of any rollout; every test passes its rollouts through it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from producer import Batch, Rollout, RolloutClient, RolloutGroup, SamplingParams
from producer.contract.errors import ResultsTimeout
from producer.contract.states import State
from producer.weights import write_checkpoint
from tests.integration.stepper import MODEL, StepEngine
from tests.waiting import DEADLINE_S, async_wait_until
from workers.engines import sim_model
from workers.engines.protocol import Engine
from workers.settings import WorkerSettings
from workers.worker import Worker

QUEUE = "q"
ROOT = Path(__file__).parents[2]


class _Worker(Worker):
    """Ends with a failure, and not the tests' process, when it stands still."""

    def _stand_still(self, reason: str) -> None:
        self.state.give_up(reason)


@dataclass(eq=False)
class Running:
    """A worker in this event loop."""

    worker: Worker
    task: asyncio.Task[int]

    @property
    def state(self) -> Any:
        return self.worker.state

    async def ended(self) -> int:
        """Its exit code, when it has ended by itself."""
        return await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)

    async def drain(self) -> int:
        """As a SIGTERM does."""
        self.worker.stop()
        return await self.ended()


class Pool:
    """Made by the fixtures `pool` and `open_pool`, which close it."""

    def __init__(self, url: str, directory: Path, limits: dict[str, int]) -> None:
        self.url = url
        self.directory = directory
        self.weights_dir = directory / "weights"
        self.weights_dir.mkdir()
        self._published = 0
        self.workers: dict[str, Running] = {}
        self._clients: list[RolloutClient] = []
        self.client = self.new_client(limits=limits)

    def new_client(self, **options: Any) -> RolloutClient:
        """One more trainer; closed with the pool."""
        options.setdefault("patience", DEADLINE_S)
        client = RolloutClient(self.url, QUEUE, weights_dir=self.weights_dir, **options)
        self._clients.append(client)
        return client

    async def start(self, engine: Engine, **settings: Any) -> Running:
        """A started worker; it stores each token at once unless `settings` say otherwise."""
        settings.setdefault("checkpoint_tokens", 1)
        settings.setdefault("weights_dir", self.weights_dir)
        settings.setdefault("fetch_seconds", 0.5)
        worker = _Worker(WorkerSettings(url=self.url, queue=QUEUE, **settings), engine)
        running = Running(worker, asyncio.create_task(worker.run()))
        self.workers[worker.state.settings.name] = running
        await async_wait_until(
            lambda: worker.state.phase != "starting" or running.task.done(), "the worker serves"
        )
        return running

    async def close(self) -> None:
        """End what still runs; a worker that ended with an exception raises it here."""
        for running in self.workers.values():
            if not running.task.done():
                running.state.stop.set()
                running.state.free.set()
        tasks = [running.task for running in self.workers.values()]
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        for client in self._clients:
            client.close()

    # weights

    def files(self, content: bytes | None = None) -> Path:
        """A directory with weights that no version had before, or with `content`."""
        self._published += 1
        directory = self.directory / f"files-{self._published}"
        directory.mkdir()
        data = b"weights %d" % self._published if content is None else content
        (directory / "model.safetensors").write_bytes(data)
        return directory

    def publish(self, content: bytes | None = None, **options: Any) -> int:
        return self.client.publish_weights(self.files(content), **options)

    def write(self) -> tuple[str, str]:
        """Files in the weights directory that are not published yet: their path and digest."""
        return write_checkpoint(self.weights_dir, QUEUE, self.files(), 0)

    async def update(self, *workers: Running, **options: Any) -> int:
        """Publish new weights and wait until these workers serve them."""
        version = self.publish(**options)
        await self.serving(version, *workers)
        return version

    async def serving(self, version: int, *workers: Running) -> None:
        await async_wait_until(
            lambda: all(w.state.version == version and w.state.phase == "serving" for w in workers),
            f"all serve version {version}",
        )

    # samples

    def submit(self, count: int = 1, **params: Any) -> list[str]:
        """Groups g0, g1, ... of the prompt [1, 2, 3] with max_tokens 8, unless said otherwise."""
        return self.client.submit(
            [[1, 2, 3]] * count,
            SamplingParams(**{"max_tokens": 8} | params),
            ids=[f"g{i}" for i in range(count)],
        )

    async def batch(self, groups: int = 1, *, timeout: float = DEADLINE_S) -> Batch:
        try:
            return await asyncio.to_thread(self.client.batch, groups, timeout=timeout)
        except ResultsTimeout as error:
            error.add_note(self._describe())
            raise

    def _describe(self) -> str:
        """What everybody is doing, for a test that waits in vain."""
        lines = [str(w) for w in self.client.status().workers]
        for name, running in self.workers.items():
            state = running.state
            lines.append(f"{name}: {state.phase} at {state.version}, failure {state.failure}")
            for h in state.held.values():
                lines.append(f"  {h.id} {h.request_id} {h.stored} {h.made} {h.budget} {h.outcome}")
        return "\n".join(lines)

    async def groups(
        self, count: int = 1, *, model: sim_model.HashModel = MODEL
    ) -> list[RolloutGroup]:
        """The next closed groups, acked, each rollout proved."""
        batch = await self.batch(count)
        assert len(batch) == count
        assert batch.ack() == count
        return [proved_group(g, model=model) for g in batch]

    async def one(self) -> Rollout:
        """The only member of the next group."""
        (group,) = await self.groups()
        (rollout,) = group.rollouts
        return rollout

    async def made(self, tokens: int, *samples: str) -> None:
        """Wait until so many tokens of each sample are stored."""

        def stored(sample: str) -> bool:
            rollout = self.client.peek(sample)
            return rollout is not None and len(rollout.response_ids) == tokens

        for sample in samples or ("g0/0",):
            await async_wait_until(partial(stored, sample), f"{tokens} tokens of {sample} stored")

    async def in_engine(self, engine: StepEngine, count: int) -> None:
        await async_wait_until(lambda: len(engine.live) == count, f"{count} are in the engine")


def proved(
    rollout: Rollout, *, model: sim_model.HashModel = MODEL, seeded: bool = False
) -> Rollout:
    """Check that the arrays fit together and that each token is what an engine that was never
    interrupted would have made of the same prompt under the same versions."""
    r = rollout
    count = len(r.response_ids)
    assert len(r.response_logprobs) == len(r.response_mask) == len(r.versions) == count
    assert r.response_mask.tolist() == [1] * count
    assert (np.diff(r.versions) >= 0).all(), "versions go back"
    assert all(s.tokens > 0 for s in r.segments)
    assert [v for s in r.segments for v in [s.version] * s.tokens] == r.versions.tolist()
    assert (r.param_version_start, r.param_version_end) == (
        (r.versions[0], r.versions[-1]) if count else (-1, -1)
    )
    if r.state is State.FINISHED:
        assert r.text == sim_model.decode(r.response_ids, skip_special_tokens=True)
        assert r.error == ""
    if not seeded:
        tokens, logprobs = sim_model.replay(
            model, r.prompt_ids, r.versions.tolist(), temperature=r.temperature
        )
        assert r.response_ids.tolist() == tokens
        assert r.response_logprobs.tolist() == logprobs
    return r


def proved_group(group: RolloutGroup, **how: Any) -> RolloutGroup:
    for index, rollout in enumerate(group.rollouts):
        assert (rollout.index, rollout.group_id) == (index, group.id)
        proved(rollout, **how)
    return group


class Process:
    """A worker process; its log is `log()`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._popen = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def ended(self, seconds: float = DEADLINE_S) -> int:
        """Its exit code."""
        return self._popen.wait(seconds)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        if self.running:
            self._popen.kill()
            self._popen.wait()


class Processes:
    """Starts worker processes of a pool, and kills at the end what still runs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.started: list[Process] = []

    def __call__(self, name: str, *, stepping: bool = False, **options: object) -> Process:
        """`rollq worker --engine sim`, or with `stepping` tests/integration/stepping.py."""
        pool = self._pool
        module = "tests.integration.stepping" if stepping else "producer.cli"
        command = [sys.executable, "-m", module]
        command += [] if stepping else ["worker", "--engine", "sim"]
        options = {
            "name": name,
            "redis": pool.url,
            "queue": QUEUE,
            "weights_dir": pool.weights_dir,
        } | options
        command += [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
        self.started.append(Process(command, pool.directory / f"{name}.log"))
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.close()
