"""`rollq status`: what a queue and its workers look like at this moment."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from producer.commands.common import (
    SETTINGS,
    ago,
    cut,
    json_option,
    read_status,
    reading,
    target,
)
from producer.status import Status, WorkerStatus

_COLUMNS = 80
_MOST_NAME = 26
#: columns for what is wrong with a version
_BAD = 68


@click.command(context_settings=SETTINGS)
@target
@json_option
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option("--every", metavar="SECONDS", default=2.0, type=click.FloatRange(0.1), help="")
def status(url: str, queue: str, as_json: bool, watch: bool, every: float) -> None:
    """Show counts, weight versions, workers.

    \b
    rollq status --queue grpo
    rollq status --queue grpo --json | jq .ready
    rollq status --queue grpo --watch --json > watched.jsonl    one object a line

    Needs read access only. Exit code 1 where there is no such queue. `rollq top` shows more.
    """
    from producer.contract.url import redact

    with reading(url, queue) as opened:
        while True:
            found = read_status(opened)
            if as_json:
                click.echo(json.dumps(to_json(queue, found), indent=None if watch else 1))
            else:
                if watch:
                    click.clear()
                click.echo("\n".join(lines(queue, redact(url), found, time.time())))
            if not watch:
                return
            time.sleep(every)


def to_json(queue: str, status: Status) -> dict[str, Any]:
    """The fields of `producer.status.Status`, and the queue's name."""
    return {"queue": queue, **dataclasses.asdict(status)}


def lines(queue: str, url: str, status: Status, now: float) -> list[str]:
    """At most 80 columns, but for long URLs and, below the rest, errors that are longer."""
    s = status
    stat = s.stats.get
    shown = [
        f"queue {click.style(queue, bold=True)} at {url}",
        f"  samples   {s.ready:,} wait, {s.leased:,} are with workers, {s.dead:,} dead",
        f"  groups    {stat('groups_enqueued', 0):,} enqueued, {stat('groups_acked', 0):,} taken, "
        f"{s.results:,} of {int(s.config['max_results']):,} closed and not taken"
        + (f", {s.grading:,} wait for rewards" if s.grading else ""),
        f"  weights   {_weights(s, now)}",
        f"  workers   {len(s.workers)} alive, {s.tokens_per_second:,.0f} tokens/s",
    ]
    workers = sorted(s.workers, key=lambda w: w.name)
    wide = min(_MOST_NAME, max((len(w.name) for w in workers), default=0))
    wide = max(wide, len("WORKER"))
    if workers:
        header = _row(wide, "WORKER", "STATE", "VERSION", "IN FLIGHT", "TOKENS/S")
        shown += ["", click.style(f"{header}  LAST ERROR", bold=True)]
        shown += [_worker(w, wide) for w in workers]
    if errors := [click.style(error, fg="red") for error in _whole(s, workers, wide)]:
        shown += ["", *errors]
    return shown


def _whole(s: Status, workers: Sequence[WorkerStatus], wide: int) -> Iterator[str]:
    """The errors that are cut above, a line each."""
    if len(bad := _bad(s)) > _BAD:
        yield bad
    for w in workers:
        if len(error := " ".join(w.last_error.split())) > _room(wide):
            yield f"{w.name}: {error}"


def _bad(s: Status) -> str:
    """Why the newest version is bad, in one line; nothing where it is not."""
    newest = int(s.weights.get("newest", 0))
    if s.of_version(newest, "state") != "bad":
        return ""
    return " ".join(f"version {newest} is bad: {s.of_version(newest, 'error')}".split())


def _weights(s: Status, now: float) -> str:
    if not s.current and "newest" not in s.weights:
        return "version 0: none were published, workers serve what they were started with"
    words = f"version {s.current}"
    if s.current:
        age = ago(now - int(s.of_version(s.current, "published_at") or 0) / 1000)
        state = s.of_version(s.current, "state")
        words += f", {state}, step {s.of_version(s.current, 'step')}, published {age} ago"
    if s.last_good != s.current:
        words += f"; last good {s.last_good}"
    if bad := _bad(s):
        words += "\n            " + click.style(cut(bad, _BAD), fg="red")
    return words


def _worker(w: WorkerStatus, wide: int) -> str:
    version = f"{w.version}→{w.loading}" if w.loading >= 0 else str(w.version)
    error = click.style(cut(w.last_error, _room(wide)), fg="red") if w.last_error else ""
    figures = f"{w.in_flight:,}", f"{w.tokens_per_second:,.0f}"
    return f"{_row(wide, w.name, w.state, version, *figures)}  {error}".rstrip()


def _row(wide: int, name: str, state: str, version: str, in_flight: str, rate: str) -> str:
    return f"{cut(name, wide):<{wide}} {cut(state, 9):<9} {version:>8} {in_flight:>9} {rate:>9}"


def _room(wide: int) -> int:
    """Columns for an error behind names that are so wide."""
    return _COLUMNS - wide - 41
