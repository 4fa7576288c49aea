"""One worker process: claim, generate, report, until told to stop.

Guarantees: whatever it claimed is reported, handed back, or comes back to others when its
lease runs out; it never serves weights that it did not prove; every end has a reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Coroutine
from typing import Any

from producer.contract.connection import AsyncQueue
from producer.contract.errors import EngineError, RollqError
from workers.admission import Admission
from workers.claim import Claimer
from workers.engines.protocol import Engine
from workers.generate import generate
from workers.held import Held
from workers.leases import LeaseThread
from workers.report import Reporter
from workers.settings import WorkerSettings
from workers.state import WorkerState
from workers.updates import Updater, interrupt

log = logging.getLogger("rollq.worker")

#: seconds between claims while nothing waits, doubling from the first to the second
_IDLE = (0.05, 0.5)
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

    @property
    def state(self) -> WorkerState:
        return self._state

    async def run(self) -> int:
        """Serve until `stop`, a signal or a failure.

        Raises:
            QueueUnusable, EngineError: it could not even start.
        """
        await self._queue.open()
        leases = LeaseThread(self._state, self._stand_still)
        self._start(leases.tick())
        leases.start()
        self._handle_signals()
        try:
            await self._engine.start()
            self._start(self._reporter.run())
            self._start(self._updater.run())
            self._start(self._updater.listen())
            await self._updater.look()
            self._state.phase = "serving"
            log.info("worker %s serves queue %s", self._settings.name, self._settings.queue)
            await self._claim_until_stopped()
            await self._drain()
        finally:
            for task in self._tasks | self._samples:
                task.cancel()
            await asyncio.gather(*self._tasks, *self._samples, return_exceptions=True)
            await asyncio.to_thread(leases.stop)
            await self._engine.shutdown()
            await self._queue.close()
        return EXIT_FAILED if self._state.failure else EXIT_OK

    def stop(self) -> None:
        """Drain and end; what a first SIGTERM or SIGINT does. A second one ends at once."""
        if self._state.stop.is_set():
            os._exit(EXIT_FAILED)
        log.info("worker %s drains", self._settings.name)
        self._state.stop.set()

    async def _claim_until_stopped(self) -> None:
        state = self._state
        idle, longest = _IDLE
        pause = idle
        stopped = asyncio.ensure_future(state.stop.wait())
        try:
            while not stopped.done():
                state.free.clear()
                claimed = await self._claim()
                for held in claimed:
                    self._generate(held)
                pause = idle if claimed else min(longest, pause * 2)
                if claimed and self._claimer.slots > 0:
                    continue
                free = asyncio.ensure_future(state.free.wait())
                # With nothing free to fill, only an end of a sample is worth waking for.
                wait = pause * random.uniform(0.5, 1.0)
                await asyncio.wait(
                    {stopped, free}, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                free.cancel()
        finally:
            stopped.cancel()

    async def _claim(self) -> list[Held]:
        state = self._state
        behind = state.version not in (state.current, state.last_good)
        if behind or not self._admission.is_open:
            return []
        return await self._claimer.claim()

    def _generate(self, held: Held) -> None:
        task = asyncio.create_task(generate(self._state, self._admission, self._reporter, held))
        self._watch(task, self._samples)

    async def _drain(self) -> None:
        """Hand back everything with its tokens, within the grace time."""
        state = self._state
        state.phase = "draining"
        if state.interruption != "failure":
            state.interruption = "drain" if state.failure is None else "failure"
        deadline = time.monotonic() + self._settings.grace_seconds
        self._admission.open()
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + self._settings.grace_seconds
            ):
                if self._engine.dead is None:
                    await interrupt(state, self._reporter, state.interruption)
                await state.until(
                    lambda: all(h.outcome for h in state.held.values()),
                    deadline - time.monotonic(),
                )
                await self._reporter.settle(list(state.held.values()))
        except TimeoutError:
            state.give_up(
                f"{len(state.held)} samples were not handed back within "
                f"{self._settings.grace_seconds:.0f} s; their leases will run out"
            )
        except EngineError as error:
            state.give_up(f"the engine failed while draining: {error}")
            await self._reporter.flush()

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
