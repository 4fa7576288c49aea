"""The one tree of errors that rollq raises.

    RollqError
    ├── InvalidSample         a prompt, parameter or id that can never be generated
    ├── InvalidPayload        bytes that are not what the contract says
    ├── IdConflict            another job was enqueued under this id before
    ├── QueueFull             `max_ready` reached and the caller asked not to wait
    ├── QueueUnusable         the Redis at the URL cannot carry a queue; says why
    ├── RedisUnavailable      Redis did not answer within the time allowed
    ├── ResultsTimeout        no group closed within the time asked for
    ├── ResultsTaken          groups waited for by id were taken before, or by somebody else
    ├── WeightsError          a publication that is wrong in itself
    │   ├── WeightsMissing    files that are not to be seen here, or not yet
    │   └── WeightsRejected   no worker could load it; the pool serves the last good version
    └── EngineError           the engine under a worker
        ├── WeightLoadError   a load failed: the engine must not serve
        └── EngineDead        its processes are gone

Each message names the thing and says what to do.
"""

from __future__ import annotations


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


class ResultsTaken(RollqError):
    """Groups that are waited for by id were taken before, or by another consumer."""


class WeightsError(RollqError):
    """A publication that is wrong in itself."""


class WeightsMissing(WeightsError):
    """Published files are not to be seen here; on a network file system they may come."""


class WeightsRejected(WeightsError):
    """No worker could load a publication; the pool serves the last good version."""


class EngineError(RollqError):
    """The engine under a worker."""


class WeightLoadError(EngineError):
    """A weight load failed half-way: the engine must not serve."""


class EngineDead(EngineError):
    """The engine's processes are gone."""
