"""A queue over a Redis connection, blocking or asyncio: runs the scripts, retries, checks.

redis-py's own silent retries are off: only the scripts are sent twice, since each of them
has the effect of once. While Redis is away, the log says since when, why, and how long it is
waited for. Used by the client, the commands and the workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff

from producer.contract.errors import (
    InvalidSample,
    QueueUnusable,
    RedisUnavailable,
)
from producer.contract.keys import TRAINER_GROUP, QueueKeys
from producer.contract.scripts import MAX_ITEMS, SCRIPTS, Argument
from producer.contract.troubles import advice, missing_queue, passing, refusal, words
from producer.contract.url import close, close_async, connect, connect_async, redact

log = logging.getLogger("rollq")

SCHEMA = "2"

#: what a queue starts with; `configure` of a client changes them
DEFAULTS: Mapping[str, int] = {
    "lease_ms": 30_000,
    "max_ready": 100_000,
    "max_results": 10_000,
    "max_crashes": 3,
    "grade_ms": 60_000,
    "max_grades": 3,
    "tombstone_ms": 24 * 3600 * 1000,
    "worker_ttl_ms": 15_000,
}

Call = tuple[str, dict[str, Argument], Sequence[Sequence[Argument]]]

_BACKOFF = ExponentialWithJitterBackoff(base=0.05, cap=2.0)
#: seconds between words about a Redis that stays away
_SAY_SECONDS = 30.0


def split(items: Sequence[Sequence[Argument]]) -> Iterator[Sequence[Sequence[Argument]]]:
    """Items in pieces that one call may carry: at most 256, and about 1 MB, so that none keeps
    Redis from others for more than a few milliseconds."""
    start = size = 0
    for i, item in enumerate(items):
        weight = sum(len(a) for a in item if isinstance(a, bytes))
        if i > start and (i - start >= MAX_ITEMS or size + weight > 1_000_000):
            yield items[start:i]
            start, size = i, 0
        size += weight
    if start < len(items):
        yield items[start:]


def stream_entries(reply: Any) -> dict[bytes, list[tuple[bytes, dict[bytes, bytes] | None]]]:
    """What XREAD or XREADGROUP gives, by stream: redis-py has it in another form for RESP3, with
    the entries within one more list."""
    if isinstance(reply, dict):
        return {stream: [e for part in parts for e in part] for stream, parts in reply.items()}
    return dict(reply or ())


class _Queue:
    """What both twins share: names, messages, and no input or output."""

    def __init__(self, url: str, queue: str, limits: Mapping[str, int] | None) -> None:
        unknown = set(limits or ()) - set(DEFAULTS)
        if unknown:
            raise InvalidSample(
                f"unknown limit {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}"
            )
        self.url = url
        self.keys = QueueKeys(queue)
        self._limits = {name: operator.index(value) for name, value in (limits or {}).items()}
        self.config: dict[str, str] = {}
        self.patience = 0.0
        #: how often Redis was away or connected to; it may have come back with an older state
        self.disruptions = 0
        #: calls that failed; each is tried again
        self.errors = 0
        self._known = False  # whether it ever answered
        self._away_since: float | None = None
        self._say_at = 0.0
        self._said: set[type] = set()

    def _evalsha(self, call: Call) -> list[Argument]:
        name, scalars, items = call
        script = SCRIPTS[name]
        return ["EVALSHA", script.sha, *script.arguments(self.keys, scalars, items)]

    def _configure(self) -> Call:
        # Where the queue was lost: as it was known, for who chose its limits may come back late.
        known: dict[str, Argument] = {**DEFAULTS, **self.config, **self._limits}
        items = [(name, known[name], int(name in self._limits)) for name in DEFAULTS]
        scalars: dict[str, Argument] = {
            "schema": SCHEMA,
            "incarnation": secrets.token_hex(8),
            "group": TRAINER_GROUP,
        }
        return "configure", scalars, items

    def _took(self, reply: list[bytes]) -> None:
        texts = [b.decode() for b in reply]
        self.config = dict(zip(texts[::2], texts[1::2], strict=True))

    def _check(self, info: Mapping[str, Any]) -> None:
        where = redact(self.url)
        version = tuple(int(p) for p in str(info["redis_version"]).split(".")[:2])
        if version < (6, 2):
            raise QueueUnusable(
                f"Redis at {where} is {info['redis_version']}; rollq needs 6.2 or newer, or Valkey"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if int(info.get("maxmemory", 0)) and policy != "noeviction":
            raise QueueUnusable(
                f"Redis at {where} has maxmemory-policy {policy}: it would drop samples; "
                "set maxmemory-policy noeviction"
            )

    def _unusable(self, error: redis.RedisError) -> QueueUnusable:
        return QueueUnusable(f"Redis at {redact(self.url)} refused: {words(error)}{advice(error)}")

    def _pause(self, error: redis.RedisError, started: float, failures: int) -> float:
        """Seconds to wait after an error that will pass; raises where it will not."""
        self.disruptions += 1
        self.errors += 1
        if missing_queue(error):
            return 0.0
        if not passing(error, known=self._known):
            raise self._unusable(error) from error
        waited = time.monotonic() - started
        if waited > self.patience:
            raise self._gave_up(error, waited) from error
        self._say_away(error)
        return float(_BACKOFF.compute(failures))

    def _say_away(self, error: redis.RedisError) -> None:
        """At first, where the reason is another one, and now and then."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = self._say_at = now
            self._said.clear()
        if now < self._say_at and type(error) in self._said:
            return
        self._said.add(type(error))
        self._say_at = now + _SAY_SECONDS
        seconds = now - self._away_since
        log.warning(
            "Redis at %s is away since %s (%.0f s): %s; trying again %s",
            redact(self.url),
            time.strftime("%H:%M:%S", time.localtime(time.time() - seconds)),
            seconds,
            words(error),
            "until it is back" if math.isinf(self.patience) else f"for up to {self.patience:g} s",
        )

    def _answered(self) -> None:
        self._known = True
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            self._away_since = None
            log.warning("Redis at %s is back after %.1f s", redact(self.url), seconds)

    def _gave_up(self, error: redis.RedisError, seconds: float) -> RedisUnavailable:
        if self._known:
            never = ""
        elif self.url.startswith("rediss"):
            # A server that misses a certificate may hang up before its reason can be read.
            never = ", and that the URL gives ssl_certfile where the server asks for one"
        else:
            never = ", and that the URL is rediss:// where the port speaks TLS"
        return RedisUnavailable(
            f"Redis at {redact(self.url)} did not answer for {seconds:.1f} s: {words(error)}; "
            f"see that it runs and can be reached from here{never}"
        )


