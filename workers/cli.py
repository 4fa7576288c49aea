"""`rollq worker`: one worker process."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from producer.contract.errors import InvalidSample
from workers.engines.protocol import Engine
from workers.settings import WorkerSettings, default_name

log = logging.getLogger("rollq")

T = TypeVar("T")


class _WorkerCommand(click.Command):
    """Says in its --help which variables stand for its options, and what --sim takes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for option in self.params:
            if isinstance(option, click.Option):
                option.show_envvar = True

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from workers.engines.sim import SimSettings

        _, _, meaning = (inspect.getdoc(SimSettings) or "").partition("engine behaves. ")
        with formatter.section("Settings of --sim, with their defaults"):
            settings = (f"{f.name}={f.default}" for f in dataclasses.fields(SimSettings))
            formatter.write_text(", ".join(settings))
            formatter.write_paragraph()
            formatter.write_text(meaning)


@click.command(
    cls=_WorkerCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "auto_envvar_prefix": "ROLLQ",
        "show_default": True,
        "max_content_width": 100,
    },
)
@click.argument("model", required=False)
@click.option("--redis", "url", default="redis://localhost:6379", envvar="ROLLQ_REDIS_URL")
@click.option("--queue", default="default", envvar="ROLLQ_QUEUE")
@click.option("--name", default=None, help="Unique in the pool; made of host and pid by default.")
@click.option(
    "--weights-dir",
    type=click.Path(path_type=Path),
    envvar="ROLLQ_WEIGHTS_DIR",
    help="Where published weights are; the directory that the trainer writes to.",
)
@click.option("--engine", type=click.Choice(["vllm", "sim", "null"]), default="vllm")
@click.option("--sim", default="", help="Settings of the simulated engine: name=value,...")
@click.option("--checkpoint-tokens", default=64, help="A killed worker costs at most so many.")
@click.option("--checkpoint-seconds", default=5.0)
@click.option("--reserve-tokens", default=256, help="Expected of a sample still to be made.")
@click.option("--max-samples", default=0, help="Held at once; 0: as many as the engine runs.")
@click.option("--grace-seconds", default=30.0, help="For handing back when told to stop.")
@click.option("--stall-seconds", default=120.0, help="Without an engine step: give up.")
@click.option("--load-seconds", default=900.0, help="For one weight load: give up.")
@click.option("--fetch-seconds", default=30.0, help="For published files to show up here.")
@click.option("--metrics-port", default=0, help="Serve /metrics, /livez, /readyz; 0: do not.")
@click.option("--metrics-host", default="127.0.0.1", help="Address for it; 0.0.0.0 for all.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
)
@click.pass_context
def worker(
    context: click.Context,
    model: str | None,
    url: str,
    queue: str,
    name: str | None,
    weights_dir: Path | None,
    engine: str,
    sim: str,
    checkpoint_tokens: int,
    checkpoint_seconds: float,
    reserve_tokens: int,
    max_samples: int,
    grace_seconds: float,
    stall_seconds: float,
    load_seconds: float,
    fetch_seconds: float,
    metrics_port: int,
    metrics_host: str,
    log_level: str,
) -> None:
    """Generate samples of a queue with MODEL until told to stop.

    MODEL and all further flags are vLLM's own, as in `vllm serve`.

    \b
    rollq worker Qwen/Qwen3-8B --redis redis://host:6379 --tensor-parallel-size 2
    rollq worker --engine sim --sim token_rate=50,max_num_seqs=64

    SIGTERM hands back every sample with its tokens and exits with 0; exit codes: 1 a failure
    (its reason is the last line of the log), 2 a wrong command line, 3 the engine or event loop
    stood still.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = WorkerSettings(
        url=url,
        queue=queue,
        name=name or default_name(),
        weights_dir=weights_dir,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_seconds=checkpoint_seconds,
        reserve_tokens=reserve_tokens,
        max_samples=max_samples,
        grace_seconds=grace_seconds,
        stall_seconds=stall_seconds,
        load_seconds=load_seconds,
        fetch_seconds=fetch_seconds,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    if weights_dir is not None and not weights_dir.is_dir():
        log.warning(
            "the weights directory %s does not exist here: until it is mounted, no published "
            "weights can be loaded; it must be the directory that the trainer publishes to",
            weights_dir,
        )
    rest = context.args
    if model is not None and model.startswith("-"):  # a flag that click took for the argument
        rest, model = [model, *rest], None
    make = {"vllm": _vllm, "sim": _sim, "null": _null}[engine]
    sys.exit(run_loop(_run(settings, make(model, sim, settings, rest))))


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run what a worker's process is for, and return what it does.

    What is loaded now stays, and samples form no rings: to look for garbage among them after each
    700 objects took an eighth of the processor time of a worker without an engine; the usual
    event loop, a third.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    result: T = uvloop.run(work)
    return result


async def _run(settings: WorkerSettings, engine: Engine) -> int:
    from workers.worker import Worker

    return await Worker(settings, engine).run()


def _sim(model: str | None, sim: str, settings: WorkerSettings, rest: list[str]) -> Engine:
    from workers.engines.sim import SimEngine, SimSettings

    if rest:
        raise click.UsageError(f"{' '.join(rest)}: the simulated engine takes --sim NAME=VALUE,...")
    try:
        text = f"stream_interval={max(1, settings.checkpoint_tokens // 4)},{sim}"
        return SimEngine(SimSettings.parse(text))
    except ValueError as error:
        raise click.UsageError(f"--sim: {error}") from None


def _null(model: str | None, sim: str, settings: WorkerSettings, rest: list[str]) -> Engine:
    from workers.engines.null import NullEngine

    if sim or rest:
        raise click.UsageError(f"{' '.join([sim, *rest])}: the null engine takes no settings")
    return NullEngine()


def _vllm(model: str | None, sim: str, settings: WorkerSettings, rest: list[str]) -> Engine:
    if model is None:
        raise click.UsageError("give the MODEL to serve, before vLLM's flags, or --engine sim")
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise click.UsageError(
            f"MODEL {model} is no directory here: give one that is, or a name on the hub"
        )
    if sim:
        raise click.UsageError("--sim goes with --engine sim")
    try:
        from workers.engines.vllm import VllmEngine, engine_args_from_cli
    except ImportError as error:
        raise InvalidSample(
            f"vLLM cannot be imported ({error}): install rollq[gpu] or rollq[cpu]"
        ) from error
    return VllmEngine(
        engine_args_from_cli(model, rest),
        checkpoint_tokens=max(1, settings.checkpoint_tokens // 4),
    )
