"""`rollq bench`: for sizing a pool, and for seeing what a change of the code costs.

Machines differ and are noisy: every figure that is worth comparing is a ratio of two things
measured in turn within one run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

#: name -> value
Figures = Mapping[str, float]


@click.group()
def bench() -> None:
    """Measure what the pool itself costs on this machine."""


_redis = click.option(
    "--redis", "url", envvar="ROLLQ_REDIS_URL", help="URL; an embedded server by default."
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@bench.command()
@_redis
@click.option("--samples", default=8192, show_default=True, type=click.IntRange(512))
@click.option("--tokens", default=1000, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--peers/--no-peers",
    "with_peers",
    default=None,
    help="Other task queues, too, where installed. They leave keys behind, so not by default "
    "if a URL is given.",
)
@_json
def queue(
    url: str | None,
    samples: int,
    tokens: int,
    rounds: int,
    with_peers: bool | None,
    as_json: bool,
) -> None:
    """Samples from submit to ack through a worker without an engine.

    Against the same bytes in a plain pipelined queue (the floor), against RQ, and against the
    task queues that `rollq bench peers --install` installs.
    """
    from producer.bench.queue import measure
    from producer.server import redis_at

    with redis_at(url) as at:
        others = url is None if with_peers is None else with_peers
        _show(measure(at, samples, tokens, rounds, others), as_json)


@bench.command()
@_redis
@click.option("--samples", default=512, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=1000, show_default=True, type=click.IntRange(1, 100_000))
@_json
def interrupt(url: str | None, samples: int, tokens: int, as_json: bool) -> None:
    """All samples in flight handed back and claimed again, as at a weight update."""
    from producer.bench.interrupt import measure
    from producer.server import redis_at

    with redis_at(url) as at:
        _show(measure(at, samples, tokens), as_json)


def _show(figures: Figures, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        click.echo(f"{name:{width}}  {value:14,.2f}")


@bench.command()
@_redis
@click.option("--engine", default="sim", show_default=True, type=click.Choice(["sim", "vllm"]))
@click.option("--workers", default="1,4,16,64", show_default=True, help="Simulated, each in turn.")
@click.option("--publications", default=20, show_default=True, type=click.IntRange(1))
@click.option("--samples", default=4, show_default=True, type=click.IntRange(1), help="A worker.")
@_json
def update(
    url: str | None, engine: str, workers: str, publications: int, samples: int, as_json: bool
) -> None:
    """From a publication to the last worker that stopped, and that serves it.

    With vLLM: how long an engine stands still, against its own pause, load and resume.
    """
    from producer.bench.update import measure, measure_vllm
    from producer.server import redis_at

    with redis_at(url) as at:
        if engine == "vllm":
            figures = measure_vllm(at, publications, samples)
        else:
            figures = measure(at, [int(n) for n in workers.split(",")], publications, samples)
        _show(figures, as_json)


@bench.command()
@click.option("--install", is_flag=True, help="Make the environments that are missing.")
def peers(install: bool) -> None:
    """Other task queues that `rollq bench queue` compares with, where they are installed.

    Each has an environment of its own in the user's cache.
    """
    from producer.bench.peer_environments import PEERS

    for peer in PEERS:
        if install and not peer.installed:
            click.echo(f"installing {', '.join(peer.requirements)} in {peer.home}", err=True)
            peer.install()
        click.echo(f"{peer.name:10} {peer.home if peer.installed else 'not installed'}")


@bench.command("all")
@_redis
@click.option("--only", multiple=True, metavar="NAME", help="Only this bench; may be repeated.")
@click.option(
    "--check",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Compare with a baseline; the one of the source tree by default.",
)
@click.option(
    "--save",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Add this run to the baseline; the last three are kept.",
)
@_json
def every(
    url: str | None, only: tuple[str, ...], check: str | None, save: str | None, as_json: bool
) -> None:
    """All benches in turn, against their goals or against an earlier run.

    Exit code 1: a bench failed, or a goal does not hold or was not measured. With --check it is
    the figures that became worse which count in place of the goals.
    """
    from producer.bench.every import run

    if not run(url, only, check, save, as_json):
        raise click.exceptions.Exit(1)


@bench.command()
@_redis
@click.option("--workers", default=100, show_default=True, type=click.IntRange(1))
@click.option("--samples", default=256, show_default=True, type=click.IntRange(1), help="Of each.")
@click.option(
    "--rate",
    default=50.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Of a sample, a second.",
)
@click.option(
    "--tokens",
    default=256,
    show_default=True,
    type=click.IntRange(64),
    help="Of each partial response when all are handed back.",
)
@click.option(
    "--length",
    "lengths",
    default=(500, 2000, 8000, 32000),
    show_default=True,
    multiple=True,
    type=click.IntRange(64),
    help="Of whole responses; give it again for more.",
)
@click.option("--proof/--no-proof", default=True, help="Against real workers.", show_default=True)
@_json
def fleet(
    url: str | None,
    workers: int,
    samples: int,
    rate: float,
    tokens: int,
    lengths: tuple[int, ...],
    proof: bool,
    as_json: bool,
) -> None:
    """How many workers one Redis serves, up to so many played ones, and what each costs it.

    A thousand workers with 256 samples each take gigabytes and many minutes on a small machine;
    --samples 64 makes it short.
    """
    from producer.bench.fleet import BUSY, measure
    from producer.server import redis_at

    with redis_at(url) as at:
        figures = measure(at, workers, samples, tokens, rate, lengths, prove=proof)
    _show(figures, as_json)
    if not as_json:
        click.echo(f"\nworkers of {samples} samples that keep one Redis {BUSY:.0%} busy")
        click.echo("response length   checkpoint 64   checkpoint 256   GB of 100 in flight")
        for length in lengths:
            at = f"at_{length}_tokens"
            usual, rarely = figures[f"workers_{at}"], figures[f"workers_{at}_checkpoint_256"]
            gigabytes = figures[f"gigabytes_per_100_workers_{at}"]
            click.echo(f"{length:15,}   {usual:13,.0f}   {rarely:14,.0f}   {gigabytes:19,.2f}")


@bench.command()
@_redis
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True)
@click.option("--workers", type=click.IntRange(1), help="For each policy.  [default: 2]")
@click.option("--slots", type=click.IntRange(1), help="Samples a worker runs.  [default: 32]")
@click.option("--batch", type=click.IntRange(1), help="Samples a trainer's step.  [default: 64]")
@click.option("--steps", type=click.IntRange(1), help="[default: 16, or 8 with vLLM]")
@click.option("--update-every", type=click.IntRange(1), help="Steps.  [default: 2]")
@click.option("--train-seconds", type=click.FloatRange(0), help="[default: 10, or 0.5 with vLLM]")
@click.option("--longest", type=click.IntRange(64), help="[default: 16384, or 512 with vLLM]")
@click.option("--speed", type=click.FloatRange(1), help="Of the simulated pool.  [default: 12]")
@click.option("--shape", "shapes", multiple=True, help="lognormal, reasoning; may be repeated.")
@click.option("--policy", "policies", multiple=True, help="Some of them; may be repeated.")
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG.")
@_json
def partial(
    url: str | None, engine: str, chart: Path | None, as_json: bool, **options: Any
) -> None:
    """What partial rollouts are worth: the same work under each policy of a weight update.

    \b
    wait      nothing is in flight: the update waits until every sample has ended
    finish    each worker ends what it holds and then loads, while the trainer goes on
    restart   samples in flight are handed back, and start again from nothing
    keep      they stay where they are and go on under the new weights
    requeue   they are handed back with their tokens, and go on anywhere

    Lengths have long tails: lognormal, or like reasoning traces (many short, a heavy tail, 5% cut).
    Columns: tokens thrown away and prefixes prefilled again, of each delivered token; how long the
    trainer waits; staleness of delivered tokens, mean and most; mean length of the first quarter
    and half of what was delivered, against that of what was submitted first.
    """
    import dataclasses
    import importlib.util

    from producer.bench import partial as bench_partial
    from producer.bench.partial_report import chart as draw
    from producer.bench.partial_report import table
    from producer.server import redis_at

    base = bench_partial.VLLM if engine == "vllm" else bench_partial.Plan()
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if engine == "vllm" and "speed" in given:
        raise click.UsageError("--speed is of the simulated engine")
    if chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--chart needs matplotlib: pip install 'rollq[bench]'")
    try:
        plan = dataclasses.replace(base, **given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with redis_at(url) as at:
        found = bench_partial.run(at, plan)
    if chart is not None:
        draw(chart, found, plan.title)
    if as_json:
        _show(bench_partial.flat(found), as_json)
    else:
        click.echo(table(found))


@bench.command()
@_redis
@click.option("--size", default="tiny", show_default=True, type=click.Choice(["tiny", "135m"]))
@click.option("--groups", type=click.IntRange(1), help="Of 8 samples, a round.  [tiny 16, 135m 4]")
@click.option("--tokens", type=click.IntRange(1), help="Of a sample.  [tiny 512, 135m 128]")
@click.option("--concurrency", type=click.IntRange(1), help="Samples at once.  [tiny 64, 135m 16]")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=0, type=click.IntRange(0), help="Of the model; 0: vLLM's own.")
@_json
def engine(
    url: str | None,
    size: str,
    groups: int | None,
    tokens: int | None,
    concurrency: int | None,
    rounds: int,
    threads: int,
    as_json: bool,
) -> None:
    """Tokens a second of vLLM through the pool and without it, in turn, with random weights."""
    from producer.bench.engine import LOADS, Load, measure
    from producer.server import redis_at

    usual = LOADS[size]
    load = Load(groups or usual.groups, tokens or usual.tokens, concurrency or usual.concurrency)
    with redis_at(url) as at:
        _show(measure(at, size, load, rounds, threads), as_json)
