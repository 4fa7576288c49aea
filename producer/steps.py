"""Operations in steps: both clients run the same ones.

An operation that may have to wait is a generator. It does one piece of work, hands out a
`Wait` and goes on when it is asked again; closing it in between undoes what nobody has got.
The blocking client sleeps through a `Wait`; the asyncio one lets its event loop run, and lets
other calls of the same client go first.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again after so many seconds."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The result of an operation that has ended."""

    value: T


#: ends with one result
Steps = Generator[Wait, None, T]
#: hands out items as it goes
Stream = Generator[Wait | T, None, None]


def advance(steps: Generator[Wait | T, None, T | None]) -> Wait | T | Done[T | None]:
    """One step."""
    try:
        return next(steps)
    except StopIteration as end:
        return Done(end.value)


def finish(steps: Steps[T]) -> T:
    """Run an operation to its end, in this thread."""
    with closing(steps):
        try:
            while True:
                time.sleep(next(steps).seconds)
        except StopIteration as end:
            result: T = end.value
            return result


def items(stream: Stream[T]) -> Iterator[T]:
    """What a stream hands out, in this thread."""
    with closing(stream):
        for item in stream:
            if isinstance(item, Wait):
                time.sleep(item.seconds)
            else:
                yield item
