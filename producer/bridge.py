"""A blocking client in a thread of its own, and the way to it from an event loop.

All of the client's work is done in that one thread, a step at a time: while one call waits,
others go between its steps, and the event loop never waits. A call that is cancelled ends at
once; the step that was under way is let finish, and what it took is put back, so that nothing
is lost. Called by `producer.aio`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from producer.batch import Batch
from producer.client import RolloutClient
from producer.contract.errors import RollqError
from producer.prompts import Prompt
from producer.steps import Done, Steps, Stream, Wait, advance

log = logging.getLogger("rollq")

T = TypeVar("T")

#: prompts of an asynchronous iterable that are read ahead, and submitted in one go
_READ_AHEAD = 256


class Bridge:
    """`connect` makes the client, in the thread, for the first call."""

    def __init__(self, connect: Callable[[], RolloutClient]) -> None:
        self._connect = connect
        self._client: RolloutClient | None = None
        self._thread = ThreadPoolExecutor(1, "rollq-client")
        self._closed = False

    async def close(self) -> None:
        if not self._closed:
            await asyncio.wrap_future(self.close_soon())

    def close_soon(self) -> Future[None]:
        """Close it behind whatever is under way or still to be put back."""
        self._closed = True
        closing = self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)
        return closing

    async def call(self, work: Callable[[RolloutClient], T]) -> T:
        """Do it in the thread, behind what is under way."""
        return await asyncio.wrap_future(self._submit(lambda: work(self._connected())))

    async def finish(self, begin: Callable[[RolloutClient], Steps[T]]) -> T:
        """The result of an operation."""
        steps = await self.call(begin)
        try:
            while True:
                step = await self._advance(steps)
                if isinstance(step, Done):
                    result: T = step.value
                    return result
                await asyncio.sleep(step.seconds)
        finally:
            self.later(steps.close)

    async def items(
        self, begin: Callable[[RolloutClient], Stream[Any]], give: Callable[[Any], T]
    ) -> AsyncIterator[T]:
        """What a stream hands out."""
        steps = await self.call(begin)
        try:
            while True:
                step = await self._advance(steps)
                if isinstance(step, Done):
                    return
                if isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                else:
                    yield give(step)
        finally:
            self.later(steps.close)

    async def _advance(self, steps: Any) -> Any:
        future = self._submit(lambda: advance(steps))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.later(lambda: self._put_back(future))
            raise

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise RollqError("this client is closed: make a new one")
        return self._thread.submit(work)

    def later(self, work: Callable[[], object]) -> None:
        """In the thread, behind the step that may be under way; nobody waits for it."""
        if not self._closed:
            self._thread.submit(_quietly, work)

    # in the thread

    def _connected(self) -> RolloutClient:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()

    def _put_back(self, future: Future[Any]) -> None:
        """Groups that a step came back with when nobody waited for them any more."""
        if future.cancelled() or future.exception():
            return
        step = future.result()
        taken = step.value if isinstance(step, Done) else step
        if isinstance(taken, Batch):
            self._connected().operations.put_back(taken.groups)


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except RollqError as error:
        log.warning("a call that nobody waits for any more failed: %s", error)


async def pieces(prompts: AsyncIterable[Prompt]) -> AsyncGenerator[list[Prompt], None]:
    """What there is whenever somebody asks, read ahead by a bounded amount."""
    end = object()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    room = asyncio.Semaphore(_READ_AHEAD)

    async def read() -> None:
        try:
            async for prompt in prompts:
                await room.acquire()
                queue.put_nowait(prompt)
        finally:
            queue.put_nowait(end)

    reading = asyncio.create_task(read())
    try:
        piece: list[Any] = []
        while not (piece and piece[-1] is end):
            piece = [await queue.get()]
            while not queue.empty():
                piece.append(queue.get_nowait())
            if found := [prompt for prompt in piece if prompt is not end]:
                yield found
                for _ in found:
                    room.release()
        await reading
    finally:
        reading.cancel()
