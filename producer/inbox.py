"""Closed groups on their way to the trainer: read from the stream, joined, acked.

A group is in hand from its reading to its ack. What was read before and never acked, by an
earlier process or because a reply was lost, is pending in Redis and is looked for again; what
comes again although it was taken is acked without being shown.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from producer.contract.connection import Queue, split
from producer.contract.keys import TRAINER_GROUP
from producer.contract.messages import RolloutGroup
from producer.pipeline import read_all
from producer.results import build_group, group_commands

#: ids that are remembered as taken, in case Redis comes back with an older state
_REMEMBERED = 100_000

#: stream entry, group id, size of the group
Entry = tuple[str, str, int]


class Inbox:
    """The results stream as one consumer sees it."""

    def __init__(self, queue: Queue, consumer: str) -> None:
        self._queue = queue
        self._consumer = consumer
        self._in_hand: dict[str, str] = {}  # group id -> its newest entry
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._behind = True  # there may be entries that this consumer has, and never saw

    def __len__(self) -> int:
        return len(self._in_hand)

    @property
    def behind(self) -> bool:
        """Whether the next read looks at what is pending, not at what is new."""
        return self._behind

    def held_by_others(self) -> dict[str, int]:
        """Consumer -> closed groups that it took and did not ack."""
        summary = ("XPENDING", self._queue.keys["results"], TRAINER_GROUP)
        [reply] = read_all(self._queue, [summary])
        consumers = reply["consumers"] if isinstance(reply, dict) else reply[3] or ()
        pairs = [tuple(c.values()) if isinstance(c, dict) else c for c in consumers]
        held = {name.decode(): int(count) for name, count in pairs}
        return {name: count for name, count in held.items() if name != self._consumer}

    def look_back(self) -> None:
        """Have the next read look at the pending entries first."""
        self._behind = True

    def read(self, most: int, block_ms: int) -> list[Entry]:
        """Up to `most` entries of groups that are not in hand; waits for new ones only."""
        looked_back, reply = self._queue.retrying(lambda: self._read_once(most, block_ms))
        fresh: list[Entry] = []
        again: list[tuple[str, str]] = []
        for entry, group_id, size in _entries(reply):
            if group_id in self._taken:
                again.append((entry, group_id))
            elif group_id in self._in_hand:
                self._in_hand[group_id] = entry
            elif len(fresh) < most:
                self._in_hand[group_id] = entry
                fresh.append((entry, group_id, size))
        self._ack(again)
        if looked_back and len(fresh) < most:
            self._behind = False
        return fresh

    def put_back(self, entries: Sequence[Entry]) -> None:
        """These were read and not shown: they stay pending, and are found again."""
        for _, group_id, _ in entries:
            self._in_hand.pop(group_id, None)
        self._behind = True

    def fetch(self, entries: Sequence[Entry]) -> tuple[RolloutGroup, ...]:
        """The groups behind entries, in their order."""
        groups = []
        for piece in _pieces(entries, 32):
            commands = [group_commands(self._queue.keys, g, size) for _, g, size in piece]
            replies = iter(read_all(self._queue, [c for cs in commands for c in cs]))
            for (entry, group_id, _), own in zip(piece, commands, strict=True):
                answer = list(itertools.islice(replies, len(own)))
                if answer[0]:
                    groups.append(build_group(entry, group_id, answer))
                else:
                    # Already taken and deleted: the entry alone came again.
                    self._ack([(entry, group_id)])
                    self._in_hand.pop(group_id, None)
        return tuple(groups)

    def ack(self, groups: Sequence[RolloutGroup]) -> int:
        """Delete groups; returns how many were still this consumer's to take."""
        acked = self._ack([(self._in_hand.pop(g.id, g.entry), g.id) for g in groups])
        for group in groups:
            self._taken[group.id] = None
        while len(self._taken) > _REMEMBERED:
            self._taken.popitem(last=False)
        return acked

    def _ack(self, items: Sequence[tuple[str, str]]) -> int:
        return sum(
            sum(self._queue.call("ack", piece, group=TRAINER_GROUP, consumer=self._consumer))
            for piece in split(items)
        )

    def _read_once(self, most: int, block_ms: int) -> tuple[bool, Any]:
        """Whether it read the pending entries, and the reply."""
        stream = self._queue.keys["results"]
        group = ("XREADGROUP", "GROUP", TRAINER_GROUP, self._consumer)
        command: tuple[Any, ...]
        looked_back = self._behind
        if looked_back:
            # All of them: those in hand are among the pending, too.
            command = (*group, "STREAMS", stream, "0")
        else:
            block = ("BLOCK", block_ms) if block_ms else ()
            command = (*group, "COUNT", min(most, 256), *block, "STREAMS", stream, ">")
        try:
            return looked_back, self._queue.redis.execute_command(*command)
        except RedisError:
            # The reply may be lost with entries in it: they are pending now.
            self._behind = True
            raise


def _pieces(items: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _entries(reply: Any) -> list[Entry]:
    """Out of whichever form redis-py gives XREADGROUP; deleted entries have no fields."""
    streams = reply.items() if isinstance(reply, dict) else reply or ()
    return [
        (entry.decode(), fields[b"group"].decode(), int(fields[b"size"]))
        for _, entries in streams
        for entry, fields in entries
        if fields
    ]
