"""Weight updates: from a notice to serving, without losing a token.

fetch and verify while the engine generates -> close admission -> every admitted sample has
made a token -> pause -> hand back, while loading -> resume -> confirm.

The level (`current` in the hash `weights`) is what counts; the stream is only a quick hint.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from producer.contract.errors import (
    EngineDead,
    EngineError,
    WeightLoadError,
    WeightsError,
    WeightsMissing,
)
from producer.contract.manifest import Manifest, confined
from producer.contract.scripts import Argument
from producer.contract.states import UpdatePolicy, WeightState
from workers.admission import Admission
from workers.held import Outcome
from workers.report import Reporter
from workers.state import WorkerState, log

#: seconds between attempts to fetch, doubling from the first to the second
_FETCH_AGAIN = (0.2, 10.0)
#: attempts before a failed fetch is reported; network file systems show files late
_QUIET_FETCHES = 3


@dataclass(frozen=True, slots=True)
class Publication:
    """One version as the hash `weights` describes it."""

    version: int
    path: str
    digest: str
    state: str
    policy: str
    deadline_s: float


class Updater:
    """Brings the worker to the newest version, one at a time."""

    def __init__(self, state: WorkerState, admission: Admission, reporter: Reporter) -> None:
        self._state = state
        self._admission = admission
        self._reporter = reporter
        self._unfetched = -1  # a current version whose files do not come: serve the last good one

    async def listen(self) -> None:
        """Read the stream of publications, for ever; each is a hint to look at the level."""
        queue = self._state.queue
        stream, last = queue.keys["updates"], "$"
        while True:
            reply = await queue.retrying(partial(queue.redis.xread, {stream: last}, block=2000))
            for _, entries in reply.items() if isinstance(reply, dict) else reply or ():
                last = entries[-1][0]
            if reply:
                await self.look()

    async def look(self) -> None:
        """Read the level itself."""
        queue = self._state.queue
        current, last_good = await queue.retrying(
            lambda: queue.redis.hmget(queue.keys["weights"], "current", "last_good")
        )
        self._state.notice(int(current or 0), int(last_good or 0))

    async def run(self) -> None:
        """Follow the level, for ever."""
        while True:
            await self._state.level_changed.wait()
            self._state.level_changed.clear()
            while (version := await self._target()) is not None:
                publication = await self._read(version)
                if publication is None or publication.state == WeightState.BAD:
                    break
                self._state.loading = version
                # Before anything is read: the clean-up of old versions spares this one.
                await self._say(loading=version)
                directory = await self._fetch(publication)
                if directory is not None:
                    await self._swap(publication, directory)
                self._state.loading = -1
                if self._state.stop.is_set():
                    return

    async def _target(self) -> int | None:
        """The version to go to: a newer one, or the current one if ours was forgotten.

        A Redis that lost its last second may not know the version served here; nobody will
        ever be given that number again, and its weights are not the pool's any more.
        """
        state, queue = self._state, self._state.queue
        if state.current >= state.version:
            if self._unfetched == state.current and self._serves_nothing:
                return state.last_good
            return state.current if state.current > state.version else None
        weights, served = queue.keys["weights"], f"{state.version}:state"
        if await queue.retrying(lambda: queue.redis.hexists(weights, served)):
            return None
        if state.current == 0:
            state.last_error = (
                f"serves version {state.version}, which the queue does not know any more; "
                "waits for a publication"
            )
            return None
        return state.current

    @property
    def _serves_nothing(self) -> bool:
        """Just started, with older weights than those that samples may be made with."""
        return self._state.version < self._state.last_good

    async def _say(self, **fields: Argument) -> None:
        """At once, and not with the next heartbeat."""
        await self._state.queue.call(
            "heartbeat", list(fields.items()), worker=self._state.settings.name
        )

    async def _read(self, version: int) -> Publication | None:
        queue = self._state.queue
        names = ("path", "digest", "state", "policy", "deadline_ms")
        path, digest, state, policy, deadline = await queue.retrying(
            lambda: queue.redis.hmget(queue.keys["weights"], [f"{version}:{n}" for n in names])
        )
        if path is None:
            return None
        try:
            words = (path.decode(), digest.decode(), state.decode(), policy.decode())
            return Publication(version, *words, int(deadline) / 1000)
        except (ValueError, AttributeError):
            self._state.last_error = f"version {version} is not described as a publication is"
            log.error("%s", self._state.last_error)
            return None

    # fetch

    async def _fetch(self, publication: Publication) -> Path | None:
        """A verified directory; None when a newer version came, or this one is given up, or the
        other of the current and the last good one is to be tried."""
        pause, most = _FETCH_AGAIN
        quiet = _QUIET_FETCHES
        failures = 0
        missing_until = time.monotonic() + self._state.settings.fetch_seconds
        is_current = publication.version == self._state.current
        if not is_current:
            pause, quiet = most, 1
        while publication.version in (self._state.current, self._state.last_good):
            try:
                return await asyncio.to_thread(self._verified, publication)
            except WeightsError as error:
                failures += 1
                late = isinstance(error, WeightsMissing) and time.monotonic() < missing_until
                words = f"version {publication.version}: {error}"
                if words != self._state.last_error:
                    log.warning("cannot fetch %s; trying again", words)
                self._state.last_error = words
                counts = failures >= quiet and not late
                if (
                    counts
                    and await self._confirm(publication.version, str(error)) == WeightState.BAD
                ):
                    return None
                if counts and is_current and self._serves_nothing:
                    self._unfetched = publication.version
                    return None
            self._state.level_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._state.level_changed.wait()
            if not is_current:
                self._unfetched = -1
                return None
            pause = min(most, pause * 2)
        return None

    def _verified(self, publication: Publication) -> Path:
        root = self._state.settings.weights_dir
        if root is None:
            raise WeightsError("this worker has no --weights-dir, so it cannot load any weights")
        directory = confined(root, publication.path)
        manifest = Manifest.read(directory)
        manifest.expect(publication.digest, directory)
        manifest.verify(directory)
        self._state.engine.check(directory)
        return directory

    # swap

    async def _swap(self, publication: Publication, directory: Path) -> None:
        """Load the new weights under the samples in flight, as the policy says."""
        state = self._state
        started = time.monotonic()
        state.phase = "updating"
        state.load_deadline = started + state.settings.load_seconds + publication.deadline_s
        try:
            await self._admission.close()
            if not await self._hold_still(publication):
                return
            await state.engine.load(directory, publication.version)
            state.version = publication.version
            await state.engine.resume()
        except WeightLoadError as error:
            for held in state.in_engine():
                held.outcome = Outcome("release", "failure")
            self._reporter.wake()
            await self._confirm(publication.version, str(error))
            state.give_up(f"loading version {publication.version} failed: {error}")
            return
        except EngineError as error:
            state.give_up(f"the engine failed during an update: {error}")
            return
        finally:
            state.load_deadline = 0.0
            state.phase = "serving"
            # Also after a failure: whoever waits there sees the stop and hands back.
            self._admission.open()
            state.free.set()
        state.last_error = ""
        log.info(
            "serving version %d after %.0f ms",
            publication.version,
            1000 * (time.monotonic() - started),
        )
        await self._say(version=publication.version, loading="", state=state.phase)
        if await self._confirm(publication.version, "") == WeightState.BAD:
            state.give_up(
                f"version {publication.version} was given up by the pool before this worker "
                "could prove it; it must start again with the current one"
            )

    async def _hold_still(self, publication: Publication) -> bool:
        """Pause the engine; unless the samples stay in it, see them all handed back.

        False, with the engine running on, if a newer publication came in the meantime.
        """
        state = self._state
        # Updates that come faster than a first token must not starve a sample.
        await state.until(
            lambda: not any(h.waits_for_token for h in state.held.values()),
            state.settings.first_token_seconds,
        )
        if publication.policy == UpdatePolicy.KEEP:
            await state.engine.pause("keep")
            return True
        if publication.policy == UpdatePolicy.FINISH:
            newest = state.current
            await state.until(
                lambda: not state.in_engine() or state.current != newest, publication.deadline_s
            )
            if state.current != newest:
                return False
        await interrupt(state, self._reporter, "update")
        return True

    async def _confirm(self, version: int, error: str) -> str:
        current, last_good, verdict = await self._state.queue.call(
            "confirm", worker=self._state.settings.name, version=version, error=error[:1000]
        )
        self._state.notice(current, last_good)
        return str(verdict.decode())


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
