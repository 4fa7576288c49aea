"""Closed groups for whoever waits: the next ones, or those with certain ids.

A group that was read and is not for this caller is put aside for the one that it is for. A
caller that gives up, by a time-out, an exception or a cancelled task, puts back what it has.
Called by the clients, in steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample, QueueFull, ResultsTaken, ResultsTimeout
from producer.contract.keys import rewards_queue
from producer.contract.messages import RolloutGroup
from producer.inbox import Entry, Inbox
from producer.outbox import Outbox
from producer.pipeline import read_all
from producer.status import Status
from producer.steps import Steps, Wait

log = logging.getLogger("rollq")

#: groups, and the newest weight version of the pool when they were taken
Taken = tuple[tuple[RolloutGroup, ...], int]

#: seconds between words to a trainer that waits in vain
_SAY_SECONDS = 30.0
#: entries that one read asks for
_MOST = 256


class Intake:
    """What one client takes from its inbox.

    Args:
        tend: called before each read; what a waiting client does for the pool.
        status: reads the pool's state, for messages.
        block_ms: milliseconds that a read waits; well below the socket's time-out.
    """

    def __init__(
        self,
        queue: Queue,
        inbox: Inbox,
        outbox: Outbox,
        tend: Callable[[], None],
        status: Callable[[], Status],
        block_ms: int,
    ) -> None:
        self._queue = queue
        self._inbox = inbox
        self._outbox = outbox
        self._tend = tend
        self._status = status
        self._block_ms = block_ms
        self._aside: dict[str, Entry] = {}
        self._named: set[str] = set()  # what somebody waits for by id

    def take(
        self,
        most: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
        follow: bool = False,
    ) -> Steps[Taken]:
        """The next `least` to `most` closed groups; fewer, or none, when there are no more."""
        if most < 1:
            raise InvalidSample(f"groups={most} must be at least 1")
        least = least or most
        self._check_room(least, len(self._inbox) - sum(map(self._free, self._aside)))
        taken: list[Entry] = []
        watch = _Watch(f"{least} groups", least, timeout, self._waiting_for)
        ended = False
        try:
            while True:
                if ended or len(taken) >= least:
                    groups, version = self._inbox.fetch(taken), self.version()
                    if len(groups) == len(taken):
                        taken = []
                        return groups, version
                    # Some went back into the making with a Redis that lost its last second.
                    taken = [e for e in taken if e[1] in self._inbox]
                    ended = False
                more, drained = self._read(most - len(taken), self._free, not follow)
                taken += more
                if drained and not more and not self._outbox.offer_again():
                    self._say_if_others_hold()
                    ended = True
                    continue
                watch.check(len(taken))
                yield Wait()
        finally:
            self._put_back(taken)

    @contextmanager
    def keeping(self, ids: Sequence[str]) -> Iterator[None]:
        """While it lasts, the groups with these ids are for `take_named` alone."""
        wanted = set(ids)
        if twice := wanted & self._named:
            raise InvalidSample(f"group {min(twice)} is waited for already")
        self._check_room(len(wanted), len(self._inbox))
        self._named |= wanted
        try:
            yield
        finally:
            self._named -= wanted

    def take_named(
        self, ids: Sequence[str], timeout: float | None, report: Callable[[int], None]
    ) -> Steps[Taken]:
        """The groups with these ids, in their order, as soon as all of them are closed.

        To be called within `keeping(ids)`.

        Raises:
            ResultsTaken: one of them went to somebody else.
            QueueFull: so many other groups wait to be taken that these cannot start.
        """
        wanted = set(ids)
        taken: dict[str, Entry] = {}
        watch = _Watch(f"{len(wanted)} groups", len(wanted), timeout, self._waiting_for)
        try:
            while True:
                if len(taken) == len(wanted):
                    by_id = {g.id: g for g in self._inbox.fetch(list(taken.values()))}
                    version = self.version()
                    if len(by_id) == len(wanted):
                        taken = {}
                        return tuple(by_id[g] for g in ids), version
                    taken = {g: entry for g, entry in taken.items() if g in self._inbox}
                more, drained = self._read(_MOST, wanted.__contains__, True)
                taken |= {entry[1]: entry for entry in more}
                report(len(taken))
                if not more:
                    self._check_coming([g for g in ids if g not in taken], drained)
                watch.check(len(taken))
                yield Wait()
        finally:
            self._put_back(taken.values())

    def version(self) -> int:
        """The newest weight version of the pool."""
        [current] = read_all(self._queue, [("HGET", self._queue.keys["weights"], "current")])
        return int(current or 0)

    def put_back(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups that were taken and shown to nobody: they come again."""
        self._put_back([(g.entry, g.id, len(g.rollouts)) for g in groups])

    def _put_back(self, entries: Collection[Entry]) -> None:
        if entries:
            self._inbox.put_back(list(entries))

    def _free(self, group_id: str) -> bool:
        return group_id not in self._named

    def _read(
        self, most: int, wanted: Callable[[str], bool], may_end: bool
    ) -> tuple[list[Entry], bool]:
        """Up to `most` entries, and whether the queue was empty before nothing was found."""
        self._tend()
        found = [self._aside.pop(g) for g in [g for g in self._aside if wanted(g)][:most]]
        if found:
            return found, False
        drained = False
        entries = self._inbox.read(most, 0)  # while results come, nobody need ask for their end
        if not entries:
            drained = not self._inbox.behind and may_end and self._drained()
            entries = self._inbox.read(most, 0 if drained else self._block_ms)
        for entry in entries:
            if wanted(entry[1]):
                found.append(entry)
            else:
                self._aside[entry[1]] = entry
        return found, drained and not self._inbox.behind

    def _drained(self) -> bool:
        keys = self._queue.keys
        # In the order that samples pass them, so that none is missed between two reads.
        names = ("ready", "leases", "grading")
        return not any(read_all(self._queue, [("ZCARD", keys[name]) for name in names]))

    def _check_room(self, groups: int, unacked: int) -> None:
        max_results = int(self._queue.config["max_results"])
        if groups + unacked > max_results:
            raise InvalidSample(
                f"groups={groups} and {unacked} unacked are more than the queue's "
                f"max_results={max_results}: they could never be closed together"
            )

    def _check_coming(self, missing: Sequence[str], drained: bool) -> None:
        """Is there still a chance that these groups come?"""
        if missing:
            self._check_start(f"{len(missing)} groups")
        gone = [g for g in missing if g not in self._outbox]
        if drained and not gone and not self._outbox.offer_again():
            gone = list(missing)
        if gone:
            raise ResultsTaken(
                f"group {gone[0]} and {len(gone) - 1} more were taken before, here or by another "
                f"consumer{self._held_by_others()}; several trainers that wait for results by "
                "id need a queue each, and a second generate() needs other ids"
            )

    def _check_start(self, what: str) -> None:
        max_results = int(self._queue.config["max_results"])
        if len(self._inbox) >= max_results:
            raise QueueFull(
                f"{what} cannot start: max_results={max_results} closed groups "
                "wait to be taken by this client; take and ack them with batches() first"
            )

    def check_start(self) -> None:
        """While groups that are waited for by id wait for room: can they ever start?

        Raises:
            QueueFull: closed groups of others are in their way.
        """
        for entry in self._inbox.read(_MOST, 0):
            self._aside[entry[1]] = entry
        self._check_start("some of these groups")

    def room(self) -> Callable[[], None]:
        """To be called while a submission waits for room: tends, and says why it waits."""
        max_ready = self._queue.config["max_ready"]
        watch = _Watch(f"room, max_ready={max_ready}", 0, None, self._waiting_for)

        def wait() -> None:
            self._tend()
            watch.check(0)

        return wait

    def _waiting_for(self) -> str:
        status = self._status()
        return (
            f"{status.ready} samples wait, {status.leased} are with workers, "
            f"{status.results} closed groups are not acked, "
            f"{len(status.workers)} workers live, weights are at version {status.current}"
            f"{self._ungraded(status)}{self._held_by_others()}"
        )

    def _ungraded(self, status: Status) -> str:
        if not status.grading:
            return ""
        rq = f"rq worker ... {rewards_queue(self._queue.keys.queue)}"
        return f"; {status.grading} closed groups wait for their rewards from `{rq}`"

    def _held_by_others(self) -> str:
        held = self._inbox.held_by_others()
        words = ", ".join(f"{count} by consumer {name}" for name, count in held.items())
        return f"; closed groups taken and not acked: {words}" if words else ""

    def _say_if_others_hold(self) -> None:
        if words := self._held_by_others():
            log.warning("no more groups%s", words)


class _Watch:
    """The patience of one that waits for `what`, so many groups."""

    def __init__(
        self, what: str, groups: int, timeout: float | None, why: Callable[[], str]
    ) -> None:
        self.groups = groups
        self._what = what
        self._timeout = timeout
        self._why = why
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._say_at = time.monotonic() + _SAY_SECONDS

    def check(self, taken: int) -> None:
        """Say what one waits for, now and then. Raises ResultsTimeout."""
        now = time.monotonic()
        if now >= self._say_at:
            log.warning("waiting for %s: %s", self._what, self._why())
            self._say_at = now + _SAY_SECONDS
        if self._deadline is not None and now > self._deadline and taken < self.groups:
            raise ResultsTimeout(
                f"{taken} of {self.groups} groups closed within {self._timeout:.0f} s; "
                f"{self._why()}"
            )
