"""What the demo shows: live figures while it runs, and the summary at its end.

On a terminal one picture is kept up to date; elsewhere (a log, CI) a line is printed now and
then. Everything fits 80 columns and says as much without colour.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from producer.contract.keys import QueueKeys
from producer.contract.url import redact
from producer.demo.chart import sparkline
from producer.status import Status

_RATE_SECONDS = 5.0
_LINE_EVERY_SECONDS = 10.0
_HEADER = " time     step version reward tokens/s in flight interrupted resumed spanning"


@dataclass(slots=True)
class Figures:
    """What the loop knows at one moment."""

    steps: int
    step: int = 0
    version: int = 0
    rollouts: int = 0
    spanning_share: float = 0.0
    rewards: list[float] = field(default_factory=list)
    status: Status | None = None
    tokens_per_second: float = 0.0
    starting: bool = True

    def stat(self, name: str) -> int:
        return self.status.stats.get(name, 0) if self.status else 0

    @property
    def in_flight(self) -> int:
        return self.status.leased if self.status else 0


class Rate:
    """Growth of a counter a second, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, count: int) -> float:
        now = time.monotonic()
        self._seen.append((now, count))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        then, first = self._seen[0]
        return (count - first) / (now - then) if now > then else 0.0


class Display:
    """A context manager; `update` draws, `say` prints a line that stays."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._started = time.monotonic()
        self._next_line = 0.0
        self._header_printed = False
        self._live = (
            Live(console=console, auto_refresh=False, transient=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def update(self, figures: Figures) -> None:
        if self._live is not None:
            self._live.update(self._picture(figures), refresh=True)
        elif self.elapsed >= self._next_line:
            self._next_line = self.elapsed + _LINE_EVERY_SECONDS
            self.say(self._line(figures))

    def _line(self, figures: Figures) -> str:
        clock = _clock(self.elapsed)
        if figures.starting:
            return f"{clock}  workers are starting"
        header = "" if self._header_printed else _HEADER + "\n"
        self._header_printed = True
        reward = f"{figures.rewards[-1]:.3f}" if figures.rewards else "-"
        step = f"{figures.step}/{figures.steps}"
        return (
            f"{header}{clock} {step:>8} {figures.version:>7} {reward:>6} "
            f"{figures.tokens_per_second:>8,.0f} {figures.in_flight:>9,} "
            f"{figures.stat('interrupted'):>11,} {figures.stat('resumed'):>7,} "
            f"{figures.spanning_share:>8.0%}"
        )

    def _picture(self, figures: Figures) -> Group:
        head = Text.assemble((self._title, "bold"), f"  {_clock(self.elapsed)}")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim", min_width=14)
        grid.add_column()
        for name, value in _rows(figures):
            grid.add_row(name, value)
        return Group(head, grid)


def _rows(figures: Figures) -> list[tuple[str, Any]]:
    bar = ProgressBar(total=figures.steps, completed=figures.step, width=44)
    progress = Table.grid(padding=(0, 2))
    progress.add_row(f"{figures.step}/{figures.steps}", bar)
    reward: Any = "-"
    if figures.rewards:
        reward = f"{figures.rewards[-1]:.3f}  {sparkline(figures.rewards, 44)}"
    ready = figures.status.ready if figures.status else 0
    rows = [
        ("step", progress),
        ("weight version", str(figures.version)),
        ("mean reward", reward),
        ("tokens/s", f"{figures.tokens_per_second:,.0f}"),
        ("in flight", f"{figures.in_flight}, and {ready} waiting"),
        ("interrupted", f"{figures.stat('interrupted'):,}"),
        ("resumed", f"{figures.stat('resumed'):,}"),
        (
            "spanning",
            f"{figures.spanning_share:.0%} of {figures.rollouts:,} rollouts "
            "have 2 or more weight versions",
        ),
    ]
    if figures.starting:
        return [("", "workers are starting; an engine takes about a minute on 2 cores")]
    for worker in sorted(figures.status.workers if figures.status else (), key=lambda w: w.name):
        error = f"  {worker.last_error[:30]}" if worker.last_error else ""
        rows.append(
            (
                worker.name,
                f"{worker.state}, version {worker.version}, {worker.in_flight} in flight, "
                f"{worker.tokens_per_second:,.0f} tokens/s{error}",
            )
        )
    return rows


def how_to_look(url: str, queue: str) -> list[str]:
    """Command lines that show the queue with redis-cli; no password is spelled out."""
    keys = QueueKeys(queue)
    cli = redis_cli(url)
    return [
        f"{cli} HGETALL '{keys['stats']}'",
        f"{cli} HGETALL '{keys['weights']}'",
        f"{cli} ZCARD '{keys['leases']}'",
        f"{cli} HGETALL '{keys.worker('worker-1')}'",
    ]


def redis_cli(url: str) -> str:
    """The start of a redis-cli command for a URL."""
    parts = urlsplit(url)
    name = next((n for n in ("redis-cli", "valkey-cli") if shutil.which(n)), "redis-cli")
    if parts.scheme == "unix":
        return f"{name} -s {shlex.quote(unquote(parts.path))}"
    return f"{name} -u {shlex.quote(redact(url))}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
