"""`rollq enqueue`: a file of prompts into the queue.

A file is read and judged whole before anything is sent, stdin as it comes. Groups go in the
order of the lines, so what was sent is always the lines up to one number, and that number is
said when it ends early.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from producer.commands.common import SETTINGS, counted, file_error, json_option, reading, target
from producer.contract.errors import InvalidSample, QueueFull, RollqError
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy

if TYPE_CHECKING:
    from producer.commands.promptfile import Line
    from producer.contract.connection import Queue
    from producer.contract.messages import Job

#: samples that one call may bring
_MEMBERS_A_CALL = 1024


def _sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option a field of SamplingParams, None where it is not given."""
    for field in reversed(dataclasses.fields(SamplingParams)):
        flag = "--" + field.name.replace("_", "-")
        default = f"[default: {field.default}]" if field.default not in (None, ()) else ""
        if isinstance(field.default, bool):
            option = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=default)
        elif isinstance(field.default, tuple):
            item = int if field.name == "stop_token_ids" else str
            option = click.option(flag, multiple=True, type=item, help="May be repeated.")
        else:
            kind: type = float if isinstance(field.default, float) else int
            option = click.option(flag, type=kind, default=None, help=default)
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What the command line says of every group."""

    params: Mapping[str, Any]
    options: Mapping[str, Any]

    def job(self, line: Line) -> Job:
        """Raises InvalidSample, naming the line."""
        from producer.prompts import make_jobs

        try:
            params = SamplingParams.from_wire({**self.params, **line.params})
            [job] = make_jobs(
                [line.prompt],
                params,
                ids=None if line.group_id is None else [line.group_id],
                metadata=None if line.metadata is None else [line.metadata],
                **self.options,
            )
            job.to_item()
        except InvalidSample as error:
            reason = str(error).removeprefix("prompt 0").removeprefix(":").strip()
            raise InvalidSample(f"{line.where}: {reason}") from None
        return job


@click.command(context_settings=SETTINGS)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@target
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "jsonl"]),
    help="By the file's name, else by its first line.",
)
@click.option("--ids-from", metavar="FIELD", help="A row's field that is its group's id.")
@click.option("--params", metavar="JSON", default="{}", help='Such as \'{"n": 8, "top_p": 0.9}\'.')
@_sampling_options
@click.option("--max-staleness", type=click.IntRange(0), help="In weight versions.")
@click.option(
    "--staleness-policy", type=click.Choice([str(p) for p in StalenessPolicy]), default="allow"
)
@click.option("--allow-restart", is_flag=True, help="For penalties: start again when interrupted.")
@click.option(
    "--reward", metavar="MODULE:FUNCTION", help="Have each group graded by `rq worker` processes."
)
@click.option("--from-line", default=1, type=click.IntRange(1), help="Leave out those before it.")
@click.option("--no-wait", is_flag=True, help="Fail when the queue is full; wait by default.")
@json_option
def enqueue(
    file: str,
    url: str,
    queue: str,
    format_: Any,
    ids_from: str | None,
    params: str,
    max_staleness: int | None,
    staleness_policy: str,
    allow_restart: bool,
    reward: str | None,
    from_line: int,
    no_wait: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Enqueue the prompts of a file, a group a line.

    FILE may be gzipped; - is stdin. Lines are plain text, or JSON: a text, token ids, chat
    messages, or an object with `prompt`, `messages` or `prompt_ids`, whose `metadata`, or else
    all of whose other fields, come back with the rollouts. A line of an OpenAI batch file
    ({"custom_id", "method", "url", "body"}) has its custom_id as group id, and its body's
    parameters win over those given here.

    \b
    rollq enqueue prompts.txt --queue grpo --n 8 --max-tokens 1024
    rollq enqueue rows.jsonl.gz --ids-from id --params '{"temperature": 0.7}'
    rollq enqueue batch.jsonl && rollq results --jsonl out.jsonl
    generate-prompts | rollq enqueue -

    A file is checked before anything is enqueued. Groups with ids (--ids-from, custom_id) can be
    enqueued again: the same job under the same id changes nothing, also for 24 hours after its
    delivery. Sampling options have vLLM's names and defaults.
    """
    from producer.commands.promptfile import opened as open_file
    from producer.commands.promptfile import read_lines

    wishes = _Wishes(
        {**_json(params), **{k: v for k, v in sampling.items() if v not in (None, ())}},
        {
            "max_staleness": max_staleness,
            "staleness_policy": staleness_policy,
            "allow_restart": allow_restart,
            "reward": reward,
        },
    )

    def jobs() -> Iterator[tuple[Line, Job]]:
        with open_file(file) as text:
            for line in read_lines(text, "stdin" if file == "-" else file, format_, ids_from):
                if line.number >= from_line:
                    yield line, wishes.job(line)

    try:
        try:
            total = None if file == "-" else sum(1 for _ in jobs())
        except InvalidSample as error:
            raise click.ClickException(f"{error}\nnothing was enqueued") from None
        with reading(url, queue) as target, _progress(total) as advance:
            target.open()
            sender = _Sender(target, advance, wait=not no_wait)
            try:
                sender.send(jobs())
            except (RollqError, KeyboardInterrupt, OSError) as error:
                raise _ended_early(sender, error) from None
    except OSError as error:
        raise file_error(error, "prompts cannot be read") from error
    _report(sender, as_json)


