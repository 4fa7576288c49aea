"""Runs commands of `rollq` against a test's Redis: in this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from producer.cli import main
from tests.integration.pool import QUEUE, ROOT


class Rollq:
    """`rollq("status", "--json")`; the queue is `q` unless the arguments say otherwise."""

    def __init__(self, url: str, queue: str = QUEUE) -> None:
        self._environment = {"ROLLQ_REDIS_URL": url, "ROLLQ_QUEUE": queue}

    def __call__(self, *arguments: object, input: str | bytes | None = None) -> Result:
        words = [str(a) for a in arguments]
        return CliRunner().invoke(main, words, input=input, env=self._environment)

    def ok(self, *arguments: object, input: str | bytes | None = None) -> str:
        """Its stdout; it must succeed."""
        result = self(*arguments, input=input)
        assert result.exit_code == 0, result.output
        return result.stdout

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        """The same as a process; the caller ends it."""
        command = [sys.executable, "-m", "producer.cli", *map(str, arguments)]
        environment = {**os.environ, **self._environment}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
