"""The real servers that the tests run on."""

from __future__ import annotations

import random
import socket
from pathlib import Path

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
    """A TCP port of this machine that nobody uses, for a server that cannot choose one itself.

    Not one of those that the kernel gives to whoever asks for any: some connection or another
    test would have it before the server binds it.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.exists() else 32768
    while True:
        port = random.randrange(10_000, max(lowest, 20_000))
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
