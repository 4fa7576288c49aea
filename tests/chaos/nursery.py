"""Starts the actors: forks them from a process that has imported everything already.

A worker that dies hundreds of times in a run must not spend a second on imports each time.
`Nursery` is the director's side; run as a module this is the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]


class Nursery:
    """`spawn` an actor; `exits` gets (pid, exit code) of each that ended."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
        )
        self._pids: SimpleQueue[int] = SimpleQueue()
        self.exits: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def spawn(self, kind: str, arguments: Any, log: Path) -> int:
        """Start an actor of ACTORS; returns its pid."""
        assert self._process.stdin is not None
        line = json.dumps({"kind": kind, "arguments": arguments, "log": str(log)})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._pids.get(timeout=120.0)

    def close(self) -> None:
        """Ends every actor, too: each asked for a SIGKILL at the death of its parent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "pid" in message:
                self._pids.put(message["pid"])
            else:
                self.exits.put((message["ended"], message["code"]))


def _worker(arguments: dict[str, Any]) -> None:
    from producer.cli import main
    from tests.chaos import board

    board.watch(Path(arguments["board"]))
    sys.argv = ["rollq", "worker", *arguments["options"]]
    main()


def _trainer(arguments: dict[str, Any]) -> None:
    from tests.chaos.trainer import Settings, Trainer

    Trainer(Settings(**arguments)).run()


ACTORS: dict[str, Callable[[Any], None]] = {"worker": _worker, "trainer": _trainer}


def _child(request: dict[str, Any]) -> None:
    """Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)
        ACTORS[request["kind"]](request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - its last words
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _say(message: dict[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    import producer.cli  # noqa: F401
    import tests.chaos.board
    import tests.chaos.trainer  # noqa: F401
    import workers.cli
    import workers.engines.sim
    import workers.worker  # noqa: F401

    heard, awake = socket.socketpair()
    heard.setblocking(False)
    awake.setblocking(False)
    signal.set_wakeup_fd(awake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(heard, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    with contextlib.suppress(BlockingIOError):
                        heard.recv(4096)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if pid == 0:
                        _child(json.loads(line))
                    _say({"pid": pid})
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    _say({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})
            time.sleep(0)


if __name__ == "__main__":
    main()
