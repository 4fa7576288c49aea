"""Ready reward functions: 1.0 for a response that has the right answer, else 0.0.

    client.submit(rows, params, reward="producer.rewards.graders:math_answer")

Each row's metadata holds the right answer as `answer`. A response that did not finish, such as a
cancelled one, gets 0.0; `group.trainable` and `rollout.state` tell it from a wrong one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from producer.contract.errors import RewardError
from producer.contract.messages import Rollout


def exact_match(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    """Is the whole text the answer, but for spaces around it?"""
    answer = _answer(metadata).strip()
    return [float(r.text.strip() == answer) for r in rollouts]


def math_answer(rollouts: Sequence[Rollout], metadata: Any) -> list[float]:
    """Is the last mathematical expression of the text equal to the answer, as math-verify judges?

    Both may be LaTeX or plain. Needs `pip install 'rollq[math]'`.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            f"math_answer needs math-verify ({error}): pip install 'rollq[math]' where "
            "`rq worker` runs"
        ) from error
    answer = _answer(metadata)
    with _own_alarms():
        gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise RewardError(f"the answer {answer!r} of the metadata is no mathematical expression")

    def grade(text: str) -> float:
        with _own_alarms():
            return float(verify(gold, parse(text)))

    return [grade(r.text) for r in rollouts]


def _answer(metadata: Any) -> str:
    answer = metadata.get("answer") if isinstance(metadata, Mapping) else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RewardError("the group's metadata has no `answer` that is a text or a number")
    return str(answer)


@contextmanager
def _own_alarms() -> Iterator[None]:
    """math-verify limits itself with SIGALRM, and leaves off the alarm that RQ had set."""
    left, started = signal.alarm(0), time.monotonic()
    try:
        yield
    finally:
        if left:
            signal.alarm(max(1, left - int(time.monotonic() - started)))
