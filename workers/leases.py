"""The lease thread: keeps the samples ours while, and only while, the worker works.

A thread with a connection of its own, so that neither a long weight load nor a blocked loop
loses a lease; but when the loop stands still or the engine hangs, it stops renewing and ends
the process with the reason, so that others can take over. It also beats the heart and reaps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from producer.contract.connection import Queue, split
from producer.contract.errors import RollqError
from producer.contract.namesakes import Namesakes
from workers.state import WorkerState

log = logging.getLogger("rollq.worker")

_PERIOD = 1.0
#: share of the lease after which it is renewed
_RENEW_AT = 0.25


class LeaseThread:
    """Started before the engine, so that a worker is on the list while it loads.

    Args:
        die: called, from this thread, with the reason when the worker stands still.
    """

    def __init__(self, state: WorkerState, die: Callable[[str], None]) -> None:
        self._state = state
        self._die = die
        self._loop = asyncio.get_running_loop()
        self._queue = Queue(state.settings.url, state.settings.queue, patience=0.0)
        self._queue.config = state.queue.config  # to be set up again if Redis loses it
        self._lease = int(state.queue.config["lease_ms"]) / 1000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollq-leases", daemon=True)
        self._ticked = time.monotonic()
        self._progress = -1
        self._progressed = time.monotonic()
        self._tokens = (0, time.monotonic())
        #: response tokens a second, lately
        self.rate = 0.0
        #: when the leases were last renewed, or none was held
        self.renewed = time.monotonic()
        self._away = False
        name = state.settings.name
        self._namesakes = Namesakes(f"worker {name!r}; what it shows of itself is of both")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and take the worker off the list."""
        self._stop.set()
        self._thread.join()

    async def tick(self) -> None:
        """Show that the event loop runs; a task of the worker."""
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(min(0.5, self._lease / 20))

    def _run(self) -> None:
        period = min(_PERIOD, self._lease / 20)
        while not self._stop.is_set():
            if reason := self.standstill():
                self._die(reason)
                return
            try:
                self._renew()
                self._beat()
                self._queue.call("reap", limit=256)
                self._away = False
            except RollqError as error:
                # Nothing is lost yet: the next period tries again.
                if not self._away:
                    log.warning("leases are not renewed: %s", error)
                self._away = True
            self._stop.wait(period)
        try:
            self._queue.call("leave", worker=self._state.settings.name)
        except RollqError as error:
            log.warning("could not leave the list of workers: %s", error)
        self._queue.close()

    def standstill(self) -> str | None:
        """Why the worker cannot be trusted to work any more; also asked by its health checks."""
        now = time.monotonic()
        state = self._state
        # An engine that starts may hold the interpreter for long; nothing is held then.
        allowed = self._lease / 2 if state.held else state.settings.stall_seconds
        if state.phase != "starting" and now - self._ticked > allowed:
            return f"the event loop stood still for {now - self._ticked:.1f} s"
        if state.load_deadline and now > state.load_deadline:
            return f"loading version {state.loading} took over {state.settings.load_seconds:.0f} s"
        if state.engine.progress != self._progress or not state.in_engine() or state.load_deadline:
            self._progress, self._progressed = state.engine.progress, now
        elif now - self._progressed > state.settings.stall_seconds:
            return f"the engine made no step for {now - self._progressed:.1f} s"
        return None

    @property
    def redis_errors(self) -> int:
        return self._queue.errors

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self.renewed < self._lease * _RENEW_AT:
            return
        held = list(self._state.held.copy().values())
        for piece in split([(h.id, h.claim.lease_token) for h in held]):
            current, last_good, answers = self._queue.call(
                "renew", piece, worker=self._state.settings.name
            )
            lost = {str(item[0]) for item, a in zip(piece, answers, strict=True) if a < 0}
            for h in held:
                if h.id in lost:
                    self._on_loop(self._state.lose, h)
            self._on_loop(self._state.notice, current, last_good)
        self.renewed = now

    def _beat(self) -> None:
        state = self._state
        now = time.monotonic()
        tokens, since = self._tokens
        if now - since >= 1.0:
            self.rate = (state.tokens - tokens) / (now - since)
            self._tokens = (state.tokens, now)
        fields = (
            ("version", state.version),
            ("loading", state.loading if state.loading >= 0 else ""),
            ("state", state.phase),
            ("in_flight", len(state.held)),
            ("tokens", state.tokens),
            ("tokens_per_second", f"{self.rate:.1f}"),
            ("last_error", state.last_error[:500]),
            ("host", socket.gethostname()),
            ("pid", os.getpid()),
            ("nonce", self._namesakes.nonce),
            *state.update_fields(),
        )
        current, last_good, other = self._queue.call(
            "heartbeat", fields, worker=state.settings.name
        )
        self._namesakes.found(other)
        self._on_loop(state.notice, current, last_good)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._stop.is_set():
            self._loop.call_soon_threadsafe(call, *arguments)
