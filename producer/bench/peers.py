"""What `rollq bench queue` compares with: the same bytes by other means."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

_BATCH = 64


def floor(server: redis.Redis, prefix: str, samples: int, tokens: int) -> None:
    """A queue with no safety at all: two lists, and pipelines of 64 commands.

    Push a prompt, pop it, push its result, pop it. Nothing can be fewer commands. Each result is
    made out of arrays and read into arrays, as the pool's is.
    """
    work, results = f"{prefix}:floor-work", f"{prefix}:floor-results"
    for start in range(0, samples, _BATCH):
        n = min(_BATCH, samples - start)
        _sent(server, [("RPUSH", work, np.ones(3, np.int32).tobytes()) for _ in range(n)])
        prompts = _sent(server, [("LPOP", work)] * n)
        made = [_answer(np.frombuffer(p, np.int32), tokens) for p in prompts]
        _sent(server, [("RPUSH", results, data) for data in made])
        for data in _sent(server, [("LPOP", results)] * n):
            values = np.frombuffer(data, np.int32)
            if len(values[:tokens]) != len(values[tokens:].view(np.float32)):
                raise AssertionError(f"a result of the floor has {len(values)} values")


def _answer(prompt: NDArray[np.int32], tokens: int) -> bytes:
    assert len(prompt)
    return np.ones(tokens, np.int32).tobytes() + np.zeros(tokens, np.float32).tobytes()


def _sent(server: redis.Redis, commands: list[tuple[Any, ...]]) -> list[Any]:
    pipe = server.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    replies: list[Any] = pipe.execute()
    return replies


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
