"""What `rollq bench queue` compares with: the same bytes by other means."""

from __future__ import annotations

import secrets

import numpy as np
import redis

from producer.contract.messages import Chunk

_BATCH = 64


def floor(server: redis.Redis, prefix: str, samples: int, tokens: int) -> None:
    """A queue with no safety at all: two lists, and pipelines of 64 commands.

    Push a prompt, pop it, push its result, pop it. Nothing can be fewer commands.
    """
    prompt = np.ones(3, np.int32).tobytes()
    result = Chunk(0, "null", 1, np.ones(tokens, np.int32), np.zeros(tokens, np.float32)).to_wire()
    work, results = f"{prefix}:floor-work", f"{prefix}:floor-results"
    for start in range(0, samples, _BATCH):
        n = min(_BATCH, samples - start)
        for command in (
            ("RPUSH", work, prompt),
            ("LPOP", work),
            ("RPUSH", results, result),
            ("LPOP", results),
        ):
            pipe = server.pipeline(transaction=False)
            for _ in range(n):
                pipe.execute_command(*command)
            pipe.execute()


def rq_simple_worker(server: redis.Redis, samples: int, tokens: int) -> None:
    """RQ with its SimpleWorker in this process, and a result of the same size."""
    from rq import Queue, SimpleWorker
    from rq.serializers import JSONSerializer

    queue = Queue(f"bench-{secrets.token_hex(3)}", connection=server, serializer=JSONSerializer)
    jobs = [queue.enqueue(answer, tokens, result_ttl=60) for _ in range(samples)]
    SimpleWorker([queue], connection=server, serializer=JSONSerializer).work(
        burst=True, logging_level="ERROR"
    )
    for job in jobs:
        if len(job.return_value() or "") != 8 * tokens:
            raise AssertionError(f"RQ's job {job.id} did not finish")
        job.delete()
    queue.delete()


def answer(tokens: int) -> str:
    """The job that RQ runs: a result as long as a rollout with its logprobs."""
    return "x" * (8 * tokens)
