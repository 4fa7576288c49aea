"""Every metric of rollq: name, type, labels, help. Pure data, with no client library.

`WORKER` is served by each worker (`rollq worker --metrics-port`), read off what that process
did itself; `POOL` by the exporter (`rollq metrics`), read off the queue's structures. Names are
as Prometheus shows them, so a counter ends in `_total`. Nobody spells a name elsewhere in the
code; dashboards, alerts and OPERATIONS tables are compared with this module by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `buckets` are a histogram's upper bounds, without the last, infinite one."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"rollq_{name}_total", "counter", labels, help)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"rollq_{name}", "gauge", labels, help)


def _histogram(name: str, help: str, *buckets: float) -> Metric:
    return Metric(f"rollq_{name}", "histogram", (), help, buckets)


# A worker. Its target tells workers apart; `rollq_worker_info` names it.

WORKER_INFO = _gauge(
    "worker_info", "Always 1; who this worker is.", "queue", "worker", "model", "version"
)
WORKER_SERVING = _gauge(
    "worker_serving", "1 once it takes samples and until it drains, as /readyz says."
)
WORKER_SAMPLES = _counter(
    "worker_samples",
    "Samples that ended here, by finish_reason: stop, length or error.",
    "finish_reason",
)
WORKER_INTERRUPTIONS = _counter(
    "worker_interruptions",
    "Samples handed back unfinished, by reason: update, drain or failure.",
    "reason",
)
WORKER_LOST = _counter(
    "worker_leases_lost", "Samples that were no longer ours: reaped, cancelled or delivered."
)
WORKER_TOKENS = _counter("worker_tokens", "Response tokens that the engine made.")
WORKER_RECOMPUTED = _counter(
    "worker_recomputed_tokens", "Prefix tokens prefilled again to resume samples."
)
WORKER_WASTED = _counter(
    "worker_wasted_tokens", "Response tokens made here that no rollout has: their lease was lost."
)
WORKER_STALENESS = _histogram(
    "worker_staleness_versions",
    "Of each sample that finished here: the pool's version minus that of its first token.",
    *(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
WORKER_VERSION = _gauge("worker_weight_version", "Weight version that the engine serves.")
WORKER_LOADING = _gauge("worker_loading_version", "Weight version on its way here, -1 for none.")
WORKER_UPDATES = _histogram(
    "worker_update_idle_seconds",
    "Of each weight update: seconds in which the engine made no token.",
    *(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
WORKER_IN_FLIGHT = _gauge("worker_in_flight", "Samples held.")
WORKER_TOKEN_RATE = _gauge("worker_tokens_per_second", "Response tokens a second, lately.")
WORKER_KV_TOKENS = _gauge("worker_kv_cache_tokens", "Tokens that the KV cache has room for.")
WORKER_KV_ROOM = _gauge(
    "worker_kv_room_tokens", "Tokens of it that are not spoken for; below 0 when overdrawn."
)
WORKER_LEASE_AGE = _gauge(
    "worker_lease_age_seconds", "Seconds since the leases were last renewed; they last lease_ms."
)
WORKER_REDIS_ERRORS = _counter(
    "worker_redis_errors", "Calls to Redis that failed; each is tried again."
)

WORKER = (
    WORKER_INFO,
    WORKER_SERVING,
    WORKER_SAMPLES,
    WORKER_INTERRUPTIONS,
    WORKER_LOST,
    WORKER_TOKENS,
    WORKER_RECOMPUTED,
    WORKER_WASTED,
    WORKER_STALENESS,
    WORKER_VERSION,
    WORKER_LOADING,
    WORKER_UPDATES,
    WORKER_IN_FLIGHT,
    WORKER_TOKEN_RATE,
    WORKER_KV_TOKENS,
    WORKER_KV_ROOM,
    WORKER_LEASE_AGE,
    WORKER_REDIS_ERRORS,
)

# The pool. Each has the label `queue`: one exporter may read many.

POOL_UP = _gauge("pool_up", "1 if Redis answered, 0 if not; then nothing else is shown.", "queue")
POOL_WAITING = _gauge("pool_samples_waiting", "Samples that wait for a worker.", "queue")
POOL_LEASED = _gauge("pool_samples_leased", "Samples with workers.", "queue")
POOL_DEAD = _gauge("pool_samples_dead", "Samples given up after their workers died.", "queue")
POOL_OLDEST = _gauge(
    "pool_oldest_waiting_seconds", "Age of the sample that waits longest, 0 for none.", "queue"
)
POOL_GRADING = _gauge("pool_groups_grading", "Groups that wait for their rewards.", "queue")
POOL_UNREAD = _gauge("pool_results_unread", "Closed groups that no trainer has read.", "queue")
POOL_UNACKED = _gauge(
    "pool_results_unacked", "Closed groups that a trainer has read and not acked.", "queue"
)
POOL_WORKERS = _gauge(
    "pool_workers", "Live workers by weight version and state.", "queue", "version", "state"
)
POOL_IN_FLIGHT = _gauge("pool_in_flight", "Samples held, as the workers say.", "queue")
POOL_TOKEN_RATE = _gauge(
    "pool_tokens_per_second", "Response tokens a second, as the workers say.", "queue"
)
POOL_VERSION = _gauge("pool_weight_version", "The newest published weight version.", "queue")
POOL_LAST_GOOD = _gauge(
    "pool_last_good_version", "The newest weight version that a worker served.", "queue"
)
POOL_BAD = _gauge(
    "pool_bad_versions", "Weight versions, of those still described, that none could load.", "queue"
)
POOL_LIMIT = _gauge(
    "pool_limit", "Limits of the queue, such as max_ready and lease_ms.", "queue", "limit"
)
POOL_ENQUEUED = _counter("pool_samples_enqueued", "Samples that were enqueued.", "queue")
POOL_SAMPLES = _counter(
    "pool_samples",
    "Samples that ended, by state: finished, failed, cancelled, stale or dead.",
    "queue",
    "state",
)
POOL_INTERRUPTIONS = _counter(
    "pool_interruptions",
    "Samples handed back unfinished, by reason: update, drain or failure.",
    "queue",
    "reason",
)
POOL_CRASHES = _counter(
    "pool_crashes", "Times that a sample was with a worker or engine that died.", "queue"
)
POOL_TOKENS = _counter("pool_tokens", "Response tokens that were stored.", "queue")
POOL_RECOMPUTED = _counter(
    "pool_recomputed_tokens", "Prefix tokens prefilled again to resume samples.", "queue"
)
POOL_WASTED = _counter(
    "pool_wasted_tokens", "Stored tokens thrown away, as their sample started again.", "queue"
)
POOL_CLOSED = _counter("pool_groups_closed", "Groups whose members all ended.", "queue")
POOL_ACKED = _counter("pool_groups_acked", "Groups that trainers took.", "queue")
POOL_GRADED = _counter("pool_groups_graded", "Groups that got their rewards.", "queue")
POOL_GRADING_FAILED = _counter(
    "pool_grading_failed", "Groups delivered with the grader's error.", "queue"
)
POOL_PUBLISHED = _counter("pool_published", "Weight versions that were published.", "queue")
POOL_EVENTS = _counter(
    "pool_events", "Every other counter of the hash `stats`, by its name there.", "queue", "event"
)

POOL = (
    POOL_UP,
    POOL_WAITING,
    POOL_LEASED,
    POOL_DEAD,
    POOL_OLDEST,
    POOL_GRADING,
    POOL_UNREAD,
    POOL_UNACKED,
    POOL_WORKERS,
    POOL_IN_FLIGHT,
    POOL_TOKEN_RATE,
    POOL_VERSION,
    POOL_LAST_GOOD,
    POOL_BAD,
    POOL_LIMIT,
    POOL_ENQUEUED,
    POOL_SAMPLES,
    POOL_INTERRUPTIONS,
    POOL_CRASHES,
    POOL_TOKENS,
    POOL_RECOMPUTED,
    POOL_WASTED,
    POOL_CLOSED,
    POOL_ACKED,
    POOL_GRADED,
    POOL_GRADING_FAILED,
    POOL_PUBLISHED,
    POOL_EVENTS,
)
