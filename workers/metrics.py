"""A worker's metrics, read off its state by whoever scrapes; nothing here waits for the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

from producer.contract import metrics as names
from producer.contract.exposition import Sample
from workers.leases import LeaseThread
from workers.state import WorkerState

_ROLLQ = version("rollq")


def samples(
    state: WorkerState, leases: LeaseThread, room: Callable[[], int], *, serving: bool
) -> Iterator[Sample]:
    """Every metric of `names.WORKER`; those of the engine once it has started."""
    settings, meter = state.settings, state.meter
    started = state.phase != "starting"
    model = state.engine.info.model if started else ""
    yield names.WORKER_INFO, (settings.queue, settings.name, model, _ROLLQ), 1
    yield names.WORKER_SERVING, (), int(serving)
    # Those that can be are there from the start, so that a rate sees the first one.
    for reason in ("stop", "length", "error"):
        yield names.WORKER_SAMPLES, (reason,), meter.ended[reason]
    for reason in ("update", "drain", "failure"):
        yield names.WORKER_INTERRUPTIONS, (reason,), meter.interruptions[reason]
    yield names.WORKER_LOST, (), meter.lost
    yield names.WORKER_TOKENS, (), state.tokens
    yield names.WORKER_RECOMPUTED, (), meter.recomputed_tokens
    yield names.WORKER_WASTED, (), meter.wasted_tokens
    yield names.WORKER_STALENESS, (), meter.staleness
    yield names.WORKER_VERSION, (), state.version
    yield names.WORKER_LOADING, (), state.loading
    yield names.WORKER_UPDATES, (), meter.update_idle
    yield names.WORKER_IN_FLIGHT, (), len(state.held)
    yield names.WORKER_TOKEN_RATE, (), leases.rate
    if started:
        yield names.WORKER_KV_TOKENS, (), state.engine.info.kv_cache_tokens
        yield names.WORKER_KV_ROOM, (), room()
    yield names.WORKER_LEASE_AGE, (), time.monotonic() - leases.renewed
    yield names.WORKER_REDIS_ERRORS, (), state.queue.errors + leases.redis_errors
