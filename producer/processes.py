"""Worker processes of the demo and the benches: started as a user would, and none left behind.

Each is `rollq worker ...` in a process group of its own, so that Ctrl-C reaches the parent alone,
which then ends them in good order: SIGTERM, time to hand back what they hold, SIGKILL for the whole
process group. If the parent is killed, the kernel sends them SIGTERM (on Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from producer.contract.errors import EngineError

#: What a worker may take to hand back its samples and end its engine.
_GRACE_SECONDS = 15.0
_LOG_TAIL_BYTES = 64 * 1024

#: Runs between fork and worker: asks the kernel for a SIGTERM at the parent's death, and ends
#: if the parent died before that.
_SHIM = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.nice(int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    log: Path
    process: subprocess.Popen[bytes]


class WorkerProcesses:
    """A context manager over worker processes; leaving it ends them.

    Start them from the main thread: the kernel takes the end of the thread that started a
    process for the end of its parent.
    """

    def __init__(self, log_directory: Path, *, nice: int = 10) -> None:
        """`nice`: they give way to the trainer, for which all workers wait in turn."""
        self._log_directory = log_directory
        self._nice = str(nice)
        self._workers: list[_Worker] = []
        self._reported: set[str] = set()

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `rollq worker ARGUMENTS`, its output going to `NAME.log`."""
        self._log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self._log_directory / f"{name}.log"
        rollq = [sys.executable, "-m", "producer.cli", "worker", *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), self._nice, *rollq],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                # A group, not a session: Linux shares the cores out among sessions, whatever
                # the niceness of their processes.
                process_group=0,
            )
        self._workers.append(_Worker(name, log, process))

    def newly_ended(self) -> list[str]:
        """A line and the end of its log for each worker that ended since the last call.

        Raises:
            EngineError: no worker is left; carries the same words.
        """
        ended = [w for w in self._workers if w.process.poll() is not None]
        words = [_obituary(w) for w in ended if w.name not in self._reported]
        self._reported.update(w.name for w in ended)
        if self._workers and len(ended) == len(self._workers):
            raise EngineError("no worker is left. " + "\n".join(words or map(_obituary, ended)))
        return words

    def stop(self) -> None:
        """End all of them. A second interrupt meanwhile ends them at once."""
        try:
            for worker in self._workers:
                # Only the worker itself: it ends its engine when it has handed back its samples.
                if worker.process.poll() is None:
                    worker.process.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _obituary(worker: _Worker) -> str:
    code = worker.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{worker.name} {how}; its log {worker.log} ends:\n{log_tail(worker.log)}"


def start_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS` that is spoken to by stdin and stdout; stderr goes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, **environment},
            process_group=0,
        )


def engine_environment(workers: int) -> dict[str, str]:
    """For so many vLLM workers that share this machine with a trainer, with or without GPUs."""
    return {
        "OMP_NUM_THREADS": str(engine_threads(workers)),
        # Workers that bind their threads to the same cores would halve each other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # A CPU engine then computes in the process that schedules. As two processes they spin
        # on shared memory while they wait for each other, which halves the speed on few cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def engine_threads(processes: int) -> int:
    """What each of so many processes may use, one core left to the others."""
    return max(1, min(4, ((os.cpu_count() or 2) - 1) // processes))


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, however long it is."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
