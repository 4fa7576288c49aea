"""The embedded server: what it is started with, and that it never outlives its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from producer.contract.errors import RedisUnavailable
from producer.server import EmbeddedServer, Prefer, find_server, redis_at, start_embedded
from tests.waiting import wait_until


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_server.url) as client:
        yield client


def test_it_is_configured_as_a_queue_needs_it(client: redis.Redis) -> None:
    config = client.config_get("port", "maxmemory-policy", "appendonly", "appendfsync", "save")

    assert config == {
        "port": "0",
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
    }


def test_no_other_user_can_read_it(own_server: EmbeddedServer, client: redis.Redis) -> None:
    client.set("secret", "x")

    assert stat.S_IMODE(own_server.directory.stat().st_mode) == 0o700
    for path in own_server.directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_directives_given_win(server_kind: Prefer, tmp_path: Path) -> None:
    directives = {
        "maxmemory": "50mb",
        "client-output-buffer-limit": "pubsub 64mb 16mb 30",
        "appendfsync": "always",
    }
    with (
        start_embedded(tmp_path, prefer=server_kind, config=directives) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        config = client.config_get("maxmemory", "client-output-buffer-limit", "appendfsync")

    assert config["maxmemory"] == str(50 * 2**20)
    assert f"pubsub {64 * 2**20} {16 * 2**20} 30" in config["client-output-buffer-limit"]
    assert config["appendfsync"] == "always"


def test_a_password_does_not_keep_it_from_starting(server_kind: Prefer, tmp_path: Path) -> None:
    with (
        start_embedded(tmp_path, prefer=server_kind, config={"requirepass": "'x y'"}) as server,
        redis.Redis.from_url(server.url, password="x y") as client,
    ):
        assert client.ping()


def test_a_killed_server_comes_back_at_the_same_url_with_its_data(
    own_server: EmbeddedServer, client: redis.Redis
) -> None:
    url, pid = own_server.url, own_server.pid
    client.set("a", "1")

    own_server.kill()
    with pytest.raises(RedisUnavailable, match="not running"):
        _ = own_server.pid
    own_server.start()

    assert own_server.url == url
    assert own_server.pid != pid
    assert client.get("a") == b"1"


def test_a_directory_given_is_kept_and_read_again(server_kind: Prefer, tmp_path: Path) -> None:
    for expected in (None, b"1"):
        with (
            start_embedded(tmp_path, prefer=server_kind) as server,
            redis.Redis.from_url(server.url) as client,
        ):
            assert client.getset("a", "1") == expected


def test_a_directory_of_its_own_goes_with_it(server_kind: Prefer) -> None:
    server = start_embedded(prefer=server_kind)
    pid = server.pid

    server.stop()
    server.stop()

    assert not server.directory.exists()
    assert not is_alive(pid)
    with pytest.raises(RedisUnavailable, match="went with stop"):
        server.start()


def test_two_servers_cannot_share_a_directory(own_server: EmbeddedServer) -> None:
    with pytest.raises(RedisUnavailable, match=r"runs in .* already"):
        start_embedded(own_server.directory)

    with redis.Redis.from_url(own_server.url) as client:
        assert client.ping()


def test_nor_does_one_that_is_too_busy_to_answer_share_it(own_server: EmbeddedServer) -> None:
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RedisUnavailable, match=r"runs in .* already"):
            start_embedded(own_server.directory)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)

    with redis.Redis.from_url(own_server.url) as client:
        assert client.ping()


@pytest.mark.parametrize("name", ["long-" * 40, "sp ace %41 'quoted' #1 ?x=y"])
def test_any_directory_will_do(server_kind: Prefer, tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    with (
        start_embedded(directory, prefer=server_kind) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.set("a", "1")
        socket_path = Path(client.connection_pool.connection_kwargs["path"])
        assert socket_path.is_socket()
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert (directory / "appendonlydir").is_dir()

    if socket_path.parent != directory:
        assert not socket_path.parent.exists()


def test_a_server_that_does_not_start_says_why(server_kind: Prefer, tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailable, match=r"(?s)ended with code 1 .*no-such-directive"):
        start_embedded(tmp_path, prefer=server_kind, config={"no-such-directive": "yes"})


def test_a_server_that_does_not_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mute = tmp_path / "redis-server"
    mute.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    mute.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("producer.server._START_SECONDS", 0.5)

    spawned: list[int] = []
    spawn = EmbeddedServer._spawn

    def noted(server: EmbeddedServer) -> subprocess.Popen[bytes]:
        process = spawn(server)
        spawned.append(process.pid)
        return process

    monkeypatch.setattr(EmbeddedServer, "_spawn", noted)

    with pytest.raises(RedisUnavailable, match=r"did not answer within 0\.5 s"):
        start_embedded()

    (pid,) = spawned
    assert not is_alive(pid)


def test_a_server_that_ignores_the_request_to_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, server_kind: Prefer, tmp_path: Path
) -> None:
    monkeypatch.setattr("producer.server._STOP_SECONDS", 0.2)
    server = start_embedded(tmp_path, prefer=server_kind)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)

    server.stop()

    assert not is_alive(pid)


def test_a_long_place_for_temporary_files_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / ("long-" * 40)
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))

    with redis_at() as url, redis.Redis.from_url(url) as client:
        assert client.ping()

    assert list(place.iterdir()) == []


def test_where_none_is_installed_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    for prefer, advice in (
        (None, r"redis-server or valkey-server, or `pip install 'rollq\[embedded\]'`"),
        ("path", "neither redis-server nor valkey-server is on PATH"),
        ("wheel", r"pip install 'rollq\[embedded\]'"),
    ):
        with pytest.raises(RedisUnavailable, match=advice):
            find_server(prefer)  # type: ignore[arg-type]


def test_a_server_on_path_goes_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = tmp_path / "valkey-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_server() == on_path


def test_a_url_given_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with redis_at("redis://elsewhere:1") as url:
        assert url == "redis://elsewhere:1"


def test_without_a_url_a_server_lasts_as_long_as_the_context() -> None:
    with redis_at() as url, redis.Redis.from_url(url) as client:
        assert client.ping()
        pid = client.info("server")["process_id"]

    assert not is_alive(pid)


def test_it_outlives_the_thread_that_started_it(server_kind: Prefer, tmp_path: Path) -> None:
    servers: list[EmbeddedServer] = []
    thread = threading.Thread(
        target=lambda: servers.append(start_embedded(tmp_path, prefer=server_kind))
    )
    thread.start()
    thread.join()

    with servers[0] as server, redis.Redis.from_url(server.url) as client:
        # Two turns of the server's own timer: by then it has seen a SIGTERM if there was one.
        hz = int(client.config_get("hz")["hz"])
        ticks = client.info("server")["uptime_in_seconds"]
        wait_until(
            lambda: client.info("server")["uptime_in_seconds"] >= ticks + 2,
            f"two seconds of a server at {hz} Hz",
        )
        assert "SIGTERM" not in server.log_tail()


_PARENT = """
import os, signal, sys
from pathlib import Path
from producer.server import start_embedded

