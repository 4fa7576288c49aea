"""The reward curve, in text for any terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, top: float = 1.0) -> str:
    """One line of blocks, from 0 to `top`."""
    return "".join(_EIGHTHS[max(1, round(8 * min(v / top, 1.0)))] for v in _columns(values, width))


def text_chart(values: Sequence[float], *, width: int = 70, height: int = 10) -> str:
    """Bars from 0 to 1 over the steps; fits 80 columns and needs no colour."""
    if not len(values):
        return "(no step was made)"
    columns = _columns(values, width)
    lines = []
    for row in range(height - 1, -1, -1):
        fill = [round(8 * min(max(v * height - row, 0.0), 1.0)) for v in columns]
        label = f"{(row + 1) / height:.1f}" if row % 2 == 1 or row == height - 1 else ""
        lines.append(f"{label:>4} │" + "".join(_EIGHTHS[f] for f in fill).rstrip())
    last = str(len(values))
    lines.append(f"{'0':>4} └" + "─" * len(columns))
    lines.append(" " * 6 + "1" + last.rjust(len(columns) - 1))
    return "\n".join(lines)


def save_picture(path: Path, rewards: Sequence[float], spanning: Sequence[float]) -> bool:
    """Write a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="tab:blue", label="mean reward")
    axes.plot(
        steps, spanning, color="tab:gray", lw=0.8, label="share of rollouts over 2+ weight versions"
    )
    axes.set(xlabel="step", ylim=(0, 1), title="rollq demo: laps")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)
    return True


def _columns(values: Sequence[float], width: int) -> NDArray[np.float64]:
    """Means of equal slices where there are more values than columns, else the values, widened."""
    array = np.asarray(values, np.float64)
    if len(array) > width:
        return np.array([part.mean() for part in np.array_split(array, width)])
    return np.repeat(array, max(1, width // max(1, len(array))))
