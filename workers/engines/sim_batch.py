"""The scheduler of the simulated engine: sequences wait, run as a batch, end.

Synchronous and without a clock of its own. One step costs a handful of numpy calls, however
many sequences run; Python looks only at those that end, fill an output or have stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workers.engines import sim_model
from workers.engines.protocol import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from workers.engines.sim import SimSettings

_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class Running:
    """A request in the batch.

    While it has a `row` its counts are in the arrays of the batch; else here. `runs` are the
    versions of the tokens not yet given out, as far as a version has ended.
    """

    request: EngineRequest
    stream: Any
    prefix: int
    position: int
    limit: int
    made: int = 0
    row: int = -1
    admission: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    runs: list[tuple[int, int]] = field(default_factory=list)
    tail: bytes = b""


class Poison(Exception):
    """A prompt that does harm was to be computed: `kind` is crash, kill or hang."""

    def __init__(self, kind: str, request_id: str) -> None:
        super().__init__(f"request {request_id} holds the id set to {kind} the engine")
        self.kind = kind


class Batch:
    """All requests of an engine: first come, first served, the newest preempted first."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._model = settings.model()
        self._poison = {
            kind: token
            for kind in ("crash", "kill", "hang")
            if (token := getattr(settings, f"{kind}_id")) is not None
        }
        self._version = 0
        self._admissions = 0
        self._prefill_until = 0.0
        self._new_tokens = 0  # of prompts that came in since the last step began
        self.live: dict[str, Running] = {}
        self._waiting: deque[Running] = deque()
        rows, width = settings.max_num_seqs, settings.stream_interval
        self._rows: list[Running | None] = [None] * rows
        self._ready_at = np.full(rows, np.inf)
        self._prefix = np.zeros(rows, np.uint64)
        self._seed = np.zeros(rows, np.uint64)
        self._position = np.zeros(rows, np.int64)
        self._made = np.zeros(rows, np.int64)
        self._limit = np.zeros(rows, np.int64)
        self._min_tokens = np.zeros(rows, np.int64)
        self._ignore_eos = np.zeros(rows, np.bool_)
        self._has_stops = np.zeros(rows, np.bool_)
        self._pending = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, width), np.int32)
        self._logprobs = np.zeros((rows, width), np.float32)

    def add(self, request: EngineRequest, stream: Any) -> None:
        """Put a request that was found valid at the end of the line."""
        ids = request.prompt_ids
        left = self._settings.max_model_len - len(ids)
        running = Running(
            request=request,
            stream=stream,
            prefix=sim_model.prefix_number(ids),
            position=len(ids),
            limit=min(request.params.max_tokens or left, left),
        )
        if request.done and request.params.stop:
            before = sim_model.bytes_of(
                ids[len(ids) - request.done :], request.params.skip_special_tokens
            )
            running.tail = _may_begin(before, request.params.stop)
        self.live[request.request_id] = running
        self._waiting.append(running)

    def end(
        self, running: Running, finish_reason: str, stop_reason: int | str | None = None
    ) -> EngineOutput:
        """Take a request out; its last output holds what was not given out yet."""
        del self.live[running.request.request_id]
        if running.row < 0:
            self._waiting.remove(running)
        output = self._take(running, finish_reason, stop_reason)
        self._vacate(running)
        return output

    def set_version(self, version: int) -> None:
        """Tokens made so far, given out or not, stay of the version before.

        What is cached of them does not: all prefixes are computed again, the oldest first.
        """
        for running in self.live.values():
            self._close_run(running)
        self._version = version
        rows = [r for r in self._rows if r is not None]
        for running in sorted(rows, key=lambda r: -r.admission):
            self._vacate(running)
            self._waiting.appendleft(running)

    def next_ready(self) -> float:
        """When the first prompt is computed; infinity if none is being computed."""
        return float(self._ready_at.min())

    def begin(self, now: float) -> float:
        """With `step_seconds`, before each step: let in who waits; return what the step takes.

        Raises:
            Poison: before the step changed anything but who waits.
        """
        self._admit(now)
        s, new = self._settings, self._new_tokens
        self._new_tokens = 0
        sequences = sum(r is not None for r in self._rows)
        prefill = new / s.prefill_rate if s.prefill_rate else 0.0
        return s.step_seconds + s.sample_seconds * sequences + prefill

    def step(self, now: float) -> list[tuple[Running, EngineOutput]] | None:
        """Make one token of every sequence whose prompt is computed; None if there is none.

        Raises:
            Poison: before the step changed anything but who waits.
        """
        if not self._settings.step_seconds:
            self._admit(now)
        rows = self._fit_cache(np.flatnonzero(self._ready_at <= now))
        if not len(rows):
            return None
        tokens, logprobs, eos = self._model.next(
            self._prefix[rows], self._seed[rows], self._version
        )
        eos &= self._made[rows] >= self._min_tokens[rows]
        tokens[eos] = sim_model.EOS
        eos &= ~self._ignore_eos[rows]
        ends: dict[int, tuple[str, int | str | None]] = {
            row: ("stop", None) for row in rows[eos].tolist()
        }
        for at in np.flatnonzero(self._has_stops[rows] & ~eos).tolist():
            reason = self._stop(self._at(int(rows[at])), tokens, at)
            if reason is not None:
                ends[int(rows[at])] = ("stop", reason)
        self._append(rows, tokens, logprobs)
        for row in rows[self._made[rows] >= self._limit[rows]].tolist():
            ends.setdefault(row, ("length", None))
        due = (self._made[rows] == 1) | (self._pending[rows] == self._settings.stream_interval)
        outputs = []
        for row in rows[due].tolist():
            if row not in ends:
                running = self._at(row)
                outputs.append((running, self._take(running, None, None)))
        for row, (finish_reason, stop_reason) in ends.items():
            running = self._at(row)
            outputs.append((running, self.end(running, finish_reason, stop_reason)))
        return outputs

    def _append(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        pending = self._pending[rows]
        self._tokens[rows, pending] = tokens
        self._logprobs[rows, pending] = logprobs
        self._prefix[rows] += sim_model.prefix_terms(tokens, self._position[rows])
        self._position[rows] += 1
        self._made[rows] += 1
        self._pending[rows] = pending + 1

    def _admit(self, now: float) -> None:
        while self._waiting:
            running = self._waiting[0]
            row = next((i for i, other in enumerate(self._rows) if other is None), -1)
            if row < 0 or self._cached() + running.position >= self._settings.kv_cache_tokens:
                return
            for kind, token in self._poison.items():
                if token in running.request.prompt_ids:
                    raise Poison(kind, running.request.request_id)
            self._waiting.popleft()
            self._occupy(running, row, now)

    def _cached(self) -> int:
        return int(self._position[np.isfinite(self._ready_at)].sum())

    def _fit_cache(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send the newest back to wait until the next token of all others fits."""
        while len(rows) and self._cached() + len(rows) > self._settings.kv_cache_tokens:
            newest = max((r for r in self._rows if r is not None), key=lambda r: r.admission)
            rows = rows[rows != newest.row]
            self._vacate(newest)
            self._waiting.appendleft(newest)
        return rows

    def _occupy(self, running: Running, row: int, now: float) -> None:
        self._admissions += 1
        running.row, running.admission = row, self._admissions
        params, pending = running.request.params, len(running.tokens)
        self._rows[row] = running
        self._prefix[row] = running.prefix
        self._seed[row] = sim_model.seed_number(params.seed, params.temperature)
        self._position[row], self._made[row] = running.position, running.made
        self._limit[row], self._min_tokens[row] = running.limit, params.min_tokens
        self._ignore_eos[row] = params.ignore_eos
        self._has_stops[row] = bool(params.stop or params.stop_token_ids)
        self._pending[row] = pending
        self._tokens[row, :pending] = running.tokens
        self._logprobs[row, :pending] = running.logprobs
        self._new_tokens += running.position
        if self._settings.prefill_rate and not self._settings.step_seconds:
            # Prompts are computed one after the other, beside the steps of the others.
            now = max(now, self._prefill_until) + running.position / self._settings.prefill_rate
            self._prefill_until = now
        self._ready_at[row] = now

    def _vacate(self, running: Running) -> None:
        row = running.row
        if row < 0:
            return
        pending = self._pending[row]
        running.tokens = self._tokens[row, :pending].copy()
        running.logprobs = self._logprobs[row, :pending].copy()
        running.prefix = int(self._prefix[row])
        running.position, running.made = int(self._position[row]), int(self._made[row])
        running.row = -1
        self._rows[row] = None
        self._ready_at[row] = np.inf

    def _stop(self, running: Running, tokens: NDArray[np.int32], at: int) -> int | str | None:
        """Stop ids and strings, as in vLLM: below min_tokens another token replaces a stop id."""
        params = running.request.params
        token, made = int(tokens[at]), int(self._made[running.row]) + 1
        if token in params.stop_token_ids:
            if made > params.min_tokens:
                return token
            token = next(i for i in self._model.ids.tolist() if i not in params.stop_token_ids)
            tokens[at] = token
        new = sim_model.token_bytes(token, params.skip_special_tokens)
        text = running.tail + new
        running.tail = _may_begin(text, params.stop)
        # Only a match that this token completes.
        match = sim_model.completed(text, len(new), params.stop)
        return match[0] if match and made > params.min_tokens else None

    def _take(
        self, running: Running, finish_reason: str | None, stop_reason: int | str | None
    ) -> EngineOutput:
        """Everything made since the last output."""
        self._close_run(running)
        row = running.row
        if row < 0:
            tokens, logprobs = running.tokens, running.logprobs
        else:
            pending = self._pending[row]
            tokens = self._tokens[row, :pending].copy()
            logprobs = self._logprobs[row, :pending].copy()
            self._pending[row] = 0
        running.tokens, running.logprobs = _NO_TOKENS, _NO_LOGPROBS
        runs, running.runs = tuple(running.runs), []
        return EngineOutput(tokens, logprobs, runs, finish_reason, stop_reason)

    def _close_run(self, running: Running) -> None:
        pending = len(running.tokens) if running.row < 0 else int(self._pending[running.row])
        new = pending - sum(count for _, count in running.runs)
        if new:
            running.runs.append((self._version, new))

    def _at(self, row: int) -> Running:
        running = self._rows[row]
        if running is None:
            raise RuntimeError(f"row {row} of the simulated engine is empty")
        return running


def _may_begin(text: bytes, stops: Sequence[str]) -> bytes:
    """The end of a text, as far as a stop string may begin there."""
    keep = max((len(stop.encode()) for stop in stops), default=1) - 1
    return text[len(text) - min(keep, len(text)) :]
