"""Generating: one task a sample, from admission to its outcome."""

from __future__ import annotations

import json

import numpy as np

from producer.contract.errors import EngineDead, EngineError, InvalidSample
from workers import resume
from workers.admission import Admission
from workers.engines.protocol import EngineOutput, EngineRequest
from workers.held import Held, Outcome
from workers.report import Reporter
from workers.state import WorkerState


async def generate(
    state: WorkerState, admission: Admission, reporter: Reporter, held: Held
) -> None:
    """Run one sample until it has an outcome; every end is explained by it."""
    try:
        if held.outcome is None:
            held.outcome = await _attempt(state, admission, held)
    except InvalidSample as error:
        held.outcome = Outcome("fail", str(error))
    except EngineError as error:
        # Handed back already where a load failed, which is no sample's fault.
        held.outcome = held.outcome or Outcome(
            "crash", f"engine of worker {state.settings.name} died: {error}"
        )
        state.give_up(f"the engine died: {error}")
    state.moved.set()
    reporter.wake()


async def _attempt(state: WorkerState, admission: Admission, held: Held) -> Outcome:
    if held.made and (stop := await state.engine.stop_of(held.response())) is not None:
        # Whoever made its last token could not report the end.
        return await _finish(state, held, "stop", stop.reason)
    params = resume.rest(held.params, held.budget, held.claim.index, held.made)
    if params is None:
        return await _finish(state, held, "length", None)
    prompt_ids = np.concatenate([held.prompt_ids, held.response_ids()])
    async with admission:
        if state.stop.is_set() or held.lost:
            return Outcome("release", state.interruption)
        # An aborted request's late outputs must never meet its next attempt.
        held.request_id = f"{held.id}-{held.claim.lease_token.replace(':', '-')}"
        if held.claim.tokens:
            state.meter.recomputed_tokens += len(prompt_ids)
        request = EngineRequest(held.request_id, prompt_ids, params, held.made)
        outputs = await state.engine.add(request)
    if held.lost:
        # Lost on its way into the engine, which did not know the request then.
        await state.engine.abort([held.request_id])
    async for output in outputs:
        held.add_output(output)
        state.tokens += len(output.token_ids)
        state.moved.set()
        if output.finish_reason is not None:
            return await _end(state, held, output)
    raise EngineDead(f"the outputs of {held.request_id} ended without a finish_reason")


async def _end(state: WorkerState, held: Held, last: EngineOutput) -> Outcome:
    if last.finish_reason in ("stop", "length"):
        return await _finish(state, held, last.finish_reason, last.stop_reason)
    if held.made >= held.budget:
        return await _finish(state, held, "length", None)
    return Outcome("release", state.interruption)


async def _finish(
    state: WorkerState, held: Held, reason: str, stop_reason: int | str | None
) -> Outcome:
    text = await state.engine.text_of(held.response())
    return Outcome("finish", reason, "" if stop_reason is None else json.dumps(stop_reason), text)
