"""What the commands share: the options for a queue, opening it, words for numbers and times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from producer.contract.errors import QueueUnusable
from producer.status import Status

if TYPE_CHECKING:
    from producer.contract.connection import Queue

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_REDIS = "redis://localhost:6379"
DEFAULT_QUEUE = "default"

#: seconds that a command waits for a Redis that is away
PATIENCE = 5.0

#: of every command: what is shown in its --help
SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100}


def target(function: F) -> F:
    """The options --redis and --queue, as `url` and `queue`."""
    queue = click.option(
        "--queue", metavar="NAME", default=DEFAULT_QUEUE, envvar="ROLLQ_QUEUE", show_envvar=True
    )
    url = click.option(
        "--redis",
        "url",
        metavar="URL",
        default=DEFAULT_REDIS,
        envvar="ROLLQ_REDIS_URL",
        show_envvar=True,
        help="redis://, rediss:// (TLS), unix:// or redis+sentinel://host:port/service.",
    )
    return url(queue(function))


#: for what a program may read
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON on stdout.")


@contextmanager
def reading(url: str, queue: str, *, patience: float = PATIENCE) -> Iterator[Queue]:
    """A queue to look at: nothing is written, so a user with read access alone may do it."""
    from producer.contract.connection import Queue

    opened = Queue(url, queue, patience=patience)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def existing(url: str, queue: str) -> Iterator[Queue]:
    """A queue that somebody made, so that a misspelt name is no empty queue.

    Raises:
        QueueUnusable: nobody did.
    """
    from producer.pipeline import read_all

    with reading(url, queue) as found:
        [config] = read_all(found, [("HGETALL", found.keys["config"])])
        _must_exist(found, config)
        yield found


def read_status(queue: Queue) -> Status:
    """Raises QueueUnusable where nobody made the queue yet."""
    from producer import pipeline

    status = pipeline.read_status(queue)
    _must_exist(queue, status.config)
    return status


def _must_exist(queue: Queue, config: Mapping[Any, Any]) -> None:
    from producer.contract.url import redact

    if not config:
        raise QueueUnusable(
            f"there is no queue {queue.keys.queue!r} at {redact(queue.url)}: the first trainer or "
            "worker makes it; look at --redis and --queue, or ROLLQ_REDIS_URL and ROLLQ_QUEUE"
        )


def file_error(error: OSError, doing: str) -> click.ClickException:
    """One line for a file that cannot be read or written."""
    name = f"{error.filename}: " if error.filename else ""
    return click.ClickException(f"{doing}: {name}{error.strerror or error}")


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`90`, `90s`, `10m`, `2h` or `1d`, in seconds."""

    name = "duration"
    _UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # noqa: RUF012

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if found is None:
            self.fail(f"{value!r} is no time: write 90s, 10m, 2h or 1d", param, ctx)
        return float(found[1]) * self._UNITS[found[2]]


def counted(number: int, noun: str) -> str:
    """`1 group`, `2,048 groups`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ago(seconds: float) -> str:
    """A span of time in at most seven characters: `8s`, `4m05s`, `2h10m`, `3d04h`."""
    s = max(0, int(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s // 60 % 60:02d}m"
    return f"{s // 86400}d{s // 3600 % 24:02d}h"


def cut(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