server = start_embedded(Path(sys.argv[2]) if len(sys.argv) > 2 else None, prefer=sys.argv[1])
print(server.pid, server.directory, flush=True)
sys.stdin.read()
"""


class Parent:
    """A process that starts a server, and stops without a word when its input ends."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PARENT, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        pid, directory = self.process.stdout.readline().split(maxsplit=1)
        self.server_pid = int(pid)
        self.directory = Path(directory.strip())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of this death")
def test_it_ends_when_its_parent_is_killed(server_kind: Prefer, tmp_path: Path) -> None:
    parent = Parent(server_kind, str(tmp_path))
    assert is_alive(parent.server_pid)

    parent.process.kill()
    wait_until(lambda: not is_alive(parent.server_pid), "the server's end")

    parent.close()
    with (
        start_embedded(tmp_path, prefer=server_kind) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.ping(), "the directory is free for the next server"


def test_it_ends_with_a_parent_that_forgets_it(server_kind: Prefer) -> None:
    parent = Parent(server_kind)

    parent.process.communicate("")

    assert parent.process.returncode == 0
    assert not is_alive(parent.server_pid)
    assert not parent.directory.exists()


def test_ctrl_c_reaches_the_parent_alone(server_kind: Prefer, tmp_path: Path) -> None:
    parent = Parent(server_kind, str(tmp_path))

    assert os.getpgid(parent.server_pid) != os.getpgid(parent.process.pid)
    os.killpg(parent.process.pid, signal.SIGSTOP)
    try:
        with redis.Redis.from_url(f"unix://{tmp_path}/redis.sock") as client:
            assert client.ping()
    finally:
        parent.close()
    wait_until(lambda: not is_alive(parent.server_pid), "the server's end")


def test_a_forked_child_leaves_it_alone(own_server: EmbeddedServer, client: redis.Redis) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # a child that hangs in stop() must not stay
        own_server.stop()
        os._exit(0)

    assert os.waitpid(child, 0) == (child, 0)

    assert client.ping()
    assert own_server.directory.exists()
