"""What travels: jobs to the workers, chunks back, rollouts to the trainer.

| message | made by | read by |
|---|---|---|
| Job | producer, in `enqueue` | worker (prompt, params), trainer (metadata) |
| Claim | `claim` | worker |
| Chunk | worker, in `checkpoint` | any later worker, trainer |
| Rollout, RolloutGroup | `producer.results`, out of all of these | trainer |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract import codec
from producer.contract.errors import InvalidPayload, InvalidSample
from producer.contract.keys import sample_id
from producer.contract.sampling import SamplingParams
from producer.contract.scripts import Argument
from producer.contract.states import StalenessPolicy, State

Messages = list[dict[str, Any]]

#: `max_tokens` of a job that set none: as many as the model's length allows
UNBOUNDED = 2**31 - 1

#: characters of a refusal that quotes what was refused
MAX_REASON = 1000

#: the engine's `logprobs_mode` unless a chunk says otherwise
LOGPROBS_MODE = "processed_logprobs"


@dataclass(frozen=True, slots=True)
class Job:
    """A group as it is enqueued: one prompt, `params.n` samples of it.

    Exactly one of `prompt` (text or chat messages) and `prompt_ids` is set. `reward` names the
    function that grades the group, `module:function`. `traceparent` is the W3C trace context
    that it was submitted under; it is no part of the job's identity.
    """

    group_id: str
    params: SamplingParams
    prompt: str | Messages | None = None
    prompt_ids: NDArray[np.int32] | None = None
    metadata: Any = None
    max_staleness: int | None = None
    staleness_policy: StalenessPolicy = StalenessPolicy.ALLOW
    reward: str = ""
    traceparent: str = ""

    @property
    def sample_ids(self) -> list[str]:
        return [sample_id(self.group_id, i) for i in range(self.params.n)]

    def to_item(self) -> tuple[Argument, ...]:
        """The item of `enqueue` that carries this job. Raises InvalidSample."""
        what = f"group {self.group_id}"
        payload = codec.pack(
            {
                "prompt": self.prompt,
                "params": self.params.to_wire(),
                "metadata": codec.pack(self.metadata, f"metadata of {what}"),
            },
            what,
        )
        ids = b"" if self.prompt_ids is None else codec.pack_ids(self.prompt_ids)
        if len(ids) + len(payload) > codec.MAX_PAYLOAD:
            raise InvalidSample(
                f"{what} has {len(ids) + len(payload)} bytes, allowed are {codec.MAX_PAYLOAD}"
            )
        staleness = "" if self.max_staleness is None else self.max_staleness
        restart = int(bool(self.params.stateful))
        facts = (
            f"{self.params.n} {staleness} {self.staleness_policy} {restart} {self.reward}".encode()
        )
        return (
            self.group_id,
            self.params.n,
            hashlib.blake2b(facts + ids + payload, digest_size=16).hexdigest(),
            UNBOUNDED if self.params.max_tokens is None else self.params.max_tokens,
            # A text's tokens are not known yet; about four bytes make one.
            len(ids) // 4 if ids else max(1, len(payload) // 4),
            staleness,
            self.staleness_policy.value,
            restart,
            self.reward,
            self.traceparent,
            payload,
            ids,
        )


def read_job(payload: bytes, what: str) -> tuple[str | Messages | None, SamplingParams, Any]:
    """Prompt, sampling parameters and metadata out of a job's bytes.

    Raises:
        InvalidPayload: not a job.
        InvalidSample: a parameter that this version of rollq does not know.
    """
    wire = codec.unpack(payload, f"job of {what}")
    try:
        prompt, params, metadata = wire["prompt"], wire["params"], wire["metadata"]
    except (TypeError, KeyError, IndexError):
        raise InvalidPayload(f"job of {what} lacks its fields") from None
    if not (
        isinstance(prompt, str | list | None)
        and isinstance(params, dict)
        and not any(isinstance(value, np.ndarray) for value in params.values())
        and isinstance(metadata, bytes)
    ):
        raise InvalidPayload(f"job of {what} has fields of a wrong type")
    try:
        sampling = SamplingParams.from_wire(params)
    except RecursionError:
        raise InvalidPayload(f"job of {what} is nested too deeply") from None
    except InvalidSample as error:
        # It quotes what it found, which may be as long as a payload.
        raise InvalidSample(str(error)[:MAX_REASON]) from None
    return prompt, sampling, codec.unpack(metadata, f"metadata of {what}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A sample in a worker's hands, as `claim` handed it out."""

    id: str
    lease_token: str
    group_id: str
    index: int
    attempts: int
    crashes: int
    interruptions: int
    tokens: int
    job: bytes
    prompt_ids: bytes

    @classmethod
    def from_reply(cls, headers: list[list[Any]], jobs: list[list[bytes]]) -> list[Claim]:
        """What `claim` answered, in its order; the claims of a group share its job's bytes.

        Raises InvalidPayload where a field of a sample is not what the scripts write.
        """
        by_group = {group: (job, prompt_ids) for group, job, prompt_ids in jobs}
        return [cls._from_wire(h, by_group) for h in headers]

    @classmethod
    def _from_wire(cls, h: list[Any], jobs: Mapping[bytes, tuple[bytes, bytes]]) -> Claim:
        try:
            group, _, index = h[0].rpartition(b"/")
            job, prompt_ids = jobs[group]
            if not (isinstance(job, bytes) and isinstance(prompt_ids, bytes)):
                raise TypeError
            return cls(
                h[0].decode(), h[1].decode(), group.decode(), int(index), int(h[2]), int(h[3]),
                int(h[4]), int(h[5]), job, prompt_ids,
            )  # fmt: skip
        except (ValueError, TypeError, AttributeError, LookupError):
            name = repr(h[0] if h else None)[:200]
            raise InvalidPayload(f"the fields of sample {name} are not a claim's") from None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive response tokens of one attempt under one weight version."""

    version: int
    worker: str
    attempt: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logprobs_mode: str = LOGPROBS_MODE

    def to_wire(self) -> bytes:
        wire: dict[str, Any] = {
            "v": self.version,
            "w": self.worker,
            "a": self.attempt,
            "t": self.token_ids,
            "l": self.logprobs,
        }
        if self.logprobs_mode != LOGPROBS_MODE:
            wire["m"] = self.logprobs_mode
        return codec.pack_own(wire, "chunk")

    @classmethod
    def from_wire(cls, data: bytes, what: str) -> Chunk:
        """Raises InvalidPayload where `data` is no chunk."""
        wire = codec.unpack_record(data, f"chunk of {what}")
        try:
            chunk = cls(
                wire["v"], wire["w"], wire["a"], wire["t"], wire["l"], wire.get("m", LOGPROBS_MODE)
            )
            sound = (
                isinstance(chunk.version, int)
                and 0 <= chunk.version < 2**31
                and isinstance(chunk.worker, str)
                and isinstance(chunk.attempt, int)
                and isinstance(chunk.logprobs_mode, str)
                and chunk.token_ids.dtype == np.int32
                and chunk.logprobs.dtype == np.float32
                and 0 < len(chunk.token_ids) == len(chunk.logprobs)
            )
        except (TypeError, KeyError, IndexError, AttributeError):
            sound = False
        if not sound:
            raise InvalidPayload(f"chunk of {what} is malformed")
        return chunk


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one run of one weight version, as one attempt made them."""

    version: int
    tokens: int
    worker: str
    attempt: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rollout:
    """The result of one sample. All arrays have one entry a response token.

    Attributes:
        prompt_ids: int32 [prompt tokens].
        response_ids: int32 [T].
        response_mask: int32 [T], 1 for every token that a policy sampled.
        response_logprobs: float32 [T], natural log, by the policy that sampled the token.
        versions: int32 [T], the weight version that computed each token.
        param_version_start, param_version_end: of the first and last token, -1 with none.
        state: terminal state; finish_reason: stop, length, error, cancelled or stale.
        attempts, interruptions, crashes: claims, deliberate hand-backs, lost workers.
        recomputed_tokens: prefix tokens that resumed attempts prefilled again.
        enqueued_at, started_at, finished_at: seconds since the epoch by Redis; 0.0 if never.
        reward: what the reward function made of it: a number or a dict of them; None without.
        prompt: the text or chat messages as submitted, None where token ids were.
    """

    id: str
    group_id: str
    index: int
    state: State
    finish_reason: str
    stop_reason: int | str | None
    error: str
    text: str
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.int32]
    response_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    segments: tuple[Segment, ...]
    attempts: int
    interruptions: int
    crashes: int
    recomputed_tokens: int
    logprobs_mode: str
    temperature: float
    top_p: float
    top_k: int
    enqueued_at: float
    started_at: float
    finished_at: float
    metadata: Any = None
    prompt: str | Messages | None = None
    reward: float | dict[str, Any] | None = None

    def __repr__(self) -> str:
        """Short: without arrays, and a long text cut."""
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        why = f", error={self.error!r}" if self.error else ""
        return (
            f"Rollout({self.id!r}, {self.state}, finish_reason={self.finish_reason!r}, "
            f"{len(self.response_ids)} tokens of versions {self.param_version_start} to "
            f"{self.param_version_end}, text={text!r}, reward={self.reward!r}{why})"
        )

    @property
    def trainable(self) -> bool:
        """It finished: it is not failed, cancelled, stale, dead or in the making."""
        return self.state is State.FINISHED

    @property
    def is_cancel(self) -> bool:
        return self.state is State.CANCELLED

    @property
    def param_version_start(self) -> int:
        return int(self.versions[0]) if len(self.versions) else -1

    @property
    def param_version_end(self) -> int:
        return int(self.versions[-1]) if len(self.versions) else -1

    def to_torch(self) -> dict[str, Any]:
        """Tensors on the CPU, with memory of their own: int64 `prompt_ids` [prompt tokens],
        and of [T] `response_ids`, `response_mask`, `versions` and float32
        `response_logprobs`."""
        import torch

        integers = ("prompt_ids", "response_ids", "response_mask", "versions")
        arrays = {name: getattr(self, name).astype(np.int64) for name in integers}
        arrays["response_logprobs"] = self.response_logprobs.copy()
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def to_verl(self) -> dict[str, Any]:
        """The fields of verl's `AgentLoopOutput`, by its names and with its plain lists.

        Those of its partial rollouts (`is_cancel`, `param_version_start`,
        `param_version_end`) stand both at the top, where the fully asynchronous trainer's
        subclass has them, and in `extra_fields`; `log_probs` is the same subclass's name for
        `response_logprobs`. `reward_score` is for the caller to set.
        """
        logprobs = self.response_logprobs.tolist()
        partial = {
            "is_cancel": self.is_cancel,
            "param_version_start": self.param_version_start,
            "param_version_end": self.param_version_end,
        }
        return {
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "response_mask": self.response_mask.tolist(),
            "response_logprobs": logprobs,
            "log_probs": logprobs,
            "reward_score": None,
            "num_turns": 2,
            "metrics": {"generate_sequences": max(0.0, self.finished_at - self.started_at)},
            **partial,
            "extra_fields": {**partial, "id": self.id, "finish_reason": self.finish_reason},
        }


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All samples of one prompt, in index order, each in a terminal state.

    `reward_error` says why no rollout has a reward although a reward function was asked for.
    """

    id: str
    rollouts: tuple[Rollout, ...]
    prompt_ids: NDArray[np.int32]
    metadata: Any
    reward_error: str = ""
    traceparent: str = ""
    #: where it lies in the results stream; `ack` needs it
    entry: str = field(repr=False, default="")

    @property
    def trainable(self) -> bool:
        """No member is failed, cancelled, stale or dead, and no grader failed."""
        return not self.reward_error and all(r.trainable for r in self.rollouts)
