"""What a waiting client does for the pool: reap, have groups graded, bring back what Redis lost.

Called before each read of results, and while a submission waits for room.
"""

from __future__ import annotations

import time

from producer.contract.connection import Call, Queue
from producer.contract.rewards import Dispatcher
from producer.inbox import Inbox
from producer.outbox import Outbox
from producer.publish import Publisher

#: seconds between offers of what is outstanding, in case Redis lost it unnoticed
_OFFER_SECONDS = 30.0
#: seconds between offers while Redis is found to have lost some of it
_OFFER_AGAIN_SECONDS = 1.0
#: seconds between looks for closed groups that nobody grades
_GRADE_SECONDS = 0.25


class Tending:
    """Of one client; a call does what is due and is cheap when nothing is."""

    def __init__(
        self,
        queue: Queue,
        inbox: Inbox,
        outbox: Outbox,
        publisher: Publisher,
        graders: Dispatcher,
    ) -> None:
        self._queue = queue
        self._inbox = inbox
        self._outbox = outbox
        self._publisher = publisher
        self._graders = graders
        self._disruptions = 0
        self._next_reap = self._next_offer = self._next_grading = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._next_reap:
            calls: list[Call] = [("reap", {"limit": 256}, ()), self._inbox.attendance()]
            self._inbox.attended(self._queue.call_many(calls)[1])
            self._next_reap = now + int(self._queue.config["lease_ms"]) / 5000
        if now >= self._next_grading and not self._graders.refused:
            if due := self._queue.call("due", limit=256):
                self._graders.send(due)
            self._next_grading = now + _GRADE_SECONDS
        if self._disruptions != self._queue.disruptions:
            self._disruptions = self._queue.disruptions
            self._inbox.recover()
            self._publisher.again()
            self._next_offer = now
        # Not before others could say what they took of it.
        if now >= self._next_offer and self._inbox.settled():
            lost = self._outbox.offer_again()
            # Also because there may be no room for all of it yet.
            self._next_offer = now + (_OFFER_AGAIN_SECONDS if lost else _OFFER_SECONDS)
