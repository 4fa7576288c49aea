"""What `rollq bench all` does with the benches: run them, compare, show, keep."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click
import redis
from rich.console import Console

from producer.bench import baseline
from producer.bench.baseline import Baseline, Change
from producer.bench.machine import Machine
from producer.bench.report import number, table
from producer.bench.suite import BENCHES, Results, run_all
from producer.server import redis_at

_NARROWEST = 120


def run(
    url: str | None, only: Sequence[str], check: str | None, save: str | None, as_json: bool
) -> bool:
    """Whether all is well; `check` and `save` are files, "" for the one of the source tree."""
    benches = [bench for bench in BENCHES if bench.name in (only or [b.name for b in BENCHES])]
    unknown = set(only) - {bench.name for bench in benches}
    if unknown:
        known = ", ".join(bench.name for bench in BENCHES)
        raise click.BadParameter(f"no bench {', '.join(sorted(unknown))}; there are {known}")
    # Read first: minutes of work would be lost on a wrong path.
    before = Baseline.read(_path(check)) if check is not None else None
    with redis_at(url) as at, redis.Redis.from_url(at) as server:
        machine = Machine.of(server)
    load = os.getloadavg()[0]
    if load > machine.cores / 2:
        click.echo(
            f"the load is {load:.1f} on {machine.cores} cores: only counts can be trusted", err=True
        )
    results = run_all(machine, url, benches, lambda words: click.echo(words, err=True))
    changes = before.changes(results) if before else []
    if as_json:
        shown = results.to_json() | {"load_before": load}
        if before:
            shown["changes"] = [change.to_json() for change in changes]
        click.echo(json.dumps(shown))
    else:
        _print(results, changes)
    if before:
        _say_what_changed(before, results, changes)
    if save is not None:
        kept = baseline.save(_path(save), results)
        click.echo(f"saved; {_path(save)} holds {kept} of at most 3 runs", err=True)
    return not results.failed and not (
        [c for c in changes if c.verdict == "worse"] if before else results.missed()
    )


def _path(named: str | None) -> Path:
    return Path(named) if named else baseline.STORED


def _print(results: Results, changes: Sequence[Change]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    console.print(table(results, changes))
    goals, missed = [g for g in results.goals() if g.value is not None], results.missed()
    console.print(f"{len(goals) - len(missed)} of {len(goals)} goals hold")


def _say_what_changed(before: Baseline, results: Results, changes: Sequence[Change]) -> None:
    if not before.machine.is_like(results.machine):
        click.echo(
            f"the baseline is of another class of machine ({before.machine.cpu}, "
            f"{before.machine.cores} cores): CPU times are not compared",
            err=True,
        )
    for change in changes:
        if change.verdict != "same":
            figure = f"{change.goal.bench} {change.goal.figure}"
            click.echo(
                f"{change.verdict}: {figure} was {number(change.then)}, "
                f"is {number(change.now)}, noise {number(change.tolerance)}",
                err=True,
            )
    for goal in before.unknown(results):
        click.echo(f"not in the baseline: {goal.bench} {goal.figure}", err=True)
    if not any(change.verdict == "worse" for change in changes):
        click.echo(f"none of {len(changes)} figures became worse", err=True)
