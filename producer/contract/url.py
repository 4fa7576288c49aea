"""Where a Redis is: its URL, how to connect to it, and what of it may be shown.

    redis://[user[:password]@]host:port/db      rediss:// for TLS      unix:///path.sock
    redis+sentinel://[user[:password]@]host:port,host:port/service[/db]

`ROLLQ_REDIS_PASSWORD_FILE` names a file that holds the password; it is read again at every
connect, so a rotated password is taken up without a restart, and it is on no command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from producer.contract.errors import QueueUnusable

PASSWORD_FILE = "ROLLQ_REDIS_PASSWORD_FILE"

#: seconds; a BLOCK must stay well below the socket's time-out
SOCKET_TIMEOUT = 10.0
CONNECT_TIMEOUT = 5.0

_SENTINEL = "redis+sentinel"


class PasswordFile(CredentialProvider):
    """User of the URL, password of a file, read at every connect."""

    def __init__(self, username: str | None, path: str) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = Path(self._path).read_text().strip()
        except OSError as error:
            raise redis.ConnectionError(
                f"{PASSWORD_FILE}={self._path} cannot be read: {error.strerror}"
            ) from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def connect(url: str, on_connect: Callable[[], None]) -> redis.Redis:
    """A blocking client that never repeats a command by itself.

    `on_connect` is called at every connect: what answers may be another server than before,
    or an older state. Raises QueueUnusable.
    """

    def connected(connection: Any) -> None:
        connection.on_connect()
        on_connect()

    options = _options(url, Retry(NoBackoff(), 0))
    options["redis_connect_func"] = connected
    if not _is_sentinel(url):
        direct: redis.Redis = _from_url(redis.Redis.from_url, url, options)
        return direct
    hosts, service, rest = _sentinel(url)
    sentinel = redis.sentinel.Sentinel(hosts, socket_timeout=CONNECT_TIMEOUT)
    client: redis.Redis = sentinel.master_for(service, **rest, **options)
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """Its asyncio twin."""
    options = _options(url, redis.asyncio.retry.Retry(NoBackoff(), 0))
    if not _is_sentinel(url):
        direct: redis.asyncio.Redis = _from_url(redis.asyncio.Redis.from_url, url, options)
        return direct
    hosts, service, rest = _sentinel(url)
    sentinel = redis.asyncio.sentinel.Sentinel(hosts, socket_timeout=CONNECT_TIMEOUT)
    client: redis.asyncio.Redis = sentinel.master_for(service, **rest, **options)
    return client


def _from_url(make: Any, url: str, options: dict[str, Any]) -> Any:
    try:
        return make(url, **options)
    except ValueError as error:
        raise QueueUnusable(
            f"{redact(url)} is no Redis URL ({error}): redis://host:port, rediss://, unix:///path "
            f"or {_SENTINEL}://host:port/service"
        ) from None


def redact(url: str) -> str:
    """The URL without its password, for messages and logs."""
    scheme, mark, rest = url.partition("://")
    user, at, where = rest.rpartition("@")
    if ":" in user:
        user = user.partition(":")[0] + ":***"
    where = re.sub(r"([?&]password=)[^&]*", r"\1***", where)
    return scheme + mark + user + at + where


def _options(url: str, retry: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "retry": retry,
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "health_check_interval": 30,
        "retry_on_timeout": False,
    }
    parts = urlsplit(url)
    if path := os.environ.get(PASSWORD_FILE):
        if ":" in parts.netloc.rpartition("@")[0]:
            raise QueueUnusable(
                f"a password is in the URL {redact(url)} and in {PASSWORD_FILE}: leave out one"
            )
        options["credential_provider"] = PasswordFile(parts.username, path)
    return options


def _is_sentinel(url: str) -> bool:
    return urlsplit(url).scheme == _SENTINEL


def _sentinel(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Hosts of the sentinels, name of the service, and options of its connections."""
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    try:
        pairs = [
            (host, int(port or 26379))
            for host, _, port in (entry.partition(":") for entry in hosts.split(","))
        ]
        options: dict[str, Any] = {"db": int(db or 0)}
    except ValueError:
        pairs = []
    if not service or not all(host for host, _ in pairs) or not pairs:
        raise QueueUnusable(
            f"{redact(url)} is no Sentinel URL: {_SENTINEL}://host:port,host:port/service[/db]"
        )
    name, _, password = user.partition(":")
    if PASSWORD_FILE not in os.environ:
        options |= {"username": name or None, "password": password or None}
    return pairs, service, options
