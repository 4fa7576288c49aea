"""The RQ job that grades one group; the only function that a rewards queue runs.

It runs in a process that `rq worker` forked for it. Whatever becomes of it, the group is
delivered: with rewards, or with the grader's error after the last attempt; the attempt counted
when it began, so nothing needs to be said by a process that is killed.
"""

from __future__ import annotations

import math
import numbers
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from producer.contract import codec
from producer.contract.connection import Queue
from producer.contract.errors import InvalidSample, RewardError
from producer.contract.messages import RolloutGroup
from producer.contract.rewards import Dispatcher
from producer.pipeline import read_all
from producer.results import build_group, group_commands
from producer.rewards.allowed import find

#: characters of a grader's error that are kept
_ERROR_LENGTH = 2000


def grade(queue_name: str, group_id: str, digest: str) -> None:
    """Grade a group and report; then see to it that others which are due get their jobs."""
    url = os.environ.get("ROLLQ_REDIS_URL") or "redis://localhost:6379"
    queue = Queue(url, queue_name, patience=10.0)
    dispatcher = Dispatcher(url, queue_name)
    try:
        _grade(queue, group_id, digest)
    finally:
        # A failed attempt is due at once: nobody has to wait for a client that tends.
        dispatcher.send(queue.call("due", limit=256))
        dispatcher.close()
        queue.close()


def _grade(queue: Queue, group_id: str, digest: str) -> None:
    request = secrets.token_hex(8)
    attempt, size, reward, limit_ms = queue.call(
        "grade", group=group_id, digest=digest, request=request
    )
    if not attempt:
        return  # graded, given up, or taken already
    report = {"group": group_id, "digest": digest, "attempt": attempt, "request": request}
    try:
        rewards = _rewards(_read(queue, group_id, size), reward.decode(), limit_ms / 1000)
        data = codec.pack(rewards, f"rewards of {group_id}")
    except BaseException as error:
        final = isinstance(error, RewardError | InvalidSample)
        queue.call("graded", **report, rewards=b"", error=_words(error), final=int(final))
        raise  # for RQ to show it
    queue.call("graded", **report, rewards=data, error="", final=1)


def _read(queue: Queue, group_id: str, size: int) -> RolloutGroup:
    commands = group_commands(queue.keys, group_id, size)
    return build_group("", group_id, read_all(queue, commands))


def _rewards(group: RolloutGroup, reward: str, seconds: float) -> list[Any]:
    """Call the function and check what it says. Raises RewardError, and what the function does."""
    function = find(reward)
    started = time.monotonic()
    answer = function(group.rollouts, group.metadata)
    if time.monotonic() - started > seconds:
        # It caught RQ's alarm and went on: what it says now is no honest answer.
        raise TimeoutError(f"{reward} took over {seconds:g} s")
    return check_rewards(answer, len(group.rollouts), reward)


def check_rewards(answer: Any, size: int, reward: str) -> list[Any]:
    """One finite number, or one map of plain values, for each rollout. Raises RewardError."""
    if hasattr(answer, "tolist"):  # numpy, torch
        answer = answer.tolist()
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise RewardError(
            f"{reward} returned a {type(answer).__name__}, not a list with a reward a rollout"
        )
    if len(answer) != size:
        raise RewardError(f"{reward} returned {len(answer)} rewards for {size} rollouts")
    return [
        _reward(value, f"{reward}: the reward of rollout {i}") for i, value in enumerate(answer)
    ]


def _reward(value: Any, what: str) -> float | dict[str, Any]:
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) for name in value):
            raise RewardError(f"{what} is a dict without names")
        return {name: _value(v, f"{what}, {name!r},") for name, v in value.items()}
    return _number(value, what)


def _value(value: Any, what: str) -> Any:
    return value if isinstance(value, str | bool | None) else _number(value, what)


def _number(value: Any, what: str) -> float:
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{what} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, not a finite number")
    return number


def _words(error: BaseException) -> str:
    text = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    return text[:_ERROR_LENGTH].encode("utf-8", "replace").decode()
