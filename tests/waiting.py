"""Waiting on a condition with a deadline, the only way that tests wait.

The deadline only bounds how long a test that fails takes: what must hold is tested, never how
soon. On a machine that is busy with other things a process may take ten seconds to start.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

_PAUSE_S = 0.01
#: for whatever a test waits for; pytest's own time limit is some times as long
DEADLINE_S = 60.0


def wait_until(predicate: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first truthy value of `predicate`; fail, saying `what`, at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {deadline_s:g} s, still not: {what} (last value {value!r})")
        time.sleep(_PAUSE_S)
    return value


async def async_wait_until(
    predicate: Callable[[], T | Awaitable[T]], what: str, deadline_s: float = DEADLINE_S
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
