"""Submit prompts and wait for exactly these: the steps behind `generate`.

What belongs to others is put aside by the intake and comes with later batches. Called by the
clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from producer.contract.errors import ResultsTimeout
from producer.contract.messages import Job
from producer.intake import Intake, Taken
from producer.outbox import Outbox
from producer.progress import Report
from producer.steps import Steps


def generate(
    outbox: Outbox,
    intake: Intake,
    jobs: Sequence[Job],
    wait: Callable[[], None],
    timeout: float | None,
    report: Report,
) -> Steps[Taken]:
    """The closed groups of these jobs, in order, not acked yet.

    Raises:
        ResultsTimeout, ResultsTaken, QueueFull: what was submitted stays, and what of it
            closes comes with later batches.
    """
    deadline = None if timeout is None else time.monotonic() + timeout

    def wait_for_room() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise ResultsTimeout(f"the queue had no room for all prompts within {timeout:.0f} s")
        wait()
        intake.check_start()

    ids = [job.group_id for job in jobs]
    with intake.keeping(ids):
        yield from outbox.enqueue(jobs, wait_for_room)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return (yield from intake.take_named(ids, left, report))
