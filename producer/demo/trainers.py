"""What stands behind the demo's loop as "the trainer": one that learns, one that pretends.

`run.py` drives either through `Trainer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from producer.client import RolloutClient
from producer.contract.messages import Rollout
from producer.demo.audit import VersionProof
from producer.demo.learner import Learner, LearnerConfig, StepMetrics, advantages
from producer.demo.model import load_model, make_model


class Trainer(Protocol):
    """A step on a batch, and a publication of what it made."""

    #: What workers are started with; None where they need no model.
    model_directory: Path | None
    proof: VersionProof | None

    def step(self, rollouts: Sequence[Rollout], rewards: NDArray[np.float64]) -> StepMetrics | None:
        """Train on groups with rewards [groups, samples], rollouts in the same order."""

    def publish(self, client: RolloutClient, step: int) -> int:
        """Publish the weights as they are now; returns their version."""


class PolicyTrainer:
    """Trains the model of `directory`, or one made there; its first weights are version 0."""

    def __init__(
        self, directory: Path, *, given: Path | None, lr: float, seed: int, threads: int
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self.model_directory: Path | None = given or directory
        self._model = load_model(given) if given else make_model(directory, seed)
        self._learner = Learner(self._model, LearnerConfig(lr=lr))
        self.proof: VersionProof | None = VersionProof(self._model)
        self.proof.keep(0)

    def step(self, rollouts: Sequence[Rollout], rewards: NDArray[np.float64]) -> StepMetrics | None:
        return self._learner.step(rollouts, advantages(rewards).ravel())

    def publish(self, client: RolloutClient, step: int) -> int:
        # Forced: with a learning rate of 0 the files never change, and the control run
        # should be interrupted as often as the one that learns.
        version = client.publish_weights(self._model, step=step, force=True)
        if self.proof is not None:
            self.proof.keep(version)
        return version


class PretendTrainer:
    """For simulated engines, which follow no weights: publishes a file that holds the step."""

    def __init__(self, directory: Path) -> None:
        self.model_directory: Path | None = None
        self.proof: VersionProof | None = None
        self._directory = directory

    def step(self, rollouts: Sequence[Rollout], rewards: NDArray[np.float64]) -> StepMetrics | None:
        return None

    def publish(self, client: RolloutClient, step: int) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(self._directory / "model.safetensors", "step", np.array([step], "<i4"))
        return client.publish_weights(self._directory, step=step, force=True)


def write_safetensors(path: Path, name: str, array: NDArray[np.int32]) -> None:
    """One int32 tensor in the safetensors format, without the package of that name.

    The format: length of the header as little-endian u64, the header as JSON, the bytes.
    """
    data = array.tobytes()
    tensor = {"dtype": "I32", "shape": list(array.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({name: tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
