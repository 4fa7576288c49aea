"""Whether the demo's run kept the contract: nothing lost, every token labelled rightly.

`Audit` sees every submission and every delivery; it collects problems and raises nothing, so
that one fault does not hide the next. `VersionProof` goes behind the labels: it keeps the
weights of each version and computes the logprobs of delivered tokens again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from producer.contract.messages import Rollout, RolloutGroup
from producer.contract.states import State
from producer.demo.learner import padded
from producer.status import Status

_TERMINAL = tuple(state.value for state in State if state.terminal)
_PROBLEMS_KEPT = 20


@dataclass(slots=True)
class Audit:
    """Counts and problems of one run; `samples` is the size of every group."""

    samples: int
    max_tokens: int
    submitted: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    rollouts: int = 0
    tokens: int = 0
    spanning: int = 0
    interrupted: int = 0
    states: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    faults: int = 0

    def submit(self, ids: Iterable[str]) -> None:
        self.submitted.update(ids)

    def receive(self, group: RolloutGroup, published: int) -> None:
        """Check one delivery; `published` is the newest version published so far."""
        if group.id in self.delivered:
            self._fault(f"group {group.id} came twice")
        if group.id not in self.submitted:
            self._fault(f"group {group.id} was never submitted")
        self.delivered.add(group.id)
        if [r.index for r in group.rollouts] != list(range(self.samples)):
            self._fault(f"group {group.id} has members {[r.index for r in group.rollouts]}")
        for rollout in group.rollouts:
            self.rollouts += 1
            self.tokens += len(rollout.response_ids)
            self.spanning += spans_versions(rollout)
            self.interrupted += rollout.interruptions > 0
            self.states[rollout.state] = self.states.get(rollout.state, 0) + 1
            for problem in rollout_problems(rollout, published, self.max_tokens):
                self._fault(f"rollout {rollout.id}: {problem}")

    def close(self, status: Status) -> None:
        """Compare with the queue after everything outstanding was cancelled and taken."""
        lost = self.submitted - self.delivered
        if lost:
            self._fault(f"{len(lost)} groups were lost, among them {sorted(lost)[:3]}")
        if status.ready or status.leased:
            self._fault(f"{status.ready} samples still wait, {status.leased} are still leased")
        enqueued = status.stats.get("samples_enqueued", 0)
        ended = sum(status.stats.get(state, 0) for state in _TERMINAL)
        if not enqueued == ended == self.rollouts:
            self._fault(
                f"{enqueued} samples were enqueued, {ended} counted as ended, "
                f"{self.rollouts} delivered"
            )

    def proved(self, proof: VersionProof) -> None:
        """Take in the proof's verdict."""
        if proof.largest_difference > proof.tolerance:
            self._fault(
                f"logprobs differ by up to {proof.largest_difference:.3g} from those of the "
                "weights that the versions name"
            )

    @property
    def ok(self) -> bool:
        return self.faults == 0

    @property
    def spanning_share(self) -> float:
        return self.spanning / max(1, self.rollouts)

    def line(self) -> str:
        """The verdict in one line."""
        states = ", ".join(f"{n} {state}" for state, n in sorted(self.states.items()))
        lost = len(self.submitted - self.delivered)
        return (
            f"audit {'passed' if self.ok else 'FAILED'}: {len(self.submitted)} groups submitted, "
            f"{lost} lost; {self.rollouts} rollouts ({states}) with {self.tokens} tokens, "
            f"{self.faults} at odds with the contract"
        )

    def _fault(self, problem: str) -> None:
        self.faults += 1
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(problem)


def spans_versions(rollout: Rollout) -> bool:
    """Were its tokens made under two weight versions or more?"""
    return rollout.param_version_start != rollout.param_version_end


