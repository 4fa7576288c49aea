"""Other task queues, each doing a no-op whose answer is as long as a rollout with its logprobs.

A script that `producer.bench.peers` runs, in the environment of the queue that is measured:

    python -P task_queues.py measure NAME URL QUEUE SAMPLES BYTES      prints samples a second

(-P, for a queue.py lies beside it.) It needs nothing of rollq, nor rollq of it. As in `rollq bench
queue` there are two processes: one submits and reads every answer back, checking its length, and
one is the worker; a few samples go before the clock starts. Each queue has settings that its
documentation gives for short tasks, the best of those tried on two cores, and the asyncio ones
have uvloop. None pickles, although arq and taskiq do unless told otherwise. All leave keys behind,
for ten minutes or for good.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

_WARM_UP = 64
_LANES = 64
_KEEP_SECONDS = 600


class TaskQueue(Protocol):
    """What is measured of a task queue."""

    def __init__(self, url: str, queue: str) -> None:
        """Take the URL of a Redis on a Unix socket, and a name."""

    def work(self) -> None:
        """Run the worker until the process ends."""

    def answers(self, samples: int, size: int) -> Iterable[str]:
        """Submit so many samples, and read each one's answer of `size` bytes back."""


class Arq:
    """`max_jobs` and `poll_delay` raised from 10 and 0.5 s; msgpack, as its documentation shows."""

    def __init__(self, url: str, queue: str) -> None:
        import msgpack
        from arq.connections import RedisSettings

        self._queue = queue
        self._redis = RedisSettings.from_dsn(url)
        self._codec = {"job_serializer": msgpack.packb, "job_deserializer": msgpack.unpackb}
        self._loop = _uvloop()

    def work(self) -> None:
        from arq import Worker, func

        async def answer(_: Any, size: int) -> str:
            return "x" * size

        async def run() -> None:
            await Worker(
                [func(answer, name="answer")],
                queue_name=self._queue,
                redis_settings=self._redis,
                max_jobs=100,
                poll_delay=0.002,
                keep_result=_KEEP_SECONDS,
                log_results=False,
                **self._codec,
            ).async_run()

        self._loop.run(run())

    def answers(self, samples: int, size: int) -> Iterable[str]:
        async def run() -> list[str]:
            from arq import create_pool

            pool = await create_pool(self._redis, default_queue_name=self._queue, **self._codec)
            jobs = await _in_lanes(lambda _: pool.enqueue_job("answer", size), range(samples))
            answers = await _in_lanes(lambda job: job.result(poll_delay=0.01), jobs)
            await pool.aclose()
            return answers

        return self._loop.run(run())


class Saq:
    """Concurrency raised from 10; answers read with MGET, as `Queue.map` does, 256 at a time.

    A sweep aborts jobs that were taken a moment ago, so there is one before the first of them
    and then none: whoever sweeps holds a lock.
    """

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self._loop = _uvloop()

    def _open(self) -> Any:
        from redis.asyncio import Redis
        from saq.queue.redis import RedisQueue

        return RedisQueue(Redis.from_url(self._url), self._queue, max_concurrent_ops=_LANES)

    def work(self) -> None:
        from saq import Worker

        async def answer(_: Any, *, size: int) -> str:
            return "x" * size

        async def run() -> None:
            timers: Any = {"sweep": _KEEP_SECONDS}
            await Worker(self._open(), [("answer", answer)], concurrency=32, timers=timers).start()

        self._loop.run(run())

    def answers(self, samples: int, size: int) -> Iterable[str]:
        async def run() -> list[str]:
            from saq import Status
            from saq.job import UNSUCCESSFUL_TERMINAL_STATUSES
            from saq.queue.base import JobError

            queue = self._open()
            await queue.sweep(lock=_KEEP_SECONDS)
            jobs = await _in_lanes(
                lambda _: queue.enqueue("answer", size=size, ttl=_KEEP_SECONDS), range(samples)
            )
            answers: list[str] = []
            while len(answers) < samples:
                asked = [job.key for job in jobs[len(answers) : len(answers) + 256]]
                for job in await queue.jobs(asked):
                    if job.status in UNSUCCESSFUL_TERMINAL_STATUSES:
                        raise JobError(job)
                    if job.status != Status.COMPLETE:
                        await asyncio.sleep(0.005)
                        break
                    answers.append(job.result)
            await queue.disconnect()
            return answers

        return self._loop.run(run())


