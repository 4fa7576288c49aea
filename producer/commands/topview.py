"""The picture of `rollq top`: of fixed columns and, on a terminal, of fixed height.

It fits 80 columns and 24 lines (a narrower screen shows its left part), says as much without
colour, and nothing in it moves when numbers grow: only a longer name widens a column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from producer.commands.common import ago, cut
from producer.commands.inflight import InFlight
from producer.status import Status, WorkerStatus

#: key -> what the workers are sorted by, and whether the largest comes first
SORTS: Mapping[str, tuple[str, Callable[[WorkerStatus], Any], bool]] = {
    "n": ("name", lambda w: w.name, False),
    "s": ("state", lambda w: (w.state, w.name), False),
    "v": ("version", lambda w: (w.version, w.name), False),
    "f": ("in flight", lambda w: w.in_flight, True),
    "t": ("tokens/s", lambda w: w.tokens_per_second, True),
}

_LOWER_ROWS = 8
_LEFT = 32
_STATE_STYLES = {"serving": "green", "updating": "yellow", "starting": "yellow"}


@dataclass(frozen=True, slots=True)
class Picture:
    """What is shown. `rates` are of the counters in `stats`, a second; `tokens` the sums of
    tokens/s so far, the newest last; `trouble` why the figures are old."""

    queue: str
    where: str
    status: Status
    in_flight: InFlight
    rates: Mapping[str, float | None]
    tokens: Sequence[float]
    at: float
    sort: str = "n"
    turned: bool = False
    trouble: str = ""


def draw(picture: Picture, width: int, height: int | None) -> Group:
    """`height`: of the screen; None to show every worker and no keys."""
    width = max(80, width)
    head = _head(picture, width)
    most = None if height is None else max(1, height - len(head) - _LOWER_ROWS - 3)
    parts: list[Any] = [
        *head,
        _workers(picture, width, most),
        _sampled(picture),
        _lower(picture, width),
    ]
    if height is not None:
        parts.append(_foot(width))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "crop"
    return Group(*parts)


def _head(p: Picture, width: int) -> list[Text]:
    s = p.status
    clock = time.strftime("%H:%M:%S", time.localtime(p.at))
    title = cut(f"{p.queue} at {p.where}", width - 20)
    first = Text.assemble(("rollq top", "bold"), "  ", title)
    first.append(clock.rjust(width - len(first.plain)))
    oldest = p.in_flight.oldest_waiting_s
    step = s.of_version(s.current, "step") or "-"
    published = s.of_version(s.current, "published_at")
    age = ago(p.at - int(published) / 1000) if published else "-"
    return [
        first,
        _second(p, width),
        _facts(
            ("version", f"{s.current:,}"),
            ("waiting", f"{s.ready:,}"),
            ("in flight", f"{s.leased:,}"),
            ("tokens/s", f"{s.tokens_per_second:,.0f}"),
        ),
        _facts(
            ("state", s.of_version(s.current, "state") or "-"),
            ("oldest", "-" if oldest is None else ago(oldest)),
            ("workers", f"{len(s.workers):,}"),
            ("groups/s", _rate(p, "groups_closed")),
        ),
        _facts(
            ("step", step),
            ("closed", f"{s.results:,}"),
            ("dead", f"{s.dead:,}"),
            ("resumed/s", _rate(p, "resumed")),
        ),
        _facts(
            ("published", age),
            ("last good", f"{s.last_good:,}"),
            ("failed", f"{s.stats.get('failed', 0):,}"),
            ("crashes", f"{s.stats.get('crashes', 0):,}"),
        ),
        _facts(("grading", f"{s.grading:,}")) if s.grading else Text(""),
    ]


def _second(p: Picture, width: int) -> Text:
    """What is wrong, else the tokens/s of late."""
    if p.trouble:
        return Text(cut(p.trouble, width), style="bold red")
    if len(p.tokens) < 2:
        return Text()
    from producer.demo.chart import sparkline

    seen = p.tokens[-(width - 10) :]
    line = sparkline(seen, len(seen), max(1.0, *seen))
    return Text.assemble(("tokens/s  ", "dim"), (line.rjust(width - 10), "cyan"))


def _facts(*facts: tuple[str, str]) -> Text:
    line = Text()
    for name, value in facts:
        line.append(f"{name:<10}", style="dim")
        line.append(f"{cut(value, 8):>8}", style="bold")
        line.append("  ")
    return line


def _rate(p: Picture, name: str) -> str:
    rate = p.rates.get(name, 0.0)
    return "-" if rate is None else f"{rate:,.1f}"


def _workers(p: Picture, width: int, most: int | None) -> Table:
    table = _table(width)
    _, key, largest_first = SORTS[p.sort]
    workers = sorted(p.status.workers, key=key, reverse=largest_first != p.turned)
    shown = workers if most is None or len(workers) <= most else workers[: most - 1]
    last = f"and {len(workers) - len(shown):,} more" if len(shown) < len(workers) else ""
    last = last if workers else "no worker is alive"
    # Of all workers, not of those shown: sorting moves no column.
    longest = max(len("WORKER*"), len(last), *(len(w.name) for w in workers))
    name = min(25 + (width - 80) // 2, longest + 1)
    error = width - name - 39
    table.add_column(_sorted(p, "n", "WORKER"), width=name)
    table.add_column(_sorted(p, "s", "STATE"), width=9)
    table.add_column(_sorted(p, "v", "VERSION"), width=9, justify="right")
    table.add_column(_sorted(p, "f", "IN FLIGHT"), width=11, justify="right")
    table.add_column(_sorted(p, "t", "TOKENS/S"), width=10, justify="right")
    table.add_column("  LAST ERROR", width=error)
    for w in shown:
        table.add_row(
            _middle_cut(w.name, name - 1),
            Text(cut(w.state, 8), style=_STATE_STYLES.get(w.state, "")),
            f"{w.version}→{w.loading}" if w.loading >= 0 else str(w.version),
            f"{w.in_flight:,}",
            f"{w.tokens_per_second:,.0f}",
            Text("  " + cut(w.last_error, error - 2), style="red"),
        )
    rows = len(shown)
    if last:
        table.add_row(last, *[""] * 5)
        rows += 1
    for _ in range((most or 0) - rows):
        table.add_row(*[""] * 6)
    return table


def _middle_cut(name: str, width: int) -> str:
    """Both ends of a name: its host, and what tells it from others on that host."""
    if len(name) <= width:
        return name
    return f"{name[: width // 2]}…{name[-(width - width // 2 - 1) :]}"


def _sorted(p: Picture, key: str, title: str) -> str:
    return title + ("*" if p.sort == key else "")


def _sampled(p: Picture) -> Text:
    looked = min(p.in_flight.looked_at, p.status.leased)
    return Text(f"{looked:,} of {p.status.leased:,} samples in flight, looked at:", style="dim")


def _lower(p: Picture, width: int) -> Table:
    grid = Table.grid(padding=0)
    grid.width = width
    grid.add_column(width=_LEFT)
    grid.add_column(width=width - _LEFT)
    grid.add_row(_staleness(p.in_flight), _slowest(p, width - _LEFT))
    return grid


def _staleness(f: InFlight) -> Table:
    """Versions behind -> samples; what is behind by more than fits is one row."""
    table = _table(_LEFT)
    table.add_column("STALENESS", width=9)
    table.add_column("SAMPLES", width=8, justify="right")
    table.add_column("", width=_LEFT - 19)
    rows = [(str(behind), f.staleness.get(behind, 0)) for behind in range(_LOWER_ROWS - 3)]
    more = sum(count for behind, count in f.staleness.items() if behind >= len(rows))
    rows += [(f"{len(rows)}+", more), ("no token", f.no_tokens)]
    largest = max(1, *(count for _, count in rows))
    for name, count in rows:
        bar = "█" * (-(-(_LEFT - 21) * count // largest))
        table.add_row(name, f"{count:,}", Text(" " + bar, style="cyan"))
    return table


def _slowest(p: Picture, width: int) -> Table:
    table = _table(width)
    table.add_column("SLOWEST GROUPS", width=width - 27)
    table.add_column("RUNNING", width=9, justify="right")
    table.add_column("ENDED", width=9, justify="right")
    table.add_column("TOKENS", width=9, justify="right")
    rows = [
        (cut(g.id, width - 28), ago(g.running_s), f"{g.ended}/{g.size}", f"{g.tokens:,}")
        for g in p.in_flight.slowest[: _LOWER_ROWS - 1]
    ]
    for row in [*rows, *[("", "", "", "")] * (_LOWER_ROWS - 1 - len(rows))]:
        table.add_row(*row)
    return table


def _foot(width: int) -> Text:
    keys = "  ".join(f"{key} {name}" for key, (name, _, _) in SORTS.items())
    return Text(f"q quit   sort: {keys}   r reverse".ljust(width)[:width], style="reverse")


def _table(width: int) -> Table:
    return Table(
        box=None, width=width, padding=0, pad_edge=False, collapse_padding=True,
        header_style="bold underline", show_edge=False,
    )  # fmt: skip
