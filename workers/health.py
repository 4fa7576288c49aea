"""Is this worker alive, is it ready, and what has it done: `/livez`, `/readyz`, `/metrics`.

Answered by threads of their own out of what the lease thread watches, so a worker whose event
loop or engine stands still is told from one that is busy.
"""

from __future__ import annotations

from collections.abc import Callable

from producer.contract.exposition import render
from producer.contract.probes import Probes
from workers.leases import LeaseThread
from workers.metrics import samples
from workers.state import WorkerState

_AT_WORK = ("serving", "updating")


class Health:
    """Of one worker; `room` says the tokens of its KV cache that are not spoken for."""

    def __init__(self, state: WorkerState, leases: LeaseThread, room: Callable[[], int]) -> None:
        self._state = state
        self._leases = leases
        self._room = room

    def probes(self) -> Probes | None:
        """A server for them, not started yet; None where no port is set."""
        settings = self._state.settings
        if not settings.metrics_port:
            return None
        return Probes(
            settings.metrics_host,
            settings.metrics_port,
            metrics=self.metrics,
            live=self.not_live,
            ready=self.not_ready,
        )

    def not_live(self) -> str:
        """Why the process should be ended; '' while it should not. Redis away is no reason."""
        return self._leases.standstill() or self._state.engine.dead or ""

    def not_ready(self) -> str:
        """Why it takes no samples; '' once it serves, also in the middle of an update."""
        state = self._state
        if state.failure is not None:
            return state.failure
        if state.stop.is_set():
            return "draining"
        return "" if state.phase in _AT_WORK else state.phase

    def metrics(self) -> bytes:
        serving = not self.not_ready()
        return render(samples(self._state, self._leases, self._room, serving=serving))
