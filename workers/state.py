"""What the parts of one worker share. Only the event loop's thread changes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from producer.contract.connection import AsyncQueue
from workers.engines.protocol import Engine
from workers.held import Held
from workers.meter import Meter
from workers.settings import WorkerSettings

log = logging.getLogger("rollq.worker")


class WorkerState:
    """The samples held, the version served, and why the worker is to stop, if it is.

    Attributes:
        version: the weights that the engine serves; loading: those it is about to, or -1.
        interruption: the reason with which aborted samples are handed back.
        moved: set whenever a token was made or a sample ended or left.
        free: set when a sample left or admission opened: time to claim.
    """

    def __init__(self, settings: WorkerSettings, queue: AsyncQueue, engine: Engine) -> None:
        self.settings = settings
        self.queue = queue
        self.engine = engine
        self.held: dict[str, Held] = {}
        self.version = 0
        self.loading = -1
        self.load_deadline = 0.0
        self.phase = "starting"
        self.interruption = "update"
        self.last_error = ""
        self.tokens = 0
        self.meter = Meter()
        self.current = 0
        self.last_good = 0
        self.failure: str | None = None
        self.stop = asyncio.Event()
        self.moved = asyncio.Event()
        self.free = asyncio.Event()
        self.level_changed = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()

    def notice(self, current: int, last_good: int) -> None:
        """Every reply of a script says the level; a change wakes the updater."""
        if (current, last_good) != (self.current, self.last_good):
            self.current, self.last_good = current, last_good
            self.level_changed.set()
            self.moved.set()

    def give_up(self, reason: str) -> None:
        """The worker cannot go on: hand everything back and end. The first reason counts."""
        if self.failure is None:
            self.failure = self.last_error = reason
            log.error("worker %s gives up: %s", self.settings.name, reason)
        self.stop.set()
        self.free.set()

    def drop(self, held: Held) -> None:
        """This attempt is over. The same sample may have been claimed again before we heard it."""
        if self.held.get(held.id) is held:
            del self.held[held.id]
        self.moved.set()
        self.free.set()

    def lose(self, held: Held) -> None:
        """Its lease is gone: stop generating it and report nothing more of it."""
        if self.held.get(held.id) is not held:
            return
        log.info("sample %s is no longer ours: reaped, cancelled or delivered already", held.id)
        held.lost = True
        self.meter.lose(held)
        self.drop(held)
        if held.request_id and held.outcome is None:
            abort = asyncio.ensure_future(self.engine.abort([held.request_id]))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)

    def in_engine(self) -> list[Held]:
        # A copy: the lease thread looks, too.
        return [h for h in self.held.copy().values() if h.request_id and h.outcome is None]

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition`, looked at whenever something moved; False at the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self.moved.clear()
                    await self.moved.wait()
        return condition()
