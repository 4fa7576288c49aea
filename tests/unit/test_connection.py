"""What `connection` decides without a Redis: pieces of a call, errors, what a log may show."""

from __future__ import annotations

import ssl

import pytest
import redis

from producer.contract.connection import Queue, split
from producer.contract.errors import InvalidSample
from producer.contract.scripts import Argument
from producer.contract.troubles import passing, words
from producer.contract.url import redact

Items = list[tuple[Argument, ...]]

#: where Redis 6.2 puts an error that a command of a script met
OF_REDIS_6 = "Error running script (call to f_0a): @user_script:54: @user_script: 54: {}"


def pieces(items: Items) -> list[int]:
    found = list(split(items))
    assert [item for piece in found for item in piece] == items
    return [len(piece) for piece in found]


def test_a_call_carries_at_most_256_items() -> None:
    assert pieces([]) == []
    assert pieces([("a", 1)]) == [1]
    assert pieces([("a", 1)] * 256) == [256]
    assert pieces([("a", 1)] * 600) == [256, 256, 88]


def test_a_call_carries_about_a_megabyte() -> None:
    assert pieces([("a", b"x" * 400_000)] * 5) == [2, 2, 1]
    assert pieces([("a", b"x"), ("b", b"x" * 4_000_000), ("c", b"x")]) == [1, 1, 1]
    assert pieces([("a", b"x" * 500_000, b"x" * 500_000)] * 2) == [1, 1]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (redis.ConnectionError("closed"), True),
        (redis.TimeoutError("slow"), True),
        (redis.exceptions.BusyLoadingError("loading"), True),
        (redis.ReadOnlyError("You can't write against a read only replica."), True),
        (redis.OutOfMemoryError("command not allowed"), True),
        (redis.ResponseError("CLUSTERDOWN The cluster is down"), True),
        (redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'"), True),
        (redis.ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), True),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis.ResponseError("BUSY Redis is busy running a script."), True),
        (redis.ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), True),
        (redis.ResponseError(OF_REDIS_6.format("-READONLY You can't write")), True),
        (redis.ResponseError(OF_REDIS_6.format("-OOM command not allowed")), True),
        (redis.ResponseError(OF_REDIS_6.format("WRONGTYPE Operation")), False),
        (redis.InvalidResponse("Protocol Error"), False),
        (redis.AuthenticationError("WRONGPASS"), False),
        (redis.exceptions.NoPermissionError("no permissions"), False),
        (redis.ResponseError("WRONGTYPE Operation against a key"), False),
        (redis.ResponseError("ERR unknown command"), False),
    ],
    ids=lambda v: type(v).__name__,
)
def test_only_errors_that_pass_by_themselves_are_waited_for(
    error: redis.RedisError, passes: bool
) -> None:
    assert passing(error, known=False) is passes


def refused_by_tls(reason: type[ssl.SSLError]) -> redis.ConnectionError:
    error = redis.ConnectionError("Error 1 connecting to host:6379.")
    error.__context__ = reason(1, "[SSL] reason")
    return error


@pytest.mark.parametrize(
    "error",
    [
        redis.AuthenticationError("WRONGPASS"),
        redis.InvalidResponse("Protocol Error"),
        refused_by_tls(ssl.SSLCertVerificationError),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_refused_passes_once_it_was_accepted(error: redis.RedisError) -> None:
    """Then the password or certificate is being rotated, or something is on the way."""
    assert not passing(error, known=False)
    assert passing(error, known=True)


def test_a_handshake_that_was_cut_is_no_refusal() -> None:
    assert passing(refused_by_tls(ssl.SSLEOFError), known=False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("redis://:secret@host:6380/1", "redis://:***@host:6380/1"),
        ("rediss://me:secret@host:6380/1?ssl_cert_reqs=none", "rediss://me:***@host:6380/1?ssl_cert_reqs=none"),
        ("redis://me:secret@[::1]:6379/0", "redis://me:***@[::1]:6379/0"),
        ("unix://me:secret@/tmp/redis.sock", "unix://me:***@/tmp/redis.sock"),
        ("redis://host:6379/0?password=secret&db=1", "redis://host:6379/0?password=***&db=1"),
    ],
)  # fmt: skip
def test_a_password_is_never_shown_and_the_rest_is(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_an_unknown_limit_is_refused_by_name() -> None:
    with pytest.raises(InvalidSample, match=r"unknown limit max_redy; there are lease_ms"):
        Queue("redis://localhost", "q", limits={"max_redy": 5})


def test_an_errors_words_go_on_behind_it() -> None:
    assert words(redis.ConnectionError("Connection refused.")) == "Connection refused"
