"""Which reward functions this process may run: those of modules that it was told to allow.

ROLLQ_REWARD_MODULES names them, separated by commas; a package allows all that is in it.
rollq's own graders are always allowed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from producer.contract.errors import RewardError
from producer.contract.messages import Rollout
from producer.contract.rewards import check_reward

log = logging.getLogger("rollq")

MODULES = "ROLLQ_REWARD_MODULES"
_OWN = "producer.rewards.graders"

#: gets a group's rollouts in index order, and its metadata; returns a reward for each
RewardFunction = Callable[[Sequence[Rollout], Any], Sequence[Any]]


def allowed_modules() -> list[str]:
    named = (name.strip() for name in os.environ.get(MODULES, "").split(","))
    return [_OWN, *(name for name in named if name)]


def serves() -> bool:
    """Is this process an `rq worker`?"""
    return sys.argv[1:2] in (["worker"], ["worker-pool"])


def preload() -> None:
    """Import what a job needs, once: each runs in a fork of this process.

    An `rq worker` ends with 1 where an allowed module cannot be imported: it would fail good
    groups for good.
    """
    importlib.import_module("producer.rewards.job")
    if importlib.util.find_spec("math_verify"):
        importlib.import_module("math_verify")  # half a second, for `graders.math_answer`
    for name in allowed_modules():
        try:
            importlib.import_module(name)
        except Exception as error:  # a stranger's module may raise anything
            said = f"{MODULES}: {name} cannot be imported: {error!r}"
            if serves():
                raise SystemExit(f"{said}; correct the name, or install it here") from error
            log.warning("%s", said)


def find(reward: str) -> RewardFunction:
    """The function that `module:function` names. Raises RewardError, saying what to do."""
    module_name, _, name = check_reward(reward).partition(":")
    if not _is_allowed(module_name):
        raise RewardError(
            f"reward {reward} is not allowed here: start this `rq worker` with "
            f"{MODULES}={module_name}; it allows {', '.join(allowed_modules())}"
        )
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"reward {reward} cannot be imported: {error}") from error
    if not callable(function):
        raise RewardError(f"reward {reward} is no function")
    # What an allowed module merely imported from elsewhere is not its own.
    if not _is_allowed(getattr(function, "__module__", None) or module_name):
        raise RewardError(
            f"reward {reward} is of the module {function.__module__}, which is not allowed here"
        )
    found: RewardFunction = function
    return found


def _is_allowed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed_modules())
