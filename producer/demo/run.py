"""`rollq demo` from start to end: a server, a model, workers, the loop, the report.

Called by `cli.py`. Everything that it starts has ended when `run` returns or raises.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from producer.client import RolloutClient
from producer.contract.errors import RollqError
from producer.demo.chart import save_picture
from producer.demo.display import Display, how_to_look
from producer.demo.loop import DemoConfig, Loop
from producer.demo.model import MAX_MODEL_LEN
from producer.demo.report import Report, audit_fields
from producer.demo.trainers import PolicyTrainer, PretendTrainer, Trainer
from producer.processes import WorkerProcesses, engine_environment, engine_threads
from producer.server import redis_at

#: A simulated worker: lengths like the task's, 60 tokens a second a sample.
_SIM = (
    "vocab_size=33,max_model_len={length},max_num_seqs={seqs},"
    "token_rate=60,mean_tokens=30,load_seconds=0.05"
)
_PARTS = ("model", "weights", "logs")


def run(config: DemoConfig, console: Console) -> Report:
    """Run the demo.

    Raises:
        RollqError: a server or the workers did not start, or all workers are gone; says why.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own(config.directory))
        url = stack.enter_context(redis_at(config.redis_url))
        # On a server that others use, a queue that nobody has used before.
        queue = "demo" if config.redis_url is None else f"demo-{secrets.token_hex(3)}"
        look = how_to_look(url, queue)
        _announce(config, console, look)
        trainer = _make_trainer(config)
        workers = stack.enter_context(WorkerProcesses(config.directory / "logs"))
        stack.callback(console.print, "Ending the workers.", highlight=False)
        weights = config.directory / "weights"
        weights.mkdir()
        _start_workers(workers, config, trainer, url, queue)
        client = stack.enter_context(RolloutClient(url, queue, weights_dir=weights))
        title = f"rollq demo: laps, {config.workers} {config.engine} workers"
        display = stack.enter_context(Display(console, title))
        loop = Loop(config, client, workers, trainer, display)
        loop.run()
    return _report(config, loop, trainer, started, look)


@contextlib.contextmanager
def _own(directory: Path) -> Iterator[None]:
    """Hold the run directory, emptied of what an earlier run left."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RollqError(f"another demo runs in {directory}; give another --dir") from None
        for part in _PARTS:
            shutil.rmtree(directory / part, ignore_errors=True)
        yield


def _announce(config: DemoConfig, console: Console, look: list[str]) -> None:
    if config.engine == "sim":
        console.print(
            "The simulated engine makes tokens from a hash and follows no weights: this run "
            "shows the machinery, and its reward cannot rise.",
            highlight=False,
        )
    lines = [
        f"Logs, weights and the reward curve go to {config.directory}/",
        "To look at the queue while this runs:",
        *(f"  {line}" for line in look),
    ]
    for line in lines:  # not wrapped: paths and commands are there to be copied
        console.print(escape(line), highlight=False, soft_wrap=True)


def _make_trainer(config: DemoConfig) -> Trainer:
    if config.engine == "sim":
        return PretendTrainer(config.directory / "model")
    return PolicyTrainer(
        config.directory / "model",
        given=config.model,
        lr=config.lr,
        seed=config.seed,
        threads=engine_threads(1),
    )


def _start_workers(
    workers: WorkerProcesses, config: DemoConfig, trainer: Trainer, url: str, queue: str
) -> None:
    environment = {
        # Not as an argument, which other users of the machine could read: it may hold a password.
        "ROLLQ_REDIS_URL": url,
        **engine_environment(config.workers),
    }
    for i in range(1, config.workers + 1):
        name = f"worker-{i}"
        weights = str(config.directory.resolve() / "weights")
        arguments = ["--queue", queue, "--name", name, "--weights-dir", weights]
        arguments += ["--checkpoint-tokens", "16", "--reserve-tokens", "64"]
        workers.start(name, arguments + _engine_arguments(config, trainer, i), environment)


def _engine_arguments(config: DemoConfig, trainer: Trainer, number: int) -> list[str]:
    if trainer.model_directory is None:
        sim = _SIM.format(length=MAX_MODEL_LEN, seqs=config.max_num_seqs)
        return ["--engine", "sim", "--sim", sim]
    return [
        str(trainer.model_directory.resolve()),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(config.max_num_seqs)),
        # On one GPU all workers share its memory; a CPU build does not read it.
        *("--gpu-memory-utilization", f"{0.8 / config.workers:.2f}"),
        # With one seed for all they would draw the same random numbers.
        *("--seed", str(config.seed * 1000 + number)),
    ]


def _report(
    config: DemoConfig, loop: Loop, trainer: Trainer, started: float, look: list[str]
) -> Report:
    figures, audit = loop.figures, loop.audit
    picture = config.directory / "reward.png"
    drawn = save_picture(picture, figures.rewards, loop.spanning)
    generating = max(1e-9, loop.trained_at - loop.first_rollout_at)
    return Report(
        engine=config.engine,
        workers=config.workers,
        lr=config.lr,
        seed=config.seed,
        steps=figures.step,
        weight_version=figures.version,
        rewards=figures.rewards,
        spanning=loop.spanning,
        rollouts=figures.rollouts,
        tokens=figures.stat("tokens"),
        spanning_share=figures.spanning_share,
        interrupted=figures.stat("interrupted"),
        resumed=figures.stat("resumed"),
        recomputed_tokens=figures.stat("recomputed_tokens"),
        tokens_per_second=figures.stat("tokens") / generating,
        seconds_to_first_rollout=loop.first_rollout_at - started,
        seconds=time.monotonic() - started,
        picture=str(picture) if drawn else None,
        look=look,
        **audit_fields(audit, trainer.proof),
    )
