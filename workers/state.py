"""What the parts of one worker share. Only the event loop's thread changes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

from producer.contract.connection import AsyncQueue
from workers.engines.protocol import Engine
from workers.held import Held
from workers.meter import Meter
from workers.settings import WorkerSettings

log = logging.getLogger("rollq.worker")


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update; the engine makes no token but while admission closes.

    Attributes:
        close: until nobody is on the way into the engine, and each in it has made a token;
            with the policy `finish` until all have ended.
        pause: until the engine stands still and its last outputs are here.
        load: of the weights. reset: caches dropped, the version read back.
        resume: until the engine was told to go on.
    """

    close: float = 0.0
    pause: float = 0.0
    load: float = 0.0
    reset: float = 0.0
    resume: float = 0.0

    @property
    def idle(self) -> float:
        """How long the engine made no token."""
        return self.pause + self.load + self.reset + self.resume


class WorkerState:
    """The samples held, the version served, and why the worker is to stop, if it is.

    Attributes:
        version: the weights that the engine serves; loading: those it is about to, or -1.
        interruption: the reason with which aborted samples are handed back.
        updates, updates_failed: how many updates it made, and versions it could not load.
        moved: set whenever a token was made or a sample ended or left.
        free: set when a sample left, admission opened, or samples are ready: time to claim.
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
        self._tokens_before = 0
        self._found_nothing = False
        self.updates = 0
        self.updates_failed = 0
        self.update_times: UpdateTimes | None = None
        self._failed_version = -1
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

    def update_failed(self, version: int) -> None:
        """Once a version, however often it is tried."""
        self.updates_failed += version != self._failed_version
        self._failed_version = version

    def update_fields(self) -> list[tuple[str, int]]:
        """What the worker's hash says of its updates; times are those of the last one, in ms."""
        counts = [("updates", self.updates), ("updates_failed", self.updates_failed)]
        times = self.update_times
        if times is None:
            return counts
        parts = [(f.name, getattr(times, f.name)) for f in fields(times)]
        return counts + [
            (f"update_{name}_ms", round(1000 * seconds))
            for name, seconds in [("idle", times.idle), *parts]
        ]

    def resumes(self) -> None:
        self._tokens_before, self._found_nothing = self.tokens, False

    def found_nothing(self) -> None:
        """To do: it holds no sample, and got none."""
        self._found_nothing = True
        self.moved.set()

    @property
    def worked(self) -> bool:
        """It made a token, or found nothing to do, since it resumed after an update."""
        return self.tokens > self._tokens_before or self._found_nothing

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

    async def until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until `condition`, looked at whenever something moved; False if time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self.moved.clear()
                    await self.moved.wait()
        return condition()
