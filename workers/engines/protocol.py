"""What a worker asks of an engine, and nothing more.

`vllm.py` and `sim.py` implement it. Guarantees that the worker relies on:

- A request that `add` returned from has been admitted: `pause("abort")` ends it.
- Every request ends with exactly one output that has a `finish_reason`; together its
  outputs hold every token that the engine made, each once, in order, and none after a stop.
- The version of a token is the one whose weights computed it.
- After `load` returned, no token and no cached prefix of older weights is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams

PauseMode = Literal["abort", "keep"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a started engine, all counts in tokens or sequences."""

    model: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    vocab_size: int
    logprobs_mode: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt: the prompt and the response so far, and what is left to make.

    `params` is already what this attempt asks for: `max_tokens` is the rest (never None,
    at least 1), `min_tokens` and `seed` are adjusted, `n` is ignored. The last `done` of
    `prompt_ids` are response: a stop string may begin among them.
    """

    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    done: int = 0

    def check(self, info: EngineInfo) -> None:
        """Raises InvalidSample: it can never run on such an engine."""
        ids = self.prompt_ids
        if len(ids) == 0:
            raise InvalidSample("the prompt is empty")
        outside = ids[(ids < 0) | (ids >= info.vocab_size)]
        if len(outside):
            raise InvalidSample(
                f"prompt id {outside[0]} is outside the vocabulary of {info.vocab_size}"
            )
        asked = self.params.max_tokens
        if asked is None or len(ids) + asked > info.max_model_len:
            raise InvalidSample(
                f"a prompt of {len(ids)} tokens and max_tokens={asked} do not fit "
                f"max_model_len={info.max_model_len}"
            )


@dataclass(frozen=True, slots=True)
class Response:
    """All tokens of a response so far, whoever made them, and what the trainer asked for."""

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a response with `stop`: a stop string, the id of a token, None for EOS."""

    reason: int | str | None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Tokens made since the last output of the same request (may be none).

    `versions` are runs `(weight version, tokens)` that sum to `len(token_ids)`.
    `finish_reason` is `stop`, `length` or `abort` on the last output, else None.
    `stop_reason` is the stop string or token id that ended it, None for EOS.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Engine(Protocol):
    """An engine in this process's event loop; its heavy part may be elsewhere."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def dead(self) -> str | None:
        """Why the engine can never serve again, or None."""

    @property
    def progress(self) -> int:
        """A number that grows while the engine steps; watched by the lease thread."""

    async def start(self) -> None:
        """Load the model at version 0. Raises EngineError with the reason."""

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Admit a request and return its outputs; while paused this may wait for the resume.

        The iterator's `aclose` aborts the request, as does a cancelled wait for an output.

        Raises:
            InvalidSample: this request can never run (too long, a bad id or parameter).
            EngineDead: the engine is gone. The iterator raises it, too.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with `finish_reason="abort"`; unknown and ended ids are no error."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `abort` also ends every admitted request; `keep` freezes them."""

    def check(self, directory: Path) -> None:
        """Refuse weights that are not this model's; called in a thread, while it generates.

        Raises:
            WeightsError: naming the tensors that are missing, unknown or of another shape.
        """

    async def load(self, directory: Path, version: int) -> float:
        """Load weights while paused, drop every cache, and serve them as `version`.

        Reads the version back from the engine before it returns; returns the seconds that
        this and the caches took.

        Raises:
            WeightLoadError: the weights may be half loaded: the engine must not serve.
        """

    async def resume(self) -> None:
        """Step again; requests added while paused now run."""

    async def encode(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        """Token ids of a text, or of chat messages through the model's chat template.

        Raises InvalidSample where the model has no tokenizer or no template.
        """

    async def stop_of(self, response: Response) -> Stop | None:
        """What stops a response (of one token or more) at its last token, if anything does.

        It never stopped before: no engine gives a token after a stop, so none is stored.
        """

    async def text_of(self, response: Response) -> str:
        """Text of a response that has ended, as one uninterrupted request would have given it.

        Without the id, or the string unless asked for, that stopped it; empty without a
        tokenizer.
        """

    async def shutdown(self) -> None:
        """End every process of the engine. Safe to call twice and on a dead engine."""
