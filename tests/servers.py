"""The real servers that the tests run on."""

from __future__ import annotations

import socket

import pytest

from producer.contract.errors import RedisUnavailable
from producer.server import Prefer, find_server

#: Test id -> where the server comes from.
SERVERS: dict[str, Prefer] = {"redis-server": "path", "valkey": "wheel"}


def require_server(name: str) -> Prefer:
    """Skip the test, with the reason, where this server is not installed."""
    prefer = SERVERS[name]
    try:
        find_server(prefer)
    except RedisUnavailable as missing:
        pytest.skip(str(missing))
    return prefer


def free_port() -> int:
    """A TCP port of this machine that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
