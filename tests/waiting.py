"""Waiting on a condition with a deadline, the only way that tests wait."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

_PAUSE_S = 0.01


def wait_until(predicate: Callable[[], T], what: str, deadline_s: float = 10.0) -> T:
    """Return the first truthy value of `predicate`; fail, saying `what`, at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {deadline_s:g} s, still not: {what} (last value {value!r})")
        time.sleep(_PAUSE_S)
    return value


async def async_wait_until(
    predicate: Callable[[], T | Awaitable[T]], what: str, deadline_s: float = 10.0
) -> T:
    """`wait_until` in an event loop; `predicate` may be a coroutine function."""
    deadline = time.monotonic() + deadline_s
    while True:
        result = predicate()
        value: T = await result if inspect.isawaitable(result) else result
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"after {deadline_s:g} s, still not: {what} (last value {value!r})")
        await asyncio.sleep(_PAUSE_S)
