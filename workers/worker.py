"""One worker process: claim, generate, report, until told to stop.

Guarantees: whatever it claimed is reported, handed back, or comes back to others when its
lease runs out; it never serves weights that it did not prove; every end has a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Coroutine
from typing import Any

from producer.contract.connection import AsyncQueue
from producer.contract.errors import EngineError, RollqError
from producer.contract.rewards import Dispatcher
from workers.admission import Admission
from workers.claim import Claimer
from workers.engines.protocol import Engine
from workers.generate import generate
from workers.health import Health
from workers.held import Held
from workers.leases import LeaseThread
from workers.report import Reporter
from workers.settings import WorkerSettings
from workers.state import WorkerState
from workers.swap import interrupt
from workers.updates import Updater

log = logging.getLogger("rollq.worker")

#: seconds between claims while nothing waits, doubling from the first to the second
_IDLE = (0.05, 0.5)
#: seconds between looks for closed groups that nobody grades
_GRADE_SECONDS = 1.0
#: seconds in which signals are one: a scheduler may tell a process and its group at once
_ONE_SIGNAL_SECONDS = 1.0
#: exit codes
EXIT_OK, EXIT_FAILED, EXIT_STOOD_STILL = 0, 1, 3


class Worker:
    """Runs one engine against one queue; `run` returns the process's exit code."""

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._queue = AsyncQueue(settings.url, settings.queue)
        self._state = WorkerState(settings, self._queue, engine)
        self._admission = Admission()
        self._reporter = Reporter(self._state)
        self._claimer = Claimer(self._state)
        self._updater = Updater(self._state, self._admission, self._reporter)
        self._tasks: set[asyncio.Task[None]] = set()
        self._samples: set[asyncio.Task[None]] = set()
        # When; a failure sets `stop`, too, and a first signal must not cut it short.
        self._told: float | None = None

    @property
    def state(self) -> WorkerState:
        return self._state

    async def run(self) -> int:
        """Serve until `stop`, a signal or a failure.

        Raises:
            QueueUnusable, EngineError: it could not even start.
        """
        self._handle_signals()
        try:
            if await self._unless_stopped(self._queue.open()):
                await self._work()
        finally:
            await self._queue.close()
        return EXIT_FAILED if self._state.failure else EXIT_OK

    async def _work(self) -> None:
        leases = LeaseThread(self._state, self._stand_still)
        self._start(leases.tick())
        probes = Health(self._state, leases, self._claimer.room).probes()
        leases.start()
        if probes:
            probes.start()
        try:
            if await self._unless_stopped(self._begin()):
                await self._serve()
                await self._drain()
        finally:
            # First, for the thread watches over a loop that ticks.
            await asyncio.to_thread(leases.stop)
            if probes:
                await asyncio.to_thread(probes.stop)
            await _cancel(self._tasks | self._samples)
            await self._engine.shutdown()

    async def _begin(self) -> None:
        await self._engine.start()
        self._start(self._reporter.run())
        self._start(self._updater.run())
        self._start(self._updater.listen())
        self._start(self._see_to_grading())
        await self._updater.look()
        self._state.phase = "serving"
        await self._updater.say(state="serving")
        log.info("worker %s serves queue %s", self._settings.name, self._settings.queue)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it came to its end; it is given up when the worker is told to stop, for an
        engine may take minutes to start, and a Redis that is away for ever."""
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(self._state.stop.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel({t for t in (working, stopped) if not t.done()})
        if working.cancelled():
            return False
        working.result()
        return True

    def stop(self) -> None:
        """Drain and end; what a first SIGTERM or SIGINT does. A later one ends at once."""
        if self._told is not None:
            if time.monotonic() - self._told > _ONE_SIGNAL_SECONDS:
                os._exit(EXIT_FAILED)
            return
        self._told = time.monotonic()
        log.info("worker %s drains", self._settings.name)
        self._state.stop.set()
        self._state.free.set()

    async def _serve(self) -> None:
        """Claim until told to stop; a claim on its way is awaited, for it may hold samples."""
        claiming = asyncio.create_task(self._claim_until_stopped())
        stopped = asyncio.create_task(self._state.stop.wait())
        await asyncio.wait({claiming, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await asyncio.wait({claiming}, timeout=self._settings.grace_seconds / 3)
        if claiming.done():
            claiming.result()
        else:
            claiming.cancel()

    async def _claim_until_stopped(self) -> None:
        state = self._state
        idle, longest = _IDLE
        pause = idle
        while not state.stop.is_set():
            state.free.clear()
            claimed = await self._claim()
            for held in claimed:
                self._generate(held)
            pause = idle if claimed else min(longest, pause * 2)
            if claimed and self._claimer.slots > 0:
                continue
            # Woken by the end of a sample, by an update that is through, by a hint that samples
            # are ready where none were, or by `stop`.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(state.free.wait(), pause * random.uniform(0.5, 1.0))

    async def _claim(self) -> list[Held]:
        state = self._state
        behind = state.version not in (state.current, state.last_good)
        if behind or not self._admission.is_open:
            return []
        claimed = await self._claimer.claim()
        if not claimed and not state.held:
            state.found_nothing()
        return claimed

    def _generate(self, held: Held) -> None:
        task = asyncio.create_task(generate(self._state, self._admission, self._reporter, held))
        self._watch(task, self._samples)

    async def _drain(self) -> None:
        """Hand back everything with its tokens, within the grace time."""
        state = self._state
        state.phase = "draining"
        if state.interruption != "failure":
            state.interruption = "drain" if state.failure is None else "failure"
        self._admission.open()
        try:
            async with asyncio.timeout(self._settings.grace_seconds):
                await self._hand_back()
        except TimeoutError:
            state.give_up(
                f"{len(state.held)} samples were not handed back within "
                f"{self._settings.grace_seconds:.0f} s; their leases will run out"
            )

    async def _hand_back(self) -> None:
        state = self._state
        try:
            if self._engine.dead is None:
                # Whoever comes in now sees the stop; a request that an engine gets when it
                # stands still would never end.
                await self._admission.until_empty()
                await interrupt(state, self._reporter, state.interruption)
        except EngineError as error:
            state.give_up(f"the engine failed while draining: {error}")
            await self._reporter.flush()
            return
        await state.until(lambda: all(h.outcome for h in state.held.values()), None)
        await self._reporter.settle(list(state.held.values()))

    async def _see_to_grading(self) -> None:
        """Have RQ jobs made for closed groups, also while no trainer waits for them."""
        dispatcher = Dispatcher(self._settings.url, self._settings.queue)
        while not dispatcher.refused:
            if due := await self._queue.call("due", limit=256):
                await asyncio.to_thread(dispatcher.send, due)
            await asyncio.sleep(_GRADE_SECONDS)

    # the process

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._watch(asyncio.create_task(work), self._tasks)

    def _watch(self, task: asyncio.Task[None], among: set[asyncio.Task[None]]) -> None:
        among.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            among.discard(task)
            if not task.cancelled() and (error := task.exception()):
                if not isinstance(error, RollqError):
                    log.error("worker %s", self._settings.name, exc_info=error)
                self._state.give_up(f"{type(error).__name__}: {error}")

        task.add_done_callback(ended)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def _stand_still(self, reason: str) -> None:
        """From the lease thread: the loop cannot be trusted any more, so end without it."""
        log.critical("worker %s ends: %s", self._settings.name, reason)
        logging.shutdown()
        os._exit(EXIT_STOOD_STILL)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel until each has ended: `asyncio.wait_for` of Python 3.11, which redis-py awaits its
    writes with, swallows a cancel that comes at the moment of success."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.05)
