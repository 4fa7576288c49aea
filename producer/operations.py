"""What a client does with samples, in steps: the part that the blocking and the asyncio client
share.

Arguments are those of the methods of `RolloutClient` that have these names, whose docstrings
say what they do. Whatever an operation has taken and nobody got is put back when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from producer import partials
from producer.batch import Batch
from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample
from producer.contract.messages import Job, Rollout, RolloutGroup
from producer.contract.sampling import SamplingParams
from producer.generate import generate
from producer.inbox import Inbox
from producer.intake import Intake
from producer.outbox import Outbox
from producer.pipeline import cancel
from producer.progress import Progress, reporting, size_of
from producer.prompts import make_jobs
from producer.publish import Publisher, Workers, check_wait
from producer.status import Status
from producer.steps import Steps, Stream

#: groups that `rollouts` reads at a time
_AHEAD = 64


class Operations:
    """Of one client. `tend` is what a waiting client does for the pool."""

    def __init__(
        self,
        queue: Queue,
        inbox: Inbox,
        outbox: Outbox,
        publisher: Publisher,
        tend: Callable[[], None],
        status: Callable[[], Status],
        block_ms: int,
    ) -> None:
        self._queue = queue
        self._inbox = inbox
        self._outbox = outbox
        self._publisher = publisher
        self._tend = tend
        self._intake = Intake(queue, inbox, outbox, tend, status, block_ms)

    # submit

    def submit(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None,
        *,
        block: bool,
        progress: Progress,
        first: int = 0,
        **options: Any,
    ) -> Steps[list[str]]:
        """`first`: the number of the first prompt, where earlier ones went before."""
        jobs: Iterable[Job] = _jobs(prompts, sampling_params, first=first, **options)
        if isinstance(prompts, Sequence):
            jobs = list(jobs)
        self._tend()
        with reporting(progress, "submitted", size_of(prompts)) as report:
            wait = self._intake.room() if block else None
            return (yield from self._outbox.enqueue(jobs, wait, lambda done: report(first + done)))

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None,
        *,
        timeout: float | None,
        progress: Progress,
        **options: Any,
    ) -> Steps[Batch]:
        """The batch is not acked yet."""
        jobs = list(_jobs(prompts, sampling_params, **options))
        self._tend()
        with reporting(progress, "generated", len(jobs)) as report:
            args = (self._outbox, self._intake, jobs, self._intake.room(), timeout, report)
            return Batch(*(yield from generate(*args)), self.ack)

    # take

    def batch(self, groups: int, *, timeout: float | None, follow: bool) -> Steps[Batch]:
        taken = yield from self._intake.take(groups, timeout=timeout, follow=follow)
        return Batch(*taken, self.ack)

    def batches(
        self, groups: int, *, ack: str, timeout: float | None, follow: bool
    ) -> Stream[Batch]:
        if ack not in ("auto", "manual"):
            raise InvalidSample(f"ack={ack!r} must be 'auto' or 'manual'")
        while batch := (yield from self.batch(groups, timeout=timeout, follow=follow)):
            yield batch
            if ack == "auto":
                batch.ack()

    def rollouts(self, *, timeout: float | None, follow: bool) -> Stream[Rollout]:
        while True:
            taken = yield from self._intake.take(_AHEAD, least=1, timeout=timeout, follow=follow)
            left = list(taken[0])
            if not left:
                return
            try:
                while left:
                    yield from left[0].rollouts
                    self.ack(left[:1])
                    del left[0]
            finally:
                self._intake.put_back(left)

    def put_back(self, groups: Sequence[RolloutGroup]) -> None:
        """These were handed out and reached nobody."""
        self._intake.put_back(groups)

    def ack(self, groups: Sequence[RolloutGroup]) -> int:
        acked = self._inbox.ack(groups)
        self._outbox.taken(g.id for g in groups)
        return acked

    # samples in the making

    def partials(self, ids: Iterable[str] | None, *, every: float) -> Stream[Rollout]:
        return partials.watch(self._queue, self._outbox, self._tend, ids, every)

    def cancel(
        self,
        ids: Iterable[str] | None,
        reason: str,
        *,
        where: Callable[[Rollout], bool] | None,
        older_than: float | None,
    ) -> Steps[int]:
        if isinstance(ids, str):
            raise InvalidSample(f"cancel takes a list of ids, not the text {ids!r}")
        if where is not None or older_than is not None:
            ids = yield from partials.matching(self._queue, self._outbox, ids, where, older_than)
        elif ids is None:
            raise InvalidSample("cancel needs ids, where= or older_than=: what is to be cancelled?")
        return cancel(self._queue, ids, reason)

    # weights

    def publish(
        self,
        root: Path | None,
        weights: Any,
        *,
        force: bool,
        wait: Workers | None,
        timeout: float,
        **options: Any,
    ) -> Steps[int]:
        check_wait(wait)
        version = self._publisher.publish(root, weights, force, **options)
        if wait is not None:
            version = yield from self._publisher.wait_served(version, wait, timeout, self._tend)
        return version

    def wait_for_version(self, version: int, *, workers: int, timeout: float) -> Steps[None]:
        yield from self._publisher.wait_for(version, workers, timeout, self._tend)


def _jobs(prompts: Any, sampling_params: SamplingParams | None, **options: Any) -> Iterable[Job]:
    if not isinstance(sampling_params, SamplingParams | None):
        raise InvalidSample(f"sampling_params must be SamplingParams, not {sampling_params!r}")
    return make_jobs(prompts, sampling_params or SamplingParams(), **options)
