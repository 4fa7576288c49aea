"""What one worker hears of weight versions and says of them.

The level (`current` in the hash `weights`) is what counts; the stream `updates` is only a quick
hint to look at it. Called by `updates.py` and what it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from producer.contract.scripts import Argument
from workers.state import WorkerState, log


@dataclass(frozen=True, slots=True)
class Publication:
    """One version as the hash `weights` describes it."""

    version: int
    path: str
    digest: str
    state: str
    policy: str
    deadline_s: float


class Level:
    """Reads and scripts of one worker; each reply brings the level itself."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def look(self) -> None:
        """Read the level itself."""
        queue = self._state.queue
        current, last_good = await queue.retrying(
            lambda: queue.redis.hmget(queue.keys["weights"], "current", "last_good")
        )
        self._state.notice(int(current or 0), int(last_good or 0))

    async def read(self, version: int) -> Publication | None:
        """None if it is not there, or not described as a publication is."""
        queue = self._state.queue
        names = ("path", "digest", "state", "policy", "deadline_ms")
        path, digest, state, policy, deadline = await queue.retrying(
            lambda: queue.redis.hmget(queue.keys["weights"], [f"{version}:{n}" for n in names])
        )
        if path is None:
            return None
        try:
            words = (path.decode(), digest.decode(), state.decode(), policy.decode())
            return Publication(version, *words, int(deadline) / 1000)
        except (ValueError, AttributeError):
            self._state.last_error = f"version {version} is not described as a publication is"
            log.error("%s", self._state.last_error)
            return None

    async def knows(self, version: int) -> bool:
        queue = self._state.queue
        weights, field = queue.keys["weights"], f"{version}:state"
        return bool(await queue.retrying(lambda: queue.redis.hexists(weights, field)))

    async def say(self, **fields: Argument) -> None:
        """At once, and not with the next heartbeat."""
        await self._state.queue.call(
            "heartbeat", list(fields.items()), worker=self._state.settings.name
        )

    async def confirm(self, version: int, error: str = "") -> str:
        """This worker serves a version, or why it cannot; returns the version's state."""
        if error:
            self._state.update_failed(version)
        current, last_good, verdict = await self._state.queue.call(
            "confirm", worker=self._state.settings.name, version=version, error=error[:1000]
        )
        self._state.notice(current, last_good)
        return str(verdict.decode())

    async def turn(self, hold_s: float, *, waits: bool = True) -> bool:
        """Ask for this worker's turn to load; with 0 s give it back."""
        current, last_good, granted = await self._state.queue.call(
            "turn",
            worker=self._state.settings.name,
            serves=self._state.version,
            hold_ms=int(1000 * hold_s),
            waits=int(waits),
        )
        self._state.notice(current, last_good)
        return bool(granted)
