"""The demo's learner: one clipped policy-gradient step on a batch of rollouts.

The importance ratio of a token is taken against `response_logprobs`, the logprob under the
weights that sampled it. A rollout that spans versions needs nothing special: each token brings
the logprob of its own version. Called by `run.py`; torch is imported only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Sampled(Protocol):
    """What the learner reads of a rollout; response arrays have one entry a token."""

    @property
    def prompt_ids(self) -> NDArray[np.int32]: ...
    @property
    def response_ids(self) -> NDArray[np.int32]: ...
    @property
    def response_mask(self) -> NDArray[Any]: ...
    @property
    def response_logprobs(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """The step's numbers. `tokens_scale` times the rollouts of a batch divides the loss."""

    lr: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_bonus: float = 0.015
    tokens_scale: float = 25.0
    #: Padded tokens of one forward pass; rollouts are sorted by length, so little is padding.
    micro_batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did, averaged over the tokens that a policy sampled."""

    loss: float
    entropy: float
    clipped: float
    grad_norm: float
    tokens: int


def advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """`rewards[groups, n]` less the mean of their group, over the standard deviation of the batch.

    All zero where every group agrees with itself: such a batch teaches nothing.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.asarray(centred / (rewards.std() + 1e-6))


class Learner:
    """AdamW on a causal language model of transformers."""

    def __init__(self, model: Any, config: LearnerConfig | None = None) -> None:
        import torch

        self.model = model
        self.config = config or LearnerConfig()
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.config.lr, betas=self.config.betas, weight_decay=0.0
        )

    def step(
        self, rollouts: Sequence[Sampled], advantages: Sequence[float] | NDArray[np.float64]
    ) -> StepMetrics:
        """One optimizer step on a batch, `advantages` one number a rollout.

        Raises ValueError where the two differ in number.
        """
        import torch

        pairs = sorted(
            zip(rollouts, advantages, strict=True), key=lambda pair: len(pair[0].response_ids)
        )
        totals = np.zeros(3)
        tokens = sum(int(rollout.response_mask.sum()) for rollout in rollouts)
        for micro in self._micro_batches(pairs):
            totals += self._accumulate(micro, scale=len(rollouts) * self.config.tokens_scale)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss, entropy, clipped = totals
        return StepMetrics(
            loss=loss,
            entropy=entropy / max(tokens, 1),
            clipped=clipped / max(tokens, 1),
            grad_norm=float(norm),
            tokens=tokens,
        )

    def _micro_batches(
        self, pairs: Sequence[tuple[Sampled, float]]
    ) -> list[Sequence[tuple[Sampled, float]]]:
        """Cut a list sorted by length so that each piece stays within its padded tokens."""
        pieces: list[Sequence[tuple[Sampled, float]]] = []
        start = 0
        for end in range(1, len(pairs) + 1):
            longest = _length(pairs[min(end, len(pairs) - 1)][0])
            if end == len(pairs) or (end + 1 - start) * longest > self.config.micro_batch_tokens:
                pieces.append(pairs[start:end])
                start = end
        return pieces

    def _accumulate(
        self, pairs: Sequence[tuple[Sampled, float]], scale: float
    ) -> NDArray[np.float64]:
        """Add one piece's gradient; return its loss, and entropy and clip count over tokens."""
        import torch

        batch = {name: torch.from_numpy(array) for name, array in padded(pairs).items()}
        # Padding is on the right, where causal attention lets nothing before it see it.
        logits = self.model(input_ids=batch["ids"], use_cache=False).logits[:, :-1]
        policy = torch.log_softmax(logits.float(), dim=-1)
        mask = batch["mask"][:, 1:]
        chosen = policy.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
        ratio = torch.exp((chosen - batch["logprobs"][:, 1:]) * mask)
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        advantage = batch["advantage"][:, None]
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        entropy = -(policy.exp() * policy).sum(-1)
        loss = -((gain + self.config.entropy_bonus * entropy) * mask).sum() / scale
        loss.backward()
        held_back = ((gain < ratio * advantage) * mask).sum()
        return np.array([loss.item(), (entropy.detach() * mask).sum().item(), held_back.item()])


def _length(rollout: Sampled) -> int:
    return len(rollout.prompt_ids) + len(rollout.response_ids)


def padded(pairs: Sequence[tuple[Sampled, float]]) -> dict[str, NDArray[Any]]:
    """Pairs of rollout and advantage as arrays [rollouts, longest], padded on the right.

    What is not a response token has mask 0.
    """
    shape = len(pairs), max(_length(rollout) for rollout, _ in pairs)
    ids = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    logprobs = np.zeros(shape, np.float32)
    for row, (rollout, _) in enumerate(pairs):
        start, end = len(rollout.prompt_ids), _length(rollout)
        ids[row, :start] = rollout.prompt_ids
        ids[row, start:end] = rollout.response_ids
        mask[row, start:end] = rollout.response_mask
        logprobs[row, start:end] = rollout.response_logprobs
    advantage = np.array([value for _, value in pairs], np.float32)
    return {"ids": ids, "mask": mask, "logprobs": logprobs, "advantage": advantage}
