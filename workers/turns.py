"""Turns: so many workers stop to load at once, and the others generate meanwhile.

How many is up to the publication (`max_updating`); who, up to the script `turn`. A worker that
waits goes on generating what it holds; one that the pool would not miss, for it holds nothing
and may claim nothing, does not wait. It is told by the stream that a turn was given back, and
looks by itself now and then, for a holder that died tells nobody.
"""

from __future__ import annotations

from workers.level import Level, Publication
from workers.state import WorkerState

#: seconds after which a worker in the line asks again by itself
_ASK_AGAIN = 0.5


class Turns:
    """The turns of one worker."""

    def __init__(self, state: WorkerState, level: Level) -> None:
        self._state = state
        self._level = level
        self._freed = False
        self._known = False  # to the script, as one that has its turn or waits for it

    def freed(self) -> None:
        """Somebody's turn is over."""
        self._freed = True
        self._state.moved.set()

    async def take(self, publication: Publication) -> bool:
        """Wait for this worker's turn; False when the version is not wanted any more.

        It asks once even then: a worker must come to some version in the end, however fast
        they follow on each other.
        """
        state, version = self._state, publication.version
        while True:
            self._freed = False
            self._known = True
            waits = self._would_be_missed()
            if await self._level.turn(version, self._longest(publication), waits=waits):
                return True
            await state.until(
                lambda: (
                    self._freed
                    or state.current != version
                    or state.stop.is_set()
                    or not self._would_be_missed()
                ),
                _ASK_AGAIN,
            )
            if state.current != version or state.stop.is_set():
                await self.give_back(version)
                return False

    async def give_back(self, version: int) -> None:
        """The turn, or the place in the line."""
        if self._known:
            await self._level.turn(version, 0)
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
