"""Reward functions for tests, good and bad; imported by `rq worker` processes.

The metadata of a group says what a function is to do where it needs to know.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from producer.contract.messages import Rollout


def length(rollouts: Sequence[Rollout], metadata: Any) -> list[int]:
    return [len(r.response_ids) for r in rollouts]


def facts(rollouts: Sequence[Rollout], metadata: Any) -> list[dict[str, Any]]:
    return [{"index": r.index, "ok": r.state == "finished", "of": metadata["of"]} for r in rollouts]


def raises(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    raise ValueError("no such answer")


def raises_once(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    marker = Path(metadata["marker"])
    if not marker.exists():
        marker.touch()
        raise OSError("not reachable yet")
    return [1.0] * len(rollouts)


def exits(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    raise SystemExit(0)


def loops(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    while True:
        time.sleep(0.01)


def loops_on(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    """Catches the alarm that would end it."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def is_late(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    """Catches the alarm, and answers as if nothing had been."""
    with contextlib.suppress(Exception):
        time.sleep(30)
    return [1.0] * len(rollouts)


def is_killed(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def kills_its_worker(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    """The whole `rq worker`, the first time."""
    marker = Path(metadata["marker"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(rollouts)


def too_few(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    return [1.0]
