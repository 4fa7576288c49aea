"""What `connection` decides without a Redis: pieces of a call, errors, what a log may show."""

from __future__ import annotations

import pytest
import redis

from producer.contract.connection import Queue, passing, split
from producer.contract.errors import InvalidSample
from producer.contract.scripts import Argument
from producer.contract.url import redact

Items = list[tuple[Argument, ...]]


def pieces(items: Items) -> list[int]:
    found = list(split(items))
    assert [item for piece in found for item in piece] == items
    return [len(piece) for piece in found]


def test_a_call_carries_at_most_256_items() -> None:
    assert pieces([]) == []
    assert pieces([("a", 1)]) == [1]
    assert pieces([("a", 1)] * 256) == [256]
    assert pieces([("a", 1)] * 600) == [256, 256, 88]


def test_a_call_carries_about_four_megabytes() -> None:
    assert pieces([("a", b"x" * 1_500_000)] * 5) == [2, 2, 1]
    assert pieces([("a", b"x"), ("b", b"x" * 5_000_000), ("c", b"x")]) == [1, 1, 1]
    assert pieces([("a", b"x" * 2_000_000, b"x" * 2_000_000)] * 2) == [1, 1]


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


def test_a_refused_password_passes_once_it_was_accepted() -> None:
    """Then it is being rotated."""
    assert passing(redis.AuthenticationError("WRONGPASS"), known=True)


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
