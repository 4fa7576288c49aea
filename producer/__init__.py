"""The trainer's side of rollq: submit prompts, take rollouts, publish weights.

Importing it loads neither torch nor vllm.
"""

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