class Queue(_Queue):
    """A queue over a blocking connection. Not to be shared between threads."""

    def __init__(
        self,
        url: str,
        queue: str = "default",
        *,
        limits: Mapping[str, int] | None = None,
        patience: float = 60.0,
    ) -> None:
        """`patience`: seconds that a call waits for a Redis that is away; one that accepts and
        never answers is noticed when the socket times out, after up to 10 s more."""
        super().__init__(url, queue, limits)
        self.patience = patience
        self.redis = connect(url, self._connected)

    def _connected(self) -> None:
        self.disruptions += 1

    def open(self) -> None:
        """Check the server and set up the queue.

        Raises:
            QueueUnusable: with the reason and what to change.
            RedisUnavailable: nothing answered within `patience`.
        """
        self._check(self.retrying(lambda: self.redis.info("everything")))
        self._took(self.retrying(lambda: self._run([self._configure()]))[0])

    def close(self) -> None:
        close(self.redis)

    def call(self, name: str, items: Sequence[Sequence[Argument]] = (), **scalars: Argument) -> Any:
        """Run one script; a lost reply is asked for again."""
        return self.call_many([(name, scalars, items)])[0]

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order in one round trip. Raises like `retrying`."""
        replies: list[Any] = self.retrying(lambda: self._run(calls))
        return replies

    def retrying(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it succeeds, with jittered backoff while Redis is away.

        Raises:
            RedisUnavailable: still away after `patience` seconds.
            QueueUnusable: Redis refuses, and would again.
        """
        started = time.monotonic()
        failures = 0
        missing = False
        while True:
            try:
                if missing:
                    self._took(self._run([self._configure()])[0])
                result = attempt()
                self._answered()
                return result
            except redis.RedisError as error:
                missing = missing_queue(error)
                failures += not missing
                pause = self._pause(error, started, failures)
            if not missing:
                time.sleep(pause)

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self.redis.pipeline(transaction=False)
        for call in calls:
            pipe.execute_command(*self._evalsha(call))
        replies = pipe.execute(raise_on_error=False)
        if unknown := _unknown(replies):
            for name in {calls[i][0] for i in unknown}:
                self.redis.script_load(SCRIPTS[name].source)
            for i, reply in zip(unknown, self._run([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return _first_error(replies)


class AsyncQueue(_Queue):
    """A queue over an asyncio connection pool; waits for Redis as long as `patience` says."""

    def __init__(
        self,
        url: str,
        queue: str = "default",
        *,
        limits: Mapping[str, int] | None = None,
        patience: float = float("inf"),
    ) -> None:
        super().__init__(url, queue, limits)
        self.patience = patience
        self.redis = connect_async(url)

    async def open(self) -> None:
        """Check the server and set up the queue; raises as `Queue.open`."""
        self._check(await self.retrying(lambda: self.redis.info("everything")))
        self._took((await self.retrying(lambda: self._run([self._configure()])))[0])

    async def close(self) -> None:
        await close_async(self.redis)

    async def call(
        self, name: str, items: Sequence[Sequence[Argument]] = (), **scalars: Argument
    ) -> Any:
        """Run one script; a lost reply is asked for again."""
        return (await self.call_many([(name, scalars, items)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order in one round trip."""
        replies: list[Any] = await self.retrying(lambda: self._run(calls))
        return replies

    async def retrying(self, attempt: Callable[[], Any]) -> Any:
        """As `Queue.retrying`, without blocking the event loop."""
        started = time.monotonic()
        failures = 0
        missing = False
        while True:
            try:
                if missing:
                    self._took((await self._run([self._configure()]))[0])
                result = await attempt()
                self._answered()
                return result
            except redis.RedisError as error:
                missing = missing_queue(error)
                failures += not missing
                pause = self._pause(error, started, failures)
            if not missing:
                await asyncio.sleep(pause)

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        async with self.redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*self._evalsha(call))
            replies = await pipe.execute(raise_on_error=False)
        if unknown := _unknown(replies):
            for name in {calls[i][0] for i in unknown}:
                await self.redis.script_load(SCRIPTS[name].source)
            again = await self._run([calls[i] for i in unknown])
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        return _first_error(replies)


def _unknown(replies: Sequence[Any]) -> list[int]:
    """Where the server did not know the script: only those calls are made again."""
    return [i for i, r in enumerate(replies) if isinstance(r, redis.exceptions.NoScriptError)]


def _first_error(replies: Iterable[Any]) -> list[Any]:
    replies = list(replies)
    for reply in replies:
        if isinstance(reply, redis.ResponseError):
            raise refusal(reply) or reply
        if isinstance(reply, Exception):
            raise reply
    return replies
