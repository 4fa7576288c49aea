"""Closed groups on their way to the trainer: read from the stream, joined, acked.

A group is in hand from its reading to its ack. What was read before and never acked, by an
earlier process or because a reply was lost, is pending in Redis and is looked for again; what
comes again although it was taken is acked without being shown.

Redis may come back from before an ack. Each client then restates what it took, and reads nothing
for as long as the others may need to do the same.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from producer.contract.connection import Call, Queue, split, stream_entries
from producer.contract.errors import InvalidSample
from producer.contract.keys import TRAINER_GROUP, check_group_id
from producer.contract.messages import RolloutGroup
from producer.contract.namesakes import Namesakes
from producer.contract.scripts import Argument
from producer.pipeline import pieces, read_ahead, read_all
from producer.results import build_group, group_commands

#: ids that are remembered as taken, in case Redis comes back with an older state
_REMEMBERED = 100_000
#: how old an ack may be that is restated, in seconds
_RESTATED_SECONDS = 600.0
#: how long nothing is read after Redis came back changed, at least: the longest pause between two
#: attempts of another client to reach it, and a second; and at most, for those that are known
#: and were not heard of: by then the socket of one that was cut off has timed out
SETTLE_SECONDS = 3.0, 12.0

_ADOPTED_A_CALL = 256
_LOOK_SECONDS = 0.1
#: groups that are read while those before are made into rollouts
_READ_A_TIME = 8

#: stream entry, group id, size of the group
Entry = tuple[str, str, int]


class Inbox:
    """The results stream as one consumer sees it."""

    def __init__(self, queue: Queue, consumer: str) -> None:
        self._queue = queue
        self._consumer = consumer
        self._in_hand: dict[str, str] = {}  # group id -> its newest entry
        self._digests: dict[str, bytes] = {}  # group id -> digest of its job, of those in hand
        self._taken: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # digest, and when
        self._behind = True  # there may be entries that this consumer has, and never saw
        self._disruptions = 0
        self._state = b""  # what Redis held when it was looked at last
        self._look_at = 0.0  # when to look again whether all have settled
        self._settled = True
        self._namesakes = Namesakes(
            f"consumer {consumer!r}; both may be given the same groups: give each trainer its rank"
        )

    def __len__(self) -> int:
        return len(self._in_hand)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._in_hand

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

    def settled(self) -> bool:
        """Whether all have restated what they took, since Redis came back changed."""
        if not self._settled and time.monotonic() > self._look_at:
            self.recover()
        return self._settled

    def recover(self) -> None:
        """After a disruption: restate what was taken, if Redis holds another state than before.

        What an outage took back cannot be told from here, so all of it is restated, the newest
        first; a group that Redis knows as taken stays as it is.
        """
        seen = self._queue.disruptions
        self._behind = True
        while (
            state := self.attended(self._queue.call_many([self.attendance()])[0])
        ) != self._state:
            oldest = time.monotonic() - _RESTATED_SECONDS
            known = reversed(self._taken.items())
            self._restate([(g, digest) for g, (digest, at) in known if at > oldest], acked=True)
            self._state = state
        self._disruptions = seen

    def attendance(self) -> Call:
        """To be sent now and then, and its reply given to `attended`."""
        mine = self._namesakes
        scalars: dict[str, Argument] = {
            "consumer": self._consumer,
            "nonce": mine.nonce,
            "place": mine.place,
            "state": self._state,
        }
        return "attend", scalars, ()

    def attended(self, reply: Any) -> bytes:
        """Returns the name of the state that Redis is in."""
        place, state, age_ms, behind = reply
        self._namesakes.found(place)
        least, most = SETTLE_SECONDS
        self._settled = age_ms > (most if behind else least) * 1000
        self._look_at = time.monotonic() + _LOOK_SECONDS
        return bytes(state)

    def read(self, most: int, block_ms: int) -> list[Entry]:
        """Up to `most` entries of groups that are not in hand; waits for new ones only."""
        while (fresh := self._read_fresh(most, block_ms)) is None:
            pass
        return fresh

    def _read_fresh(self, most: int, block_ms: int) -> list[Entry] | None:
        """None if all of them came again: there may be more behind."""
        if self._disruptions != self._queue.disruptions:
            self.recover()
        if not self.settled():
            time.sleep(_LOOK_SECONDS)
            return []
        looked_back, reply = self._queue.retrying(lambda: self._read_once(most, block_ms))
        if self._disruptions != self._queue.disruptions:
            # Perhaps read from an older state. Whatever it was, it is pending now.
            self._behind = True
            return []
        entries = _entries(reply)
        gone = self._gone([g for _, g, _ in entries if g not in self._in_hand])
        fresh: list[Entry] = []
        again: list[tuple[str, str]] = []
        for entry, group_id, size in entries:
            if group_id in gone:
                again.append((entry, group_id))
            elif group_id in self._in_hand:
                self._in_hand[group_id] = entry
            elif len(fresh) < most:
                self._in_hand[group_id] = entry
                fresh.append((entry, group_id, size))
        self._ack(again)
        if looked_back and len(fresh) < most:
            self._behind = False
        elif entries and not fresh:
            return None
        return fresh

    def _gone(self, group_ids: Sequence[str]) -> set[str]:
        """Those that were taken, here or, before their entry was read, by somebody else."""
        exists = read_all(self._queue, [("EXISTS", self._queue.keys.group(g)) for g in group_ids])
        found = zip(group_ids, exists, strict=True)
        # With its tombstone an id is free to be used again.
        oldest = time.monotonic() - int(self._queue.config["tombstone_ms"]) / 1000
        return {
            g for g, there in found if not there or self._taken.get(g, (b"", -math.inf))[1] > oldest
        }

    def put_back(self, entries: Sequence[Entry]) -> None:
        """These were read and not shown: they stay pending, and are found again."""
        for _, group_id, _ in entries:
            self._in_hand.pop(group_id, None)
            self._digests.pop(group_id, None)
        self._behind = True

    def fetch(self, entries: Sequence[Entry]) -> tuple[RolloutGroup, ...]:
        """The groups behind entries, in their order, as far as they are there and closed.

        One that is not was taken meanwhile, or Redis came back from before it had closed, or was
        graded: it is not in hand any more, and comes again when it has.
        """
        answers = self._queue.retrying(lambda: list(self._read_groups(entries)))
        groups, gone = [], []
        for (entry, group_id, _), (fields, group) in zip(entries, answers, strict=True):
            if group is not None:
                self._digests[group_id] = fields[b"digest"]
                groups.append(group)
                continue
            self._in_hand.pop(group_id, None)
            if not fields:
                gone.append((entry, group_id))
        self._ack(gone)
        return tuple(groups)

    def _read_groups(
        self, entries: Sequence[Entry]
    ) -> Iterator[tuple[dict[bytes, bytes], RolloutGroup | None]]:
        """Of each entry, the fields of its group and, if all of it is there, the group."""
        asked = [(e, group_commands(self._queue.keys, e[1], e[2])) for e in entries]
        parts = list(pieces(asked, _READ_A_TIME))
        batches = ([command for _, own in part for command in own] for part in parts)
        for replies, part in zip(read_ahead(self._queue, batches), parts, strict=True):
            rest = iter(replies)
            for (entry, group_id, _), own in part:
                answer = list(itertools.islice(rest, len(own)))
                fields: dict[bytes, bytes] = answer[0]
                closed = b"entry" in fields and all(answer[1::2])
                yield fields, build_group(entry, group_id, answer) if closed else None

    def ack(self, groups: Sequence[RolloutGroup]) -> int:
        """Delete groups; returns how many were still this consumer's to take."""
        answers = self._ack([(self._in_hand.pop(g.id, g.entry), g.id) for g in groups])
        refused = []
        for group, answer in zip(groups, answers, strict=True):
            digest = self._digests.pop(group.id, b"")
            if digest:
                self._taken[group.id] = digest, time.monotonic()
                if not answer:
                    refused.append((group.id, digest))
        while len(self._taken) > _REMEMBERED:
            self._taken.popitem(last=False)
        # Perhaps Redis forgot that these were read, or closed, or even submitted.
        return sum(answers) + sum(self._restate(refused, acked=False))

    def adopt(self, consumer: str, idle: float, *, force: bool) -> int:
        """See `RolloutClient.adopt`."""
        if check_group_id(consumer, "consumer") == self._consumer:
            raise InvalidSample(
                f"consumer {consumer} is this client: its groups come by themselves"
            )
        adopted = 0
        while True:
            moved, idle_ms = self._queue.call(
                "adopt",
                **{"from": consumer},
                group=TRAINER_GROUP,
                consumer=self._consumer,
                idle_ms=0 if force else max(1, int(idle * 1000)),
                limit=_ADOPTED_A_CALL,
            )
            if not force and 0 <= idle_ms < idle * 1000:
                raise InvalidSample(
                    f"consumer {consumer} read {idle_ms / 1000:.0f} s ago and may live; if it is "
                    "gone for good, adopt it with force=True or a smaller idle="
                )
            adopted += int(moved)
            self._behind = True
            if moved < _ADOPTED_A_CALL:
                return adopted

    def _ack(self, items: Sequence[tuple[str, str]]) -> list[int]:
        answers: list[int] = []
        for piece in split(items):
            answers += self._queue.call("ack", piece, group=TRAINER_GROUP, consumer=self._consumer)
        return answers

    def _restate(self, items: Sequence[tuple[str, bytes]], *, acked: bool) -> list[int]:
        answers: list[int] = []
        for piece in split(items):
            answers += self._queue.call(
                "restate",
                piece,
                group=TRAINER_GROUP,
                consumer=self._consumer,
                acked=int(acked),
            )
        return answers

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


def _entries(reply: Any) -> list[Entry]:
    """Deleted entries have no fields."""
    return [
        (entry.decode(), fields[b"group"].decode(), int(fields[b"size"]))
        for entries in stream_entries(reply).values()
        for entry, fields in entries
        if fields
    ]
