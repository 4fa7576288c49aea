"""Two live processes under one name: each finds the other's mark in place of its own.

Used by the client, for its consumer, and by a worker's lease thread. One that was started again
under its name finds the mark of the one before it, once; that is no reason to say anything.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket

log = logging.getLogger("rollq")


class Namesakes:
    """The mark of one process, and what it found in its place.

    Args:
        what: who has the name, and what to do about another, for the warning.
    """

    def __init__(self, what: str) -> None:
        self.nonce = secrets.token_hex(8)
        self.place = f"{socket.gethostname()}:{os.getpid()}"
        self._what = what
        self._before = ""
        self._warned: set[str] = set()

    def found(self, place: bytes) -> None:
        """`place`: of the process whose mark was there, b'' if it was ours or none."""
        there = place.decode("utf-8", "replace")
        if there and there == self._before and there not in self._warned:
            self._warned.add(there)
            log.warning("another process, at %s, lives under the same name: %s", there, self._what)
        self._before = there
