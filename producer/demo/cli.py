"""`rollq demo`: the options, the signals, the exit code."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import click


@click.command()
@click.option("--steps", default=100, show_default=True, type=click.IntRange(1))
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--engine", default="vllm", show_default=True, type=click.Choice(["vllm", "sim"]))
@click.option(
    "--redis",
    "redis_url",
    help="URL of a Redis, where the run's queue stays; an own server is started by default.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model directory with the task's vocabulary; a tiny one is made by default.",
)
@click.option("--lr", default=5e-3, show_default=True, help="Learning rate; with 0 nothing rises.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**20))
@click.option(
    "--dir",
    "directory",
    default="rollq-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="For logs, weights and the reward curve.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout at the end.")
def demo(
    steps: int,
    workers: int,
    engine: str,
    redis_url: str | None,
    model: Path | None,
    lr: float,
    seed: int,
    directory: Path,
    as_json: bool,
) -> None:
    """Train a tiny model with vLLM workers, weights changing while they generate.

    The task is to go on with the alphabet a to f, from a letter, for a number of laps.
    Exit code 0 if the audit of the run holds: no group lost, every token labelled with the
    weight version that made it.
    """
    from rich.console import Console

    from producer.demo.loop import DemoConfig
    from producer.demo.report import show
    from producer.demo.run import run

    _check(engine, model)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    console = Console(stderr=as_json)
    config = DemoConfig(
        steps=steps,
        workers=workers,
        engine="sim" if engine == "sim" else "vllm",
        redis_url=redis_url,
        model=model,
        lr=lr,
        seed=seed,
        directory=directory,
    )
    report = run(config, console)
    show(report, console, queue_stays=redis_url is not None)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    sys.exit(0 if report.audit_ok else 1)


def _check(engine: str, model: Path | None) -> None:
    """Refuse what cannot work, before anything is started."""
    from importlib.util import find_spec

    if engine == "sim":
        if model is not None:
            raise click.UsageError("--model goes with --engine vllm: a simulated engine has none")
        return
    missing = [name for name in ("vllm", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{', '.join(missing)} is not installed: `pip install 'rollq[cpu]'` (or [gpu]), "
            "or see the machinery alone with --engine sim"
        )
    if model is not None:
        from producer.demo.model import misfit

        reason = misfit(model)
        if reason is not None:
            raise click.BadParameter(f"{model} cannot do the demo's task: {reason}")


def _leave(number: int, frame: FrameType | None) -> None:
    """Unwind as Ctrl-C does, so that everything started is ended."""
    sys.exit(128 + number)
