"""Many reads in one round trip, retried as a whole; and what clients and commands do with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import hiredis

from producer.contract.connection import Queue, split
from producer.contract.keys import split_sample_id
from producer.status import Status, build_status, status_commands, worker_commands

T = TypeVar("T")


def read_all(queue: Queue, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """Replies to read-only commands, in order; raises as `Queue.retrying`."""

    def attempt() -> list[Any]:
        pipe = queue.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute()

    replies: list[Any] = queue.retrying(attempt) if commands else []
    return replies


def read_ahead(queue: Queue, batches: Iterable[Sequence[tuple[Any, ...]]]) -> Iterator[list[Any]]:
    """Replies to batches of read-only commands: Redis answers the next batch while the caller
    works on this one. To be called within `Queue.retrying`, for nothing is retried here."""
    pool = queue.redis.connection_pool
    connection = pool.get_connection()
    unread: deque[Sequence[tuple[Any, ...]]] = deque()
    clean = True
    try:
        for batch in batches:
            clean = False
            connection.send_packed_command([b"".join(hiredis.pack_command(c) for c in batch)])
            unread.append(batch)
            if len(unread) > 1:
                yield [queue.redis.parse_response(connection, c[0]) for c in unread.popleft()]
        while unread:
            replies = [queue.redis.parse_response(connection, c[0]) for c in unread.popleft()]
            clean = not unread
            yield replies
    finally:
        if not clean:  # a reply on its way would be taken for that of the next command
            connection.disconnect()
        pool.release(connection)


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def read_status(queue: Queue) -> Status:
    """A queue at this moment, in two round trips."""
    replies = read_all(queue, status_commands(queue.keys))
    return build_status(replies, read_all(queue, worker_commands(queue.keys, replies[-1])))


def before_ms(queue: Queue, age: float) -> float:
    """Milliseconds by Redis's clock, `age` seconds ago."""
    [(seconds, micros)] = read_all(queue, [("TIME",)])
    return (float(seconds) - age) * 1000 + float(micros) / 1000


def cancel(queue: Queue, ids: Iterable[str], reason: str) -> int:
    """Cancel groups and samples; returns how many samples were not terminal yet."""
    items = [(g, "" if index is None else index) for g, index in map(split_sample_id, ids)]
    return sum(sum(queue.call("cancel", piece, reason=reason)) for piece in split(items))
