"""A socket in front of a Redis that loses replies on demand.

The server has run the command, the client's connection ends before the reply: what a client
sees when a network or a proxy fails at the worst moment.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, unquote, urlsplit

_BUFFER = 1 << 16


class Proxy:
    """Forwards a unix socket to the Redis at `server_url`, itself a unix socket.

    `lose(word)`: the next request that holds `word` reaches the server; its reply does not
    reach the client, whose connection is closed instead.
    """

    def __init__(self, server_url: str, directory: Path) -> None:
        self._server = unquote(urlsplit(server_url).path)
        self._path = directory / "proxy.sock"
        self._lock = threading.Lock()
        self._word: bytes | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self.lost = 0
        self.seen: list[bytes] = []

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._path))}"

    def lose(self, word: str) -> None:
        with self._lock:
            self._word = word.encode()

    def requests(self, word: str) -> int:
        """How many requests held `word` so far."""
        return b"".join(self.seen).count(word.encode())

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._listener.settimeout(0.05)
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._path.unlink()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, selectors.DefaultSelector() as selector:
            server.connect(self._server)
            selector.register(client, selectors.EVENT_READ)
            selector.register(server, selectors.EVENT_READ)
            request, losing = b"", False
            while not self._stopping.is_set():
                for key, _ in selector.select(0.05):
                    data = key.fileobj.recv(_BUFFER)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is server:
                        if losing:
                            self.lost += 1
                            return
                        request = b""
                        client.sendall(data)
                        continue
                    self.seen.append(data)
                    request += data
                    losing = losing or self._takes(request)
                    server.sendall(data)

    def _takes(self, request: bytes) -> bool:
        with self._lock:
            if self._word is None or self._word not in request:
                return False
            self._word = None
            return True
