"""The command `rollq`: one group whose subcommands any installed package can add.

A subcommand is an entry point of the group `rollq.commands` that names a click command. So
`rollq worker` lives with the workers, and this module imports neither them nor anything heavy:
`rollq --help` reads the first line of each command's docstring from its source, and only the
command that is run is imported.

Every error of rollq, and a Redis that cannot be reached, ends as one line on stderr and exit
code 1; a wrong command line as exit code 2, Ctrl-C as 130, and a reader that closed its end of a
pipe in silence.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import click

from producer.contract.errors import RollqError
from producer.contract.url import PASSWORD_FILE, has_password

GROUP = "rollq.commands"

_CTRL_C = 130


class EntryPointGroup(click.Group):
    """A click group over the entry points of `rollq.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        entry = _commands().get(name)
        if entry is None:
            return None
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            raise click.ClickException(
                f"the command {name} ({entry.value}) cannot be loaded: {error}"
            ) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{entry.value} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = _commands()
        if not commands:
            formatter.write_paragraph()
            formatter.write_text(_not_installed())
            return
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(commands[name])) for name in sorted(commands)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not _commands():
            raise click.ClickException(_not_installed())
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any(map(has_password, args)):
            click.echo(
                "Warning: a password on the command line can be read by every user of this "
                f"machine; give the URL in ROLLQ_REDIS_URL, or the password in {PASSWORD_FILE}",
                err=True,
            )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RollqError as error:
            raise click.ClickException(str(error)) from error
        except _redis_unusable() as error:
            raise click.ClickException(f"Redis: {error}") from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(_CTRL_C) from None


def _redis_unusable() -> tuple[type[Exception], ...]:
    """What an operator can mend; any other error of redis-py is a fault of ours and keeps its
    trace. Imported when something went wrong, for it takes longer than most commands."""
    import redis.exceptions as of_redis

    return (
        of_redis.ConnectionError,
        of_redis.TimeoutError,
        of_redis.NoPermissionError,
        of_redis.ReadOnlyError,
    )


def _commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _not_installed() -> str:
    return (
        "There are no commands, for rollq is not installed in this Python: "
        "run `pip install -e .` in the checkout."
    )


def _summary(entry: EntryPoint) -> str:
    """First line of the docstring of the function that `entry` names, without running it."""
    try:
        spec = importlib.util.find_spec(entry.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def _version() -> str:
    try:
        return version("rollq")
    except PackageNotFoundError:
        return "unknown (not installed)"


@click.group(cls=EntryPointGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="rollq")
def main() -> None:
    """A Redis-driven pool of vLLM workers for reinforcement-learning rollouts.

    \b
    rollq worker Qwen/Qwen3-8B --queue grpo        on each GPU
    rollq enqueue prompts.jsonl --queue grpo --n 8
    rollq top --queue grpo
    rollq results --queue grpo --jsonl out.jsonl

    Exit codes: 0 done, 1 it failed (one line on stderr says why and what to do), 2 a wrong
    command line, 130 Ctrl-C. ROLLQ_REDIS_URL and ROLLQ_QUEUE stand for --redis and --queue.
    """


if __name__ == "__main__":
    main(prog_name="rollq")
