"""Every bench, one after the other, in a process of its own as a user would start it.

Called by `rollq bench all`. A bench that failed, or whose packages are not here, is in `failed`
with the reason: none is left out in silence.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from producer.bench.goals import GOALS, Goal
from producer.bench.machine import Machine
from producer.bench.peer_environments import last_line
from producer.contract.errors import RollqError

_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Bench:
    """`rollq bench COMMAND`, its packages beyond those of rollq, and how to have them.

    `shown`: which figures the table has beside those with goals, a regular expression of whole
    names; JSON has all.
    """

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    install: str = ""
    shown: str = ".*"


_VLLM = ("vllm", "psutil")
_INSTALL = "pip install 'rollq[cpu,bench]', or gpu"

#: in the order in which they run; a new bench is a line here
BENCHES = (
    Bench("queue", ["queue"]),
    Bench("interrupt", ["interrupt"]),
    Bench("engine", ["engine"], _VLLM, _INSTALL, ".*_per_second|.*_per_token"),
    Bench("engine-135m", ["engine", "--size", "135m"], _VLLM, _INSTALL, ".*_per_second"),
    Bench("update", ["update"], shown="workers_.*_(stopped|serving)_ms"),
    Bench("update-vllm", ["update", "--engine", "vllm"], _VLLM, _INSTALL),
    Bench("partial", ["partial"], shown=".*_(times_wait|staleness_mean|length_first_half)"),
    Bench("fleet", ["fleet"], shown="workers_at_.*|interrupt_.*_ms|gigabytes_in_flight"),
)


def shown(bench: str, figure: str) -> bool:
    """In the table, even without a goal."""
    return any(b.name == bench and re.fullmatch(b.shown, figure) for b in BENCHES)


@dataclass(frozen=True, slots=True)
class Results:
    """Of each bench that ran its figures by name, of each that did not the reason."""

    machine: Machine
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, goal: Goal) -> float | None:
        """The figure of a goal; None if it was not measured."""
        return self.figures.get(goal.bench, {}).get(goal.figure)

    def goals(self) -> list[Goal]:
        """Those of the benches that were asked for."""
        return [g for g in GOALS if g.bench in self.figures or g.bench in self.failed]

    def unmeasured(self) -> list[Goal]:
        return [g for g in self.goals() if self.of(g) is None]

    def missed(self) -> list[Goal]:
        """Goals that do not hold, or were not measured."""
        figures = ((goal, self.of(goal)) for goal in self.goals() if goal.value is not None)
        return [goal for goal, figure in figures if figure is None or goal.missed_by(figure)]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.to_json(),
            "figures": self.figures,
            "failed": self.failed,
            "missed": [f"{goal.bench}.{goal.figure}" for goal in self.missed()],
        }


def run_all(
    machine: Machine, url: str | None, benches: Sequence[Bench], say: Callable[[str], None]
) -> Results:
    """Run these; each has an embedded server of its own unless `url` is given."""
    results = Results(machine)
    for bench in benches:
        say(f"rollq bench {' '.join(bench.command)}")
        try:
            results.figures[bench.name] = _run(bench, url)
        except RollqError as error:
            results.failed[bench.name] = str(error)
            say(f"  {error}")
    return results


def _run(bench: Bench, url: str | None) -> dict[str, float]:
    missing = [name for name in bench.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise RollqError(f"not installed: {', '.join(missing)}; {bench.install}")
    environment = dict(os.environ)
    if url is not None:
        environment["ROLLQ_REDIS_URL"] = url  # not an argument: it may hold a password
    command = [sys.executable, "-m", "producer.cli", "bench", *bench.command, "--json"]
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                timeout=_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RollqError(f"not done within {_TIMEOUT_SECONDS:g} s") from None
        errors.seek(0)
        words = errors.read()
    if done.returncode != 0:
        raise RollqError(f"exit code {done.returncode}: {last_line(words)}")
    return _figures(done.stdout)


def _figures(output: str) -> dict[str, float]:
    """The JSON object on the last line."""
    try:
        figures = json.loads(output.strip().splitlines()[-1])
        return {str(name): float(value) for name, value in figures.items()}
    except (IndexError, ValueError, TypeError, AttributeError) as error:
        raise RollqError(f"printed no flat JSON object of numbers: {error}") from error
