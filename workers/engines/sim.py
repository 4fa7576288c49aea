"""A simulated engine: a model that is a hash (`sim_model.py`), a real scheduler (`sim_batch.py`).

Made for the demo, for tests and for benchmarks of everything around an engine
(`rollq worker --engine sim`); it needs neither torch nor a model.

What it guarantees:

- A token, its logprob and whether the sample stops there depend on nothing but the ids
  before it, the seed (none at temperature 0) and the weight version. So a sample that
  was interrupted and goes on elsewhere equals the uninterrupted one under the same
  versions, and one id lost, doubled or misplaced in a prefix changes all that follows.
- Requests wait, run, are preempted for want of KV cache and are aborted as in vLLM: with
  their tokens, in outputs of `stream_interval` after a first one that holds one token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import (
    EngineDead,
    InvalidSample,
    WeightLoadError,
    WeightsError,
)
from producer.contract.manifest import Manifest
from workers.engines import sim_model
from workers.engines.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PauseMode,
    Response,
    Stop,
)
from workers.engines.sim_batch import Batch, Poison

#: With no token rate the loop is given back after this many seconds of stepping.
_SLICE_SECONDS = 0.001
#: While prompts are computed and nothing steps.
_LONGEST_SLEEP = 0.1
#: Steps are not made up for beyond this: a loop that was blocked is not a fast engine.
_CATCH_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SimSettings:
    """How the simulated engine behaves. Rates are a second, 0 for as fast as possible.

    With `step_seconds` a step takes so long, `sample_seconds` more for each sequence in it, and
    its new prompts at `prefill_rate`, which delay all others as on a GPU; else `token_rate`
    steps are made a second and prompts are computed beside them. `late_seconds` delays the
    last outputs of aborted requests. `fail_versions` are loads that fail. A prompt that holds
    `crash_id` kills the engine when it is computed, `kill_id` the process (SIGKILL), and at
    `hang_id` the engine stops stepping.
    """

    vocab_size: int = 512
    max_model_len: int = 4096
    max_num_seqs: int = 256
    kv_cache_tokens: int = 1 << 18
    token_rate: float = 0.0
    prefill_rate: float = 0.0
    step_seconds: float = 0.0
    sample_seconds: float = 0.0
    mean_tokens: float = 0.0
    stream_interval: int = 16
    start_seconds: float = 0.0
    add_seconds: float = 0.0
    load_seconds: float = 0.0
    late_seconds: float = 0.0
    fail_versions: tuple[int, ...] = ()
    crash_id: int | None = None
    kill_id: int | None = None
    hang_id: int | None = None

    def __post_init__(self) -> None:
        if self.kv_cache_tokens < self.max_model_len:
            raise ValueError(
                f"kv_cache_tokens={self.kv_cache_tokens} cannot hold one sequence of "
                f"max_model_len={self.max_model_len}"
            )
        if self.max_num_seqs < 1 or self.stream_interval < 1:
            raise ValueError("max_num_seqs and stream_interval must be at least 1")
        if self.token_rate and self.step_seconds:
            raise ValueError("token_rate and step_seconds both say how long a step takes")
        if self.sample_seconds and not self.step_seconds:
            raise ValueError("sample_seconds needs step_seconds")

    @classmethod
    def parse(cls, text: str) -> SimSettings:
        """Read `name=value,name=value`; several versions are written `3+5`.

        Raises:
            ValueError: a name that is not a setting or a value that does not fit.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name not in fields:
                raise ValueError(
                    f"{part!r} is no setting of the simulated engine; these are: "
                    + ", ".join(fields)
                )
            try:
                if name == "fail_versions":
                    values[name] = tuple(int(v) for v in value.split("+"))
                else:
                    values[name] = float(value) if fields[name].type == "float" else int(value)
            except ValueError:
                raise ValueError(f"{name}={value!r} is not a number") from None
        return cls(**values)

    def model(self) -> sim_model.HashModel:
        poison = {i for i in (self.crash_id, self.kill_id, self.hang_id) if i is not None}
        stop = 1.0 / self.mean_tokens if self.mean_tokens > 0 else 0.0
        return sim_model.HashModel(self.vocab_size, min(stop, 1.0), frozenset(poison))


