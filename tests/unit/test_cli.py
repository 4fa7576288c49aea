"""The command group: commands come from installed packages, late, and errors end as one line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import producer.cli

_MODULE = '''
import click
import redis
from producer.contract.errors import QueueFull

@click.command()
@click.argument("what")
def greet(what):
    """Greet somebody.

    At length.
    """
    click.echo(f"hello {what}")

@click.command()
def full():
    """Raise an error of rollq."""
    raise QueueFull("the queue grpo holds 10 samples; wait, or raise max_ready")

@click.command()
def away():
    """Call a Redis that is not there."""
    redis.Redis.from_url("unix:///nonexistent/redis.sock").ping()

@click.command()
def bug():
    """Raise anything else."""
    raise RuntimeError("a bug")

not_a_command = 1
'''

_ENTRY_POINTS = """
[rollq.commands]
greet = rollq_extra.commands:greet
full = rollq_extra.commands:full
away = rollq_extra.commands:away
bug = rollq_extra.commands:bug
renamed = rollq_extra.commands:no_such_name
gone = rollq_extra.gone:gone
nested = no_such_package.gone:gone
wrong = rollq_extra.commands:not_a_command
"""


@pytest.fixture
def extra_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that adds commands."""
    package = tmp_path / "rollq_extra"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "commands.py").write_text(_MODULE)
    metadata = tmp_path / "rollq_extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rollq-extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("rollq_extra")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(producer.cli.main, args, prog_name="rollq")


@pytest.mark.usefixtures("extra_package")
def test_help_lists_commands_with_their_first_line_and_imports_none() -> None:
    result = run("--help")

    assert result.exit_code == 0
    lines = [
        line.split(maxsplit=1) for line in result.stdout.partition("Commands:")[2].splitlines()
    ]
    listed = {line[0]: line[1] if len(line) > 1 else "" for line in lines if line}
    assert listed["greet"] == "Greet somebody."
    assert listed["full"] == "Raise an error of rollq."
    assert listed["renamed"] == listed["gone"] == listed["nested"] == ""
    assert "rollq_extra.commands" not in sys.modules


@pytest.mark.usefixtures("extra_package")
def test_a_command_gets_its_arguments() -> None:
    result = run("greet", "you")

    assert (result.exit_code, result.stdout) == (0, "hello you\n")


@pytest.mark.usefixtures("extra_package")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("full", "Error: the queue grpo holds 10 samples; wait, or raise max_ready\n"),
        ("away", "Error: Redis: "),
        ("gone", "Error: the command gone (rollq_extra.gone:gone) cannot be loaded: No module"),
        ("renamed", "Error: the command renamed (rollq_extra.commands:no_such_name) cannot be"),
        ("wrong", "Error: rollq_extra.commands:not_a_command is not a click command\n"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_code_1(command: str, message: str) -> None:
    result = run(command)

    assert result.exit_code == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.usefixtures("extra_package")
def test_a_bug_keeps_its_traceback() -> None:
    result = run("bug")

    assert isinstance(result.exception, RuntimeError)


@pytest.mark.usefixtures("extra_package")
def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("grete")

    assert result.exit_code == 2
    assert "No such command 'grete'" in result.stderr


def test_without_metadata_it_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer.cli, "entry_points", lambda group: ())

    assert "pip install -e ." in " ".join(run("--help").stdout.split())
    result = run("demo")
    assert result.exit_code == 1
    assert "pip install -e ." in result.stderr


def test_every_command_of_rollq_loads_and_says_what_it_does() -> None:
    commands = [entry for entry in entry_points(group=producer.cli.GROUP) if entry.dist]
    ours = [entry.name for entry in commands if entry.dist and entry.dist.name == "rollq"]
    assert ours, "rollq is not installed"

    listed = run("--help").stdout
    for name in ours:
        result = run(name, "--help")
        assert result.exit_code == 0, result.output
        summary = next(line for line in listed.splitlines() if line.split()[:1] == [name])
        assert len(summary.split()) > 1, f"{name} has no docstring"


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "producer.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.startswith("rollq, version ")
