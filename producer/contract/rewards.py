"""Grading: closed groups become RQ jobs, which ordinary `rq worker` processes run.

Called by whoever tends a queue: waiting clients, workers, and graders themselves. Any of them
may die at any moment: `due` hands a group out again after a lease time, a job's id is made of
group, digest and attempt, so it is enqueued once, and the attempt counts when it begins.

RQ is imported with the first group that is due; nothing here is pickled.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import redis

from producer.contract import codec
from producer.contract.errors import InvalidPayload, InvalidSample, RollqError
from producer.contract.keys import rewards_queue
from producer.contract.url import connect, redact

log = logging.getLogger("rollq")

#: the only function that a reward job may name
JOB = "producer.rewards.job.grade"

#: seconds for which RQ keeps what succeeded and what failed
_KEEP_RESULT, _KEEP_FAILURE = 60, 24 * 3600

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z]\w*\Z", re.ASCII)

#: an item of the reply of `due`
Due = Sequence[Any]


def check_reward(reward: str) -> str:
    """A reward function's name, `package.module:function`. Raises InvalidSample."""
    if not isinstance(reward, str) or len(reward) > 200 or not _FUNCTION.match(reward):
        raise InvalidSample(
            f"reward={reward!r} must name a function as 'package.module:function', "
            "such as 'producer.rewards.graders:exact_match'"
        )
    return reward


class Serializer:
    """RQ's serializer of a rewards queue: msgpack, and no job but our own.

    RQ runs whatever function a job names, so one that names another is refused here.
    """

    @staticmethod
    def dumps(value: Any) -> bytes:
        return codec.pack(value, "RQ payload")

    @staticmethod
    def loads(data: bytes) -> Any:
        value = codec.unpack(data, "RQ payload")
        # Only a job's call is a list; a result is None, and meta a map.
        if isinstance(value, list) and (
            len(value) != 4 or value[:2] != [JOB, None] or value[3] != {}
        ):
            raise InvalidPayload(f"an RQ job of this queue may call {JOB} and nothing else")
        return value


class Dispatcher:
    """Enqueues the RQ jobs of groups that are due. Not to be shared between threads.

    Args:
        url: of the queue's Redis; ROLLQ_REWARDS_URL names another one for RQ.
    """

    def __init__(self, url: str, queue: str) -> None:
        self._url = os.environ.get("ROLLQ_REWARDS_URL") or url
        self._queue = queue
        self._rq: Any = None
        self._away = False
        #: why this process can never enqueue jobs: others have to
        self.refused = ""

    def send(self, due: Sequence[Due]) -> None:
        """Enqueue a job for each, unless there is one. What fails is handed out again later."""
        try:
            self._send([_Job(self._queue, d) for d in due])
            self._away = False
        except (ImportError, redis.exceptions.NoPermissionError) as error:
            self.refused = f"{type(error).__name__}: {error}"
            log.warning("this process leaves rewards to others, it cannot use RQ: %s", self.refused)
        except (redis.RedisError, OSError, RollqError) as error:
            if not self._away:
                log.warning(
                    "%d groups wait for their rewards: RQ's Redis at %s: %s; trying again",
                    len(due),
                    redact(self._url),
                    error,
                )
            self._away = True

    def close(self) -> None:
        if self._rq is not None:
            self._rq.connection.close()

    def _send(self, jobs: Sequence[_Job]) -> None:
        from rq.exceptions import DuplicateJobError

        rq = self._open()
        waiting: set[str] | None = None
        for job in jobs:
            try:
                job.enqueue(rq)
            except DuplicateJobError:
                # It was enqueued before, and its attempt has not begun. Unless it waits still,
                # its worker died between taking and beginning it, or could not reach us.
                waiting = set(rq.job_ids) if waiting is None else waiting
                if job.id not in waiting:
                    rq.connection.delete(rq.job_class.key_for(job.id))
                    job.enqueue(rq)

    def _open(self) -> Any:
        if self._rq is None:
            from rq import Queue as RqQueue

            self._rq = RqQueue(
                rewards_queue(self._queue),
                connection=connect(self._url, lambda: None),
                serializer=Serializer,
            )
        return self._rq


class _Job:
    """The RQ job of one attempt at one group."""

    def __init__(self, queue: str, due: Due) -> None:
        group, digest, attempts, reward, limit_ms = due
        self._group, self._digest = group.decode(), digest.decode()
        self._queue, self._reward = queue, reward.decode()
        # RQ's alarm comes surely after the limit, so that who catches it is found out.
        self._seconds = math.ceil(limit_ms / 1000) + 1
        what = hashlib.blake2b(f"{queue} {self._group} {self._digest}".encode(), digest_size=8)
        readable = re.sub(r"[^A-Za-z0-9_-]", "-", self._group)[:64]
        self.id = f"{readable}-{what.hexdigest()}-{attempts + 1}"

    def enqueue(self, rq: Any) -> None:
        rq.enqueue_call(
            JOB,
            (self._queue, self._group, self._digest),
            timeout=self._seconds,
            result_ttl=_KEEP_RESULT,
            failure_ttl=_KEEP_FAILURE,
            description=f"{self._reward} of group {self._group}",
            job_id=self.id,
            unique=True,
        )


def read_rewards(data: bytes, size: int, what: str) -> list[float | dict[str, Any]]:
    """Rewards as `graded` stored them. Raises InvalidPayload."""
    rewards = codec.unpack(data, f"rewards of {what}")
    if not isinstance(rewards, list) or len(rewards) != size:
        raise InvalidPayload(f"rewards of {what} are not one a rollout")
    return rewards
