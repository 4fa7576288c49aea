"""Progress of a submission or a generation: a bar by rich, or a function that is told.

`progress` is False (nothing), True (a bar on stderr, where that is a terminal) or a function of
(done, total), with a total of None while it is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from producer.contract.errors import InvalidSample

Progress = bool | Callable[[int, int | None], None]
Report = Callable[[int], None]


@contextmanager
def reporting(progress: Progress, what: str, total: int | None) -> Iterator[Report]:
    """A function that is to be told how many are done."""
    if callable(progress):
        yield lambda done: progress(done, total)
    elif progress is True:
        with _bar(what, total) as report:
            yield report
    elif progress is False:
        yield lambda done: None
    else:
        raise InvalidSample(f"progress={progress!r} must be True, False or a function(done, total)")


def size_of(prompts: Any) -> int | None:
    """How many prompts, where that can be known before they are read."""
    if isinstance(prompts, str):
        return 1
    try:
        return len(prompts)
    except TypeError:
        return None


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
