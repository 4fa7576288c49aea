"""A sample in this worker's hands: its tokens, what of them is stored, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from producer.contract.messages import Chunk, Claim
from producer.contract.sampling import SamplingParams
from workers.engines.protocol import EngineOutput, Response

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
#: half a megabyte: far below what a payload may have
_CHUNK_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A chunk at its place in the response."""

    offset: int
    chunk: Chunk
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.chunk.token_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How this attempt ended: what is to be reported once every token is stored."""

    kind: Literal["finish", "release", "fail", "crash"]
    reason: str
    stop_reason: str = ""
    text: str = ""


@dataclass(slots=True, eq=False)
class Held:
    """One claimed sample. Only the event loop's thread changes it.

    Every chunk of the response stays in `pieces`, also those of earlier attempts, so that
    all of it can be sent again to a Redis that lost its last second.
    """

    claim: Claim
    params: SamplingParams
    prompt_ids: NDArray[np.int32]
    worker: str
    logprobs_mode: str
    budget: int = 0
    pieces: list[Piece] = field(default_factory=list)
    stored: int = 0
    made: int = 0
    fresh: int = 0
    request_id: str = ""
    outcome: Outcome | None = None
    lost: bool = False
    _unsealed: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = field(
        default_factory=list
    )
    _unsealed_since: float = 0.0

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def waits_for_token(self) -> bool:
        """In the engine, and without a token of this attempt yet."""
        return bool(self.request_id) and self.fresh == 0 and self.outcome is None

    def add_stored(self, chunk: Chunk, data: bytes) -> None:
        """A chunk that an earlier attempt stored."""
        self.pieces.append(Piece(self.made, chunk, data))
        self.made += len(chunk.token_ids)
        self.stored = self.made

    def add_output(self, output: EngineOutput) -> None:
        """Tokens that the engine just made."""
        start = 0
        for version, tokens in output.versions:
            part = slice(start, start + tokens)
            if not self._unsealed:
                self._unsealed_since = time.monotonic()
            self._unsealed.append((version, output.token_ids[part], output.logprobs[part]))
            start += tokens
        self.made += start
        self.fresh += start

    def due(self, tokens: int, seconds: float) -> bool:
        """Are so many tokens unsealed, or is the oldest so old, or is this the end?"""
        if not self._unsealed:
            return self.stored < self.made or self.outcome is not None
        sealed = self.pieces[-1].end if self.pieces else 0
        return (
            self.outcome is not None
            or self.made - sealed >= tokens
            or time.monotonic() - self._unsealed_since >= seconds
        )

    def seal(self) -> None:
        """Turn what the engine made into chunks, one a run of a version."""
        while self._unsealed:
            version = self._unsealed[0][0]
            run = 0
            while run < len(self._unsealed) and self._unsealed[run][0] == version:
                run += 1
            parts, self._unsealed = self._unsealed[:run], self._unsealed[run:]
            _, token_ids, logprobs = parts[0]
            if run > 1:
                token_ids = np.concatenate([ids for _, ids, _ in parts])
                logprobs = np.concatenate([logprobs for _, _, logprobs in parts])
            for at in range(0, len(token_ids), _CHUNK_TOKENS):
                chunk = Chunk(
                    version=version,
                    worker=self.worker,
                    attempt=self.claim.attempts,
                    token_ids=token_ids[at : at + _CHUNK_TOKENS],
                    logprobs=logprobs[at : at + _CHUNK_TOKENS],
                    logprobs_mode=self.logprobs_mode,
                )
                offset = self.pieces[-1].end if self.pieces else 0
                self.pieces.append(Piece(offset, chunk, chunk.to_wire()))

    def unstored(self) -> list[Piece]:
        """Sealed pieces that Redis does not have yet, in order."""
        at = len(self.pieces)
        while at and self.pieces[at - 1].offset >= self.stored:
            at -= 1
        return self.pieces[at:]

    def response_ids(self) -> NDArray[np.int32]:
        """All response tokens so far, int32 [made]."""
        self.seal()
        parts = [p.chunk.token_ids for p in self.pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NO_IDS

    def response(self) -> Response:
        return Response(self.prompt_ids, self.response_ids(), self.params)
