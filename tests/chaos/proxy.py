"""A TCP proxy that misbehaves: one port an actor, so that each can be cut off alone.

Runs an event loop in a thread of its own; every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any


class Proxy:
    """Forwards the ports that `port` opens to a unix socket."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self._links: dict[str, _Link] = {}
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def port(self, name: str) -> int:
        """The port of a link, opened at the first call."""

        async def open_link() -> int:
            if name not in self._links:
                link = self._links[name] = _Link(self)
                await link.listen()
            return self._links[name].port

        return asyncio.run_coroutine_threadsafe(open_link(), self.loop).result(5.0)

    def cut(self, name: str) -> None:
        """Reset every connection of a link."""
        self._on(name, _Link.cut)

    def hold(self, name: str, seconds: float) -> None:
        """Pass nothing on for so long, either way; connections are accepted meanwhile."""
        self._on(name, lambda link: link.hold(seconds))

    def drop_reply(self, name: str, word: bytes, share: float) -> None:
        """Of the reply to the next request that holds `word` pass on that share of its bytes,
        then reset the connection."""
        self._on(name, lambda link: link.lose(word, share))

    def close(self) -> None:
        async def end() -> None:
            for link in self._links.values():
                link.close()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _on(self, name: str, call: Callable[[_Link], None]) -> None:
        self.loop.call_soon_threadsafe(lambda: call(self._links[name]))


class _Link:
    """All connections of one actor."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.port = 0
        self.held = 0
        self.to_lose: tuple[bytes, float] | None = None
        self.ends: set[_End] = set()

    async def listen(self) -> None:
        self._server = await self.proxy.loop.create_server(
            lambda: _End(self, None), "127.0.0.1", 0, backlog=256
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        for end in list(self.ends):
            end.reset()

    def lose(self, word: bytes, share: float) -> None:
        self.to_lose = (word, share)

    def hold(self, seconds: float) -> None:
        self.held += 1
        for end in self.ends:
            end.look()
        self.proxy.loop.call_later(seconds, self._release)

    def _release(self) -> None:
        self.held -= 1
        for end in self.ends:
            end.look()

    def close(self) -> None:
        self._server.close()
        self.cut()


class _End(asyncio.Protocol):
    """One side of a connection; `peer` is the other. The client's side opens the server's."""

    def __init__(self, link: _Link, peer: _End | None) -> None:
        self._link = link
        self._peer = peer
        self._is_client = peer is None
        self._transport: Any = None
        self._full = False  # the other side takes no more for now
        self._paused = False
        self._share: float | None = None  # of the next reply that is passed on before a reset

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._link.ends.add(self)
        if self._is_client:
            # Nothing is read before there is somewhere to send it.
            self._full = True
            self._opening = self._link.proxy.loop.create_task(self._open())
        self.look()

    async def _open(self) -> None:
        try:
            _, self._peer = await self._link.proxy.loop.create_unix_connection(
                lambda: _End(self._link, self), self._link.proxy.server
            )
        except OSError:
            return self.reset()
        self._full = False
        self.look()

    def data_received(self, data: bytes) -> None:
        link = self._link
        if self._peer is None:
            return
        if self._is_client and link.to_lose is not None and link.to_lose[0] in data:
            _, self._peer._share = link.to_lose
            link.to_lose = None
        if self._share is not None:
            self._peer.write(data[: int(len(data) * self._share)])
            self._peer.reset()
            return self.reset()
        self._peer.write(data)

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._set_full(True)

    def resume_writing(self) -> None:
        self._set_full(False)

    def _set_full(self, full: bool) -> None:
        if self._peer is not None:
            self._peer._full = full
            self._peer.look()

    def look(self) -> None:
        """Read, or do not."""
        pause = self._full or self._link.held > 0
        if pause != self._paused and not self._transport.is_closing():
            self._paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        self._link.ends.discard(self)
        if self._peer is not None and self._peer._transport is not None:
            self._peer._transport.close()

    def reset(self) -> None:
        """Close with a RST, as a host that forgot the connection does."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_INET and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
