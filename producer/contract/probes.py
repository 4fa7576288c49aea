"""An HTTP server for `/metrics`, `/livez` and `/readyz`, in threads of its own.

Nothing here waits for an event loop: a process whose loop stands still can still say so. A check
returns why not, or '' for yes. Used by `rollq worker --metrics-port` and by `rollq metrics`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from producer.contract.errors import InvalidSample, RollqError

log = logging.getLogger("rollq")

_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
#: seconds for a client to send its request
_PATIENCE = 5.0


class Probes:
    """Serves from `start` to `stop`; port 0 takes a free one, see `port`.

    Raises:
        InvalidSample: the address cannot be listened on; says why.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Callable[[], bytes],
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, _METRICS, metrics()),
            "/livez": lambda: _verdict(live()),
            "/readyz": lambda: _verdict(ready()),
        }

        class Handler(_Handler):
            answers = pages

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise InvalidSample(f"metrics cannot be served on {host}:{port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="rollq-probes",
            daemon=True,
        )  # fmt: skip

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the server; the port is free when it returns."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _verdict(why_not: str) -> tuple[int, str, bytes]:
    return (503, _TEXT, f"{why_not}\n".encode()) if why_not else (200, _TEXT, b"ok\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer would ask the DNS for this host's name, which can take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "rollq", int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    answers: dict[str, Callable[[], tuple[int, str, bytes]]]
    timeout = _PATIENCE
    server_version = "rollq"

    def do_GET(self) -> None:
        page = self.answers.get(self.path.partition("?")[0])
        if page is None:
            status, kind, body = 404, _TEXT, b"there are /metrics, /livez and /readyz\n"
        else:
            try:
                status, kind, body = page()
            except (RollqError, ImportError) as error:
                status, kind, body = 503, _TEXT, f"{error}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
