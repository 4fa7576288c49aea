"""The one tree of errors that rollq raises.

    RollqError
    ├── InvalidSample         a prompt, parameter or id that can never be generated
    ├── InvalidPayload        bytes that are not what the contract says
    ├── IdConflict            another job was enqueued under this id before
    ├── QueueFull             `max_ready` reached and the caller asked not to wait
    ├── QueueUnusable         the Redis at the URL cannot carry a queue; says why
    ├── RedisUnavailable      Redis did not answer within the time allowed
    ├── ResultsTimeout        no group closed within the time asked for
    ├── RewardError           a reward function that may not run, or answers nonsense
    ├── ResultsTaken          groups waited for by id were taken before, or by somebody else
    ├── WeightsError          a publication that is wrong in itself
    │   ├── WeightsMissing    files that are not to be seen here, or not yet
    │   └── WeightsRejected   workers could not load it; says each one's reason
    └── EngineError           the engine under a worker
        ├── WeightLoadError   a load failed: the engine must not serve
        └── EngineDead        its processes are gone

Each message names the thing and says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping


class RollqError(Exception):
    """Base of every error of rollq."""


class InvalidSample(RollqError, ValueError):
    """A prompt, parameter or id that can never be generated."""


class InvalidPayload(RollqError, ValueError):
    """Bytes that are not what the contract says."""


class IdConflict(RollqError):
    """Another job was enqueued under this id before."""


class QueueFull(RollqError):
    """`max_ready` is reached and the caller asked not to wait."""


class QueueUnusable(RollqError):
    """The Redis at this URL cannot carry a queue."""


class RedisUnavailable(RollqError):
    """Redis did not answer within the time allowed."""


class ResultsTimeout(RollqError, TimeoutError):
    """No group closed within the time asked for."""


class RewardError(RollqError):
    """A reward function that may not run here, or answers nonsense."""


class ResultsTaken(RollqError):
    """Groups that are waited for by id were taken before, or by another consumer."""


class WeightsError(RollqError):
    """A publication that is wrong in itself."""


class WeightsMissing(WeightsError):
    """Published files are not to be seen here; on a network file system they may come."""


class WeightsRejected(WeightsError):
    """A publication that workers could not load; a pool where none could serves the last good.

    Attributes:
        version: the publication. reasons: why not, by the name of each worker.
    """

    def __init__(
        self, message: str, version: int = -1, reasons: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.version = version
        self.reasons = dict(reasons or {})


class EngineError(RollqError):
    """The engine under a worker."""


class WeightLoadError(EngineError):
    """A weight load failed half-way: the engine must not serve."""


class EngineDead(EngineError):
    """The engine's processes are gone."""