def rollout_problems(rollout: Rollout, published: int, max_tokens: int) -> list[str]:
    """What contradicts the contract in one rollout; empty if all is well."""
    found = []
    tokens = len(rollout.response_ids)
    lengths = {
        "response_logprobs": len(rollout.response_logprobs),
        "response_mask": len(rollout.response_mask),
        "versions": len(rollout.versions),
        "segments": sum(segment.tokens for segment in rollout.segments),
    }
    for name, length in lengths.items():
        if length != tokens:
            found.append(f"{tokens} response ids but {name} cover {length}")
    versions = rollout.versions.tolist()
    if any(a > b for a, b in itertools.pairwise(versions)):
        found.append(f"versions decrease: {versions}")
    if versions and not 0 <= min(versions) <= max(versions) <= published:
        found.append(f"versions {min(versions)} to {max(versions)} were not all published")
    if versions != [s.version for s in rollout.segments for _ in range(s.tokens)]:
        found.append("versions and segments disagree")
    if not bool(np.all(rollout.response_mask == 1)):
        found.append("response_mask hides tokens that a policy sampled")
    if not bool(np.all(np.isfinite(rollout.response_logprobs))):
        found.append("a logprob is not finite")
    if tokens > max_tokens or (rollout.finish_reason == "length" and tokens != max_tokens):
        found.append(f"{tokens} tokens of {max_tokens}, finished by {rollout.finish_reason}")
    return found + _attempt_problems(rollout)


def _attempt_problems(rollout: Rollout) -> list[str]:
    """Every attempt but the last ended by an interruption or a crash, and left its trace."""
    attempts = [segment.attempt for segment in rollout.segments]
    before_last = rollout.interruptions + rollout.crashes
    possible = {before_last + 1}
    if rollout.state is State.CANCELLED:
        possible.add(before_last)  # cancelled while it waited
    found = []
    if rollout.attempts not in possible:
        found.append(
            f"{rollout.attempts} attempts do not go with {rollout.interruptions} interruptions "
            f"and {rollout.crashes} crashes"
        )
    if attempts and (attempts != sorted(attempts) or attempts[-1] > rollout.attempts):
        found.append(f"segments are of attempts {attempts}, of {rollout.attempts}")
    return found


class VersionProof:
    """Computes logprobs again under the weights that each token's version names.

    `largest_difference` is over tokens under their own version; `other_difference`, the mean
    over the same tokens under other versions, shows that a wrong label would have been seen.
    """

    #: Two builds of float32 arithmetic agree to about 1e-5; some GPU kernels only to 1e-2.
    tolerance = 0.02

    def __init__(self, model: Any, *, versions_kept: int = 32, rollouts_a_batch: int = 8) -> None:
        self._model = model
        self._weights: dict[int, dict[str, Any]] = {}
        self._versions_kept = versions_kept
        self._rollouts_a_batch = rollouts_a_batch
        self._other_sum = 0.0
        self._other_tokens = 0
        self.tokens = 0
        self.largest_difference = 0.0

    @property
    def other_difference(self) -> float:
        return self._other_sum / max(1, self._other_tokens)

    def keep(self, version: int) -> None:
        """Remember the model's weights as they are now, as `version`."""
        state = self._model.state_dict()
        self._weights[version] = {name: tensor.detach().clone() for name, tensor in state.items()}
        while len(self._weights) > self._versions_kept:
            del self._weights[min(self._weights)]

    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Check the rollouts with the most versions of a batch."""
        known = [r for r in rollouts if len(r.versions) and set(r.versions) <= set(self._weights)]
        known.sort(key=lambda r: len(set(r.versions.tolist())), reverse=True)
        chosen = known[: self._rollouts_a_batch]
        if not chosen:
            return
        batch = padded([(rollout, 0.0) for rollout in chosen])
        labels = np.full(batch["ids"].shape, -1)
        for row, rollout in enumerate(chosen):
            start = len(rollout.prompt_ids)
            labels[row, start : start + len(rollout.versions)] = rollout.versions
        for version in np.unique(labels[labels >= 0]).tolist():
            difference = np.abs(self._logprobs(version, batch["ids"]) - batch["logprobs"][:, 1:])
            own = difference[labels[:, 1:] == version]
            other = difference[(labels[:, 1:] >= 0) & (labels[:, 1:] != version)]
            self.tokens += own.size
            self.largest_difference = max(self.largest_difference, float(own.max()))
            self._other_sum += float(other.sum())
            self._other_tokens += other.size

    def _logprobs(self, version: int, ids: Any) -> Any:
        """Logprob of each id but the first, after the ids before it."""
        import torch

        with torch.no_grad():
            inputs = torch.from_numpy(ids)
            output = torch.func.functional_call(
                self._model, self._weights[version], (), {"input_ids": inputs, "use_cache": False}
            )
            logprobs = torch.log_softmax(output.logits[:, :-1].float(), dim=-1)
            return logprobs.gather(-1, inputs[:, 1:, None]).squeeze(-1).numpy()
