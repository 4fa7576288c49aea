"""Many reads in one round trip, retried as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producer.contract.connection import Queue


def read_all(queue: Queue, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """Replies to read-only commands, in order; raises as `Queue.retrying`."""

    def attempt() -> list[Any]:
        pipe = queue.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute()

    replies: list[Any] = queue.retrying(attempt) if commands else []
    return replies
