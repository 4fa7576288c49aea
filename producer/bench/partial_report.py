"""What `rollq bench partial` says: figures, a table, a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.bench.partial_loop import Told, Work

#: (shape, policy)
Case = tuple[str, str]
Found = Mapping[Case, Mapping[str, float]]

#: share of a trainer's time for neither waiting nor training, beyond which times say little
_TOO_BUSY = 0.05
#: figure -> heading, format
_COLUMNS = {
    "times_wait": ("times wait", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "share_thrown_away": ("thrown away", "{:.0%}"),
    "share_prefilled_again": ("prefilled", "{:.0%}"),
    "share_trainer_waits": ("waits", "{:.0%}"),
    "staleness_mean": ("staleness", "{:.2f}"),
    "staleness_max": ("most", "{:.0f}"),
    "length_first_quarter": ("length 1/4", "{:.2f}"),
    "length_first_half": ("1/2", "{:.2f}"),
}
#: panels of the chart: figure -> what it shows, and of each bar
_PANELS = {
    "tokens_per_second": "useful tokens a second\n(times wait)",
    "staleness_mean": "mean staleness of\ndelivered tokens, versions",
    "length_first_quarter": "mean length of the first\nquarter delivered (1: no bias)",
}
_LABELS = (
    "{tokens_per_second:,.0f}{against}",
    "{staleness_mean:.1f}, max {staleness_max:.0f}",
    "{length_first_quarter:.2f}",
)
#: apart also for the colour-blind, and on paper (of Okabe and Ito's palette)
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def figures(
    told: Mapping[Case, Told], work_of: Callable[[str], Work], coarse: int, speed: float
) -> dict[Case, dict[str, float]]:
    """Of each case, in tokens and seconds of what was simulated:

    times_wait: useful tokens a second against those of `wait`, if that was run.
    tokens_per_second: delivered ones, from the first submit to the last batch, so with the time
    in which the pool runs dry at the end.
    share_thrown_away, share_prefilled_again: tokens made and thrown away, and prefixes computed
    again to go on, for each delivered token.
    share_trainer_waits, share_trainer_other: of the time: for its next batch; for neither that
    nor training, which is little unless the machine is too busy for these figures.
    staleness_mean, staleness_max: of delivered tokens, in versions.
    length_first_quarter, length_first_half: mean length of the samples delivered up to then,
    against that of as many in the order in which they were submitted; 1 is no bias.
    """
    found = {}
    for (shape, policy), t in told.items():
        work = work_of(shape)
        tokens = int(work.lengths.sum())
        gaps = np.concatenate(t.gaps)
        base = told.get((shape, "wait"))
        waits, trains = t.waited / t.seconds, (work.steps - 1) * work.train_seconds / t.seconds
        found[shape, policy] = {
            **({"times_wait": base.seconds / t.seconds} if base else {}),
            "tokens_per_second": tokens * coarse / (t.seconds * speed),
            "share_thrown_away": t.wasted / tokens,
            "share_prefilled_again": t.prefilled / tokens,
            "share_trainer_waits": waits,
            "share_trainer_other": 1.0 - waits - trains,
            "staleness_mean": float(gaps.mean()),
            "staleness_max": float(gaps.max()),
            "length_first_quarter": _bias(t, work.lengths, 4),
            "length_first_half": _bias(t, work.lengths, 2),
            "seconds": t.seconds * speed,
            "updates": float(t.updates),
        }
    return found


def _bias(told: Told, submitted: NDArray[np.int64], part: int) -> float:
    many = max(1, len(submitted) // part)
    return float(np.mean(told.delivered[:many]) / submitted[:many].mean())


def table(found: Found) -> str:
    lines = []
    for shape in dict.fromkeys(shape for shape, _ in found):
        rows = {policy: values for (s, policy), values in found.items() if s == shape}
        columns = [c for c in _COLUMNS if all(c in values for values in rows.values())]
        heads = [_COLUMNS[c][0] for c in columns]
        lines += ["", "  ".join([f"{shape:10}", *heads])]
        for policy, values in rows.items():
            cells = [_COLUMNS[c][1].format(values[c]) for c in columns]
            padded = [cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True)]
            lines.append("  ".join([f"{policy:10}", *padded]))
    # One that waits for all waits for their loads, too.
    others = (v["share_trainer_other"] for (_, policy), v in found.items() if policy != "wait")
    other = max(others, default=0.0)
    if other > _TOO_BUSY:
        lines += ["", f"{other:.0%} of a trainer's time went to neither waiting nor training: the"]
        lines.append("machine was too busy for these figures.")
    return "\n".join(lines[1:])


def chart(path: Path, found: Found, title: str) -> None:
    """A PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(shape for shape, _ in found))
    policies = list(dict.fromkeys(policy for _, policy in found))
    figure = Figure(figsize=(11, 1.6 + 0.62 * len(policies)), dpi=120, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for i, shape in enumerate(shapes):
        rows = [{"against": _against(r), **r} for r in (found[shape, p] for p in policies)]
        at = np.arange(len(policies)) + (i - (len(shapes) - 1) / 2) * 0.8 / len(shapes)
        bars: dict[str, Any] = {"height": 0.8 / len(shapes), "color": _COLOURS[i], "label": shape}
        for axes, name, label in zip(panels, _PANELS, _LABELS, strict=True):
            values: list[Any] = [row[name] for row in rows]
            drawn = axes.barh(at, values, **bars)
            axes.bar_label(drawn, [label.format(**r) for r in rows], padding=3, fontsize=8)
    for axes, name in zip(panels, _PANELS, strict=True):
        axes.set_xlabel(_PANELS[name])
        axes.margins(x=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(policies)), policies, fontsize=11)
    panels[0].invert_yaxis()
    panels[2].axvline(1.0, color="black", lw=0.8, ls=":")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _against(row: Mapping[str, float]) -> str:
    return f" ({row['times_wait']:.2f})" if "times_wait" in row else ""
