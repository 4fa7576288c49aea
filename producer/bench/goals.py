"""What `rollq bench` measures against: its goals, and the figures worth comparing between runs.

Machines differ and are noisy. So a figure has a kind, which says where it may be compared:

- `ratio` of two things measured in turn within one run, and `count` (commands, bytes, tokens): on
  any machine, for neither has a unit of time.
- `cpu`, CPU time for a piece of work: on machines of one class, where load matters little.
- `time`: nowhere. Its goal is for the machine that the README describes.

Read by `suite.py` and `baseline.py`; a new goal is a line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["ratio", "count", "cpu", "time"]
Bound = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Of one figure of one bench. Without a `value` it is only watched for getting worse."""

    bench: str
    figure: str
    kind: Kind
    bound: Bound
    value: float | None = None

    def missed_by(self, figure: float) -> float:
        """How far the figure is on the wrong side of the goal; 0 if it holds or there is none."""
        return 0.0 if self.value is None else max(0.0, self.worse_by(figure, self.value))

    def worse_by(self, figure: float, than: float) -> float:
        """Positive where `figure` is the worse of the two."""
        return than - figure if self.bound == "at least" else figure - than


GOALS = (
    Goal("queue", "times_best_peer", "ratio", "at least", 10),
    Goal("queue", "times_rq", "ratio", "at least", 40),
    Goal("queue", "share_of_floor", "ratio", "at least", 0.6),
    Goal("queue", "commands_per_sample", "count", "at most", 3),
    Goal("queue", "redis_cpu_us_per_sample", "cpu", "at most", 60),
    Goal("queue", "bytes_per_token", "count", "at most", 8.5),
    Goal("queue", "slow_commands", "count", "at most", 0),
    Goal("interrupt", "interrupt_ms", "time", "at most", 60),
    Goal("engine", "share_of_bare", "ratio", "at least", 0.97),
    Goal("engine-135m", "share_of_bare", "ratio", "at least", 0.99),
    Goal("update", "workers_64_stopped_p99_ms", "time", "at most", 100),
    Goal("update-vllm", "times_bare_idle", "ratio", "at most", 1.15),
    Goal("partial", "lognormal_requeue_times_wait", "ratio", "at least"),
    Goal("partial", "reasoning_requeue_times_wait", "ratio", "at least"),
    Goal("fleet", "of_100_workers_scripts_per_worker_second", "count", "at most"),
    Goal("fleet", "of_100_workers_bytes_in_per_token", "count", "at most"),
    Goal("fleet", "of_100_workers_redis_cpu_us_per_1000_tokens", "cpu", "at most"),
    Goal("fleet", "times_cost_per_worker", "ratio", "at most"),
)
