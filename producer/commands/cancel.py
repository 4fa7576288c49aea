"""`rollq cancel`: end groups or samples that are not wanted any more."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from producer.commands.common import SETTINGS, Duration, counted, existing, json_option, target
from producer.contract.keys import split_sample_id

if TYPE_CHECKING:
    from producer.contract.connection import Queue

_PAGE = 256


@click.command(context_settings=SETTINGS)
@click.argument("ids", nargs=-1)
@target
@click.option("--all", "everything", is_flag=True, help="Every group that is not closed.")
@click.option(
    "--older-than",
    type=Duration(),
    metavar="AGE",
    help="Every group enqueued before so long: 90s, 10m, 2h, 1d.",
)
@click.option("--dry-run", is_flag=True, help="Only say which groups these are.")
@click.option("--yes", is_flag=True, help="Do not ask, with --all or --older-than.")
@click.option("--reason", default="cancelled by the operator", help="Comes with the rollouts.")
@json_option
def cancel(
    ids: tuple[str, ...],
    url: str,
    queue: str,
    everything: bool,
    older_than: float | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Cancel groups or samples by id, or many at once.

    IDS are groups (3fe1c9d2) or samples (3fe1c9d2/4). The trainer gets them as `cancelled`,
    with the tokens made so far; their groups are not trainable.

    \b
    rollq cancel --queue grpo 3fe1c9d2 77aa01ff/0
    rollq cancel --queue grpo --older-than 2h --dry-run
    rollq cancel --queue grpo --all --yes

    Exit code 1 where none of IDS was there to be cancelled.
    """
    from producer.pipeline import before_ms
    from producer.pipeline import cancel as cancel_ids

    given = bool(ids) + everything + (older_than is not None)
    if given != 1:
        raise click.UsageError("give IDS, or --all, or --older-than")
    with existing(url, queue) as target:
        if ids:
            wanted = list(ids)
            ended = 0 if dry_run else cancel_ids(target, wanted, reason)
        else:
            before = before_ms(target, older_than or 0.0)
            wanted = list(dict.fromkeys(_groups(target, before)))
            if not _sure(wanted, queue, dry_run or yes):
                raise click.ClickException("nothing was cancelled")
            ended = 0 if dry_run else _cancel_all(target, wanted, before, reason)
    if as_json:
        click.echo(json.dumps({"ids": wanted, "samples_cancelled": ended}))
    elif dry_run:
        click.echo("\n".join(wanted) if wanted else "none")
    else:
        click.echo(f"{counted(ended, 'sample')} cancelled")
    if ids and not ended and not dry_run:
        raise click.ClickException("none of these waits or is with a worker")


def _sure(wanted: list[str], queue: str, decided: bool) -> bool:
    if decided or not wanted:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError("this asks before it cancels: give --yes, or --dry-run first")
    return click.confirm(f"Cancel {counted(len(wanted), 'group')} of the queue {queue}?", err=True)


def _cancel_all(queue: Queue, wanted: list[str], before: float, reason: str) -> int:
    """Also those that were missed, because workers claimed or handed back while we read."""
    from producer.pipeline import cancel as cancel_ids

    ended = 0
    found = wanted
    while found:
        ended += cancel_ids(queue, found, reason)
        known = set(wanted)
        found = [g for g in dict.fromkeys(_groups(queue, before)) if g not in known]
        wanted += found
    return ended


def _groups(queue: Queue, before: float) -> Iterator[str]:
    """Groups of samples that wait or are with a worker, and are as old; with repetitions."""
    from producer.pipeline import read_all

    for name in ("ready", "leases"):
        for start in itertools.count(0, _PAGE):
            page = (queue.keys[name], str(start), str(start + _PAGE - 1))
            samples = [raw.decode() for raw in read_all(queue, [("ZRANGE", *page)])[0]]
            if not samples:
                break
            ats = read_all(queue, [("HMGET", queue.keys.sample(s), "enqueued_at") for s in samples])
            for sample, [at] in zip(samples, ats, strict=True):
                if at is not None and float(at) <= before:
                    yield split_sample_id(sample)[0]
