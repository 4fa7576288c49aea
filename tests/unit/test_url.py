"""URLs: what they mean, what is refused, and that no error or log shows a password of one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.contract.errors import QueueUnusable
from producer.contract.url import (
    PASSWORD_FILE,
    SENTINEL_PASSWORD_FILE,
    connect,
    connect_async,
    has_password,
    redact,
)


def blocking(url: str) -> Any:
    return connect(url, lambda: None)


def options(client: Any) -> dict[str, Any]:
    return dict(client.connection_pool.connection_kwargs)


both = pytest.mark.parametrize("make", [blocking, connect_async], ids=["blocking", "asyncio"])


@both
@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("redis://host:1/2", {"host": "host", "port": 1, "db": 2}),
        ("redis://me:p%40%2F%3A%25@host", {"username": "me", "password": "p@/:%"}),
        ("redis://a%3Ab:x@host", {"username": "a:b", "password": "x"}),
        ("redis://host?username=me&password=p%26%3D", {"username": "me", "password": "p&="}),
        ("redis://[::1]:7", {"host": "::1", "port": 7}),
        ("unix://:p%23@/a%20b.sock?db=3", {"path": "/a b.sock", "db": 3, "password": "p#"}),
        ("rediss://host?ssl_cert_reqs=none", {"host": "host", "ssl_cert_reqs": "none"}),
        ("redis+sentinel://me:p%40@a:1,b/main/4", {"username": "me", "password": "p@", "db": 4}),
    ],
)
def test_a_url_says_where_and_as_whom(
    make: Callable[[str], Any], url: str, means: dict[str, Any]
) -> None:
    found = options(make(url))

    assert {name: found.get(name) for name in means} == means
    assert found["socket_timeout"] == 10.0
    assert found["retry"].get_retries() == 0


@both
@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("a", [("a", 26379)]),
        ("a:1,b,c:3", [("a", 1), ("b", 26379), ("c", 3)]),
        ("[::1]:1,[fe80::2]", [("::1", 1), ("fe80::2", 26379)]),
    ],
)
def test_sentinels_have_hosts_ports_and_passwords_of_their_own(
    make: Callable[[str], Any], hosts: str, pairs: list[tuple[str, int]], tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    query = f"?sentinel_username=you&sentinel_password=q%40&ssl_ca_certs={ca}"
    client = make(f"rediss+sentinel://me:p@{hosts}/main{query}")

    manager = client.connection_pool.sentinel_manager
    asked = [options(s) for s in manager.sentinels]
    assert [(o["host"], o["port"]) for o in asked] == pairs
    assert {(o["username"], o["password"], o["ssl_ca_certs"]) for o in asked} == {
        ("you", "q@", str(ca))
    }
    assert {o["retry"].get_retries() for o in asked} == {0}
    assert client.connection_pool.service_name == "main"
    assert options(client)["ssl_ca_certs"] == str(ca)
    assert "SSL" in client.connection_pool.connection_class.__name__


@both
@pytest.mark.parametrize(
    ("scheme", "variable", "whose"),
    [("redis", PASSWORD_FILE, "any"), ("redis+sentinel", SENTINEL_PASSWORD_FILE, "sentinel")],
)
def test_a_password_file_goes_with_the_user_of_the_url(
    make: Callable[[str], Any],
    scheme: str,
    variable: str,
    whose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "password"
    monkeypatch.setenv(variable, str(file))
    user = "sentinel_username" if whose == "sentinel" else "username"
    client = make(f"{scheme}://host/{'main' if whose == 'sentinel' else ''}?{user}=m%40e")
    if whose == "sentinel":
        client = client.connection_pool.sentinel_manager.sentinels[0]
    provider = options(client)["credential_provider"]

    for secret in ("one", "two"):
        file.write_text(f"{secret}\n")
        assert provider.get_credentials() == ("m@e", secret)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(redis.AuthenticationError, match=rf"{variable}={file} .* it is no text"):
        provider.get_credentials()
    file.unlink()
    with pytest.raises(redis.AuthenticationError, match="No such file"):
        provider.get_credentials()


@pytest.mark.parametrize("url", ["redis://:p@host", "redis://host?password=p"])
def test_two_passwords_are_one_too_many(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_FILE, "/somewhere")
    with pytest.raises(QueueUnusable, match=f"{PASSWORD_FILE}: leave out one"):
        blocking(url)


@both
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://host?sokcet_timeout=5", "option sokcet_timeout is unknown; there are client_n"),
        ("redis://host?decode_responses=true", "option decode_responses is unknown"),
        ("redis://host?socket_timeout=0.1", "option socket_timeout is unknown"),
        ("redis://host?ssl_ca_certs=/x", "option ssl_ca_certs goes with rediss:// only"),
        ("redis://host?sentinel_password=p", "option sentinel_password is unknown"),
        ("rediss://host?ssl_certfile=/no/file", "ssl_certfile=/no/file cannot be read"),
        ("rediss://host?ssl_cert_reqs=maybe", "is no Redis URL"),
        ("redis://host/seven", "is no Redis URL"),
        ("redis://host?db=x", "is no Redis URL"),
        ("redis://host?password", "is no Redis URL"),
        ("redis://host:port", "is no Redis URL"),
        ("redis://host#x", "is no Redis URL"),
        ("unix://tmp/redis.sock", "is no Redis URL"),
        ("unix://", "is no Redis URL"),
        ("http://host", "is no Redis URL"),
        ("localhost:6379", "localhost:6379 is no Redis URL"),
        ("", "is no Redis URL"),
        ("redis+sentinel://host:1", "is no Redis URL"),
        ("redis+sentinel://host:1/", "is no Redis URL"),
        ("redis+sentinel://,/main", "is no Redis URL"),
        ("redis+sentinel://a:b/main", "is no Redis URL"),
        ("redis+sentinel://a/main/x", "is no Redis URL"),
    ],
)
def test_what_cannot_work_is_refused_with_what_there_is(
    make: Callable[[str], Any], url: str, says: str
) -> None:
    with pytest.raises(QueueUnusable) as refused:
        make(url)
    assert says in str(refused.value)


# secrets


SECRET = "hunter2"

#: as people write them, with a password that should have been percent-encoded, or elsewhere
SPELLED = [
    "redis://:{}@host",
    "redis://:{}/x@host:1",
    "redis://:x/{}@host:1",
    "redis://me:{}#x@host",
    "redis://:1#{}@host",
    "redis://:1?{}@host",
    "redis://:1/{}@host",
    "redis://:{}@{}@host",
    "redis://:a://{}@host",
    "redis://me:{}",
    "redis://:{}",
    "redis://me:{}/0",
    "redis://me:[{}@host",
    "redis://me:{}\u2100x@host",
    "redis://me:{}%@host:x",
    "redis://host?password={}",
    "redis://host?password=x@{}",
    "redis://me@host?password=x@{}",
    "redis://host?passw%6Frd={}",
    "redis://host?passwd={}",
    "redis://host#password={}",
    "redis://host?password=x#{}",
    "redis://host?password=x&{}",
    "redis://host?password=x@y&{}@z",
    "rediss://host?ssl_password={}&ssl_certfile=/no/file",
    "unix://:{}@/tmp/redis.sock?db=x",
    "redis+sentinel://:{}@a,b",
    "redis+sentinel://:{}@a:1,b:2/main?sentinel_password={}",
    "redis+sentinel://a:1,b:{}@x/main",
    "me:{}@host:6379",
    ":{}@host",
    "host:{}",
    "postgres://me:{}@host",
]


@both
@pytest.mark.parametrize("form", SPELLED)
def test_no_error_shows_a_password(make: Callable[[str], Any], form: str) -> None:
    url = form.replace("{}", SECRET)

    assert SECRET not in redact(url)
    assert SECRET not in redact(redact(url))
    said = ""
    try:
        client = make(url)
        said = repr(client) + repr(client.connection_pool)
    except QueueUnusable as error:
        said = "".join(traceback.format_exception(error))
    assert said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("argument", "has"),
    [
        ("redis://:p@host", True),
        ("--redis=redis://me:p@host:1/0", True),
        ("rediss+sentinel://a/main?sentinel_password=p", True),
        ("unix://:p@/tmp/x", True),
        ("redis://host:6379/0", False),
        ("redis://me@host?ssl_ca_certs=/x", False),
        ("--redis=unix:///tmp/redis.sock", False),
        ("Qwen/Qwen3-8B", False),
        ('{"a":"b@c"}', False),
    ],
)
def test_an_argument_that_spells_out_a_password_is_known(argument: str, has: bool) -> None:
    assert has_password(argument) is has


def test_an_asyncio_connection_packs_what_redis_py_would() -> None:
    pool = connect_async("redis://localhost").connection_pool
    ours = pool.connection_class(**pool.connection_kwargs)
    commands = [("CONFIG GET", "max*"), (b"EVALSHA", "ü", 1, b"\x00\r\n" * 5000, 1.5), ("PING",)]

    packed = b"".join(ours.pack_commands(commands))

    assert packed == b"".join(redis.asyncio.Connection().pack_commands(commands))
    assert (
        b"".join(ours.pack_command(*commands[0]))
        == b"*3\r\n$6\r\nCONFIG\r\n$3\r\nGET\r\n$4\r\nmax*\r\n"
    )