class _Sender:
    """Sends groups in pieces; `line` is the last line of which everything is in the queue."""

    def __init__(self, queue: Queue, advance: Callable[[int], None], *, wait: bool) -> None:
        self._queue = queue
        self._advance = advance
        self._wait = wait
        self._disruptions = queue.disruptions
        self.line = 0
        self.samples = 0
        self._ahead: set[str] = set()  # found room while one before them found none
        self.answers: Counter[str] = Counter()

    @property
    def disrupted(self) -> bool:
        return self._queue.disruptions != self._disruptions

    def send(self, jobs: Iterable[tuple[Line, Job]]) -> None:
        piece: list[tuple[Line, Job]] = []
        members = 0
        try:
            for line, job in jobs:
                if piece and members + job.params.n > _MEMBERS_A_CALL:
                    self._send(piece)
                    piece, members = [], 0
                piece.append((line, job))
                members += job.params.n
        except InvalidSample:
            # Those before the bad line are good: what was sent ends just before it.
            self._send(piece)
            raise
        self._send(piece)

    def _send(self, piece: list[tuple[Line, Job]]) -> None:
        pauses = itertools.chain((0.05, 0.1, 0.2), itertools.repeat(0.5))
        while piece:
            first_full = self._offer(piece)
            if first_full is None:
                return
            if not self._wait:
                raise QueueFull(
                    f"max_ready={self._queue.config['max_ready']} samples are waiting already"
                )
            piece = piece[first_full:]
            time.sleep(next(pauses))

    def _offer(self, piece: list[tuple[Line, Job]]) -> int | None:
        """Returns the place of the first for which there is no room, None if all are in."""
        from producer.contract.connection import split

        at = 0
        full: int | None = None
        for items in split([job.to_item() for _, job in piece]):
            for answer in self._queue.call("enqueue", items):
                line, job = piece[at]
                at += 1
                if answer == b"conflict":
                    raise InvalidSample(
                        f"{line.where}: the id {job.group_id!r} was enqueued before with another "
                        "prompt or other parameters; give a new id, or the very same line"
                    )
                if answer == b"full":
                    full = at - 1 if full is None else full
                elif full is None:
                    self._took(answer.decode(), line, job)
                elif answer == b"new":
                    self._ahead.add(job.group_id)
            if full is not None:
                return full
        return None

    def _took(self, answer: str, line: Line, job: Job) -> None:
        if job.group_id in self._ahead:
            self._ahead.remove(job.group_id)
            answer = "new"
        self.answers[answer] += 1
        self.samples += job.params.n if answer == "new" else 0
        self.line = line.number
        self._advance(1)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no JSON: {error}", param_hint="--params") from None
    if not isinstance(found, dict):
        raise click.BadParameter("must be an object", param_hint="--params")
    return found


def _words(sender: _Sender) -> str:
    counts = sender.answers
    words = f"{counted(counts['new'], 'group')} enqueued ({counted(sender.samples, 'sample')})"
    if counts["same"]:
        words += f", {counts['same']:,} were in the queue already"
    if counts["done"]:
        words += f", {counts['done']:,} were delivered already"
    return words


def _ended_early(sender: _Sender, error: BaseException) -> BaseException:
    """The same error, with what was enqueued before it."""
    if not sender.line:
        words = "nothing was enqueued"
    else:
        words = (
            f"{_words(sender)}: all up to line {sender.line}; "
            f"go on with --from-line {sender.line + 1}"
        )
    if isinstance(error, KeyboardInterrupt):
        click.echo(words, err=True)
        return error
    return click.ClickException(f"{error}\n{words}")


def _report(sender: _Sender, as_json: bool) -> None:
    if sender.disrupted:
        click.echo(
            "Redis was away meanwhile; if it came back without its last second, enqueue the same "
            "file again (with ids of your own, what is there stays as it is)",
            err=True,
        )
    if as_json:
        counts = {name: sender.answers[name] for name in ("new", "same", "done")}
        click.echo(json.dumps({**counts, "samples": sender.samples}))
    else:
        click.echo(_words(sender))


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; yields what advances it."""
    if not sys.stderr.isatty():
        yield lambda by: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("enqueuing", total=total)
        yield lambda by: bar.advance(task, by)
