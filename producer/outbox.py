"""What this client submitted and has not acked: enqueued, and offered again if Redis lost it.

Redis may come back without its last second. `enqueue` is idempotent by id, so offering
everything outstanding again costs little and brings back exactly what vanished.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from producer.contract.connection import Queue, split
from producer.contract.errors import IdConflict, InvalidSample, QueueFull
from producer.contract.messages import Job
from producer.contract.scripts import Argument
from producer.steps import Steps, Wait

#: samples that one `enqueue` call may bring, so that a call stays short
_MEMBERS_A_CALL = 1024
#: seconds that prompts are gathered for one call
_GATHER_SECONDS = 0.5

Item = Sequence[Argument]


class Outbox:
    """Enqueues jobs and keeps their bytes until their groups are acked."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._outstanding: dict[str, tuple[Item, float]] = {}  # and when it was last seen

    def __len__(self) -> int:
        return len(self._outstanding)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._outstanding

    def groups(self) -> list[tuple[str, int]]:
        """Id and size of what is outstanding, oldest first."""
        return [(str(item[0]), int(item[1])) for item, _ in self._outstanding.values()]

    def enqueue(
        self,
        jobs: Iterable[Job],
        wait: Callable[[], None] | None,
        report: Callable[[int], None] = lambda groups: None,
    ) -> Steps[list[str]]:
        """Enqueue jobs in order; returns their group ids.

        Args:
            wait: called while the queue is full, between two attempts; None to raise instead.
            report: told how many groups are enqueued.

        Raises:
            IdConflict, QueueFull, InvalidSample: see `RolloutClient.submit`.
        """
        enqueued: list[str] = []
        pauses = itertools.chain((0.01, 0.02, 0.05, 0.1, 0.2), itertools.repeat(0.5))
        for batch in self._batches(jobs):
            items: list[Item] = [job.to_item() for job in batch]
            while items:
                full = [i for piece in split(items) for i in self._offer(piece)]
                if full and wait is None:
                    raise QueueFull(
                        f"max_ready={self._queue.config['max_ready']} samples are waiting; "
                        f"{len(enqueued) + len(batch) - len(full)} groups were enqueued, "
                        f"the first that was not is {full[0][0]!s}"
                    )
                report(len(enqueued) + len(batch) - len(full))
                items = full
                if items and wait is not None:
                    wait()
                    yield Wait(next(pauses))
            enqueued += [job.group_id for job in batch]
            yield Wait()
        return enqueued

    def offer_again(self) -> int:
        """Enqueue whatever is outstanding and not there any more; returns how many groups were
        not there, also those for which there is no room yet.

        What was not seen for half the time that tombstones are kept is let go: another
        client may have taken it, and nobody would know any more.
        """
        oldest = time.monotonic() - int(self._queue.config["tombstone_ms"]) / 2000
        self._outstanding = {g: o for g, o in self._outstanding.items() if o[1] > oldest}
        pieces = split([item for item, _ in self._outstanding.values()])
        return sum(answer in (b"new", b"full") for p in pieces for answer in self._answers(p))

    def taken(self, group_ids: Iterable[str]) -> None:
        """These groups need not be offered any more."""
        for group_id in group_ids:
            self._outstanding.pop(group_id, None)

    def _offer(self, items: Sequence[Item]) -> list[Item]:
        """One call; returns the items for which there is no room yet."""
        answers = zip(items, self._answers(items), strict=True)
        return [item for item, answer in answers if answer == b"full"]

    def _answers(self, items: Sequence[Item]) -> list[bytes]:
        answers: list[bytes] = self._queue.call("enqueue", items)
        pairs = list(zip(items, answers, strict=True))
        for item, answer in pairs:
            if answer == b"done":
                self._outstanding.pop(str(item[0]), None)
            elif answer in (b"new", b"same"):
                self._outstanding[str(item[0])] = item, time.monotonic()
        conflicts = [str(item[0]) for item, answer in pairs if answer == b"conflict"]
        if conflicts:
            raise IdConflict(
                f"group id {', '.join(conflicts)} was enqueued before with another job; "
                "give a new id, or the very same job"
            )
        return answers

    def _batches(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        max_ready = int(self._queue.config["max_ready"])
        batch: list[Job] = []
        members = 0
        since = time.monotonic()
        for job in jobs:
            if job.params.n > max_ready:
                raise InvalidSample(
                    f"group {job.group_id} has n={job.params.n} samples, more than the "
                    f"queue's max_ready={max_ready}"
                )
            full = members + job.params.n > min(_MEMBERS_A_CALL, max_ready)
            # What is read slowly, such as a stream, is not kept back until a call is full.
            if batch and (full or time.monotonic() - since > _GATHER_SECONDS):
                yield batch
                batch, members, since = [], 0, time.monotonic()
            batch.append(job)
            members += job.params.n
        if batch:
            yield batch
