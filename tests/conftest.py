"""Fixtures: every test that takes one of these runs on redis-server and on Valkey.

`redis_url`, `redis_client` and `async_redis` share one server a session, emptied before each
test. A test that kills, restarts or configures its server takes `own_server`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.servers import SERVERS, require_server
from tests.waiting import DEADLINE_S


@pytest.fixture(scope="session", params=SERVERS)
def server_kind(request: pytest.FixtureRequest) -> Prefer:
    """What to give `start_embedded` as `prefer`."""
    return require_server(request.param)


@pytest.fixture(scope="session")
def redis_server(
    server_kind: Prefer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A server that the whole session shares: leave it running and as configured."""
    with start_embedded(tmp_path_factory.mktemp("redis"), prefer=server_kind) as server:
        yield server


@pytest.fixture
def own_server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server for this test alone, to be killed and restarted at will."""
    with start_embedded(tmp_path / "redis", prefer=server_kind) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    """URL of an empty Redis."""
    # A busy disk may hold up a server for seconds.
    with redis.Redis.from_url(redis_server.url, socket_timeout=DEADLINE_S) as client:
        client.flushall()
        client.script_flush()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of an empty Redis: bytes in and out, no silent retry."""
    with redis.Redis.from_url(
        redis_url, retry=Retry(NoBackoff(), 0), socket_timeout=DEADLINE_S
    ) as client:
        yield client


@pytest.fixture
async def async_redis(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """The asyncio twin of `redis_client`."""
    client = redis.asyncio.Redis.from_url(redis_url, retry=AsyncRetry(NoBackoff(), 0))
    async with client:
        yield client