class _Stream:
    """The outputs of one request. `aclose` and a cancelled wait abort the request."""

    def __init__(self, engine: SimEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._queue: asyncio.Queue[EngineOutput | EngineDead] = asyncio.Queue()
        self._ended = False

    def put(self, output: EngineOutput | EngineDead) -> None:
        self._queue.put_nowait(output)

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(output, EngineDead):
            self._ended = True
            raise output
        self._ended = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            await self._engine.abort([self._request_id])


class SimEngine:
    """Implements `workers.engines.protocol.Engine`; one task steps all sequences."""

    def __init__(self, settings: SimSettings | None = None, *, model: str = "sim") -> None:
        self.settings = settings or SimSettings()
        self._name = model
        self._batch = Batch(self.settings)
        self._dead: str | None = None
        self._ended = asyncio.Event()
        self._hung = False
        self._paused = False
        self._progress = 0
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._late: dict[_Stream, asyncio.TimerHandle] = {}

    @property
    def info(self) -> EngineInfo:
        s = self.settings
        return EngineInfo(
            model=self._name,
            max_model_len=s.max_model_len,
            max_num_seqs=s.max_num_seqs,
            kv_cache_tokens=s.kv_cache_tokens,
            vocab_size=s.vocab_size,
            logprobs_mode="processed_logprobs",
        )

    @property
    def dead(self) -> str | None:
        return self._dead

    @property
    def progress(self) -> int:
        return self._progress

    async def start(self) -> None:
        await asyncio.sleep(self.settings.start_seconds)
        self._task = asyncio.create_task(self._run(), name="sim-engine")
        self._task.add_done_callback(self._run_ended)

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self._check_alive()
        self._check_request(request)
        if self.settings.add_seconds:
            await asyncio.sleep(self.settings.add_seconds)
            self._check_alive()
        stream = _Stream(self, request.request_id)
        self._batch.add(request, stream)
        self._wake()
        return stream

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            running = self._batch.live.get(request_id)
            if running is not None:
                self._give_late(running.stream, self._batch.end(running, "abort"))

    async def pause(self, mode: PauseMode) -> None:
        await self._answer()
        self._paused = True
        self._work.clear()
        if mode == "abort":
            await self.abort(list(self._batch.live))

    def check(self, directory: Path) -> None:
        """Any weights are a hash's."""

    async def load(self, directory: Path, version: int) -> float:
        await self._answer()
        if not self._paused:
            raise WeightLoadError(f"cannot load {directory} while stepping: pause first")
        await asyncio.sleep(self.settings.load_seconds)
        self._check_alive()
        reason = await asyncio.to_thread(_weights_problem, directory)
        if version in self.settings.fail_versions:
            reason = f"version {version} is set to fail"
        if reason is not None:
            self._dead = f"version {version} did not load from {directory}: {reason}"
            raise WeightLoadError(self._dead)
        self._batch.set_version(version)
        return 0.0

    async def resume(self) -> None:
        await self._answer()
        self._paused = False
        self._wake()

    async def encode(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        text = prompt if isinstance(prompt, str) else sim_model.chat_text(prompt)
        return sim_model.encode(text, self.settings.vocab_size)

    async def stop_of(self, response: Response) -> Stop | None:
        return sim_model.stop_of(response)

    async def text_of(self, response: Response) -> str:
        return sim_model.text_of(response)

    async def shutdown(self) -> None:
        self._die("the engine was shut down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def crash(self, reason: str = "crashed on command") -> None:
        """Die as an engine does whose core was killed."""
        self._die(reason)

    def hang(self) -> None:
        """Stop stepping and answering, without an error, as a stuck kernel does."""
        self._hung = True
        self._work.clear()

    async def _run(self) -> None:
        timed = self.settings.token_rate or self.settings.step_seconds
        while True:
            await self._work.wait()
            due = time.monotonic()
            due += self._step_takes(due)
            while self._work.is_set():
                if not timed:
                    await asyncio.sleep(self._step_for(_SLICE_SECONDS))
                    continue
                now = time.monotonic()
                if now - due > _CATCH_UP_SECONDS:
                    due = now
                while due <= now and self._work.is_set():
                    self._step()
                    due += self._step_takes(due)
                await asyncio.sleep(max(due - now, _SLICE_SECONDS))

    def _step_takes(self, now: float) -> float:
        """Seconds to the end of the step that begins now."""
        if not self.settings.step_seconds:
            return 1.0 / self.settings.token_rate if self.settings.token_rate else 0.0
        try:
            return self._batch.begin(now)
        except Poison as poison:
            self._harm(poison)
            return self.settings.step_seconds

    def _step_for(self, seconds: float) -> float:
        """Step as often as that time allows; return how long there is nothing to do."""
        until = time.monotonic() + seconds
        while self._work.is_set() and (now := time.monotonic()) < until:
            if not self._step():
                return min(max(self._batch.next_ready() - now, 0.0), _LONGEST_SLEEP)
        return 0.0

    def _step(self) -> bool:
        """One step of the batch; False if there was nothing to compute."""
        if not self._work.is_set():
            return False
        self._progress += 1
        try:
            outputs = self._batch.step(time.monotonic())
        except Poison as poison:
            self._harm(poison)
            return False
        for running, output in outputs or ():
            running.stream.put(output)
        if not self._batch.live:
            self._work.clear()
        return outputs is not None

    def _harm(self, poison: Poison) -> None:
        if poison.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if poison.kind == "hang":
            self.hang()
        else:
            self._die(str(poison))

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"the simulated engine failed: {error!r}")

    def _give_late(self, stream: _Stream, output: EngineOutput) -> None:
        if not self.settings.late_seconds:
            return stream.put(output)

        def give() -> None:
            del self._late[stream]
            stream.put(output)

        loop = asyncio.get_running_loop()
        self._late[stream] = loop.call_later(self.settings.late_seconds, give)

    def _wake(self) -> None:
        if self._batch.live and not (self._paused or self._hung or self._dead):
            self._work.set()

    async def _answer(self) -> None:
        """Return as a live engine does; a hung one never answers."""
        self._check_alive()
        if self._hung:
            await self._ended.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the simulated engine is dead: {self._dead}")
        if self._task is None:
            raise EngineDead("the simulated engine was not started")

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._work.clear()
        self._ended.set()
        for timer in self._late.values():
            timer.cancel()
        streams = [*self._late, *(r.stream for r in self._batch.live.values())]
        self._late.clear()
        for running in list(self._batch.live.values()):
            self._batch.end(running, "abort")
        for stream in streams:
            stream.put(EngineDead(f"the simulated engine is dead: {self._dead}"))

    def _check_request(self, request: EngineRequest) -> None:
        request.check(self.info)
        if request.request_id in self._batch.live:
            raise InvalidSample(f"request id {request.request_id!r} is in use")


def _weights_problem(directory: Path) -> str | None:
    """What keeps a publication from loading: its manifest, or files it does not fit."""
    try:
        for name, (size, _) in Manifest.read(directory).files.items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, its manifest says {size}"
    except (WeightsError, OSError) as error:
        return str(error)
    return None
