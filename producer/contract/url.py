"""Where a Redis is: its URL, how to connect to it, and what of it may be shown.

    redis://[user[:password]@]host:port/db      rediss:// for TLS      unix:///path.sock
    redis+sentinel://[user[:password]@]host:port,host:port/service[/db]      rediss+sentinel://

Behind a `?` may stand `db`, `username`, `password`, `client_name`, `protocol`, with TLS `ssl_...`
as redis-py names them (`ssl_ca_certs=/path/ca.pem`), and for sentinels with a password of their
own `sentinel_username` and `sentinel_password`. Anything else is refused, by name. User and
password are percent-encoded.

`ROLLQ_REDIS_PASSWORD_FILE` names a file that holds the password; it is read again at every
connect, so a rotated password is taken up without a restart, and it is on no command line.
`ROLLQ_SENTINEL_PASSWORD_FILE` does the same for the sentinels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from producer.contract.errors import QueueUnusable

PASSWORD_FILE = "ROLLQ_REDIS_PASSWORD_FILE"
SENTINEL_PASSWORD_FILE = "ROLLQ_SENTINEL_PASSWORD_FILE"

#: seconds; a BLOCK must stay well below the socket's time-out
SOCKET_TIMEOUT = 10.0
CONNECT_TIMEOUT = 5.0

_SENTINEL = "+sentinel"
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_FORMS = (
    "redis://host:port/db, rediss://, unix:///path or redis+sentinel://host:port,host:port/service"
)
_OPTIONS = {"db", "username", "password", "client_name", "protocol"}
_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = {
    *_TLS_FILES,
    *("ssl_ca_data", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_min_version"),
    "ssl_password",
}


class PasswordFile(CredentialProvider):
    """User of the URL, password of the file that `variable` names, read at every connect."""

    def __init__(self, username: str | None, path: str, variable: str = PASSWORD_FILE) -> None:
        self._username = username
        self._path = path
        self._variable = variable

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = Path(self._path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise redis.AuthenticationError(
                f"{self._variable}={self._path} cannot be read: {reason}"
            ) from None
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _PacksInC:
    """Before a connection of redis.asyncio, which packs each argument in Python: an eighth of the
    processor time of a worker without an engine."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0].encode() if isinstance(args[0], str) else args[0]
        return [hiredis.pack_command((*name.split(), *args[1:]))]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [packed for command in commands for packed in self.pack_command(*command)]


