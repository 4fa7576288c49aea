"""`rollq bench partial`: what partial rollouts are worth.

The same prompts with the same long-tailed lengths, and new weights every few steps, under each
policy of `partial_loop.py`. On the simulated engine all cases run side by side, each with a queue
and workers of its own: so all see the same noise, and there is time enough for the queue's own
delays not to count. Real vLLM runs them one after the other on the same workers.

The simulated engine costs what a model of 8 billion parameters in bfloat16 does on an H100: a step
reads 16 GB of weights, and of each sample 4,000 tokens of KV cache of 128 KB, at 77% of 3.35 TB/s
(what vLLM reached of an A100's bandwidth with such a model, by
https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on); prompts are computed at half of
989 TFLOP/s. A load takes 2 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from producer.aio import AsyncRolloutClient
from producer.bench.partial_loop import POLICIES, SHAPES, Told, Work, draw_lengths, work_off
from producer.bench.partial_report import Case, figures
from producer.contract.connection import Queue
from producer.contract.errors import EngineError
from producer.processes import WorkerProcesses, engine_environment

_STEP_SECONDS, _SAMPLE_SECONDS = 6.2e-3, 2.0e-4
_PREFILL_RATE, _LOAD_SECONDS = 30_000.0, 2.0
_SERVE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. Tokens and seconds are those of the pool that is simulated.

    Attributes:
        slots: samples that a worker generates at once.
        batch, steps, train_seconds, update_every: of the trainer; see `Work`.
        longest, prompt: tokens.
        speed: the engine is so many times faster than what it simulates.
        coarse: a token of the engine is so many of those.
    """

    engine: str = "sim"
    workers: int = 2
    slots: int = 32
    batch: int = 64
    update_every: int = 2
    steps: int = 16
    train_seconds: float = 10.0
    longest: int = 16384
    prompt: int = 512
    speed: float = 12.0
    coarse: int = 16
    shapes: tuple[str, ...] = SHAPES
    policies: tuple[str, ...] = POLICIES

    def __post_init__(self) -> None:
        for given, known in ((self.shapes, SHAPES), (self.policies, POLICIES)):
            if unknown := set(given) - set(known):
                raise ValueError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
        if self.steps < self.update_every:
            raise ValueError(f"no update in {self.steps} steps: it comes every {self.update_every}")

    @property
    def title(self) -> str:
        """For a chart."""
        engine = "vLLM" if self.engine == "vllm" else "simulated"
        return (
            f"The same {self.batch * self.steps} samples of up to {self.longest:,} tokens under "
            f"each policy: {self.workers} {engine} workers of {self.slots},\n"
            f"new weights every {self.update_every * self.batch} samples"
        )

    @property
    def cases(self) -> list[Case]:
        return [(shape, policy) for shape in self.shapes for policy in self.policies]

    def work(self, shape: str) -> Work:
        """As the engine sees it."""
        count, update = self.batch * self.steps, self.batch * self.update_every
        return Work(
            draw_lengths(shape, count, self.longest // self.coarse, update),
            self.prompt // self.coarse,
            self.batch,
            self.update_every,
            self.slots * self.workers,
            self.train_seconds / self.speed,
        )


#: for a model of 90,000 parameters on a CPU, in its own tokens and seconds
VLLM = Plan(
    engine="vllm",
    steps=8,
    train_seconds=0.5,
    longest=512,
    prompt=32,
    speed=1.0,
    coarse=1,
)


def measure(url: str, plan: Plan | None = None) -> dict[str, float]:
    """`SHAPE_POLICY_FIGURE` for each shape and policy; the figures are those of `figures`."""
    return flat(run(url, plan or Plan()))


def flat(found: Mapping[Case, Mapping[str, float]]) -> dict[str, float]:
    return {f"{s}_{p}_{name}": v for (s, p), values in found.items() for name, v in values.items()}


def run(url: str, plan: Plan) -> dict[Case, dict[str, float]]:
    """The figures of each case; see `figures`."""
    name = f"bench-{secrets.token_hex(3)}"
    with (
        tempfile.TemporaryDirectory() as directory,
        WorkerProcesses(Path(directory) / "logs", nice=0) as workers,
    ):
        root = Path(directory)
        (root / "weights").mkdir()
        if plan.engine == "vllm":
            queues = dict.fromkeys(plan.cases, name)
            arguments, environment = _vllm(plan, root), engine_environment(plan.workers)
        else:
            queues = {case: "-".join((name, *case)) for case in plan.cases}
            arguments, environment = _sim(plan, root), {}
        environment["ROLLQ_REDIS_URL"] = url  # it may hold a password
        arguments += ["--weights-dir", str(root / "weights")]
        for queue in dict.fromkeys(queues.values()):
            for i in range(plan.workers):
                own = ["--queue", queue, "--name", f"worker-{i}"]
                workers.start(f"{queue}-{i}", arguments + own, environment)
        told = asyncio.run(_all(url, plan, queues, root, workers))
    return figures(told, plan.work, plan.coarse, plan.speed)


async def _all(
    url: str, plan: Plan, queues: dict[Case, str], root: Path, workers: WorkerProcesses
) -> dict[Case, Told]:
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(workers))
            told = await _trainers(url, plan, queues, root)
            watching.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return told


