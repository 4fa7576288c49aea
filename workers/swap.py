"""Swapping: the part of an update in which this worker does not generate.

close admission -> every admitted sample has made a token -> pause -> hand back, while loading
-> caches dropped, version read back -> resume -> confirm. Each part is timed.
"""

from __future__ import annotations

import time
from pathlib import Path

from producer.contract.errors import EngineDead, EngineError, WeightLoadError
from producer.contract.states import UpdatePolicy, WeightState
from workers.admission import Admission
from workers.held import Outcome
from workers.level import Level, Publication
from workers.report import Reporter
from workers.state import UpdateTimes, WorkerState, log


class Swapper:
    """Loads new weights under the samples in flight, as the publication's policy says."""

    def __init__(
        self, state: WorkerState, level: Level, admission: Admission, reporter: Reporter
    ) -> None:
        self._state = state
        self._level = level
        self._admission = admission
        self._reporter = reporter

    async def swap(self, publication: Publication, directory: Path) -> bool:
        """True when it serves them; False when a newer version came, or the worker must end."""
        state = self._state
        started = time.monotonic()
        state.phase = "updating"
        state.load_deadline = started + state.settings.load_seconds + publication.deadline_s
        try:
            await self._admission.close()
            if not await self._may_stop(publication):
                return False
            state.update_times = times = await self._load(publication, directory, started)
            state.meter.update_idle.observe(times.idle)
        except WeightLoadError as error:
            for held in state.in_engine():
                held.outcome = Outcome("release", "failure")
            self._reporter.wake()
            await self._level.confirm(publication.version, str(error))
            state.give_up(f"loading version {publication.version} failed: {error}")
            return False
        except EngineError as error:
            state.update_failed(publication.version)
            state.give_up(f"the engine failed during an update: {error}")
            return False
        finally:
            state.load_deadline = 0.0
            state.phase = "serving"
            # Also after a failure: whoever waits there sees the stop and hands back.
            self._admission.open()
            state.free.set()
        await self._prove(publication.version, times)
        return not state.stop.is_set()

    async def _may_stop(self, publication: Publication) -> bool:
        """Wait for what must come first; False if a newer publication came in the meantime."""
        state = self._state
        # Updates that come faster than a first token must not starve a sample.
        await state.until(
            lambda: not any(h.waits_for_token for h in state.held.values()),
            state.settings.first_token_seconds,
        )
        if publication.policy != UpdatePolicy.FINISH:
            return True
        newest = state.current
        await state.until(
            lambda: not state.in_engine() or state.current != newest, publication.deadline_s
        )
        return state.current == newest

    async def _load(self, publication: Publication, directory: Path, started: float) -> UpdateTimes:
        """From here to the end the engine makes no token."""
        state = self._state
        closed = time.monotonic()
        if publication.policy == UpdatePolicy.KEEP:
            await state.engine.pause("keep")
        else:
            await interrupt(state, self._reporter, "update")
        paused = time.monotonic()
        reset = await state.engine.load(directory, publication.version)
        state.version = publication.version
        loaded = time.monotonic()
        state.resumes()
        await state.engine.resume()
        return UpdateTimes(
            close=closed - started,
            pause=paused - closed,
            load=loaded - paused - reset,
            reset=reset,
            resume=time.monotonic() - loaded,
        )

    async def _prove(self, version: int, times: UpdateTimes) -> None:
        state = self._state
        state.last_error = ""
        state.updates += 1
        seconds = times.close + times.idle
        log.info("serving version %d after %.2f s (load %.2f s)", version, seconds, times.load)
        await self._level.say(
            version=version, loading="", state=state.phase, **dict(state.update_fields())
        )
        if await self._level.confirm(version) == WeightState.BAD:
            state.give_up(
                f"version {version} was given up by the pool before this worker "
                "could prove it; it must start again with the current one"
            )


async def interrupt(state: WorkerState, reporter: Reporter, reason: str) -> None:
    """Abort everything in the engine, await the last outputs, and start handing back.

    Raises:
        EngineDead: the engine does not end its requests.
    """
    state.interruption = reason
    await state.engine.pause("abort")
    if not await state.until(lambda: not state.in_engine(), state.settings.final_output_seconds):
        await state.engine.abort([h.request_id for h in state.in_engine()])
        if not await state.until(
            lambda: not state.in_engine(), state.settings.final_output_seconds
        ):
            raise EngineDead(f"{len(state.in_engine())} requests did not end after their abort")
    reporter.wake()
