"""An engine that answers every request at once: what remains is the cost of everything else.

For `rollq bench queue`. All of a request's tokens come in one output and are all the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidSample
from workers.engines.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PauseMode,
    Response,
    Stop,
)

_INFO = EngineInfo(
    model="null",
    max_model_len=1 << 20,
    max_num_seqs=1024,
    kv_cache_tokens=1 << 30,
    vocab_size=1 << 17,
    logprobs_mode="processed_logprobs",
)


@dataclass(slots=True)
class _Answer:
    """One output. An async generator that is left behind costs more than the sample."""

    tokens: int
    version: int

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        return EngineOutput(
            token_ids=np.ones(self.tokens, np.int32),
            logprobs=np.zeros(self.tokens, np.float32),
            versions=((self.version, self.tokens),),
            finish_reason="length",
        )


@dataclass(slots=True)
class NullEngine:
    """Implements `workers.engines.protocol.Engine`."""

    info: EngineInfo = _INFO
    progress: int = 0
    dead: str | None = None
    _version: int = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        request.check(self.info)
        self.progress += 1
        return _Answer(request.params.max_tokens or 0, self._version)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """None is ever running."""

    async def pause(self, mode: PauseMode) -> None:
        """Nothing steps."""

    def check(self, directory: Path) -> None:
        """Any weights do."""

    async def load(self, directory: Path, version: int) -> float:
        self._version = version
        return 0.0

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def encode(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        raise InvalidSample("the null engine has no tokenizer: give token ids")

    async def stop_of(self, response: Response) -> Stop | None:
        return None

    async def text_of(self, response: Response) -> str:
        return ""

    async def shutdown(self) -> None:
        """Nothing to end."""
