"""`rollq doctor`: is all there that a pool needs, seen from this machine and this user?

Each check is one line, and what is not well says what to do. The checks of the Redis are in
`doctor_redis.py`, those of this machine in `doctor_host.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from producer.commands.common import SETTINGS, json_option, reading, target

State = Literal["ok", "warn", "fail", "skip"]

_MARKS = {"ok": ("ok", "green"), "warn": ("WARN", "yellow"), "fail": ("FAIL", "red")}


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what was found, and what to do where it is not well."""

    name: str
    state: State
    found: str
    todo: str = ""


Checks = Iterator[Check]


@click.command(context_settings=SETTINGS)
@target
@click.option(
    "--role",
    type=click.Choice(["trainer", "worker", "monitor"]),
    help="What this side is to do; worker where vLLM is installed, else trainer.",
)
@click.option(
    "--weights-dir",
    type=click.Path(path_type=Path),
    envvar="ROLLQ_WEIGHTS_DIR",
    show_envvar=True,
    help="The directory shared by trainer and workers.",
)
@click.option("--model", help="What `rollq worker` is to serve: a directory or a name.")
@click.option("--no-digest", is_flag=True, help="Do not read all files of the current weights.")
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    url: str,
    queue: str,
    role: str | None,
    weights_dir: Path | None,
    model: str | None,
    no_digest: bool,
    as_json: bool,
) -> None:
    """Check Redis, rights, clock, weights, vLLM, GPU; say what to do.

    \b
    rollq doctor --queue grpo
    rollq doctor --role worker --model Qwen/Qwen3-8B --weights-dir /shared/weights
    rollq doctor --json | jq '.[] | select(.state != "ok")'

    Run it where the trainer or the worker is to run, with its environment. It changes nothing
    but a key of its own, which it removes, and a file in the weights directory, likewise. Exit
    code 1 if a check fails; a warning is not a failure.
    """
    from producer.commands import doctor_host, doctor_redis

    side = role or ("worker" if find_spec("vllm") else "trainer")
    checks: list[Check] = []

    def add(found: Checks) -> None:
        for check in found:
            checks.append(check)
            if not as_json:
                click.echo(_line(check))

    with reading(url, queue, patience=0.0) as target:
        add(doctor_redis.server(target))
        weights: dict[str, str] | None = None
        if checks[0].state == "ok":
            weights = {}
            add(doctor_redis.rights(target, side))
            add(doctor_redis.clock(target))
            add(doctor_redis.pool(target, weights))
    add(doctor_host.weights_dir(weights_dir, side, weights, read_all=not no_digest))
    if side == "worker":
        add(doctor_host.vllm())
        add(doctor_host.gpu())
        add(doctor_host.model(model))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(c) for c in checks], indent=1))
    failed = sum(c.state == "fail" for c in checks)
    if failed:
        click.echo(f"{failed} of {len(checks)} checks failed, as {side}", err=True)
        context.exit(1)


def guarded(name: str, todo: str, look: Callable[[], Checks]) -> Checks:
    """The checks of `look`; what it raises of Redis or of files is a failed check itself."""
    from redis.exceptions import RedisError

    from producer.contract.errors import RollqError

    try:
        yield from look()
    except (RollqError, RedisError, OSError) as error:
        yield Check(name, "fail", str(error), todo)


def _line(check: Check) -> str:
    mark, colour = _MARKS.get(check.state, ("-", "white"))
    line = f"{click.style(f'{mark:<5}', fg=colour)} {check.name:<12} {check.found}"
    return (
        f"{line}\n      {'':<12} {click.style('→', fg=colour)} {check.todo}" if check.todo else line
    )
