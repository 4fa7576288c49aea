"""The password of a Redis is in no log, argument, repr, key or error of ours; files are private."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from click.testing import CliRunner

from producer import RolloutClient
from producer.cli import main
from producer.contract.connection import AsyncQueue, Queue
from producer.contract.errors import RollqError
from producer.contract.url import PASSWORD_FILE
from producer.demo.loop import DemoConfig
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration.pool import QUEUE, ROOT, Pool, Process
from tests.integration.stepper import StepEngine
from tests.servers import free_port
from tests.waiting import DEADLINE_S, async_wait_until, wait_until

#: with all that a URL, a shell, a log or a pattern could stumble over between two plain words
FIRST, LAST = "hunter2", "swordfish"
PASSWORD = f"{FIRST} @:/?#&=%25%s{{0}}[\\'\"é\u2100;{LAST}"


def clean(text: str) -> str:
    """The text, if it holds no part of the password that could be told from other words."""
    assert FIRST not in text
    assert LAST not in text
    return text


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Any: what may leak is on our side."""
    port = {"port": str(free_port()), "bind": "127.0.0.1"}
    with start_embedded(tmp_path / "redis", config=port) as server:
        yield server


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", PASSWORD)
        yield admin


Given = Callable[[pytest.MonkeyPatch, Path, int], str]


def in_url(patch: pytest.MonkeyPatch, place: Path, port: int) -> str:
    return f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0"


def in_query(patch: pytest.MonkeyPatch, place: Path, port: int) -> str:
    return f"redis://127.0.0.1:{port}/0?username=default&password={quote(PASSWORD, safe='')}"


def in_file(patch: pytest.MonkeyPatch, place: Path, port: int) -> str:
    (place / "secret").write_text(PASSWORD)
    patch.setenv(PASSWORD_FILE, str(place / "secret"))
    return f"redis://127.0.0.1:{port}/0"


