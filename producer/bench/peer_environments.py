"""Other task queues in environments of their own, and how they compare.

Called by `rollq bench queue` and `rollq bench peers`. Some pin another redis-py than rollq's and
some would move packages that vLLM uses, so none shares its environment: each has one in the
user's cache, made by `rollq bench peers --install` and made anew when its requirements change.
What runs in it is `task_queues.py`, which says how each is set up.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from producer.contract.errors import RollqError

_SCRIPT = Path(__file__).with_name("task_queues.py")
_TIMEOUT_SECONDS = 120.0
_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Peer:
    """A task queue by the name that `task_queues.py` knows, and what pip is asked for."""

    name: str
    requirements: tuple[str, ...]

    @property
    def home(self) -> Path:
        """Of its environment."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        return cache / "rollq" / "peers" / f"{self.name}-{python}"

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def installed(self) -> bool:
        """Whether all of its requirements are there, by what `install` wrote at its end."""
        try:
            return self._stamp.read_text() == self._words
        except FileNotFoundError:
            return False

    def install(self) -> None:
        """Make its environment, in place of an older one.

        Raises:
            RollqError: pip failed; holds its last words.
        """
        venv.create(self.home, clear=True, with_pip=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", *self.requirements]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode != 0:
            raise RollqError(f"cannot install {self.name}: {last_line(done.stderr)}")
        self._stamp.write_text(self._words)

    def rate(self, url: str, samples: int, size: int) -> float:
        """Samples a second, each with an answer of `size` bytes.

        Raises:
            RollqError: it failed, or not all answers came back.
        """
        name = f"bench-{secrets.token_hex(3)}"
        script = [str(self.python), "-P", str(_SCRIPT), "measure", self.name]
        with _open_pipe() as ours:  # it ends when the other end is closed, at the latest by exit
            try:
                done = subprocess.run(
                    [*script, url, name, str(samples), str(size)],
                    stdin=ours,
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT_SECONDS,
                )
            except subprocess.TimeoutExpired:
                raise RollqError(f"{self.name}: not done within {_TIMEOUT_SECONDS:g} s") from None
        if done.returncode != 0:
            raise RollqError(f"{self.name} failed: {last_line(done.stderr)}")
        return float(done.stdout)

    @property
    def _stamp(self) -> Path:
        return self.home / "installed"

    @property
    def _words(self) -> str:
        return "\n".join(self.requirements)


PEERS = (
    Peer("arq", ("arq~=0.28", "msgpack~=1.1", "uvloop")),
    # It imports typing_extensions, and does not ask for it.
    Peer("saq", ("saq[redis,hiredis]~=0.26", "typing-extensions", "uvloop")),
    Peer("taskiq", ("taskiq~=0.13", "taskiq-redis~=1.2", "hiredis", "uvloop")),
    Peer("dramatiq", ("dramatiq[redis]~=2.2", "hiredis")),
    Peer("celery", ("celery[redis]~=5.7", "hiredis")),
)


def compare(url: str, samples: int, size: int, ours: Callable[[], float]) -> dict[str, float]:
    """Each peer that is installed between two measurements of ours: its rate, and the least ratio.

    Empty where none is installed.
    """
    figures, times = {}, []
    before = 0.0
    for peer in (p for p in PEERS if p.installed):
        before = before or ours()
        rate = peer.rate(url, min(samples, _SAMPLES), size)
        after = ours()
        figures[f"{peer.name}_samples_per_second"] = rate
        times.append((before + after) / 2 / rate)
        before = after
    return {**figures, "times_best_peer": min(times)} if times else {}


@contextmanager
def _open_pipe() -> Iterator[int]:
    """The end to read of a pipe whose other end no child inherits."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def last_line(words: str) -> str:
    """What a program that failed said last."""
    lines = words.strip().splitlines()
    return lines[-1] if lines else "no message"
