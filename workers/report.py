"""Reporting: checkpoints and ends of all samples, in one round trip a flush.

A sample's end is only sent behind its tokens or with the last of them, and counts only when all
are stored; what Redis answers to be missing is sent again. While Redis is away, flushes wait and
generation goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence

from producer.contract.connection import Call, split
from producer.contract.scripts import Argument
from workers.held import Held, Piece
from workers.state import WorkerState

#: seconds between looks for samples whose checkpoint is due: those of a look share a call
_CHECKPOINT_SECONDS = 0.1
#: seconds that the end of a sample waits for company, while there may be some
_LINGER = 0.01


class Reporter:
    """One flush at a time; `wake` is cheap and called from the sample tasks."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()

    def wake(self) -> None:
        """A sample has its end: report it."""
        self._wake.set()

    async def run(self) -> None:
        """Flush what is due, for ever."""
        while True:
            # Not wait_for: in Python 3.11 it swallows a cancel that comes with the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECKPOINT_SECONDS):
                    await self._wake.wait()
                if any(h.outcome is None for h in self._state.held.values()):
                    await asyncio.sleep(_LINGER)
            self._wake.clear()
            await self.flush()

    async def settle(self, samples: Sequence[Held]) -> None:
        """Flush until none of these, all with an outcome, is ours any more."""
        while any(self._state.held.get(h.id) is h for h in samples):
            await self.flush()

    async def flush(self) -> None:
        """Store what is due, then report the outcomes."""
        async with self._lock:
            settings = self._state.settings
            due = [
                h
                for h in self._state.held.values()
                if h.due(settings.checkpoint_tokens, settings.checkpoint_seconds)
            ]
            batch: list[tuple[Call, Sequence[Held]]] = [*self._checkpoints(due), *self._ends(due)]
            if not batch:
                return
            replies = await self._state.queue.call_many([call for call, _ in batch])
            for ((name, _, _), samples), (current, last_good, answers) in zip(
                batch, replies, strict=True
            ):
                self._state.notice(current, last_good)
                for held, answer in zip(samples, answers, strict=True):
                    self._answered(name, held, answer)

    def _checkpoints(self, due: Sequence[Held]) -> list[tuple[Call, Sequence[Held]]]:
        items: list[Sequence[Argument]] = []
        owners = []
        for held in due:
            held.seal()
            pieces = held.unstored()
            if held.outcome is not None and held.outcome.kind == "finish":
                pieces = pieces[:-1]  # the last one goes with the end
            for piece in pieces:
                items.append((held.id, held.claim.lease_token, *_stored(piece)))
                owners.append(held)
        return self._calls("checkpoint", {}, items, owners)

    def _ends(self, due: Sequence[Held]) -> list[tuple[Call, Sequence[Held]]]:
        kinds: dict[tuple[str, str], list[Held]] = defaultdict(list)
        for held in due:
            if end := held.outcome:
                kinds[end.kind, end.reason if end.kind == "release" else ""].append(held)
        calls: list[tuple[Call, Sequence[Held]]] = []
        for (kind, reason), samples in kinds.items():
            items = [self._end_item(h) for h in samples]
            if kind == "finish":
                calls += self._calls("finish", {}, items, samples)
            elif kind == "release":
                calls += self._calls("release", {"reason": reason}, items, samples)
            else:
                scalars: dict[str, Argument] = {"kind": "crash" if kind == "crash" else "error"}
                calls += self._calls("fail", scalars, items, samples)
        return calls

    def _end_item(self, held: Held) -> Sequence[Argument]:
        end = held.outcome
        assert end is not None
        key = (held.id, held.claim.lease_token)
        if end.kind == "finish":
            last = held.unstored()[-1:]
            tail = _stored(last[0]) if last else (held.made, 0, 0, b"")
            return (*key, held.made, end.reason, end.stop_reason, end.text, *tail)
        if end.kind == "release":
            return (*key, held.made)
        return (*key, end.reason)

    def _calls(
        self,
        name: str,
        scalars: dict[str, Argument],
        items: Sequence[Sequence[Argument]],
        owners: Sequence[Held],
    ) -> list[tuple[Call, Sequence[Held]]]:
        calls: list[tuple[Call, Sequence[Held]]] = []
        at = 0
        for piece in split(items):
            call: Call = (name, {"worker": self._state.settings.name, **scalars}, piece)
            calls.append((call, owners[at : at + len(piece)]))
            at += len(piece)
        return calls

    def _answered(self, name: str, held: Held, answer: int) -> None:
        if answer < 0:
            self._state.lose(held)
        elif name == "fail":
            self._taken(held)
        else:
            held.stored = answer
            if name != "checkpoint" and answer >= held.made:
                self._taken(held)
            elif held.stored < held.made and held.outcome is not None:
                self._wake.set()

    def _taken(self, held: Held) -> None:
        """Redis has the end of this attempt."""
        if held.outcome is not None:
            self._state.meter.reported(held, held.outcome, self._state.current)
        self._state.drop(held)


def _stored(piece: Piece) -> Sequence[Argument]:
    """Offset, count, version and chunk, as `checkpoint` and `finish` take them."""
    return piece.offset, len(piece.chunk.token_ids), piece.chunk.version, piece.data
