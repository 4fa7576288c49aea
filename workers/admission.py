"""The gate between a claim and the engine: an update closes it and waits out who is inside."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Admission:
    """`async with admission:` around each `engine.add`; open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    async def __aenter__(self) -> None:
        # Another close may come between the wake-up and this task's turn.
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def close(self) -> None:
        """Let nobody in any more; returns when nobody is inside."""
        self._open.clear()
        await self.until_empty()

    async def until_empty(self) -> None:
        """Nobody is inside."""
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_open(self) -> None:
        await self._open.wait()
