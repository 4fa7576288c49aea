"""The outputs of one request of vLLM, as the worker takes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from producer.contract.errors import EngineDead, EngineError, InvalidSample
from workers.engines.protocol import EngineOutput


class VllmStream:
    """The outputs of one request. `aclose` and a cancelled wait abort the request."""

    def __init__(self, llm: Any, queue: Any) -> None:
        self._llm = llm
        self._queue = queue
        self._ended = False
        self._given = 0

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = self._queue.get_nowait() or await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except Exception as error:
            self._ended = True
            if not self._llm.errored and (last := _refusal(error)) is not None:
                return last
            raise EngineDead(f"vLLM's engine ended under the request: {error}") from error
        return self._convert(output.outputs[0])

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            await abort(self._llm, [self._queue.request_id], internal=True)

    def _convert(self, completion: Any) -> EngineOutput:
        tokens, flat, reason = completion.token_ids, completion.logprobs, completion.finish_reason
        logprobs = [flat.logprobs[i] for i in flat.start_indices] if tokens else []
        if len(tokens) != len(logprobs):
            raise EngineError(f"vLLM gave {len(tokens)} tokens and {len(logprobs)} logprobs")
        if reason is None:
            starts = self._starts()
        else:
            self._ended = True
            starts = [(span.version, span.start) for span in completion.weight_versions or ()]
            if reason not in ("stop", "length"):
                # Also vLLM's own `error`: the sample is whole so far and can be resumed.
                reason = "abort"
        begin, self._given = self._given, self._given + len(tokens)
        return EngineOutput(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            _runs(starts, begin, self._given),
            reason,
            completion.stop_reason if reason == "stop" else None,
        )

    def _starts(self) -> list[tuple[str, int]]:
        """At which token each version began, of a request that goes on."""
        try:
            state = self._llm.output_processor.request_states[self._queue.request_id]
            return list(state.weight_version_starts)
        except (AttributeError, KeyError) as error:
            raise EngineError(
                "this vLLM does not tell the weight version of tokens before their request "
                f"ends ({error!r}): use a version that rollq supports"
            ) from error


def _refusal(error: Exception) -> EngineOutput | None:
    """The last output of a request that a live engine refused; None for any other error.

    Raises:
        InvalidSample: the request is to blame.
    """
    from vllm.exceptions import RetryableRequestError, VLLMClientError

    if isinstance(error, VLLMClientError):
        raise InvalidSample(f"vLLM refuses the request: {error}") from error
    if isinstance(error, RetryableRequestError):
        # What reaches the core of vLLM 0.33 after a pause: the same as an abort without a token.
        return EngineOutput(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
    return None


async def abort(llm: Any, request_ids: list[str], *, internal: bool) -> None:
    """Ids that ended or never were do no harm, and a dead core has nothing to abort."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if not llm.errored:
        with contextlib.suppress(EngineDeadError):
            await llm.abort(request_ids, internal=internal)


def _runs(starts: Sequence[tuple[str, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """The part of a request's version spans that covers its tokens begin to end."""
    runs = []
    for index, (version, start) in enumerate(starts):
        stop = starts[index + 1][1] if index + 1 < len(starts) else end
        count = min(stop, end) - max(start, begin)
        if count > 0:
            runs.append((0 if version == "default" else int(version), count))
    if sum(count for _, count in runs) != end - begin:
        raise EngineError(f"vLLM gave versions {list(starts)} for tokens {begin} to {end}")
    return tuple(runs)
