"""deploy/redis/: the configuration and the made passwords work on a real server, and the memory
that OPERATIONS.md promises is what a real server takes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer import QueueUnusable, SamplingParams
from producer.contract.connection import Queue
from producer.contract.url import PASSWORD_FILE
from producer.server import Prefer, find_server, start_embedded
from tests.deploy.conftest import DEPLOY
from tests.deploy.test_acl import roles
from tests.integration.pool import QUEUE, Pool
from tests.waiting import async_wait_until, wait_until
from workers.engines.sim import SimEngine, SimSettings


@pytest.fixture
def configured(deploy: Path, server_kind: Prefer, tmp_path: Path) -> Iterator[str]:
    """Host and path of a server on deploy's configuration, reached through a socket."""
    socket = tmp_path / "redis.sock"
    overrides = {
        "aclfile": deploy / "redis" / "secrets" / "users.acl",
        "port": 0,
        "unixsocket": socket,
    }
    options = [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
    config = tmp_path / "redis.conf"
    text = (deploy / "redis" / "redis.conf").read_text()
    assert "\ndir /data\n" in text
    config.write_text(text.replace("/data", str(tmp_path)))
    command = [str(find_server(server_kind)), str(config), *options]
    log = tmp_path / "redis.log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as server,
    ):
        try:
            wait_until(lambda: socket.exists() or server.poll() is not None, "the server listens")
            assert server.poll() is None, log.read_text()
            yield str(socket)
        finally:
            server.terminate()


def test_the_server_keeps_what_it_has_and_lets_in_who_has_a_password(
    configured: str, deploy: Path
) -> None:
    password = (deploy / "redis" / "secrets" / "worker").read_text()
    queue = Queue(f"unix://worker:{password}@{configured}", QUEUE)
    queue.open()  # checks the server, and that this user may do its work
    info = queue.redis.info("everything")
    assert (info["maxmemory_policy"], info["aof_enabled"]) == ("noeviction", 1)
    assert info["maxmemory"] == 4 << 30
    queue.close()
    for role in roles():
        with (
            redis.Redis.from_url(f"unix://{role}:change-me-{role}@{configured}") as client,
            pytest.raises((redis.AuthenticationError, QueueUnusable)),
        ):
            client.ping()
    with (
        redis.Redis.from_url(f"unix://{configured}") as nobody,
        pytest.raises(redis.RedisError, match=r"required|authenticated"),
    ):
        nobody.ping()


@pytest.mark.parametrize("role", ["worker", "trainer"])
def test_the_files_of_passwords_open_the_queue(
    configured: str, deploy: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """As every manifest connects: the user in the URL, the password in a file."""
    monkeypatch.setenv(PASSWORD_FILE, str(deploy / "redis" / "secrets" / role))
    queue = Queue(f"unix://{role}@{configured}", QUEUE)
    queue.open()
    queue.close()


def test_passwords_differ_and_change_without_a_restart(configured: str, deploy: Path) -> None:
    secrets = deploy / "redis" / "secrets"

    def client(role: str, password: str) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)  # a wrong password stays wrong
        return redis.Redis(
            unix_socket_path=configured, username=role, password=password, retry=retry
        )

    admin = client("admin", (secrets / "admin").read_text())
    inode = (secrets / "users.acl").stat().st_ino
    before = {role: (secrets / role).read_text() for role in roles() if role != "default"}
    assert len({*before.values()}) == len(before) == 6
    assert all(len(password) == 48 for password in before.values())
    subprocess.run([deploy / "redis" / "new-passwords.sh"], check=True)
    after = {role: (secrets / role).read_text() for role in before}
    assert not {*before.values()} & {*after.values()}
    assert (secrets / "users.acl").stat().st_ino == inode, "a mounted file is written in place"
    with admin:
        admin.acl_load()
    for role, password in after.items():
        with client(role, password) as new, client(role, before[role]) as old:
            assert new.ping()
            with pytest.raises(redis.AuthenticationError):
                old.ping()
    users = (secrets / "users.acl").read_text()
    assert "change-me" not in users
    template = (DEPLOY / "redis" / "users.acl").read_text()
    assert re.sub(r" #[0-9a-f]{64} ", " PASSWORD ", users) == re.sub(
        r" >change-me-\w+ ", " PASSWORD ", template
    )


# memory


def promised(prompt: int, response: int, n: int) -> tuple[float, float]:
    """Bytes a sample while it waits, and when its group is closed, by OPERATIONS.md."""
    text = (DEPLOY / "OPERATIONS.md").read_text()
    found = re.search(
        r"waiting = (\d+) \+ \((\d+) \+ ([\d.]+) x prompt\) / n\n"
        r" *closed  = waiting \+ (\d+) \+ ([\d.]+) x response",
        text,
    )
    assert found, "the formula is in OPERATIONS.md"
    sample, group, token, closed, answer = map(float, found.groups())
    waiting = sample + (group + token * prompt) / n
    return waiting, waiting + closed + answer * response


@pytest.mark.parametrize(
    ("prompt", "response", "n"), [(100, 256, 1), (1000, 1000, 1), (512, 2048, 8), (64, 128, 16)]
)
async def test_a_sample_takes_as_much_memory_as_operations_says(
    server_kind: Prefer, tmp_path: Path, prompt: int, response: int, n: int
) -> None:
    """Never more than a tenth above the formula, and at least half of it.

    Without a log, whose buffer grows while the disk is busy.
    """
    (tmp_path / "pool").mkdir()
    with start_embedded(tmp_path / "redis", prefer=server_kind, appendonly=False) as server:
        pool = Pool(server.url, tmp_path / "pool", {})
        engine = SimEngine(SimSettings(stream_interval=16, max_model_len=4096))
        worker = await pool.start(engine, name="a", checkpoint_tokens=64)
        pool.client.submit([[5] * 10] * 64, SamplingParams(max_tokens=16))  # what is there once
        await async_wait_until(lambda: pool.client.status().results == 64, "all are closed")
        assert await worker.drain() == 0

        def used() -> int:
            return int(pool.client._queue.redis.info("memory")["used_memory"])

        def as_said(formula: float) -> bool:
            """Also when buffers of connections that ended are freed, which takes the server a
            while."""
            return 0.5 * formula < (used() - before) / (groups * n) < 1.1 * formula

        waiting, closed = promised(prompt, response, n)
        # Enough that buffers do not count.
        groups, before = (1024 if response < 1000 else 128) // n, used()
        params = SamplingParams(n=n, max_tokens=response)
        pool.client.submit([[5] * prompt] * groups, params)
        await async_wait_until(lambda: as_said(waiting), f"{waiting:.0f} bytes a waiting sample")
        engine = SimEngine(SimSettings(stream_interval=16, max_model_len=4096))
        worker = await pool.start(engine, name="b", checkpoint_tokens=64)
        await async_wait_until(
            lambda: pool.client.status().results == 64 + groups, "all are closed"
        )
        assert await worker.drain() == 0
        await async_wait_until(lambda: as_said(closed), f"{closed:.0f} bytes a closed sample")
        await pool.close()