@pytest.mark.parametrize("give", [in_url, in_query, in_file], ids=["url", "query", "file"])
async def test_a_password_is_shown_nowhere(
    server: EmbeddedServer,
    admin: redis.Redis,
    give: Given,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through work, a rotation, a restart of Redis and every kind of failure to connect."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "pool").mkdir()
    url = give(monkeypatch, tmp_path, int(server._config["port"]))
    pool = Pool(url, tmp_path / "pool", {})
    inside = await pool.start(StepEngine(), name="inside")
    monkeypatch.setenv("ROLLQ_REDIS_URL", url)
    worker = [sys.executable, "-m", "producer.cli", "worker", "--engine", "sim"]
    worker += ["--queue", QUEUE, "--name", "process", "--log-level", "debug"]
    outside = Process(worker, tmp_path / "process.log")
    with contextlib.closing(outside):
        await async_wait_until(lambda: len(pool.client.status().workers) == 2, "both live")
        version = await pool.update(inside)
        clean(arguments_of(os.getpid()))

        admin.config_set("requirepass", "other")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await async_wait_until(lambda: "is away" in outside.log(), "the worker says so")
        said = [failure(lambda: Queue(url, QUEUE, patience=0.0).open())]
        admin.config_set("requirepass", PASSWORD)
        await async_wait_until(lambda: "is back" in outside.log(), "the worker says so")
        everything = stored(admin)
        pool.submit(4)
        await pool.groups(4)
        pool.client.wait_for_version(version, timeout=DEADLINE_S)
        said += [command("dead", "list", "--json"), command("dead", "show", "x/0")]
        server.kill()
        for attempt in (
            lambda: Queue(url, QUEUE, patience=0.0).open(),
            lambda: asyncio.run(AsyncQueue(url, QUEUE, patience=0.0).open()),
            lambda: RolloutClient(url, patience=0.0),
            lambda: Queue(url.replace("redis:", "http:"), QUEUE),
        ):
            said.append(await asyncio.to_thread(failure, attempt))
        said.append(await asyncio.to_thread(command, "dead", "list"))
        server.start()
        admin.config_set("requirepass", PASSWORD)

    assert b"process" in everything
    for text in (caplog.text, outside.log(), everything.decode(errors="replace"), *said):
        assert clean(text)
    for thing in (inside.state.settings, inside.state.queue, inside.state.queue.redis, pool.client):
        clean(repr(thing) + str(thing))
    clean(repr(pool.client._queue.redis) + repr(DemoConfig(redis_url=url)))
    await pool.close()


def arguments_of(process: int) -> str:
    """Argument lists of all that a process started, and they."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        # A thread or process may have ended since it was listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                found += [Path(f"/proc/{child}/cmdline").read_text(), arguments_of(int(child))]
    assert found or process != os.getpid()
    return "\n".join(found)


def failure(attempt: Callable[[], Any]) -> str:
    """What a program would print of an error that nobody caught."""
    with pytest.raises(RollqError) as error:
        attempt()
    return "".join(traceback.format_exception(error.value))


def command(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code in (0, 1)
    return done.output + repr(done.exception) + "\n"


def stored(admin: redis.Redis) -> bytes:
    keys = admin.keys("*")
    assert keys
    return b"\n".join([*keys, *(admin.dump(key) or b"" for key in keys)])


def test_a_password_on_a_command_line_is_warned_of_and_not_repeated() -> None:
    for target in (
        f"redis://:{FIRST}@127.0.0.1:1",
        f"redis://:{FIRST}/@127.0.0.1:1",
    ):
        done = CliRunner().invoke(main, ["dead", "--redis", target, "drop"])

        assert "Warning: a password on the command line can be read" in done.stderr
        assert "ROLLQ_REDIS_URL" in clean(done.output)
    assert (
        "Warning" not in CliRunner().invoke(main, ["dead", "--redis", "redis://h", "drop"]).stderr
    )


def test_no_process_of_ours_is_told_a_url_by_an_argument() -> None:
    for path in [*(ROOT / "producer").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            parts = {ast.List: "elts", ast.JoinedStr: "values"}.get(type(node))
            words = [getattr(e, "value", "") for e in getattr(node, parts)] if parts else []
            told = {"--redis", "--redis="} & {w for w in words if isinstance(w, str)}
            assert not told, f"{path}:{node.lineno}: give it ROLLQ_REDIS_URL"


def test_help_shows_no_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLQ_REDIS_URL", f"redis://:{FIRST}@host")
    for name in main.list_commands(None):  # type: ignore[arg-type]
        assert clean(CliRunner().invoke(main, [name, "--help"]).output)


def test_a_servers_configuration_is_on_no_command_line(server_kind: Prefer, tmp_path: Path) -> None:
    """Also not while it starts, in the process that becomes the server."""
    seen: list[str] = []
    config = {"requirepass": FIRST, "masterauth": f"'{LAST}'"}
    with start_embedded(tmp_path / "redis", prefer=server_kind, config=config) as server:
        seen.append(arguments_of(os.getpid()))
        for path in server.directory.rglob("*"):
            if path.is_file():
                clean(path.read_bytes().decode(errors="replace"))
        with redis.Redis.from_url(server.url, password=FIRST) as client:
            assert client.config_get("masterauth") == {"masterauth": LAST}
        seen.append(repr(server._process.args))  # type: ignore[union-attr]
    assert clean("".join(seen))


# files


def private(path: Path) -> bool:
    return stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0


@pytest.fixture
def open_umask() -> Iterator[None]:
    """As where everybody may read and write what is made without a thought."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_servers_files_and_sockets_are_private(
    server_kind: Prefer, tmp_path: Path, open_umask: None
) -> None:
    for directory in (None, tmp_path / "given", tmp_path / ("long" * 30)):
        with start_embedded(directory, prefer=server_kind) as server:
            with redis.Redis.from_url(server.url) as client:
                client.set("a", "b")
                client.bgrewriteaof()
                wait_until(
                    lambda c=client: not c.info("persistence")["aof_rewrite_in_progress"],
                    "the file is rewritten",
                )
            sockets = [Path(redis_path(server.url))]
            made = [server.directory, *server.directory.rglob("*"), *sockets, sockets[0].parent]
            assert len(made) > 4
            assert [str(p) for p in made if not private(p)] == []


def redis_path(url: str) -> str:
    return str(redis.connection.parse_url(url)["path"])


def test_a_demos_directory_is_private(tmp_path: Path, open_umask: None) -> None:
    directory = tmp_path / "demo"
    arguments = ["--engine", "sim", "--steps", "1", "--workers", "1", "--json"]
    log = tmp_path / "demo.log"
    demo = Process(
        [sys.executable, "-m", "producer.cli", "demo", *arguments, "--dir", str(directory)], log
    )
    with contextlib.closing(demo):
        assert demo.ended() == 0, demo.log()
    assert (directory / "logs" / "worker-1.log").is_file()
    assert private(directory)
    assert private(directory / "logs")
