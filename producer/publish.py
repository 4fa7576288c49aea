"""Publishing: from weights to a version in the pool, and what the workers made of it.

`prepare` writes the files and says what the script `publish` is to be told; `served` reads off
a pool's status whether to wait on; a client's `Publisher` does both.
"""

from __future__ import annotations

import json
import logging
import operator
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from producer.contract.connection import Queue
from producer.contract.errors import ResultsTimeout, WeightsError, WeightsRejected
from producer.contract.states import UpdatePolicy, WeightState
from producer.status import Status
from producer.steps import Steps, Wait
from producer.weights import newest_noted, note_newest, remove_old, write_checkpoint

log = logging.getLogger("rollq")

#: how many workers are to serve a version
Workers = int | Literal["all"]

_LOOK_SECONDS = 0.05
_HALF = "50%"


class Publisher:
    """What one client publishes. `status` reads the pool's state."""

    def __init__(self, queue: Queue, status: Callable[[], Status]) -> None:
        self._queue = queue
        self._status = status
        # where its files are, and what describes it: to be made again if Redis forgets it
        self._last: tuple[Path, dict[str, Any]] | None = None
        self._newest = 0  # the highest version that this client knows of
        self._version = 0  # what `_last` is
        self._again: dict[int, int] = {}  # a version that Redis forgot -> the one made for it

    def publish(self, root: Path | None, weights: Any, force: bool, **options: Any) -> int:
        """Write the files and publish them; see `prepare`. Returns the version."""
        queue = self._queue.keys.queue
        publication = prepare(root, queue, weights, **options)
        assert root is not None  # or it was refused
        version = self._version = self.send(root, publication, force)
        self._last = root, publication
        clean_up(root, queue, self._status())
        return version

    def send(self, root: Path, publication: dict[str, Any], force: bool) -> int:
        of = root, self._queue.keys.queue, self._queue.config["incarnation"]
        version, new = self._queue.call(
            "publish",
            request=secrets.token_hex(8),
            force=int(force),
            floor=max(self._newest, newest_noted(*of)),
            **publication,
        )
        if not new:
            log.warning(
                "published the same files as version %d: nothing new; "
                "force=True makes a version of them",
                version,
            )
        self._newest = max(self._newest, version)
        try:
            note_newest(*of, version)
        except OSError as error:
            log.warning("version %d is published, and cannot be noted: %s", version, error)
        return int(version)

    def again(self) -> None:
        """If Redis forgot the last publication: under a new, higher version."""
        if self._last and int(self._status().weights.get("newest", 0)) < self._newest:
            lost, self._version = self._version, self.send(*self._last, force=True)
            self._again[lost] = self._version

    def made_again(self, version: int) -> int:
        """What has become of a version that Redis may have forgotten."""
        while version in self._again:
            version = self._again[version]
        return version

    def wait_served(
        self, version: int, wait: Workers, timeout: float, tend: Callable[[], None]
    ) -> Steps[int]:
        """Until so many workers serve it; raises what `served` does, or ResultsTimeout.

        Returns the version, which is another one if Redis forgot it meanwhile.
        """
        return self._wait(lambda s, v: served(s, v, wait), version, wait, timeout, tend)

    def wait_for(
        self, version: int, workers: int, timeout: float, tend: Callable[[], None]
    ) -> Steps[int]:
        """Until so many workers serve it or a newer one, or it was given up."""

        def enough(status: Status, version: int) -> bool:
            if error := rejected(status, version):
                raise error
            return sum(w.version >= version for w in status.workers) >= workers

        return self._wait(enough, version, workers, timeout, tend)

    def _wait(
        self,
        enough: Callable[[Status, int], bool],
        version: int,
        wait: Workers,
        timeout: float,
        tend: Callable[[], None],
    ) -> Steps[int]:
        deadline = time.monotonic() + timeout
        while True:
            tend()
            version = self.made_again(version)
            if enough(status := self._status(), version):
                return version
            if time.monotonic() > deadline:
                raise not_served(status, version, wait, timeout)
            yield Wait(_LOOK_SECONDS)


