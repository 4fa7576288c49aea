"""A queue over a Redis that is away, full, read-only, or not fit for a queue."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.contract import url
from producer.contract.connection import AsyncQueue, Queue
from producer.contract.errors import QueueUnusable, RedisUnavailable
from producer.contract.scripts import SCRIPTS
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration import contract
from tests.integration.contract import Driver, job
from tests.proxy import Proxy
from tests.waiting import DEADLINE_S, async_wait_until


@pytest.fixture
async def queue(own_server: EmbeddedServer) -> AsyncIterator[AsyncQueue]:
    queue = AsyncQueue(own_server.url, "q", patience=DEADLINE_S)
    await queue.open()
    yield queue
    await queue.close()


def test_what_is_not_wanted_can_be_cancelled_in_a_full_redis(own_server: EmbeddedServer) -> None:
    driver = Driver(Queue(own_server.url, "q"))
    driver.enqueue(job("g", 2), job("h"))
    driver.claim(1)
    driver.redis.script_load(SCRIPTS["cancel"].source)
    driver.redis.config_set("maxmemory", 1)

    assert [driver.send(contract.cancel(group)) for group in "gh"] == [2, 1]

    driver.redis.config_set("maxmemory", 0)
    assert driver.redis.xlen(driver.keys["results"]) == 2


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (lambda r: r.config_set("maxmemory", 1), lambda r: r.config_set("maxmemory", 0)),
        (lambda r: r.replicaof("127.0.0.1", 1), lambda r: r.replicaof("NO", "ONE")),
    ],
    ids=["full", "read-only"],
)
async def test_a_commit_is_tried_again_until_redis_takes_it(
    own_server: EmbeddedServer,
    queue: AsyncQueue,
    spoil: Callable[[Any], None],
    mend: Callable[[Any], None],
) -> None:
    """Cases 28 and 32: the sample keeps its lease, the tokens are stored once."""
    sync = Queue(own_server.url, "q")
    driver = Driver(sync)
    driver.enqueue(job())
    c = driver.claim_one()
    driver.redis.script_load(SCRIPTS["checkpoint"].source)
    spoil(driver.redis)

    commit = asyncio.create_task(queue.call_many([contract.checkpoint(c, 0, 8)]))
    await async_wait_until(lambda: _refused(driver.redis) >= 2, "two refusals")
    assert not commit.done()
    mend(driver.redis)

    assert (await commit)[0][2] == [8]
    assert driver.tokens(c.id) == list(range(8))
    assert driver.sample(c.id)["state"] == "leased"
    sync.close()


def _refused(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("failed_calls", 0))


async def test_a_call_waits_for_a_redis_that_comes_back(
    own_server: EmbeddedServer, queue: AsyncQueue
) -> None:
    assert (await queue.call_many([contract.enqueue(job())]))[0] == [b"new"]
    own_server.stop()

    again = asyncio.create_task(queue.call_many([contract.enqueue(job())]))
    await async_wait_until(lambda: len(asyncio.all_tasks()) > 1, "the call runs")
    assert not again.done()
    own_server.start()

    assert (await again)[0] == [b"same"]


async def test_patience_ends(own_server: EmbeddedServer) -> None:
    own_server.stop()
    twin = AsyncQueue(own_server.url, "q", patience=0.0)
    with pytest.raises(RedisUnavailable, match=r"redis\.sock did not answer for"):
        await twin.open()
    await twin.close()
    queue = Queue(own_server.url, "q", patience=0.0)
    with pytest.raises(RedisUnavailable, match=r"redis\.sock did not answer for"):
        queue.open()
    queue.close()


@pytest.mark.parametrize("form", ["redis://{}", "rediss://{}", "redis+sentinel://{}/main"])
async def test_who_accepts_and_never_answers_is_named(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis, one before its TLS handshake, and a sentinel."""
    monkeypatch.setattr(url, "SOCKET_TIMEOUT", 0.3)
    monkeypatch.setattr(url, "CONNECT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = form.format(f"127.0.0.1:{mute.getsockname()[1]}")
        queue, twin = Queue(where, "q", patience=0.0), AsyncQueue(where, "q", patience=0.0)
        with pytest.raises(RedisUnavailable, match=f"{re.escape(where)} did not answer for"):
            await asyncio.to_thread(queue.open)
        with pytest.raises(RedisUnavailable, match=f"{re.escape(where)} did not answer for"):
            await twin.open()
        queue.close()
        await twin.close()


async def test_what_is_no_redis_is_refused() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1") as server:
        where = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        queue, twin = (
            Queue(where, "q", patience=DEADLINE_S),
            AsyncQueue(where, "q", patience=DEADLINE_S),
        )
        with pytest.raises(QueueUnusable, match="is this the port of a Redis"):
            await asyncio.to_thread(queue.open)
        with pytest.raises(QueueUnusable, match="is this the port of a Redis"):
            await twin.open()
        queue.close()
        await twin.close()


def test_setting_up_a_queue_again_survives_a_lost_reply(driver: Driver, tmp_path: Path) -> None:
    for name in ("configure", "reap"):
        driver.redis.script_load(SCRIPTS[name].source)
    with Proxy(driver.queue.url, tmp_path) as proxy:
        queue = Queue(proxy.url, "q", patience=DEADLINE_S)
        queue.redis.ping()
        driver.redis.flushall()

        proxy.lose(SCRIPTS["configure"].sha)

        assert queue.call("reap", limit=1) == [0, 0]
        assert proxy.lost == 1
        queue.close()


def test_a_redis_that_evicts_is_refused_with_what_to_change(
    server_kind: Prefer, tmp_path: Path
) -> None:
    evicting = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}
    with start_embedded(tmp_path, prefer=server_kind, config=evicting) as server:
        queue = Queue(server.url, "q")
        with pytest.raises(QueueUnusable, match=r"allkeys-lru.*set maxmemory-policy noeviction"):
            queue.open()
        queue.close()


def test_a_wrong_password_is_refused_at_once_and_never_shown(
    own_server: EmbeddedServer,
) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        admin.config_set("requirepass", "right")
        path = own_server.url.removeprefix("unix://")
        queue = Queue(f"unix://:hunter2@{path}", "q")
        with pytest.raises(QueueUnusable) as refused:
            queue.open()
        queue.close()
        assert "hunter2" not in str(refused.value)
        admin.config_set("requirepass", "")


def test_a_user_without_rights_is_told_so(own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~*", "+info", "+ping")
    path = own_server.url.removeprefix("unix://")
    queue = Queue(f"unix://guest:pw@{path}", "q")
    with pytest.raises(QueueUnusable, match=r"(?i)no permissions|NOPERM"):
        queue.open()
    queue.close()
