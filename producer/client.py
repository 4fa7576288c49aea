"""RolloutClient: a trainer's hold on a pool.

    submit -> (workers) -> batches -> ack, and publish_weights whenever a step is done.

What was submitted comes back exactly once by id, whole groups at a time; what was taken but
not acked comes again to the same `consumer` after a restart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from producer.batch import Batch
from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample
from producer.contract.keys import check_group_id, split_sample_id
from producer.contract.messages import Rollout, RolloutGroup
from producer.contract.rewards import Dispatcher
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy, UpdatePolicy
from producer.inbox import Inbox
from producer.operations import Operations
from producer.outbox import Outbox
from producer.pipeline import read_all, read_status
from producer.progress import Progress
from producer.prompts import Prompt
from producer.publish import Publisher, Workers
from producer.results import build_rollout, sample_commands
from producer.status import Status, texts
from producer.steps import finish, items
from producer.tending import Tending


class RolloutClient:
    """A connection of a trainer to the queue `queue` of a pool.

    Args:
        url: of Redis: `redis://`, `rediss://` or `unix://`; ROLLQ_REDIS_URL by default.
        consumer: this trainer's rank; what it took and did not ack comes again under the
            same name.
        weights_dir: shared directory for published weights; ROLLQ_WEIGHTS_DIR by default.
        patience: seconds that a call waits for a Redis that is away.
        limits: limits of the queue to set, such as `max_ready`; see `connection.DEFAULTS`.

    Raises:
        QueueUnusable: the server cannot carry a queue; says why.
        RedisUnavailable: it does not answer.
    """

    #: milliseconds that a read of results waits; well below the socket's time-out
    _block_ms = 500

    def __init__(
        self,
        url: str | None = None,
        queue: str = "default",
        *,
        consumer: str = "0",
        weights_dir: str | os.PathLike[str] | None = None,
        patience: float = 60.0,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        url = url or os.environ.get("ROLLQ_REDIS_URL") or "redis://localhost:6379"
        weights_dir = weights_dir or os.environ.get("ROLLQ_WEIGHTS_DIR")
        self.consumer = check_group_id(consumer, "consumer")
        self.weights_dir = Path(weights_dir) if weights_dir else None
        self._queue = Queue(url, queue, limits=limits, patience=patience)
        self._outbox = Outbox(self._queue)
        self._inbox = Inbox(self._queue, self.consumer)
        self._publisher = Publisher(self._queue, self.status)
        self._graders = Dispatcher(url, queue)
        self._tend = Tending(self._queue, self._inbox, self._outbox, self._publisher, self._graders)
        self._queue.open()
        self._inbox.recover()
        # Between two reads it reaps, which must be often for a lease.
        block_ms = min(self._block_ms, int(self._queue.config["lease_ms"]) // 5)
        #: what this client does with samples; shared with the asyncio twin
        self.operations = Operations(
            self._queue,
            self._inbox,
            self._outbox,
            self._publisher,
            self._tend,
            self.status,
            block_ms,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection; what was submitted stays in the queue."""
        self._graders.close()
        self._queue.close()

    # submit

    def submit(
        self,
        prompts: Iterable[Prompt] | str,
        sampling_params: SamplingParams | None = None,
        *,
        ids: Iterable[str] | None = None,
        metadata: Iterable[Any] | None = None,
        max_staleness: int | None = None,
        staleness_policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
        allow_restart: bool = False,
        reward: str | None = None,
        block: bool = True,
        progress: Progress = False,
    ) -> list[str]:
        """Enqueue one group a prompt; returns the group ids, in order.

        Enqueuing the same job under the same id again changes nothing, also after it was
        delivered. A list is checked whole before anything is enqueued; any other iterable,
        such as a generator or a `datasets.Dataset`, is read as it is sent, so that a full
        queue (`max_ready`) slows the reading. See `producer.prompts.make_jobs` for what a
        prompt may be.

        Args:
            reward: a function `package.module:function`: a group is delivered when it is
                graded, or with the grader's error as `group.reward_error`.
            block: wait while the queue is full, instead of raising.
            progress: True for a bar, or a function of (groups enqueued, groups or None).

        Raises:
            InvalidSample: naming the prompt and what is wrong with it.
            IdConflict: an id is taken by another job.
            QueueFull: `max_ready` is reached and `block` is False; its message says how
                many groups were enqueued before.
        """
        return finish(
            self.operations.submit(
                prompts,
                sampling_params,
                ids=ids,
                metadata=metadata,
                max_staleness=max_staleness,
                staleness_policy=staleness_policy,
                allow_restart=allow_restart,
                reward=reward,
                block=block,
                progress=progress,
            )
        )

    def generate(
        self,
        prompts: Iterable[Prompt] | str,
        sampling_params: SamplingParams | None = None,
        *,
        ids: Iterable[str] | None = None,
        metadata: Iterable[Any] | None = None,
        max_staleness: int | None = None,
        staleness_policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
        allow_restart: bool = False,
        reward: str | None = None,
        timeout: float | None = None,
        progress: Progress = True,
    ) -> Batch:
        """Submit prompts and wait for exactly these; returns their groups in the same order.

        They are acked when it returns. Other groups that close meanwhile come with later
        batches of this client; so do these, if it is given up. All must fit into the
        queue's `max_results`. Where several trainers take from one queue, another of them
        may get what it waits for, which is an error: give it a queue of its own there.

        Args:
            timeout: seconds for all of it.
            progress: True for a bar, or a function of (groups closed, groups).

        Raises:
            ResultsTimeout: says what the pool is doing.
            ResultsTaken: some were taken before, under the same ids, or by somebody else.
            QueueFull: other closed groups fill `max_results`, so that these cannot start.
            InvalidSample, IdConflict: as `submit`.
        """
        batch = finish(
            self.operations.generate(
                prompts,
                sampling_params,
                ids=ids,
                metadata=metadata,
                max_staleness=max_staleness,
                staleness_policy=staleness_policy,
                allow_restart=allow_restart,
                reward=reward,
                timeout=timeout,
                progress=progress,
            )
        )
        batch.ack()
        return batch

    # results

    def batches(
        self,
        groups: int = 64,
        *,
        ack: Literal["auto", "manual"] = "auto",
        timeout: float | None = None,
        follow: bool = False,
    ) -> Iterator[Batch]:
        """Batches of `groups` closed groups, as they close, until the queue has no more.

        With `ack="auto"` a batch is acked when the next one is asked for: a trainer that
        dies in between gets it again. With `"manual"` call `batch.ack()`, for example after
        a checkpoint. The last batch may be smaller. With `follow` it never ends.

        Raises:
            ResultsTimeout: a batch took longer than `timeout` seconds.
        """
        return items(self.operations.batches(groups, ack=ack, timeout=timeout, follow=follow))

    def batch(
        self, groups: int = 64, *, timeout: float | None = None, follow: bool = False
    ) -> Batch:
        """The next `groups` closed groups; fewer, or none, when the queue has no more.

        Raises:
            ResultsTimeout: what did close stays with this client for its next call.
        """
        return finish(self.operations.batch(groups, timeout=timeout, follow=follow))

    def rollouts(self, *, timeout: float | None = None, follow: bool = False) -> Iterator[Rollout]:
        """One rollout after another, those of a group together and in index order.

        A group is acked when the first rollout behind it is asked for. One that was not
        left behind comes again with the next call. Ends and raises as `batches`.
        """
        return items(self.operations.rollouts(timeout=timeout, follow=follow))

    def ack(self, groups: Sequence[RolloutGroup]) -> int:
        """Delete delivered groups; returns how many were still this consumer's to take."""
        return self.operations.ack(groups)

    def adopt(self, consumer: str, *, idle: float = 600.0, force: bool = False) -> int:
        """Take over what a consumer that is gone for good had taken; returns how many groups.

        They come with the next batches; what it still acks afterwards counts no more.

        Raises:
            InvalidSample: it read within `idle` seconds, so it may live, and `force` is False.
        """
        return self._inbox.adopt(consumer, idle, force=force)

    # samples

    def peek(self, sample_id: str) -> Rollout | None:
        """A sample as it is now, with the tokens checkpointed so far; None if unknown."""
        group_id, index = split_sample_id(sample_id)
        if index is None:
            raise InvalidSample(f"{sample_id!r} is a group; a sample is {group_id}/0 and so on")
        keys = self._queue.keys
        group, fields, chunks = read_all(
            self._queue, [("HGETALL", keys.group(group_id)), *sample_commands(keys, sample_id)]
        )
        return build_rollout(sample_id, group or fields, fields, chunks) if fields else None

    def partials(
        self, ids: Iterable[str] | None = None, *, every: float = 0.5
    ) -> Iterator[Rollout]:
        """Samples as they grow: each with all its tokens so far whenever it has more of them,
        and once when it has ended.

        It looks every `every` seconds at what this client submitted and has not acked, or at
        those of its groups and samples that `ids` names, and ends when all of them have
        ended. Nothing is taken: the groups still come with `batches`.
        """
        return items(self.operations.partials(ids, every=every))

    def cancel(
        self,
        ids: Iterable[str] | None = None,
        reason: str = "cancelled by the trainer",
        *,
        where: Callable[[Rollout], bool] | None = None,
        older_than: float | None = None,
    ) -> int:
        """Cancel groups or samples; returns how many samples were not terminal yet.

        They are delivered with the tokens made so far, as `cancelled`.

        Args:
            ids: of groups or samples.
            where, older_than: choose among what this client submitted and has not acked (and
                `ids` names, if given): samples, as `partials` shows them, for which `where`
                is true and that were enqueued more than `older_than` seconds ago.
        """
        return finish(self.operations.cancel(ids, reason, where=where, older_than=older_than))

    # weights

    def publish_weights(
        self,
        weights: Any,
        *,
        step: int = 0,
        policy: UpdatePolicy | str = UpdatePolicy.REQUEUE,
        deadline_s: float = 60.0,
        max_updating: float | None = None,
        force: bool = False,
        wait: Workers | None = None,
        timeout: float = 600.0,
    ) -> int:
        """Publish weights to the pool; returns the version that Redis gave them.

        Args:
            weights: a torch module, a state dict with checkpoint names, or a directory of
                safetensors files.
            step: a label, kept with the version.
            policy: what becomes of samples in flight: `requeue` hands them back, `keep`
                goes on in place under the new weights, `finish` lets them end, for at
                most `deadline_s` seconds.
            max_updating: how many workers may stop to load at once: a number, or a float
                from 0 to 1 for a share of those that live, 1.0 for all; by default half of
                them, and one in any case. The others go on generating meanwhile.
            force: make a new version although these files are the current ones.
            wait: for so many workers, or "all" that live, to serve it, at most `timeout`
                seconds. A worker that leaves is not waited for. If Redis forgets the version
                meanwhile, it is published again, and the new one is returned.

        Raises:
            WeightsError: no weights_dir is set, or these are no weights.
            WeightsRejected: while waiting: workers could not load it; `reasons` has why.
            ResultsTimeout: while waiting; says what each worker serves.
        """
        return finish(
            self.operations.publish(
                self.weights_dir,
                weights,
                force=force,
                wait=wait,
                timeout=timeout,
                step=step,
                policy=policy,
                deadline_s=deadline_s,
                max_updating=max_updating,
            )
        )

    def wait_for_version(self, version: int, *, workers: int = 1, timeout: float = 60.0) -> None:
        """Wait until `workers` workers serve `version` or a newer one.

        Raises:
            WeightsRejected: no worker could load it; carries each worker's reason.
            ResultsTimeout: says what each worker serves.
        """
        finish(self.operations.wait_for_version(version, workers=workers, timeout=timeout))

    # watching

    def status(self) -> Status:
        """Counts, weight versions, workers and counters at this moment."""
        return read_status(self._queue)

    def config(self) -> dict[str, str]:
        """The queue's schema version, incarnation and limits."""
        [fields] = read_all(self._queue, [("HGETALL", self._queue.keys["config"])])
        return texts(fields)
