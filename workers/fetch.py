"""Fetching: published files, verified and in the page cache, while the engine generates.

Every byte is read by a process of its own (`producer/contract/digest.py`), one an update: it
starts in 20 ms, a thread would hold up the event loop, and ending it is all it takes to stop it.
Files so small that they are read in less than that are read by a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from producer.contract import digest
from producer.contract.errors import WeightsError, WeightsMissing
from producer.contract.manifest import Manifest, confined
from producer.contract.states import WeightState
from workers.level import Level, Publication
from workers.state import WorkerState, log

_T = TypeVar("_T")

#: seconds between attempts to fetch, doubling from the first to the second
_FETCH_AGAIN = (0.2, 10.0)
#: attempts before a failed fetch is reported; network file systems show files late
_QUIET_FETCHES = 3
#: bytes of all files that are read in less time, some 8 ms, than a process takes to start
_SMALL = 8 << 20


class Fetcher:
    """Fetches one publication at a time.

    `unfetched` is a current version whose files do not come, while this worker, just started,
    may serve nothing that it has: the last good one is to be tried instead.
    """

    def __init__(self, state: WorkerState, level: Level) -> None:
        self._state = state
        self._level = level
        self.unfetched = -1
        self._gave_way = False  # the last fetch was ended for a newer version

    async def fetch(self, publication: Publication) -> Path | None:
        """A verified directory; None when a newer version came, or this one is given up, or the
        other of the current and the last good one is to be tried."""
        state, version = self._state, publication.version
        pause, most = _FETCH_AGAIN
        quiet = _QUIET_FETCHES
        failures = 0
        missing_until = time.monotonic() + state.settings.fetch_seconds
        is_current = version == state.current
        if not is_current:
            pause, quiet = most, 1
        while version == (state.current if is_current else state.last_good):
            state.level_changed.clear()
            try:
                return await self._unless_superseded(publication, is_current)
            except WeightsError as error:
                failures += 1
                late = isinstance(error, WeightsMissing) and time.monotonic() < missing_until
                words = f"version {version}: {error}"
                if words != state.last_error:
                    log.warning("cannot fetch %s; trying again", words)
                state.last_error = words
                counts = failures >= quiet and not late
                if counts and await self._level.confirm(version, str(error)) == WeightState.BAD:
                    return None
                if counts and is_current and serves_nothing(state):
                    self.unfetched = version
                    return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await state.level_changed.wait()
            if not is_current:
                self.unfetched = -1
                return None
            pause = min(most, pause * 2)
        return None

    async def _unless_superseded(self, publication: Publication, is_current: bool) -> Path | None:
        """A newer version ends the reading, but never twice on end: publications that come
        faster than files can be read would keep a worker at old weights for ever."""
        state, version = self._state, publication.version
        insists = self._gave_way

        def superseded() -> bool:
            return not insists and version != (state.current if is_current else state.last_good)

        reading = asyncio.ensure_future(self._verified(publication))
        reading.add_done_callback(lambda _: state.moved.set())
        try:
            await state.until(lambda: reading.done() or superseded(), None)
        finally:
            if not reading.done():
                reading.cancel()
                await _outlast(reading)
        self._gave_way = reading.cancelled() or superseded()
        if not self._gave_way:
            return reading.result()
        if not reading.cancelled() and (error := reading.exception()):
            log.info("version %d is not the newest any more: %s", version, error)
        return None

    async def _verified(self, publication: Publication) -> Path:
        root = self._state.settings.weights_dir
        if root is None:
            raise WeightsError("this worker has no --weights-dir, so it cannot load any weights")
        directory, manifest = await _in_thread(_looked_at, root, publication)
        if sum(size for size, _ in manifest.files.values()) > _SMALL:
            await _read(directory, manifest)
        else:
            await _in_thread(manifest.verify, directory)
        await _in_thread(self._state.engine.check, directory)
        return directory


def serves_nothing(state: WorkerState) -> bool:
    """Just started, with older weights than those that samples may be made with."""
    return state.version < state.last_good


def _looked_at(root: Path, publication: Publication) -> tuple[Path, Manifest]:
    directory = confined(root, publication.path)
    manifest = Manifest.read(directory)
    manifest.expect(publication.digest, directory)
    manifest.check_sizes(directory)
    return directory, manifest


async def _in_thread(work: Callable[..., _T], *arguments: object) -> _T:
    """As `asyncio.to_thread`, but the process ends without it where a file system stands still."""
    told: concurrent.futures.Future[_T] = concurrent.futures.Future()
    told.set_running_or_notify_cancel()

    def run() -> None:
        try:
            told.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            told.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(told)


async def _outlast(work: asyncio.Future[Any]) -> None:
    """Wait for the end of `work`; a cancel that comes meanwhile, or several, is obeyed then."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def _reader(paths: Sequence[Path]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that reads files; it has ended when this is left. Raises OSError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            digest.__file__,
            *paths,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
    )
    try:
        # A start that is cancelled in its middle leaves pipes behind.
        await _outlast(starting)
        yield starting.result()
    finally:
        if starting.exception() is None:
            process = starting.result()
            assert process.stdin is not None
            if process.returncode is None:
                process.kill()
                await process.wait()
            process.stdin.close()


async def _read(directory: Path, manifest: Manifest) -> None:
    """Read all files in a process of its own and compare their digests; ends with the task."""
    paths = [directory / name for name in manifest.files]
    try:
        async with _reader(paths) as process:
            assert process.stdout is not None
            output = await process.stdout.read()
            code = await process.wait()
    except OSError as error:
        raise WeightsError(f"cannot start a process that reads {directory}: {error}") from error
    if code:
        raise WeightsError(f"the process that reads {directory} ended with {code}; see its log")
    found = dict(zip(paths, json.loads(output), strict=True))

    def said(path: Path) -> str:
        answer = found[path]
        if isinstance(answer, dict):
            raise OSError(answer["errno"], answer["error"])
        return str(answer)

    await _in_thread(manifest.verify, directory, said)