async def _trainers(url: str, plan: Plan, queues: dict[Case, str], root: Path) -> dict[Case, Told]:
    """All at once where each has a queue of its own, else in turn."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(case: Case) -> Told:
            shape, policy = case
            client, queue = clients[queues[case]]
            return await work_off(client, queue, plan.work(shape), policy, root / "model")

        clients = {}
        for name in dict.fromkeys(queues.values()):
            client = AsyncRolloutClient(url, name, weights_dir=root / "weights")
            clients[name] = await stack.enter_async_context(client), Queue(url, name)
            stack.callback(clients[name][1].close)
            clients[name][1].open()
            await _served(client, plan.workers)
        if len(clients) == 1:
            # A real engine compiles at its first requests, and at its first load.
            slots = plan.slots * plan.workers
            short = Work(np.full(3 * slots, 32), plan.prompt, slots, 1, slots, 0.0)
            await work_off(*clients[queues[plan.cases[0]]], short, "requeue", root / "model")
            return {case: await one(case) for case in plan.cases}
        told = await asyncio.gather(*map(one, plan.cases))
        return dict(zip(plan.cases, told, strict=True))


async def _served(client: AsyncRolloutClient, workers: int) -> None:
    """Wait until so many have started; they are on the list, and at version 0, before that."""
    deadline = time.monotonic() + _SERVE_SECONDS
    while sum(w.state == "serving" for w in (await client.status()).workers) < workers:
        if time.monotonic() > deadline:
            raise EngineError(f"the workers did not start within {_SERVE_SECONDS:.0f} s")
        await asyncio.sleep(0.2)


async def _watch(workers: WorkerProcesses) -> None:
    """Raises EngineError when a worker ends: the others could not do its work as fast."""
    while True:
        if ended := workers.newly_ended():
            raise EngineError("\n".join(ended))
        await asyncio.sleep(1)


def _sim(plan: Plan, root: Path) -> list[str]:
    """Leaves something to publish in `root/model`, too."""
    from producer.demo.trainers import write_safetensors

    (root / "model").mkdir()
    write_safetensors(root / "model" / "model.safetensors", "none", np.zeros(1, np.int32))
    length = (plan.longest + plan.prompt) // plan.coarse
    slower = plan.coarse / plan.speed
    settings = {
        "max_model_len": length,
        "max_num_seqs": plan.slots,
        "kv_cache_tokens": 2 * plan.slots * length,
        "step_seconds": slower * _STEP_SECONDS,
        "sample_seconds": slower * _SAMPLE_SECONDS,
        "prefill_rate": _PREFILL_RATE / slower,
        "load_seconds": _LOAD_SECONDS / plan.speed,
    }
    return ["--engine", "sim", "--sim", ",".join(f"{k}={v}" for k, v in settings.items())]


def _vllm(plan: Plan, root: Path) -> list[str]:
    from producer.demo.model import make_model

    length = plan.longest + plan.prompt
    make_model(root / "model", 0, length)
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(length)]
    flags += ["--gpu-memory-utilization", f"{0.8 / plan.workers:.2f}"]  # where they share a GPU
    return [str(root / "model"), *flags, "--max-num-seqs", str(plan.slots)]
