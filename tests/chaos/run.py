"""`python -m tests.chaos.run`: a pool under every harm we know, and an audit of what came out.

    python -m tests.chaos.run --seconds 60 --seed 7
    python -m tests.chaos.run --samples 100000 --seed 7 --gap 1.5

The same seed gives the same work and the same events in the same order; their times differ.
Exit code 1 where an invariant was broken; then the logs stay, and their place is said.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import click

from tests.chaos.auditor import Auditor, Report
from tests.chaos.director import Director, Plan


def run(plan: Plan, directory: Path) -> Report:
    """Run, drain, audit. Everything that was started has ended when it returns."""
    director = Director(plan, directory)
    try:
        director.run()
        return Auditor(directory, director.work, director.evidence, director.redis).report()
    finally:
        director.close()


def table(report: Report) -> str:
    """The auditor's table."""
    lines = [f"{name:32} {value}" for name, value in report.facts.items()]
    lines.append("")
    for verdict in report.verdicts:
        word = "EXCEEDED" if verdict.timed else "BROKEN"
        word = f"{word} {len(verdict.broken)}" if verdict.broken else "holds"
        lines.append(f"{verdict.name:32} {word:12} {verdict.remark}".rstrip())
        lines += [f"    {what}" for what in verdict.broken[:20]]
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=float, help="Of harm; the drain comes after.  [default: 30]")
@click.option("--samples", default=0, help="Run until so many are submitted; --seconds at most.")
@click.option("--seed", default=1)
@click.option("--workers", default=4)
@click.option("--gap", default=0.8, help="Mean seconds between two events.")
@click.option("--poison", default=0.01, help="Share of groups whose prompt kills.")
@click.option("--publish-seconds", default=3.0)
@click.option("--json", "as_json", is_flag=True)
@click.option("--keep", is_flag=True, help="Keep the logs of a sound run, too.")
def main(
    seconds: float | None,
    samples: int,
    seed: int,
    workers: int,
    gap: float,
    poison: float,
    publish_seconds: float,
    as_json: bool,
    keep: bool,
) -> None:
    """Run the pool under chaos and audit it."""
    plan = Plan(
        seed=seed,
        workers=workers,
        seconds=seconds or (math.inf if samples else 30.0),
        samples=samples,
        gap=gap,
        poison=poison,
        publish_seconds=publish_seconds,
    )
    directory = Path(tempfile.mkdtemp(prefix="rollq-chaos-"))
    report = run(plan, directory)
    if as_json:
        broken = {v.name: v.broken for v in report.verdicts}
        click.echo(json.dumps({"facts": report.facts, "broken": broken}, indent=1))
    else:
        click.echo(table(report))
    if report.sound and not keep:
        shutil.rmtree(directory)
    else:
        click.echo(f"logs are in {directory}", err=True)
    sys.exit(0 if report.sound else 1)


if __name__ == "__main__":
    main()
