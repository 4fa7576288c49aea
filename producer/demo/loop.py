"""The trainer's loop of the demo.

    submit ahead -> take a batch -> train -> publish -> ack

It keeps more groups submitted than a batch takes, so that every publication finds samples in
flight: they are interrupted, and go on under the newer weights. At the end what is still
outstanding is cancelled and taken, and the whole run is audited. Called by `run.py`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from producer.batch import Batch
from producer.client import RolloutClient
from producer.contract.errors import EngineError, ResultsTimeout, RollqError
from producer.contract.messages import RolloutGroup
from producer.contract.sampling import SamplingParams
from producer.demo import laps
from producer.demo.audit import Audit, spans_versions
from producer.demo.display import Display, Figures, Rate
from producer.demo.trainers import Trainer
from producer.processes import WorkerProcesses

#: Without a batch for so long something is wrong that nobody reported.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.3
_SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """`groups` prompts a step with `samples` rollouts each, `ahead` steps' worth submitted.

    `max_num_seqs` is how many samples a worker's engine runs at once.
    """

    steps: int = 100
    workers: int = 2
    engine: Literal["vllm", "sim"] = "vllm"
    redis_url: str | None = field(default=None, repr=False)  # it may hold a password
    model: Path | None = None
    lr: float = 5e-3
    seed: int = 0
    directory: Path = Path("rollq-demo")
    groups: int = 24
    samples: int = 8
    ahead: float = 2.5
    max_num_seqs: int = 96


class Loop:
    """One run; afterwards `audit` and `figures` say what happened."""

    def __init__(
        self,
        config: DemoConfig,
        client: RolloutClient,
        workers: WorkerProcesses,
        trainer: Trainer,
        display: Display,
    ) -> None:
        self.audit = Audit(config.samples, laps.MAX_TOKENS)
        self.figures = Figures(config.steps)
        self.spanning: list[float] = []
        #: Moments of `time.monotonic`: the first finished rollout, the end of training.
        self.first_rollout_at = 0.0
        self.trained_at = 0.0
        self._config = config
        self._client = client
        self._workers = workers
        self._trainer = trainer
        self._display = display
        self._rng = np.random.default_rng(config.seed)
        self._params = SamplingParams(n=config.samples, max_tokens=laps.MAX_TOKENS)
        self._outstanding = 0
        self._rate = Rate()

    def run(self) -> None:
        """All steps, then the settlement.

        Raises:
            EngineError: no worker is left, or nothing came for minutes.
        """
        self._submit_ahead()
        for step in range(1, self._config.steps + 1):
            batch = self._next_batch()
            self._submit_ahead()
            self._train(batch)
            self.figures.version = self._trainer.publish(self._client, step)
            batch.ack()
            self.figures.step = step
            self._tick()
        self.trained_at = time.monotonic()
        self._settle()

    def _submit_ahead(self) -> None:
        """Bring what is outstanding up to `ahead` steps' worth."""
        missing = round(self._config.groups * self._config.ahead) - self._outstanding
        prompts = laps.draw(self._rng, missing)
        ids = self._client.submit(
            [prompt.ids for prompt in prompts],
            self._params,
            metadata=[{"laps": p.laps, "letter": p.letter} for p in prompts],
        )
        self.audit.submit(ids)
        self._outstanding += len(ids)

    def _next_batch(self) -> Batch:
        """A batch, with the display and the workers looked after while it is awaited."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                batch = self._client.batch(self._config.groups, timeout=_POLL_SECONDS)
            except ResultsTimeout as reason:
                self._tick()
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"no batch in {_PATIENCE_SECONDS:.0f} s ({reason}); "
                        f"the workers' logs are in {self._config.directory / 'logs'}"
                    ) from reason
                continue
            if len(batch) < self._config.groups:
                raise RollqError("the queue lost groups that are outstanding: was it flushed?")
            self._take(batch)
            self.figures.rollouts = self.audit.rollouts
            self.figures.spanning_share = self.audit.spanning_share
            self.spanning.append(float(np.mean([spans_versions(r) for r in batch.rollouts])))
            return batch

    def _take(self, batch: Batch) -> None:
        for group in batch:
            self.audit.receive(group, self.figures.version)
        self._outstanding -= len(batch)

    def _train(self, batch: Batch) -> None:
        """One step on the groups that can be trained on."""
        groups = [group for group in batch if group.trainable]
        if not groups:
            return
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = rewards_of(groups)
        self._trainer.step(rollouts, rewards)
        self.figures.rewards.append(float(rewards.mean()))
        if self._trainer.proof is not None:
            self._trainer.proof.check(rollouts)

    def _tick(self) -> None:
        """Look at the pool, say so if a worker ended, and draw."""
        figures = self.figures
        figures.status = self._client.status()
        figures.tokens_per_second = self._rate(figures.stat("tokens"))
        if figures.starting and figures.stat("finished"):
            figures.starting = False
            self.first_rollout_at = time.monotonic()
        for words in self._workers.newly_ended():
            self._display.say(words)
        self._display.update(figures)

    def _settle(self) -> None:
        """Cancel what is outstanding, take it, and close the audit."""
        outstanding = self.audit.submitted - self.audit.delivered
        self._client.cancel(outstanding, reason="the demo is over")
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._outstanding and time.monotonic() < deadline:
            with contextlib.suppress(ResultsTimeout):
                batch = self._client.batch(self._outstanding, timeout=_POLL_SECONDS)
                if not batch:
                    break  # what is missing now is lost, and the audit says so
                self._take(batch)
                batch.ack()
        self.figures.status = self._client.status()
        self.audit.close(self.figures.status)
        if self._trainer.proof is not None:
            self.audit.proved(self._trainer.proof)


def rewards_of(groups: list[RolloutGroup]) -> NDArray[np.float64]:
    """Rewards [groups, samples]; the question comes back as metadata."""
    return np.array(
        [
            [laps.reward(laps.Prompt(**group.metadata), r.response_ids) for r in group.rollouts]
            for group in groups
        ]
    )
