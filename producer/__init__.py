"""The trainer's side of rollq: submit prompts, take rollouts, publish weights.

Importing it loads neither torch nor vllm, and numpy and redis only when a name is first used:
so a command starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.aio import AsyncRolloutClient
    from producer.batch import AsyncBatch, Batch
    from producer.client import RolloutClient
    from producer.contract.errors import (
        IdConflict,
        InvalidSample,
        QueueFull,
        QueueUnusable,
        RedisUnavailable,
        ResultsTaken,
        ResultsTimeout,
        RewardError,
        RollqError,
        WeightsError,
        WeightsRejected,
    )
    from producer.contract.messages import Rollout, RolloutGroup, Segment
    from producer.contract.sampling import SamplingParams

__all__ = [
    "AsyncBatch",
    "AsyncRolloutClient",
    "Batch",
    "IdConflict",
    "InvalidSample",
    "QueueFull",
    "QueueUnusable",
    "RedisUnavailable",
    "ResultsTaken",
    "ResultsTimeout",
    "RewardError",
    "Rollout",
    "RolloutClient",
    "RolloutGroup",
    "RollqError",
    "SamplingParams",
    "Segment",
    "WeightsError",
    "WeightsRejected",
]

#: where to look for a name, first hit wins
_MODULES = ("contract.errors", "contract.sampling", "contract.messages", "batch", "client", "aio")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"producer.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'producer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
