"""What a run of the demo came to, as data and as the last thing on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from producer.demo.audit import Audit, VersionProof
from producer.demo.chart import text_chart

#: How many steps the reward at the start and at the end is a mean of.
_ENDS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """Shares and counts of rollouts are of those that were trained on; times in seconds."""

    engine: str
    workers: int
    lr: float
    seed: int
    steps: int
    weight_version: int
    rewards: list[float]
    spanning: list[float]
    rollouts: int
    tokens: int
    spanning_share: float
    interrupted: int
    resumed: int
    recomputed_tokens: int
    tokens_per_second: float
    seconds_to_first_rollout: float
    seconds: float
    groups_submitted: int
    groups_lost: int
    proof_tokens: int
    proof_largest_difference: float
    proof_other_difference: float
    audit_ok: bool
    audit: str
    problems: list[str]
    picture: str | None
    look: list[str]

    @property
    def reward_start(self) -> float:
        return float(np.mean(self.rewards[:_ENDS])) if self.rewards else 0.0

    @property
    def reward_end(self) -> float:
        return float(np.mean(self.rewards[-_ENDS:])) if self.rewards else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "reward_start": self.reward_start,
            "reward_end": self.reward_end,
        }


def audit_fields(audit: Audit, proof: VersionProof | None) -> dict[str, Any]:
    """The part of a `Report` that the audit knows."""
    return {
        "groups_submitted": len(audit.submitted),
        "groups_lost": len(audit.submitted - audit.delivered),
        "proof_tokens": proof.tokens if proof else 0,
        "proof_largest_difference": proof.largest_difference if proof else 0.0,
        "proof_other_difference": proof.other_difference if proof else 0.0,
        "audit_ok": audit.ok,
        "audit": audit.line(),
        "problems": list(audit.problems),
    }


def show(report: Report, console: Console, *, queue_stays: bool) -> None:
    """Table, reward curve, verdict; fits 80 columns."""
    table = Table(title="rollq demo", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(max_width=50)
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    if report.engine == "sim":
        _say(console, ["The simulated engine follows no weights: its reward says nothing."])
    else:
        _say(console, ["mean reward by step", text_chart(report.rewards)])
    if report.picture is not None:
        _say(console, [f"as a picture: {report.picture}"], wrap=False)
    when = "now" if queue_stays else "while a demo runs"
    _say(console, [f"the same with redis-cli, {when}:"])
    _say(console, [f"  {line}" for line in report.look], wrap=False)
    _say(console, [report.audit, *(f"  {problem}" for problem in report.problems)])


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("steps, last weight version", f"{report.steps}, {report.weight_version}"),
        (
            f"mean reward, first {_ENDS} to last {_ENDS} steps",
            f"{report.reward_start:.3f} to {report.reward_end:.3f}",
        ),
        ("rollouts, tokens", f"{report.rollouts:,}, {report.tokens:,}"),
        ("rollouts over 2 or more versions", f"{report.spanning_share:.0%}"),
        ("samples interrupted, resumed", f"{report.interrupted:,}, {report.resumed:,}"),
        ("tokens a second", f"{report.tokens_per_second:,.0f}"),
        (
            "seconds to the first rollout, in all",
            f"{report.seconds_to_first_rollout:.0f}, {report.seconds:.0f}",
        ),
    ]
    if report.proof_tokens:
        rows.append(
            (
                "logprobs computed again",
                f"{report.proof_tokens:,}; off by at most {report.proof_largest_difference:.1g} "
                "under the version of their label, "
                f"by {report.proof_other_difference:.1g} on average under another",
            )
        )
    return rows


def _say(console: Console, lines: Sequence[str], *, wrap: bool = True) -> None:
    """Plain lines; paths and commands are not wrapped, so that they can be copied."""
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=not wrap)
