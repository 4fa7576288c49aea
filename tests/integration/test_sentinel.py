"""A master, a replica and a sentinel, all with passwords: a failover loses nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.contract.connection import AsyncQueue, Queue
from producer.contract.errors import QueueUnusable, RedisUnavailable
from producer.contract.url import PASSWORD_FILE, SENTINEL_PASSWORD_FILE
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.servers import free_port
from tests.waiting import async_wait_until, wait_until

PASSWORD, SENTINEL_PASSWORD = "a p@ss/w:rd", "an%other"
IN_URL = "a%20p%40ss%2Fw%3Ard", "an%25other"


@dataclass
class Watched:
    """What a test may do to the three."""

    master: EmbeddedServer
    port: int
    sentinel: Any

    @property
    def where(self) -> str:
        return f"127.0.0.1:{self.port}/main"

    def led_by(self) -> int:
        """The port of the master, as the sentinel sees it."""
        return int(self.sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")[1])

    def gave_way(self) -> bool:
        """Until then one that was told to takes writes, which are lost."""
        try:
            with redis.Redis.from_url(self.master.url, password=PASSWORD) as master:
                return bool(master.info("replication")["role"] == "slave")
        except redis.ConnectionError:
            return True

    def replicated(self) -> None:
        """Wait until the replica has all that the master has: replication is asynchronous."""
        with redis.Redis.from_url(self.master.url, password=PASSWORD) as master:
            master.set("mark", 1)
            wait_until(lambda: master.wait(1, 1000), "the replica has the mark, and all before it")


@pytest.fixture
def watched(server_kind: Prefer, tmp_path: Path) -> Iterator[Watched]:
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        servers = []
        for name, port in zip(("first", "second"), ports, strict=False):
            config = {
                "port": str(port),
                "bind": "127.0.0.1",
                "requirepass": f"'{PASSWORD}'",
                "masterauth": f"'{PASSWORD}'",
                "repl-diskless-sync-delay": "0",
            }
            if servers:
                config["replicaof"] = f"127.0.0.1 {ports[0]}"
            server = start_embedded(tmp_path / name, prefer=server_kind, config=config)
            servers.append(stack.enter_context(server))
        replica = stack.enter_context(redis.Redis.from_url(servers[1].url, password=PASSWORD))
        wait_until(
            lambda: replica.info("replication")["master_link_status"] == "up", "the replica follows"
        )
        config_file = tmp_path / "sentinel.conf"
        config_file.write_text(
            f"port {ports[2]}\nbind 127.0.0.1\ndir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
            f'requirepass "{SENTINEL_PASSWORD}"\n'
            f"sentinel monitor main 127.0.0.1 {ports[0]} 1\n"
            f'sentinel auth-pass main "{PASSWORD}"\n'
            "sentinel down-after-milliseconds main 4000\nsentinel failover-timeout main 5000\n"
        )
        process = subprocess.Popen([servers[0].binary, config_file, "--sentinel"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        sentinel = stack.enter_context(redis.Redis(port=ports[2], password=SENTINEL_PASSWORD))
        wait_until(lambda: _knows_the_replica(sentinel), "the sentinel knows both")
        yield Watched(servers[0], ports[2], sentinel)


def _knows_the_replica(sentinel: Any) -> bool:
    try:
        replicas = sentinel.sentinel_slaves("main")
    except redis.RedisError:
        return False
    return any(r["port"] and "s_down" not in r["flags"] for r in replicas)


def in_url(watched: Watched, files: Callable[..., None]) -> str:
    password, sentinels = IN_URL
    return f"redis+sentinel://:{password}@{watched.where}?sentinel_password={sentinels}"


def in_files(watched: Watched, files: Callable[..., None]) -> str:
    files(PASSWORD_FILE, PASSWORD)
    files(SENTINEL_PASSWORD_FILE, SENTINEL_PASSWORD)
    return f"redis+sentinel://default@{watched.where}"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def write(variable: str, secret: str) -> None:
        (tmp_path / variable).write_text(f"{secret}\n")
        monkeypatch.setenv(variable, str(tmp_path / variable))

    return write


def ask(watched: Watched) -> None:
    def started() -> bool:
        try:
            watched.sentinel.execute_command("SENTINEL", "FAILOVER", "main")
        except redis.ResponseError as error:
            return str(error).startswith("INPROG")
        return True

    # It takes no replica that it has not heard of for some seconds.
    wait_until(started, "the sentinel begins a failover")


def kill(watched: Watched) -> None:
    watched.master.kill()


@pytest.mark.parametrize(
    ("fail", "url"), [(ask, in_url), (kill, in_files)], ids=["asked", "killed"]
)
async def test_a_failover_under_samples_in_flight(
    watched: Watched,
    files: Callable[..., None],
    tmp_path: Path,
    fail: Callable[[Watched], None],
    url: Callable[..., str],
) -> None:
    """Half of the tokens are made before, half while nobody leads or after it."""
    (tmp_path / "pool").mkdir()
    pool = Pool(url(watched, files), tmp_path / "pool", {"lease_ms": 20_000})
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    first = await pool.update(worker)
    pool.submit(8)
    samples = [f"g{i}/0" for i in range(8)]
    await pool.made(3, *samples)
    before = watched.led_by()
    watched.replicated()

    fail(watched)
    engine.allow(1)
    await async_wait_until(lambda: watched.led_by() != before, "another leads")
    await async_wait_until(watched.gave_way, "nobody is led by the one before")
    held = worker.state.held.values()
    await async_wait_until(lambda: [h.made for h in held] == [4] * 8, "a token more of each")
    engine.plan = lambda r: None
    second = await pool.update(worker)
    pool.client.submit([[7]], ids=["late"])
    groups = await pool.groups(9)

    assert second > first
    assert sorted(g.id for g in groups) == [*(f"g{i}" for i in range(8)), "late"]
    for group in groups:
        (rollout,) = group.rollouts
        if group.id != "late":
            assert rollout.versions.tolist() == [first] * 4 + [second] * 4
        assert rollout.crashes == 0
    assert worker.state.failure is None
    assert pool.client.status().results == 0
    await pool.close()


async def test_what_is_wrong_with_a_sentinel_is_said(watched: Watched) -> None:
    password, sentinels = IN_URL
    where = f"redis+sentinel://:{password}@{watched.where}"
    for url, error, says in (
        (f"{where}?sentinel_password=wrong", QueueUnusable, "check .* password for the sentinels"),
        (f"{where}er?sentinel_password={sentinels}", RedisUnavailable, "master found for 'mainer'"),
    ):
        queue, twin = Queue(url, "q", patience=0.0), AsyncQueue(url, "q", patience=0.0)
        with pytest.raises(error, match=says) as said:
            queue.open()
        assert "client" not in str(said.value), "redis-py quotes the settings of its clients"
        with pytest.raises(error, match=says):
            await twin.open()
        queue.close()
        await twin.close()
