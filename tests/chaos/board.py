"""How many tokens a worker's engine has made, in a file that outlives a SIGKILL.

The worker's process writes it with every step of its engine; the director reads it after the
kill and compares it with what Redis has.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from workers.engines import sim
from workers.engines.sim_batch import Batch, Running

_SLOTS = 256
_SLOT = struct.Struct("<q120s")


class Board:
    """A slot a request: its length with the prompt, and its id. The newest `_SLOTS` are kept."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SLOTS * _SLOT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._slots: dict[str, int] = {}

    def note(self, request_id: str, length: int) -> None:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = len(self._slots)
        _SLOT.pack_into(self._map, slot % _SLOTS * _SLOT.size, length, request_id.encode())


def read(path: Path) -> dict[tuple[str, int], int]:
    """(sample, attempt) -> tokens of its prompt and response."""
    found = {}
    for length, name in _SLOT.iter_unpack(path.read_bytes() if path.exists() else b""):
        if name := name.rstrip(b"\0").decode():
            sample, attempt, _ = name.rsplit("-", 2)
            found[sample, int(attempt)] = length
    return found


def watch(path: Path) -> None:
    """Have every engine of this process write its board there.

    On a busy machine it does not make up for lost time in one burst, either, which no report
    could come between.
    """
    vars(sim)["_CATCH_UP_SECONDS"] = 0.05
    board = Board(path)
    step, end = Batch.step, Batch.end

    def note(batch: Batch, running: Running) -> None:
        at = running.position if running.row < 0 else int(batch._position[running.row])
        board.note(running.request.request_id, at)

    def stepping(self: Batch, now: float) -> Any:
        outputs = step(self, now)
        for running in self.live.values():
            note(self, running)
        return outputs

    def ending(self: Batch, running: Running, *why: Any) -> Any:
        note(self, running)
        return end(self, running, *why)

    Batch.step = stepping  # type: ignore[method-assign]
    Batch.end = ending  # type: ignore[method-assign]
