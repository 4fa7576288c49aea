"""`rollq top`: a pool as it works, on one screen that is kept up to date.

On a terminal until `q`; elsewhere (a pipe, a log) one picture without colour, once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from producer.commands.common import SETTINGS, json_option, read_status, reading, target
from producer.contract.errors import RedisUnavailable

if TYPE_CHECKING:
    from producer.commands.topview import Picture
    from producer.contract.connection import Queue

#: what an arrow or a function key sends
_ESCAPES = re.compile(r"\x1b(\[[0-9;]*[A-Za-z~]|O[A-Z])")

#: seconds over which rates are taken
_RATE_SECONDS = 10.0


@click.command(context_settings=SETTINGS)
@target
@click.option("--every", metavar="SECONDS", default=1.0, type=click.FloatRange(0.1), help="")
@click.option("--once", is_flag=True, help="One picture, as when stdout is no terminal.")
@json_option
def top(url: str, queue: str, every: float, once: bool, as_json: bool) -> None:
    """Watch workers, throughput, staleness and the slowest groups.

    \b
    rollq top --queue grpo
    rollq top --queue grpo | tee pool.txt      once, in plain text
    rollq top --queue grpo --json | jq .in_flight.staleness

    Keys: n, s, v, f, t sort the workers by name, state, version, samples in flight, tokens/s;
    r turns the order round; q quits. Staleness and the slowest groups are those of at most 256
    samples with workers, so that looking costs a large pool no more than a small one. Needs
    read access only.
    """
    from rich.console import Console

    with reading(url, queue, patience=0.0 if sys.stdout.isatty() else 5.0) as opened:
        watch = _Watch(opened, url)
        console = Console(highlight=False)
        if as_json:
            picture = watch.look()
            facts = {"queue": queue, **dataclasses.asdict(picture.status)}
            click.echo(json.dumps({**facts, "in_flight": dataclasses.asdict(picture.in_flight)}))
        elif once or not console.is_terminal:
            from producer.commands.topview import draw

            if not console.is_terminal:
                console.width = max(80, console.width)  # a pipe has no edge to be cut at
            with console.capture() as captured:
                console.print(draw(watch.look(), console.width, None))
            drawn = [line.rstrip() for line in captured.get().splitlines()]
            click.echo("\n".join(drawn), color=console.is_terminal)
        else:
            _live(watch, console, every)


def _live(watch: _Watch, console: Any, every: float) -> None:
    from rich.live import Live

    from producer.commands.topview import SORTS, draw

    sort, turned = "n", False
    picture = watch.look()
    with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        next_look = time.monotonic() + every
        while True:
            shown = dataclasses.replace(picture, sort=sort, turned=turned)
            live.update(draw(shown, console.width, console.height), refresh=True)
            key = keys.wait(next_look - time.monotonic())
            if key == "q":
                return
            if key in SORTS:
                sort = key
            elif key == "r":
                turned = not turned
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + every
                try:
                    picture = watch.look()
                except RedisUnavailable as error:
                    picture = dataclasses.replace(picture, trouble=str(error))


class _Watch:
    """Looks at a queue, and remembers what rates need."""

    def __init__(self, queue: Queue, url: str) -> None:
        from producer.contract.url import redact

        self._queue = queue
        self._where = redact(url)
        self._seen: deque[tuple[float, dict[str, int]]] = deque()
        self._tokens: deque[float] = deque(maxlen=256)

    def look(self) -> Picture:
        from producer.commands.inflight import look
        from producer.commands.topview import Picture

        status = read_status(self._queue)
        now = time.monotonic()
        self._seen.append((now, status.stats))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        self._tokens.append(status.tokens_per_second)
        then, before = self._seen[0]
        return Picture(
            queue=self._queue.keys.queue,
            where=self._where,
            status=status,
            in_flight=look(self._queue, status.current),
            rates={
                name: (count - before.get(name, 0)) / (now - then) if now > then else None
                for name, count in status.stats.items()
            },
            tokens=tuple(self._tokens),
            at=time.time(),
        )


class _Keys:
    """Single keys from a terminal, without Enter; its settings come back at the end."""

    def __init__(self) -> None:
        self._old: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            import termios
            import tty

            self._old = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._old is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._old)

    def wait(self, seconds: float) -> str:
        """A key, or `` when none was pressed in time."""
        seconds = max(0.0, seconds)
        if self._old is None:
            time.sleep(seconds)
            return ""
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        keys = _ESCAPES.sub("", pressed)
        # Nothing at all is a terminal that hung up.
        return "q" if "q" in keys or not pressed else keys[-1:]
