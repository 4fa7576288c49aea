"""Engines that make exactly as many tokens as a test allows, at the moment it allows them.

Their tokens are those of the simulated model, so `sim_model.replay` says what an uninterrupted
engine would have made. Nothing here depends on time: between two calls of a test nothing moves
but what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import EngineDead, InvalidSample, WeightLoadError
from tests.waiting import async_wait_until
from workers.engines import sim_model
from workers.engines.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PauseMode,
    Response,
    Stop,
)
from workers.engines.sim import SimEngine, SimSettings

MODEL = sim_model.HashModel(512)
_NEVER = 1e-9  # tokens a second

#: says how many tokens a request makes by itself after its admission; None: all it asks for
Plan = Callable[[EngineRequest], int | None]


def sample_of(request_id: str) -> str:
    """The sample's id out of `sample-attempt-nonce`."""
    return request_id.rsplit("-", 2)[0]


def attempts(*tokens: int) -> Plan:
    """The n-th request of each sample makes tokens[n], later ones all that they ask for."""
    seen: dict[str, int] = {}

    def plan(request: EngineRequest) -> int | None:
        sample = sample_of(request.request_id)
        nth = seen[sample] = seen.get(sample, -1) + 1
        return tokens[nth] if nth < len(tokens) else None

    return plan


@dataclass(eq=False)
class _Live:
    request: EngineRequest
    ids: list[int]
    allowed: int
    made: int = 0
    outputs: asyncio.Queue[EngineOutput | EngineDead] = field(default_factory=asyncio.Queue)


