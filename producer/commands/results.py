"""`rollq results`: closed groups out of the queue into files, acked when they are on the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from producer.commands.common import PATIENCE, SETTINGS, counted, existing, file_error, target
from producer.contract.errors import ResultsTimeout, RollqError

if TYPE_CHECKING:
    from producer.client import RolloutClient
    from producer.commands.export import Writer
    from producer.contract.messages import RolloutGroup

#: groups asked for at once, at most
_BATCH = 64
#: seconds that groups which closed wait for more of them
_LINGER = 0.5
#: seconds between words to somebody who waits in vain
_SAY_SECONDS = 30.0


@dataclass(slots=True)
class _Written:
    """What is on the disk and acked."""

    groups: int = 0
    untrainable: int = 0

    def __str__(self) -> str:
        words = f"{counted(self.groups, 'group')} written"
        return words + (f", {self.untrainable:,} not trainable" if self.untrainable else "")


@click.command(context_settings=SETTINGS)
@target
@click.option("--jsonl", metavar="FILE", help="Append to FILE; - (the default) is stdout.")
@click.option("--parquet", metavar="DIR", help="Add part files to DIR; needs rollq[parquet].")
@click.option("--follow", is_flag=True, help="Go on for ever, also when nothing is left to come.")
@click.option("--groups", type=click.IntRange(1), help="End after so many.")
@click.option("--timeout", type=float, help="Fail when no group closed for so many seconds.")
@click.option("--consumer", default="results", help="Whose unacked groups come again.")
@click.option("--part-groups", default=512, type=click.IntRange(1, 1024), help="A parquet file.")
@click.option("--part-seconds", default=60.0, help="A part is not held back for longer.")
def results(
    url: str,
    queue: str,
    jsonl: str | None,
    parquet: str | None,
    follow: bool,
    groups: int | None,
    timeout: float | None,
    consumer: str,
    part_groups: int,
    part_seconds: float,
) -> None:
    """Write closed groups to a file as they close, and take them out of the queue.

    It ends when every group was taken, or with --follow never. A row is a rollout; its columns
    are the fields of producer.Rollout, and group_size, trainable and reward_error of its group;
    a reward that is a dict is in reward_parts. Rows of a group stand together, in the order of
    `index`.

    \b
    rollq results --queue grpo --jsonl out.jsonl
    rollq results --queue grpo --follow --parquet out/       out/part-000001.parquet, ...
    rollq results --queue grpo | jq -r .text

    A group is acked when it is on the disk, so a kill at any moment loses none; start it again
    with the same file, and none is doubled. What a trainer took and did not ack stays with its
    consumer ("0" where it gave none), until somebody asks with that --consumer.
    """
    if jsonl is not None and parquet is not None:
        raise click.UsageError("give --jsonl or --parquet")
    from producer.client import RolloutClient
    from producer.commands.export import JsonLines, Parquet

    done = _Written()
    try:
        with (
            existing(url, queue),
            RolloutClient(url, queue, consumer=consumer, patience=PATIENCE) as client,
        ):
            unacked = max(1, int(client.config()["max_results"]) // 2)
            writer: Writer = (
                Parquet(parquet, min(part_groups, unacked), part_seconds)
                if parquet
                else JsonLines(jsonl or "-")
            )
            with closing(writer):
                takes = _takes(client, min(_BATCH, unacked), groups, timeout, follow)
                _copy(client, writer, takes, done)
    except KeyboardInterrupt:
        click.echo(done, err=True)
        raise
    except OSError as error:
        if isinstance(error, BrokenPipeError | RollqError):
            raise
        raise file_error(error, "results cannot be written; what was not is still queued") from None
    click.echo(done, err=True)


def _copy(
    client: RolloutClient,
    writer: Writer,
    takes: Iterator[Sequence[RolloutGroup]],
    done: _Written,
) -> None:
    """Write and ack what is taken, and count it in `done`."""

    def ack(written: Sequence[RolloutGroup]) -> None:
        if written:
            client.ack(written)
            done.groups += len(written)
            done.untrainable += sum(not g.trainable for g in written)

    try:
        for taken in takes:
            ack(writer.write(taken))
    finally:
        # Ctrl-C, too, leaves on the disk what was taken.
        ack(writer.flush())


def _takes(
    client: RolloutClient, limit: int, most: int | None, timeout: float | None, follow: bool
) -> Iterator[Sequence[RolloutGroup]]:
    """As many groups at a time as close within a moment; none when that passed in vain."""
    left = most
    size = 1
    waiting_since = said = time.monotonic()
    while left is None or left > 0:
        want = min(size, limit if left is None else min(left, limit))
        try:
            batch = client.batch(want, timeout=_LINGER, follow=follow)
        except ResultsTimeout as error:
            now = time.monotonic()
            waited, why = now - waiting_since, str(error).partition("; ")[2]
            if size == 1 and timeout is not None and waited > timeout:
                raise ResultsTimeout(f"no group closed within {timeout:g} s; {why}") from None
            if not follow and now - max(said, waiting_since) >= _SAY_SECONDS:
                click.echo(f"waiting: {why}", err=True)
                said = now
            size = max(1, size // 2)
            yield ()
            continue
        if not batch:
            return
        yield batch.groups
        size = min(2 * size, limit)
        waiting_since = time.monotonic()
        left = None if left is None else left - len(batch)
