"""Turns: so many workers stop to load at once, and the others generate meanwhile.

How many is up to the publication (`max_updating`); who, up to the script `turn`. A worker that
waits goes on generating what it holds; one that the pool would not miss, for it holds nothing
and may claim nothing, does not wait. A turn that is given back goes to the next in the line, who
is told by a stream of its own; each also asks by itself now and then, for a holder that died tells
nobody.
"""

from __future__ import annotations

from workers.level import Level, Publication
from workers.state import WorkerState

#: seconds after which a worker in the line asks again by itself; well below a heartbeat's life,
#: for so long a turn is kept for one that was not told
_ASK_AGAIN = 2.0


class Turns:
    """The turns of one worker."""

    def __init__(self, state: WorkerState, level: Level) -> None:
        self._state = state
        self._level = level
        self._called = False
        self._known = False  # to the script, as one that has its turn or waits for it

    def called(self) -> None:
        """It is this worker's turn."""
        self._called = True
        self._state.moved.set()

    async def take(self, publication: Publication) -> bool:
        """Wait for this worker's turn; False when the version is not wanted any more.

        It asks once even then: a worker must come to some version in the end, however fast
        they follow on each other.
        """
        state, version = self._state, publication.version
        while True:
            self._called = False
            self._known = True
            waits = self._would_be_missed()
            if await self._level.turn(self._longest(publication), waits=waits):
                return True
            await state.until(
                lambda: (
                    self._called
                    or state.current != version
                    or state.stop.is_set()
                    or not self._would_be_missed()
                ),
                _ASK_AGAIN,
            )
            if state.current != version or state.stop.is_set():
                await self.give_back()
                return False

    async def give_back(self) -> None:
        """The turn, or the place in the line."""
        if self._known:
            await self._level.turn(0)
            self._known = False

    async def back_at_work(self, version: int) -> None:
        """Wait until it generates again, or has nothing to do.

        Else the next one would stop while this one has not started yet.
        """
        state = self._state
        if self._known:
            await state.until(
                lambda: state.worked or state.current != version or state.stop.is_set(),
                state.settings.first_token_seconds,
            )

    def _would_be_missed(self) -> bool:
        state = self._state
        return bool(state.held) or state.version in (state.current, state.last_good)

    def _longest(self, publication: Publication) -> float:
        """More than an update may take: after `load_seconds` the worker has ended itself."""
        settings = self._state.settings
        return (
            settings.load_seconds + publication.deadline_s + 2 * settings.first_token_seconds + 60
        )
