"""Weight updates: from a notice to serving, without losing a token.

    fetch and verify (fetch.py) -> wait for a turn (turns.py) -> swap (swap.py)

The engine generates until the swap. What is heard and said of versions is in `level.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from producer.contract.connection import stream_entries
from producer.contract.scripts import Argument
from producer.contract.states import WeightState
from workers.admission import Admission
from workers.fetch import Fetcher, serves_nothing
from workers.level import Level, Publication
from workers.report import Reporter
from workers.state import WorkerState
from workers.swap import Swapper
from workers.turns import Turns


class Updater:
    """Brings the worker to the newest version, one at a time."""

    def __init__(self, state: WorkerState, admission: Admission, reporter: Reporter) -> None:
        self._state = state
        self._level = Level(state)
        self._fetcher = Fetcher(state, self._level)
        self._turns = Turns(state, self._level)
        self._swapper = Swapper(state, self._level, admission, reporter)

    async def listen(self) -> None:
        """Read the streams of hints and of this worker's turns, for ever. From their beginning:
        what comes between two reads must not be missed."""
        queue = self._state.queue
        updates, turn = queue.keys["updates"], queue.keys.turn(self._state.settings.name)
        last: dict[Any, Any] = {updates: "0", turn: "0"}
        while True:
            reply = await queue.retrying(partial(queue.redis.xread, last, block=2000))
            news = stream_entries(reply)
            for stream, entries in news.items():
                last[stream.decode()] = entries[-1][0]
            if turn.encode() in news:
                self._turns.called()
            hints = {hint for _, fields in news.get(updates.encode(), ()) for hint in fields or ()}
            if b"ready" in hints:
                self._state.free.set()
            if hints - {b"ready"}:
                await self.look()

    async def look(self) -> None:
        """Read the level itself."""
        await self._level.look()

    async def say(self, **fields: Argument) -> None:
        """At once, and not with the next heartbeat."""
        await self._level.say(**fields)

    async def run(self) -> None:
        """Follow the level, for ever."""
        state = self._state
        while True:
            await state.level_changed.wait()
            state.level_changed.clear()
            while (version := await self._target()) is not None:
                publication = await self._level.read(version)
                if publication is None or publication.state == WeightState.BAD:
                    break
                state.loading = version
                # Before anything is read: the clean-up of old versions spares this one.
                await self._level.say(loading=version)
                await self._update(publication)
                state.loading = -1
                if state.stop.is_set():
                    return

    async def _update(self, publication: Publication) -> None:
        directory = await self._fetcher.fetch(publication)
        if directory is None or not await self._turns.take(publication):
            return
        if await self._swapper.swap(publication, directory):
            await self._turns.back_at_work(publication.version)
        # One that must end keeps its turn until it has left the list.
        if not self._state.stop.is_set():
            await self._turns.give_back()

    async def _target(self) -> int | None:
        """The version to go to: a newer one, or the current one if ours was forgotten.

        A Redis that lost its last second may not know the version served here; nobody will
        ever be given that number again, and its weights are not the pool's any more.
        """
        state = self._state
        if state.current >= state.version:
            if self._fetcher.unfetched == state.current and serves_nothing(state):
                return state.last_good
            return state.current if state.current > state.version else None
        if await self._level.knows(state.version):
            return None
        if state.current == 0:
            state.last_error = (
                f"serves version {state.version}, which the queue does not know any more; "
                "waits for a publication"
            )
            return None
        return state.current
