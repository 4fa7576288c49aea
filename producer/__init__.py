"""The trainer's side of rollq: submit prompts, take rollouts, publish weights.

Importing it loads neither torch nor vllm.
"""

from producer.client import Batch, RolloutClient
from producer.contract.errors import RollqError
from producer.contract.messages import Rollout, RolloutGroup, Segment
from producer.contract.sampling import SamplingParams

__all__ = [
    "Batch",
    "Rollout",
    "RolloutClient",
    "RolloutGroup",
    "RollqError",
    "SamplingParams",
    "Segment",
]
