"""The figures of earlier runs, and what became worse or better since. For `rollq bench all`.

A figure is compared with the median of the runs that are kept, if its kind may be compared at all
(see `goals.py`). It has changed when it is further from that than twice the spread of those runs,
and than the least that is taken for a change of its kind. On a machine with eight times more to
run than cores the same code moved counts by less than 1%, so 2% is their least; it moved CPU time
by 10% and ratios by a factor of three, which is in the spread. For a quiet machine their least,
15% and 10%, is a choice. With one run kept there is no spread: save two or three.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from producer.bench.goals import Goal, Kind
from producer.bench.machine import Machine
from producer.bench.suite import Results
from producer.contract.errors import RollqError

#: beside the benches, so that it changes with them
STORED = Path(__file__).with_name("baseline.json")
#: share of a figure that is noise in any case
LEAST: Mapping[Kind, float] = {"ratio": 0.10, "cpu": 0.15, "count": 0.02}
_SPREADS = 2.0
_KEPT_RUNS = 3

Verdict = Literal["worse", "same", "better"]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure against the baseline's. `now` is None where this run has none of it."""

    goal: Goal
    then: float
    now: float | None
    tolerance: float

    @property
    def verdict(self) -> Verdict:
        if self.now is None:
            return "worse"
        worse_by = self.goal.worse_by(self.now, self.then)
        if abs(worse_by) <= self.tolerance:
            return "same"
        return "worse" if worse_by > 0 else "better"

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": f"{self.goal.bench}.{self.goal.figure}",
            "verdict": self.verdict,
            "then": self.then,
            "now": self.now,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last runs on one class of machine, the newest last: bench -> figure -> value."""

    machine: Machine
    runs: tuple[dict[str, dict[str, float]], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises RollqError where there is none, or nothing that `save` wrote."""
        try:
            stored = json.loads(path.read_text())
            return cls(Machine.from_json(stored["machine"]), tuple(stored["runs"]))
        except FileNotFoundError:
            raise RollqError(f"there is no baseline {path}; --save makes one") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RollqError(f"{path} is not a baseline that --save wrote: {error}") from error

    def changes(self, results: Results) -> list[Change]:
        """Of all figures that both may have; those of benches that were not asked for are not."""
        return [
            Change(goal, statistics.median(then), results.of(goal), self._tolerance(goal, then))
            for goal in results.goals()
            if self._comparable(goal, results) and (then := self._values(goal))
        ]

    def unknown(self, results: Results) -> list[Goal]:
        """What this run has and no kept one has, so that nothing can be said of it."""
        return [
            goal
            for goal in results.goals()
            if self._comparable(goal, results)
            and results.of(goal) is not None
            and not self._values(goal)
        ]

    def _comparable(self, goal: Goal, results: Results) -> bool:
        if goal.kind == "cpu":
            return self.machine.is_like(results.machine)
        return goal.kind != "time"

    def _values(self, goal: Goal) -> list[float]:
        values = (run.get(goal.bench, {}).get(goal.figure) for run in self.runs)
        return [value for value in values if value is not None]

    def _tolerance(self, goal: Goal, then: list[float]) -> float:
        least = LEAST[goal.kind] * abs(statistics.median(then))
        return max(least, _SPREADS * (max(then) - min(then)))


def save(path: Path, results: Results) -> int:
    """Add what may be compared of a run, on another class of machine in place of what is there.

    Returns how many runs are kept now.

    Raises:
        RollqError: a bench failed, or the file is no baseline.
    """
    if results.failed:
        raise RollqError(f"nothing saved: no figures of {', '.join(results.failed)}")
    run: dict[str, dict[str, float]] = {}
    for goal in results.goals():
        figure = results.of(goal)
        if figure is not None and goal.kind != "time":
            run.setdefault(goal.bench, {})[goal.figure] = float(f"{figure:.4g}")
    runs = [run]
    if path.exists() and (old := Baseline.read(path)).machine.is_like(results.machine):
        runs = [*old.runs, run][-_KEPT_RUNS:]
    stored = {"machine": results.machine.to_json(), "runs": runs}
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return len(runs)
