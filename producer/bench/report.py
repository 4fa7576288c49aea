"""The table of `rollq bench all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from producer.bench.baseline import Change
from producer.bench.goals import Goal
from producer.bench.suite import Results, shown

_STYLES = {"worse": "red", "better": "green", "same": "dim"}


def table(results: Results, changes: Sequence[Change]) -> Table:
    """A row a figure that has a goal or is `shown`, and what changed if that was asked for."""
    goals = {(goal.bench, goal.figure): goal for goal in results.goals()}
    changed = {(c.goal.bench, c.goal.figure): c for c in changes}
    drawn = Table(title=str(results.machine), title_justify="left")
    for column in ("bench", "figure"):
        drawn.add_column(column, no_wrap=True)
    for column in ("value", "goal"):
        drawn.add_column(column, justify="right", no_wrap=True)
    drawn.add_column("")
    if changes:
        drawn.add_column("before", justify="right", no_wrap=True)
        drawn.add_column("since then", no_wrap=True)
    for bench, figures in rows(results).items():
        for name, value in figures.items():
            goal, change = goals.get((bench, name)), changed.get((bench, name))
            if goal is None and not shown(bench, name):
                continue
            since = (number(change.then), _since(change)) if change else ()
            drawn.add_row(bench, name, number(value), *_judged(goal, value), *since)
        if bench in results.failed:
            drawn.add_row(bench, "", "", "", Text(results.failed[bench], "red"))
        drawn.add_section()
    return drawn


def rows(results: Results) -> Mapping[str, Mapping[str, float | None]]:
    """Every figure there is, and None for those of goals that should be there and are not."""
    found: dict[str, dict[str, float | None]] = {name: {} for name in results.failed}
    found |= {bench: dict(figures) for bench, figures in results.figures.items()}
    for goal in results.unmeasured():
        found[goal.bench][goal.figure] = None
    return found


def number(value: float | None) -> str:
    """Four digits are more than any figure here is good for."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def distance(by: float, of: float) -> str:
    """In percent, or as it is where the percentage would be of nothing."""
    return f"{by / abs(of):.0%}" if of else number(by)


def _judged(goal: Goal | None, value: float | None) -> tuple[str, Text]:
    if goal is None or goal.value is None:
        return "", Text("not measured" if value is None else "", "red")
    words = f"{goal.bound} {number(goal.value)}"
    if value is None:
        return words, Text("not measured", "red")
    missed_by = goal.missed_by(value)
    if missed_by:
        return words, Text(f"missed by {distance(missed_by, goal.value)}", "red")
    return words, Text("holds", "green")


def _since(change: Change) -> Text:
    if change.now is None:
        return Text("gone", "red")
    by = distance(abs(change.now - change.then), change.then)
    within = distance(change.tolerance, change.then)
    words = "same" if change.verdict == "same" else f"{change.verdict} by {by}"
    return Text(f"{words} (noise {within})", _STYLES[change.verdict])
