"""RolloutClient: a trainer's hold on a pool.

    submit -> (workers) -> batches -> ack, and publish_weights whenever a step is done.

What was submitted comes back exactly once by id, whole groups at a time; what was taken but
not acked comes again to the same `consumer` after a restart.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from producer.batch import Batch
from producer.contract.connection import Call, Queue, split
from producer.contract.errors import (
    InvalidSample,
    ResultsTimeout,
    WeightsError,
    WeightsRejected,
)
from producer.contract.keys import check_group_id, split_sample_id
from producer.contract.messages import Job, Rollout, RolloutGroup
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy, UpdatePolicy, WeightState
from producer.inbox import Entry, Inbox
from producer.outbox import Outbox
from producer.pipeline import read_all
from producer.prompts import Prompt, make_jobs
from producer.results import build_rollout, sample_commands
from producer.status import Status, build_status, status_commands, texts, worker_commands
from producer.weights import remove_old, write_checkpoint

log = logging.getLogger("rollq")

#: seconds between offers of what is outstanding, in case Redis lost it unnoticed
_OFFER_SECONDS = 30.0
#: seconds between offers while Redis is found to have lost some of it
_OFFER_AGAIN_SECONDS = 1.0
#: seconds between words to a trainer that waits in vain
_SAY_SECONDS = 30.0
#: milliseconds; well below the socket's time-out
_BLOCK_MS = 500


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
        self._next_reap = self._next_offer = 0.0
        self._published: dict[str, Any] = {}  # the last publication, to be made again if lost
        self._newest = 0  # the highest version this client knows of
        self._disruptions = 0
        self._queue.open()
        self._inbox.recover()

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
        block: bool = True,
    ) -> list[str]:
        """Enqueue one group a prompt; returns the group ids, in order.

        Enqueuing the same job under the same id again changes nothing, also after it was
        delivered. A list is checked whole before anything is enqueued; any other iterable
        is read as it is sent. See `producer.prompts.make_jobs` for what a prompt may be.

        Raises:
            InvalidSample: naming the prompt and what is wrong with it.
            IdConflict: an id is taken by another job.
            QueueFull: `max_ready` is reached and `block` is False; its message says how
                many groups were enqueued before.
        """
        if not isinstance(sampling_params, SamplingParams | None):
            raise InvalidSample(f"sampling_params must be SamplingParams, not {sampling_params!r}")
        self._tend()
        jobs: Iterable[Job] = make_jobs(
            prompts,
            sampling_params or SamplingParams(),
            ids=ids,
            metadata=metadata,
            max_staleness=max_staleness,
            staleness_policy=staleness_policy,
            allow_restart=allow_restart,
        )
        if isinstance(prompts, Sequence):
            jobs = list(jobs)
        return self._outbox.enqueue(jobs, self._wait_for_room() if block else None)

    def _wait_for_room(self) -> Callable[[], None]:
        pauses = itertools.chain((0.01, 0.02, 0.05, 0.1, 0.2), itertools.repeat(0.5))

        def wait() -> None:
            self._tend()
            time.sleep(next(pauses))

        return wait

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
        if ack not in ("auto", "manual"):
            raise InvalidSample(f"ack={ack!r} must be 'auto' or 'manual'")
        while batch := self.batch(groups, timeout=timeout, follow=follow):
            yield batch
            if ack == "auto":
                batch.ack()

    def batch(
        self, groups: int = 64, *, timeout: float | None = None, follow: bool = False
    ) -> Batch:
        """The next `groups` closed groups; fewer, or none, when the queue has no more.

        Raises:
            ResultsTimeout: what did close stays with this client for its next call.
        """
        max_results = int(self._queue.config["max_results"])
        if groups < 1:
            raise InvalidSample(f"groups={groups} must be at least 1")
        if groups + len(self._inbox) > max_results:
            raise InvalidSample(
                f"groups={groups} and {len(self._inbox)} unacked are more than the queue's "
                f"max_results={max_results}: they could never be closed together"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        # Between two blocks it reaps, which must be often for a lease.
        block_ms = min(_BLOCK_MS, int(self._queue.config["lease_ms"]) // 5)
        taken: list[Entry] = []
        say_at = time.monotonic() + _SAY_SECONDS
        ended = False
        while True:
            if ended or len(taken) >= groups:
                found = self._inbox.fetch(taken)
                if len(found) == len(taken):
                    return Batch(found, self.ack)
                taken = [e for e in taken if e[1] in self._inbox]
                ended = False
            self._tend()
            drained = not self._inbox.behind and not follow and self._drained()
            more = self._inbox.read(groups - len(taken), 0 if drained else block_ms)
            taken += more
            if drained and not more and not self._inbox.behind and not self._outbox.offer_again():
                self._say_if_others_hold()
                ended = True
                continue
            if time.monotonic() >= say_at:
                log.warning("waiting for %d groups: %s", groups, self._waiting_for())
                say_at = time.monotonic() + _SAY_SECONDS
            if deadline is not None and time.monotonic() > deadline and len(taken) < groups:
                self._inbox.put_back(taken)
                raise ResultsTimeout(
                    f"{len(taken)} of {groups} groups closed within {timeout:.0f} s; "
                    f"{self._waiting_for()}"
                )

    def ack(self, groups: Sequence[RolloutGroup]) -> int:
        """Delete delivered groups; returns how many were still this consumer's to take."""
        acked = self._inbox.ack(groups)
        self._outbox.taken(g.id for g in groups)
        return acked

    def adopt(self, consumer: str, *, idle: float = 600.0, force: bool = False) -> int:
        """Take over what a consumer that is gone for good had taken; returns how many groups.

        They come with the next batches; what it still acks afterwards counts no more.

        Raises:
            InvalidSample: it read within `idle` seconds, so it may live, and `force` is False.
        """
        return self._inbox.adopt(consumer, idle, force=force)

    def _drained(self) -> bool:
        keys = self._queue.keys
        ready, leased = read_all(self._queue, [("ZCARD", keys["ready"]), ("ZCARD", keys["leases"])])
        return not ready and not leased

    def _waiting_for(self) -> str:
        status = self.status()
        return (
            f"{status.ready} samples wait, {status.leased} are with workers, "
            f"{len(status.workers)} workers live, weights are at version {status.current}"
            f"{self._held_by_others()}"
        )

    def _held_by_others(self) -> str:
        held = self._inbox.held_by_others()
        words = ", ".join(f"{count} by consumer {name}" for name, count in held.items())
        return f"; closed groups taken and not acked: {words}" if words else ""

    def _say_if_others_hold(self) -> None:
        if words := self._held_by_others():
            log.warning("consumer %s has no more groups%s", self.consumer, words)

    def _tend(self) -> None:
        """What a waiting client does for the pool: reap, and bring back what Redis lost."""
        now = time.monotonic()
        if now >= self._next_reap:
            calls: list[Call] = [("reap", {"limit": 256}, ()), self._inbox.attendance()]
            self._inbox.attended(self._queue.call_many(calls)[1])
            self._next_reap = now + int(self._queue.config["lease_ms"]) / 5000
        if self._disruptions != self._queue.disruptions:
            self._disruptions = self._queue.disruptions
            self._inbox.recover()
            self._publish_again()
            self._next_offer = now
        # Not before others could say what they took of it.
        if now >= self._next_offer and self._inbox.settled():
            lost = self._outbox.offer_again()
            # Also because there may be no room for all of it yet.
            self._next_offer = now + (_OFFER_AGAIN_SECONDS if lost else _OFFER_SECONDS)

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

    def cancel(self, ids: Iterable[str], reason: str = "cancelled by the trainer") -> int:
        """Cancel groups or samples by id; returns how many samples were not terminal yet.

        They are delivered with the tokens made so far, as `cancelled`.
        """
        if isinstance(ids, str):
            raise InvalidSample(f"cancel takes a list of ids, not the text {ids!r}")
        items = [
            (group, "" if index is None else index) for group, index in map(split_sample_id, ids)
        ]
        return sum(sum(self._queue.call("cancel", p, reason=reason)) for p in split(items))

    # weights

    def publish_weights(
        self,
        weights: Any,
        *,
        step: int = 0,
        policy: UpdatePolicy | str = UpdatePolicy.REQUEUE,
        deadline_s: float = 60.0,
        force: bool = False,
    ) -> int:
        """Publish weights to the pool; returns the version that Redis gave them.

        Args:
            weights: a torch module, a state dict with checkpoint names, or a directory of
                safetensors files.
            step: a label, kept with the version.
            policy: what becomes of samples in flight: `requeue` hands them back, `keep`
                goes on in place under the new weights, `finish` lets them end, for at
                most `deadline_s` seconds.
            force: make a new version although these files are the current ones.

        Raises:
            WeightsError: no weights_dir is set, or these are no weights.
        """
        if self.weights_dir is None:
            raise WeightsError(
                "no weights directory: give RolloutClient(weights_dir=...) or set "
                "ROLLQ_WEIGHTS_DIR to a directory that the workers see, too"
            )
        if policy not in tuple(UpdatePolicy):
            raise WeightsError(f"policy={policy!r} must be one of {', '.join(UpdatePolicy)}")
        if not 0 <= deadline_s <= 86_400:
            raise WeightsError(f"deadline_s={deadline_s} must be 0 to 86400 seconds")
        step = operator.index(step)
        queue = self._queue.keys.queue
        path, digest = write_checkpoint(self.weights_dir, queue, weights, step)
        publication: dict[str, Any] = {
            "digest": digest,
            "path": path,
            "step": step,
            "policy": str(policy),
            "deadline_ms": int(deadline_s * 1000),
        }
        version = self._publish(publication, force)
        self._published = publication
        status = self.status()
        in_use = [v for w in status.workers for v in (w.version, w.loading)]
        remove_old(self.weights_dir, queue, status.weights, in_use)
        return version

    def _publish(self, publication: dict[str, Any], force: bool) -> int:
        version, _new = self._queue.call(
            "publish",
            request=secrets.token_hex(8),
            force=int(force),
            floor=self._newest,
            **publication,
        )
        self._newest = max(self._newest, version)
        return int(version)

    def _publish_again(self) -> None:
        """If Redis forgot this client's last publication: under a new, higher version."""
        if self._published and int(self.status().weights.get("newest", 0)) < self._newest:
            self._publish(self._published, force=True)

    def wait_for_version(self, version: int, *, workers: int = 1, timeout: float = 60.0) -> None:
        """Wait until `workers` workers serve `version` or a newer one.

        Raises:
            WeightsRejected: no worker could load it; carries a worker's reason.
            ResultsTimeout: says what each worker serves.
        """
        deadline = time.monotonic() + timeout
        while True:
            status = self.status()
            if status.weights.get(f"{version}:state") == WeightState.BAD:
                raise WeightsRejected(
                    f"version {version} could not be loaded, the pool serves "
                    f"{status.last_good}: {status.weights.get(f'{version}:error', '')}"
                )
            if sum(w.version >= version for w in status.workers) >= workers:
                return
            if time.monotonic() > deadline:
                serving = ", ".join(f"{w.name}: {w.version} {w.last_error}" for w in status.workers)
                raise ResultsTimeout(
                    f"version {version} is not on {workers} workers after {timeout:.0f} s; "
                    f"they serve {serving or 'nothing: no worker lives'}"
                )
            time.sleep(0.05)

    # watching

    def status(self) -> Status:
        """Counts, weight versions, workers and counters at this moment."""
        keys = self._queue.keys
        replies = read_all(self._queue, status_commands(keys))
        workers = read_all(self._queue, worker_commands(keys, replies[-1]))
        return build_status(replies, workers)

    def config(self) -> dict[str, str]:
        """The queue's schema version, incarnation and limits."""
        [fields] = read_all(self._queue, [("HGETALL", self._queue.keys["config"])])
        return texts(fields)
