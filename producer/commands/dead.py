"""`rollq dead`: samples that were given up after they killed their workers.

Their groups were delivered with an error in their place; here they can be looked at, tried
once more as groups of their own, or forgotten.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from typing import Any

import click

from producer.commands.common import SETTINGS, F, existing, target
from producer.contract.codec import unpack_ids
from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample
from producer.contract.keys import check_group_id, split_sample_id
from producer.contract.messages import Job, read_job
from producer.contract.states import StalenessPolicy
from producer.pipeline import read_all
from producer.status import texts


@click.group(context_settings=SETTINGS)
@target
@click.pass_context
def dead(context: click.Context, url: str, queue: str) -> None:
    """Look at samples that were given up, try them again, or forget them.

    \b
    rollq dead list --queue grpo
    rollq dead show 3fe1c9d2/4 --queue grpo
    rollq dead retry 3fe1c9d2/4 --queue grpo
    """
    context.obj = {"url": url, "queue": queue}


def _late_target(function: F) -> F:
    """--redis and --queue also behind the subcommand, where they win."""

    def take(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            context.obj[parameter.name] = value

    for name, words in (("--queue", ["queue"]), ("--redis", ["url"])):
        function = click.option(name, *words, expose_value=False, callback=take)(function)
    return function


@dead.command("list")
@click.option("--limit", default=100, help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@_late_target
@click.pass_obj
def list_(where: dict[str, str], limit: int, as_json: bool) -> None:
    """The newest first: when, id, crashes, tokens, reason."""
    with existing(**where) as queue:
        [found] = read_all(
            queue, [("ZREVRANGE", queue.keys["dead"], "0", str(limit - 1), "WITHSCORES")]
        )
        rows = [(i.decode(), float(at) / 1000) for i, at in _pairs(found)]
        fields = read_all(queue, [("HGETALL", queue.keys.sample(i)) for i, _ in rows])
    for (sid, at), raw in zip(rows, fields, strict=True):
        sample = texts(raw)
        crashes, tokens = sample.get("crashes", "?"), sample.get("tokens", "0")
        if as_json:
            facts = {"id": sid, "at": at, "crashes": crashes, "error": sample.get("error", "")}
            click.echo(json.dumps(facts))
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            click.echo(f"{when}  {sid}  {crashes} crashes  {tokens} tokens  {sample.get('error')}")
    if not rows and not as_json:
        click.echo("no dead samples")


@dead.command()
@click.argument("sample_id")
@_late_target
@click.pass_obj
def show(where: dict[str, str], sample_id: str) -> None:
    """All that is known of one, as JSON: its state, prompt, parameters and metadata."""
    with existing(**where) as queue:
        fields, job = _read(queue, sample_id)
    prompt: Any = job.prompt if job.prompt_ids is None else job.prompt_ids.tolist()
    facts = {
        "id": sample_id,
        **{k: v for k, v in fields.items() if k not in ("job", "prompt_ids")},
        "prompt": prompt,
        "sampling_params": job.params.to_wire(),
        "metadata": job.metadata,
    }
    click.echo(json.dumps(facts, indent=1, default=repr))


@dead.command()
@click.argument("sample_ids", nargs=-1, required=True)
@_late_target
@click.pass_obj
def retry(where: dict[str, str], sample_ids: tuple[str, ...]) -> None:
    """Enqueue each again, as a group of its own with a new id, and forget the old one."""
    with existing(**where) as queue:
        for sample_id in sample_ids:
            _, job = _read(queue, sample_id)
            [answer] = queue.call("enqueue", [job.to_item()])
            if answer != b"new":
                raise InvalidSample(f"{sample_id} was not enqueued: {answer.decode()}")
            _drop(queue, [sample_id])
            click.echo(f"{sample_id} waits as group {job.group_id}")


@dead.command()
@click.argument("sample_ids", nargs=-1, required=True)
@_late_target
@click.pass_obj
def drop(where: dict[str, str], sample_ids: tuple[str, ...]) -> None:
    """Forget samples for good."""
    with existing(**where) as queue:
        for sample_id in sample_ids:
            if not _drop(queue, [sample_id]):
                raise InvalidSample(f"{sample_id} is not among the dead; see `rollq dead list`")
            click.echo(f"{sample_id} is forgotten")


def _read(queue: Queue, sample_id: str) -> tuple[dict[str, str], Job]:
    """Fields of a dead sample, and its job as a group of one under a new id."""
    group_id, index = split_sample_id(sample_id)
    if index is None:
        raise InvalidSample(f"{sample_id!r} is a group; a sample is {group_id}/0 and so on")
    keys = queue.keys
    at, fields, group = read_all(
        queue,
        [
            ("ZSCORE", keys["dead"], sample_id),
            ("HGETALL", keys.sample(sample_id)),
            ("HGETALL", keys.group(group_id)),
        ],
    )
    if at is None or not fields:
        raise InvalidSample(f"{sample_id} is not among the dead; see `rollq dead list`")
    holder = group or fields  # an acked group left its job with its dead
    prompt, params, metadata = read_job(holder[b"job"], sample_id)
    prompt_ids = unpack_ids(holder[b"prompt_ids"], f"prompt of {sample_id}")
    job = Job(
        group_id=check_group_id(f"{group_id[:100]}-{secrets.token_hex(4)}"),
        params=dataclasses.replace(params, n=1),
        prompt=prompt,
        prompt_ids=prompt_ids if len(prompt_ids) else None,
        metadata=metadata,
        max_staleness=int(staleness) if (staleness := holder.get(b"max_staleness")) else None,
        staleness_policy=StalenessPolicy(holder.get(b"staleness_policy", b"allow").decode()),
        reward=holder.get(b"reward", b"").decode(),
    )
    return texts(fields), job


def _drop(queue: Queue, sample_ids: list[str]) -> int:
    items = [(i, split_sample_id(i)[0]) for i in sample_ids]
    return sum(queue.call("drop", items))


def _pairs(found: Any) -> list[tuple[bytes, float]]:
    """(id, score) of each, out of whichever form redis-py gives WITHSCORES."""
    if found and not isinstance(found[0], list | tuple):
        return list(zip(found[::2], map(float, found[1::2]), strict=True))
    return [(i, float(score)) for i, score in found or ()]