def prepare(
    root: Path | None,
    queue: str,
    weights: Any,
    *,
    step: int,
    policy: UpdatePolicy | str,
    deadline_s: float,
    max_updating: float | None,
) -> dict[str, Any]:
    """Check everything, write the files, and return what describes the publication.

    Raises:
        WeightsError: no weights directory, a wrong option, or what is no weights.
    """
    if root is None:
        raise WeightsError(
            "no weights directory: give RolloutClient(weights_dir=...) or set "
            "ROLLQ_WEIGHTS_DIR to a directory that the workers see, too"
        )
    if policy not in tuple(UpdatePolicy):
        raise WeightsError(f"policy={policy!r} must be one of {', '.join(UpdatePolicy)}")
    if not 0 <= deadline_s <= 86_400:
        raise WeightsError(f"deadline_s={deadline_s} must be 0 to 86400 seconds")
    most = _most(max_updating)
    step = operator.index(step)
    path, digest = write_checkpoint(root, queue, weights, step)
    return {
        "digest": digest,
        "path": path,
        "step": step,
        "policy": str(policy),
        "deadline_ms": int(deadline_s * 1000),
        "max_updating": most,
    }


def check_wait(wait: Workers | None) -> None:
    """Raises WeightsError: neither None, "all" nor a number of workers."""
    if wait is None or wait == "all" or _count(wait):
        return
    raise WeightsError(f"wait={wait!r} must be a number of workers from 1, or 'all'")


def clean_up(root: Path, queue: str, status: Status) -> None:
    """Remove old files that no worker serves or loads."""
    in_use = [v for w in status.workers for v in (w.version, w.loading)]
    remove_old(root, queue, status.weights, in_use)


def failures(level: Mapping[str, str], version: int) -> dict[str, str]:
    """Worker -> why it could not load the version."""
    failed: dict[str, str] = json.loads(level.get(f"{version}:failed", "{}"))
    return failed


def rejected(status: Status, version: int) -> WeightsRejected | None:
    """The error, if the pool has given the version up."""
    if status.weights.get(f"{version}:state") != WeightState.BAD:
        return None
    return WeightsRejected(
        f"version {version} could not be loaded, the pool serves {status.last_good}: "
        + status.weights.get(f"{version}:error", ""),
        version,
        failures(status.weights, version),
    )


def served(status: Status, version: int, wait: Workers) -> bool:
    """Do so many workers serve the version, or a newer one?

    "all" are those that live and are through with their start, and at least one.

    Raises:
        WeightsRejected: so many never will, or with "all" some could not load it; not before
            each worker has said what became of it.
    """
    if error := rejected(status, version):
        raise error
    serving = {w.name for w in status.workers if w.version >= version}
    failed = {
        name: reason
        for name, reason in failures(status.weights, version).items()
        if name not in serving
    }
    undecided = [w for w in status.workers if w.name not in serving and w.name not in failed]
    if wait == "all":
        if any(w.state != "starting" for w in undecided) or not (serving or failed):
            return False
    elif len(serving) >= wait:
        return True
    elif len(serving) + len(undecided) >= wait:
        return False
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise WeightsRejected(
            f"version {version} is on {len(serving)} workers and {len(failed)} could not load "
            f"it: {reasons}",
            version,
            failed,
        )
    return wait == "all"


def not_served(status: Status, version: int, wait: Workers, timeout: float) -> ResultsTimeout:
    """The error of a wait that took too long."""
    serving = ", ".join(f"{w.name}: {w.version} {w.last_error}" for w in status.workers)
    return ResultsTimeout(
        f"version {version} is not on {wait} workers after {timeout:.0f} s; "
        f"they serve {serving or 'nothing: no worker lives'}"
    )


def _most(max_updating: float | None) -> str:
    """As the script `publish` takes it: `2`, or `50%` of the workers that live."""
    if max_updating is None:
        return _HALF
    if isinstance(max_updating, float) and 0 < max_updating <= 1:
        return f"{100 * max_updating:.10g}%"
    if count := _count(max_updating):
        return str(count)
    raise WeightsError(
        f"max_updating={max_updating!r} must be a number of workers from 1, or a share of them: "
        "a float above 0, up to 1.0 for all at once"
    )


def _count(workers: Any) -> int:
    """A number of workers from 1; 0 for what is none."""
    try:
        return 0 if isinstance(workers, bool) else max(0, operator.index(workers))
    except TypeError:
        return 0