class StepEngine:
    """Implements `workers.engines.protocol.Engine`.

    Attributes:
        plan: see `Plan`; by default each request runs to its end at once.
        requests: every request that was added, in order; `paused` and `loads`: what was asked.
        add_gate, load_gate, encode_gate: while clear, the calls of that name wait there.
        at_pause: called at the beginning of a pause, in the same tick.
        refuse, fail_loads: sample ids and versions that are refused with these errors.
        template: makes the ids of a prompt that is text or chat.
    """

    def __init__(self, plan: Plan | None = None, *, max_model_len: int = 4096) -> None:
        self.plan: Plan = plan or (lambda request: None)
        self.max_model_len = max_model_len
        self.max_num_seqs = 256
        self.kv_cache_tokens = 1 << 18
        self.requests: list[EngineRequest] = []
        self.ended: list[tuple[str, str]] = []
        self.paused: list[PauseMode] = []
        self.loads: list[int] = []
        self.add_gate = asyncio.Event()
        self.load_gate = asyncio.Event()
        self.encode_gate = asyncio.Event()
        self.at_pause: Callable[[], None] = lambda: None
        self.refuse: dict[str, str] = {}
        self.fail_loads: set[int] | dict[int, str] = set()
        self.template: Callable[[Any], NDArray[np.int32]] = lambda prompt: sim_model.encode(
            prompt if isinstance(prompt, str) else sim_model.chat_text(prompt), 512
        )
        self.version = 0
        self.progress = 0
        self.dead: str | None = None
        self.live: dict[str, _Live] = {}
        self._stepping = True
        for gate in (self.add_gate, self.load_gate, self.encode_gate):
            gate.set()

    # what a test does

    def allow(self, tokens: int, sample: str | None = None, *, ended: bool = True) -> None:
        """Make so many more tokens of this sample, or of each that is here.

        Without `ended` the last token does not end the request, as when an abort comes between.
        """
        chosen = [
            live
            for live in self.live.values()
            if sample in (None, sample_of(live.request.request_id))
        ]
        assert chosen, f"{sample or 'nothing'} is not in the engine yet: wait for its admission"
        for live in chosen:
            live.allowed += tokens
            self._step(live, ended)

    def end(self, sample: str, reason: str = "stop") -> None:
        """End a sample as its EOS would."""
        for live in list(self.live.values()):
            if sample == sample_of(live.request.request_id):
                self._end(live, reason)

    def crash(self, reason: str = "crashed on command") -> None:
        self.dead = reason
        for live in self.live.values():
            live.outputs.put_nowait(EngineDead(reason))
        self.live.clear()

    def asked(self, sample: str) -> list[tuple[int, int, int]]:
        """(prompt tokens, max_tokens, min_tokens) of each request of a sample."""
        return [
            (len(r.prompt_ids), r.params.max_tokens or 0, r.params.min_tokens)
            for r in self.requests
            if sample_of(r.request_id) == sample
        ]

    # what a worker asks

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="step",
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_tokens=self.kv_cache_tokens,
            vocab_size=512,
            logprobs_mode="processed_logprobs",
        )

    async def start(self) -> None:
        """Nothing to load."""

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        await self.add_gate.wait()
        self._check_alive()
        if reason := self.refuse.get(sample_of(request.request_id)):
            raise InvalidSample(reason)
        ids = request.prompt_ids.tolist()
        if not ids or min(ids) < 0 or max(ids) >= 512:
            raise InvalidSample(f"a prompt id of {ids} is outside the vocabulary")
        most = request.params.max_tokens
        assert most is not None
        assert len(ids) + most <= self.max_model_len
        planned = self.plan(request)
        live = _Live(request, ids, most if planned is None else planned)
        self.live[request.request_id] = live
        self._step(live)
        return _outputs(live)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if live := self.live.get(request_id):
                self._end(live, "abort")

    async def pause(self, mode: PauseMode) -> None:
        self._check_alive()
        self.paused.append(mode)
        self.at_pause()
        self._check_alive()
        self._stepping = False
        if mode == "abort":
            await self.abort(list(self.live))

    def check(self, directory: Path) -> None:
        """Any weights do."""

    async def load(self, directory: Path, version: int) -> float:
        await self.load_gate.wait()
        self._check_alive()
        self.loads.append(version)
        if version in self.fail_loads:
            reasons = self.fail_loads if isinstance(self.fail_loads, dict) else {}
            reason = reasons.get(version, f"version {version} is set to fail")
            self.crash(reason)
            raise WeightLoadError(reason)
        self.version = version
        return 0.0

    async def resume(self) -> None:
        self._check_alive()
        self._stepping = True
        for live in list(self.live.values()):
            self._step(live)

    async def encode(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        await self.encode_gate.wait()
        return self.template(prompt)

    async def stop_of(self, response: Response) -> Stop | None:
        return sim_model.stop_of(response)

    async def text_of(self, response: Response) -> str:
        return sim_model.text_of(response)

    async def shutdown(self) -> None:
        if self.dead is None:
            self.crash("shut down")

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)

    def _step(self, live: _Live, ended: bool = True) -> None:
        """Make what is allowed, in one output."""
        params = live.request.params
        assert params.max_tokens is not None
        count = min(live.allowed, params.max_tokens) - live.made
        if not self._stepping or count <= 0:
            return
        self.progress += 1
        tokens, logprobs = sim_model.replay(
            MODEL,
            live.ids,
            [self.version] * count,
            seed=params.seed,
            temperature=params.temperature,
        )
        live.ids += tokens
        live.made += count
        last = "length" if ended and live.made == params.max_tokens else None
        if last:
            self._forget(live, last)
        live.outputs.put_nowait(
            EngineOutput(
                np.array(tokens, np.int32),
                np.array(logprobs, np.float32),
                ((self.version, count),),
                last,
            )
        )

    def _end(self, live: _Live, reason: str) -> None:
        self._forget(live, reason)
        none = np.empty(0, np.int32)
        live.outputs.put_nowait(EngineOutput(none, none.astype(np.float32), (), reason))

    def _forget(self, live: _Live, reason: str) -> None:
        del self.live[live.request.request_id]
        self.ended.append((sample_of(live.request.request_id), reason))


class SteppedSim(SimEngine):
    """The simulated engine with its scheduler and its outputs, that steps when a test says so."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SimSettings(token_rate=_NEVER, **settings))

    async def in_engine(self, count: int) -> None:
        await async_wait_until(lambda: len(self._batch.live) == count, f"{count} are in the engine")

    def steps(self, count: int) -> None:
        """Each makes a token of every sequence that runs; the first ones compute the prompts."""
        for _ in range(count):
            self._step()

    async def go_on(self) -> None:
        """Step until cancelled, others having their turns in between."""
        while True:
            self._step()
            await asyncio.sleep(0)


async def _outputs(live: _Live) -> AsyncIterator[EngineOutput]:
    while True:
        output = await live.outputs.get()
        if isinstance(output, EngineDead):
            raise output
        yield output
        if output.finish_reason is not None:
            return