class Taskiq:
    """Streams, 100 messages a read and as many prefetched; answers as JSON, read once."""

    def __init__(self, url: str, queue: str) -> None:
        from taskiq.serializers import JSONSerializer
        from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

        backend: Any = RedisAsyncResultBackend(
            url, keep_results=False, result_ex_time=_KEEP_SECONDS, serializer=JSONSerializer()
        )
        self._broker = RedisStreamBroker(url, queue, consumer_id="0").with_result_backend(backend)

        async def answer(size: int) -> str:
            return "x" * size

        self._answer = self._broker.register_task(answer, task_name="answer")
        self._loop = _uvloop()

    def work(self) -> None:
        from taskiq.api import run_receiver_task

        self._loop.run(
            run_receiver_task(
                self._broker,
                max_async_tasks=100,
                max_prefetch=100,
                validate_params=False,
                run_startup=True,
            )
        )

    def answers(self, samples: int, size: int) -> Iterable[str]:
        async def run() -> list[str]:
            await self._broker.startup()
            tasks = await _in_lanes(lambda _: self._answer.kiq(size), range(samples))
            results = await _in_lanes(lambda t: t.wait_result(check_interval=0.01), tasks)
            await self._broker.shutdown()
            return [r.return_value for r in results]

        return self._loop.run(run())


class Dramatiq:
    """One process with 8 threads (the default), a longer prefetch, answers read with `group`."""

    def __init__(self, url: str, queue: str) -> None:
        os.environ["dramatiq_queue_prefetch"] = "100"  # noqa: SIM112 - its own spelling
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker
        from dramatiq.results import Results
        from dramatiq.results.backends import RedisBackend

        self._broker = RedisBroker(url=url, namespace=queue)
        backend = RedisBackend(url=url, namespace=f"{queue}-results")
        self._broker.add_middleware(Results(backend=backend))

        def answer(size: int) -> str:
            return "x" * size

        self._answer = dramatiq.actor(
            answer, broker=self._broker, store_results=True, result_ttl=1000 * _KEEP_SECONDS
        )

    def work(self) -> None:
        from dramatiq import Worker

        Worker(self._broker, worker_threads=8).start()
        threading.Event().wait()

    def answers(self, samples: int, size: int) -> Iterable[str]:
        from dramatiq import group

        messages = (self._answer.message(size) for _ in range(samples))
        sent = group(messages, broker=self._broker).run()
        yield from sent.get_results(block=True, timeout=600_000)


class Celery:
    """Four threads, a long prefetch, no gossip or events; JSON, sent and read as a `group`."""

    def __init__(self, url: str, queue: str) -> None:
        import celery

        at = url.replace("unix://", "redis+socket://")
        self._app = celery.Celery(queue, broker=at, backend=at, set_as_current=False)
        self._app.conf.update(
            task_default_queue=queue,
            task_serializer="json",
            result_serializer="json",
            accept_content=["json"],
            result_expires=_KEEP_SECONDS,
            worker_prefetch_multiplier=100,
            worker_enable_remote_control=False,
            broker_connection_retry_on_startup=True,
        )

        def answer(size: int) -> str:
            return "x" * size

        self._answer = self._app.task(answer, name="answer")

    def work(self) -> None:
        options = [
            "--pool=threads",
            "--concurrency=4",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
        ]
        self._app.worker_main(["worker", "--loglevel=ERROR", *options])

    def answers(self, samples: int, size: int) -> Iterable[str]:
        from celery import group

        tasks = group([self._answer.s(size) for _ in range(samples)], app=self._app)
        yield from tasks.apply_async().get(timeout=600)


_QUEUES: dict[str, type[TaskQueue]] = {
    "arq": Arq,
    "saq": Saq,
    "taskiq": Taskiq,
    "dramatiq": Dramatiq,
    "celery": Celery,
}


def measure(name: str, url: str, queue: str, samples: int, size: int) -> float:
    """Samples a second through one worker process."""
    peer = _QUEUES[name](url, queue)
    command = [sys.executable, "-P", __file__, "work", name, url, queue]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr) as worker:
        try:
            _check(peer.answers(_WARM_UP, size), _WARM_UP, size)
            started = time.perf_counter()
            _check(peer.answers(samples, size), samples, size)
            return samples / (time.perf_counter() - started)
        finally:
            worker.kill()


def _check(answers: Iterable[str], samples: int, size: int) -> None:
    lengths = [len(answer) for answer in answers]
    if lengths != [size] * samples:
        raise SystemExit(f"{len(lengths)} answers of {samples}; lengths {sorted(set(lengths))}")


def _uvloop() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _in_lanes(call: Callable[[Any], Awaitable[Any]], items: Iterable[Any]) -> list[Any]:
    """The answer to each item in order, with so many calls at once as there are lanes."""
    lanes = asyncio.Semaphore(_LANES)

    async def one(item: Any) -> Any:
        async with lanes:
            return await call(item)

    return await asyncio.gather(*map(one, items))


def _end_with_parent() -> None:
    """End when stdin does: its other end is the parent's."""

    def wait() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock would outlive the interpreter
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(role: str, name: str, url: str, queue: str, *counts: str) -> None:
    """Be one of the two processes."""
    _end_with_parent()
    if role == "work":
        _QUEUES[name](url, queue).work()
    else:
        samples, size = map(int, counts)
        sys.stdout.write(f"{measure(name, url, queue, samples, size)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