def connect(url: str, on_connect: Callable[[], None]) -> redis.Redis:
    """A blocking client that never repeats a command by itself.

    `on_connect` is called at every connect: what answers may be another server than before,
    or an older state. Raises QueueUnusable.
    """

    def connected(connection: Any) -> None:
        connection.on_connect()
        on_connect()

    more = {"retry": Retry(NoBackoff(), 0), "redis_connect_func": connected}
    client: redis.Redis = _make(redis, url, more)
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """Its asyncio twin."""
    more = {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
    client: redis.asyncio.Redis = _make(redis.asyncio, url, more)
    pool = client.connection_pool
    theirs = pool.connection_class
    pool.connection_class = type(theirs.__name__, (_PacksInC, theirs), {})
    return client


def close(client: redis.Redis) -> None:
    """Close a client of `connect`, and what it asks its sentinels with."""
    client.close()
    for sentinel in _sentinels_of(client):
        sentinel.close()


async def close_async(client: redis.asyncio.Redis) -> None:
    """Close a client of `connect_async`."""
    await client.aclose()
    for sentinel in _sentinels_of(client):
        await sentinel.aclose()


def redact(url: str) -> str:
    """The URL without its passwords, for messages and logs; also of what is no URL."""
    scheme, mark, rest = url.partition("://")
    if not re.fullmatch(r"[\w+.-]+", scheme) or not mark:
        scheme, mark, rest = "", "", url
    rest = re.sub(r"([?&#])([^=&]*)(=?)[^&]*", _redact_option, rest)
    before, at, where = rest.rpartition("@")
    user = re.split(r"[:/?#]", before)[0]
    hidden = "" if user == before else ":***"
    hosts, path = re.split(r"(?=[/?#]|$)", where, maxsplit=1)
    # A port that is no number may be a password whose @host was forgotten.
    hosts = re.sub(r"(^|,)([^,:\[\]]*):(?!\d*(?:,|$))[^,]*", r"\1\2:***", hosts)
    return scheme + mark + user + hidden + at + hosts + path


def has_password(text: str) -> bool:
    """Whether `text`, an argument of a command, holds a URL that spells out a password."""
    found = re.search(r"\b(?:rediss?(?:\+sentinel)?|unix)://.*", text)
    return found is not None and redact(found[0]) != found[0]


def _redact_option(option: re.Match[str]) -> str:
    mark, name, equals = option.groups()
    if equals and "pass" not in unquote(name).lower():
        return option[0]
    return f"{mark}{name}=***" if equals else option[0] if "@" in name else f"{mark}***"


def _make(library: Any, url: str, more: dict[str, Any]) -> Any:
    """A client of `redis` or `redis.asyncio`, not connected; raises QueueUnusable."""
    try:
        return _client(library, url, more)
    except (ValueError, TypeError, redis.RedisError):
        # Not the error's own words: they may quote a part of the password.
        raise QueueUnusable(
            f"{redact(url)} is no Redis URL: {_FORMS}, user and password percent-encoded"
        ) from None


def _client(library: Any, url: str, more: dict[str, Any]) -> Any:
    """Raises ValueError, TypeError and RedisError of redis-py, too, for what is no URL."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or parts.fragment:
        raise ValueError
    parse_qsl(parts.query, strict_parsing=bool(parts.query))
    user, at, hosts = parts.netloc.rpartition("@")
    path = parts.path
    if by_sentinel := parts.scheme.endswith(_SENTINEL):
        service, _, path = unquote(path).strip("/").partition("/")
        pairs = _hosts(hosts)
        if not service or not pairs:
            raise ValueError
        hosts, path = "any", f"/{path}"
    unix = parts.scheme == "unix"
    if bool(hosts and unix) or not (path if unix else re.fullmatch(r"/?\d*", path)):
        raise ValueError
    scheme = parts.scheme.removesuffix(_SENTINEL)
    given = library.connection.parse_url(f"{scheme}://{user}{at}{hosts}{path}?{parts.query}")
    theirs = _sentinel_options(given, url) if by_sentinel else {}
    options = given | _options(given, url, PASSWORD_FILE)
    if not by_sentinel:
        pool = library.ConnectionPool(**options, **more)
        client = library.Redis.from_pool(pool)
    else:
        tls = {k: v for k, v in options.items() if k.startswith("ssl_")}
        ssl = {"ssl": scheme == "rediss"}
        for name in ("host", "connection_class"):
            options.pop(name, None)
        sentinel = library.sentinel.Sentinel(
            pairs, sentinel_kwargs={**theirs, **tls, **ssl, "retry": more["retry"]}
        )
        client = sentinel.master_for(service, **options, **ssl, **more)
    # Options of a wrong kind come to light when a connection is made, even if not connected.
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return client


def _hosts(netloc: str) -> list[tuple[str, int]]:
    """Of each sentinel, host and port. Raises ValueError."""
    pairs = []
    for entry in netloc.split(","):
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d+))?", entry)
        if found is None:
            raise ValueError
        pairs.append((unquote(found[1]).strip("[]"), int(found[2] or 26379)))
    return pairs


def _options(given: dict[str, Any], url: str, variable: str) -> dict[str, Any]:
    """Checks `given`, the options of a URL, and returns what every connection gets beside them."""
    known = _OPTIONS | (_TLS_OPTIONS if url.startswith("rediss") else set())
    unknown = given.keys() - known - {"host", "port", "path", "connection_class"}
    if unknown:
        name = min(unknown)
        why = "goes with rediss:// only" if name in _TLS_OPTIONS else "is unknown"
        raise QueueUnusable(
            f"{redact(url)}: the option {name[:50]} {why}; there are {', '.join(sorted(known))}"
        )
    for name in _TLS_FILES:
        if name in given and not os.access(given[name], os.R_OK):
            raise QueueUnusable(f"{redact(url)}: {name}={given[name]} cannot be read")
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "health_check_interval": 30,
    }
    if path := os.environ.get(variable):
        if "password" in given:
            raise QueueUnusable(
                f"a password is in the URL {redact(url)} and in {variable}: leave out one"
            )
        options["credential_provider"] = PasswordFile(given.pop("username", None), path, variable)
    return options


def _sentinel_options(given: dict[str, Any], url: str) -> dict[str, Any]:
    """What a URL says of its sentinels' own users, taken out of `given`."""
    own = {
        name: given.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in given
    }
    own |= _options(own, url, SENTINEL_PASSWORD_FILE)
    return own | {"socket_timeout": CONNECT_TIMEOUT}


def _sentinels_of(client: Any) -> list[Any]:
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return manager.sentinels if manager else []
