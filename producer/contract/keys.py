"""The names of a queue's keys, and the only place that spells them.

All keys of a queue share the hash tag `{queue}`, so they live in one slot of a Redis
Cluster. The scripts get these names as KEYS; a name that ends in `:` is the prefix of
one key an id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from producer.contract.errors import InvalidSample

PREFIX = "rollq:"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_ID = re.compile(r"[A-Za-z0-9_.:@=+-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Key names of one queue.

    Raises:
        InvalidSample: the queue's name has other characters than letters, digits, `_.-`.
    """

    queue: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.queue):
            raise InvalidSample(
                f"queue name {self.queue!r} must be 1 to 64 letters, digits, '_', '.' or '-'"
            )

    def __getitem__(self, name: str) -> str:
        """The key or prefix called `name` in a script's header."""
        return f"{PREFIX}{{{self.queue}}}:{NAMES[name]}"

    def sample(self, sample_id: str) -> str:
        return self["sample"] + sample_id

    def chunks(self, sample_id: str) -> str:
        return self["chunks"] + sample_id

    def group(self, group_id: str) -> str:
        return self["group"] + group_id

    def worker(self, name: str) -> str:
        return self["worker"] + name

    def turn(self, name: str) -> str:
        return self["turn"] + name


#: name in a script's header -> what follows the queue's tag
NAMES = {
    "ready": "ready",  # zset: sample id -> sequence number, below 0 after a crash
    "leases": "leases",  # zset: sample id -> expiry, ms of Redis TIME
    "sample": "sample:",  # hash a sample: its state, all text; a count that is absent is 0
    "chunks": "chunks:",  # list a sample: msgpack chunks, the only truth about its tokens
    "group": "group:",  # hash a group: size, index -> terminal state; job, prompt_ids binary
    "results": "results",  # stream: one entry a closed group
    "grading": "grading",  # zset: closed group that waits for its rewards -> when to look, ms
    "done": "done:",  # string with TTL a group: tombstone of what was acked
    "dead": "dead",  # zset: dead-lettered sample id -> when, ms
    "weights": "weights",  # hash: the versions, `current` and `last_good`
    "updates": "updates",  # stream: publications, and that samples are ready; only hints
    "turns": "turns",  # zset: worker name -> until when it has its turn to load, ms
    "line": "line",  # zset: worker that waits for its turn -> its place
    "turn": "turn:",  # stream with TTL a worker: tells it that it has its turn
    "workers": "workers",  # zset: worker name -> last heartbeat, ms
    "starting": "starting",  # zset: those of them that still start -> last heartbeat, ms
    "worker": "worker:",  # hash with TTL a worker: what it says of itself
    "trainers": "trainers",  # hash: consumer -> nonce and place of its client
    "request": "request:",  # string with TTL a claim call: the ids it got
    "stats": "stats",  # hash: counters that only grow
    "config": "config",  # hash: schema, incarnation, limits
}

#: the consumer group on `results`
TRAINER_GROUP = "trainer"


def sample_id(group_id: str, index: int) -> str:
    return f"{group_id}/{index}"


def split_sample_id(sid: str) -> tuple[str, int | None]:
    """`group/index` to its parts; the index is None for a group's id."""
    group, slash, index = sid.partition("/")
    if slash and not index.isdecimal():
        raise InvalidSample(f"{sid!r} is no sample: an id is group/index, with a number behind '/'")
    return group, int(index) if slash else None


def check_group_id(group_id: str, what: str = "group id") -> str:
    """An id or name that fits into keys and lists. Raises InvalidSample, naming `what`."""
    if not isinstance(group_id, str) or not _ID.match(group_id):
        raise InvalidSample(
            f"{what} {group_id!r} must be 1 to 128 letters, digits or any of _.:@=+-"
        )
    return group_id


def rewards_queue(queue: str) -> str:
    """RQ's queue of the jobs that grade this queue's groups; all of RQ's keys are its own."""
    return f"rollq-rewards-{queue}"
