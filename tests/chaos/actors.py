"""The processes of a chaos run, kept alive as a deploy manifest would."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.nursery import Nursery
from tests.chaos.proxy import Proxy
from tests.chaos.trainer import Settings
from tests.chaos.work import CHECKPOINT, QUEUE, SIM

_PAUSE = 0.1  # before an actor that ended is started again


@dataclass(eq=False)
class Actor:
    """A place for one process after another; `link` is its proxy's."""

    kind: str
    link: str
    name: str = ""
    pid: int = 0
    starts: int = 0
    start_at: float = 0.0
    stopped: bool = False
    killed: bool = False
    codes: Counter[int] = field(default_factory=Counter)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Actors:
    """Workers and trainers, each behind a link of the proxy."""

    def __init__(
        self, directory: Path, proxy: Proxy, seed: int, workers: int, trainers: list[Settings]
    ) -> None:
        self._directory = directory
        self._proxy = proxy
        self._seed = seed
        self._nursery = Nursery()
        self._settings = {f"trainer-{s.rank}": s for s in trainers}
        self.workers = [Actor("worker", f"worker-{i}") for i in range(workers)]
        self.trainers = [Actor("trainer", link) for link in self._settings]
        self._by_pid: dict[int, Actor] = {}
        self.finishing = False

    @property
    def all(self) -> list[Actor]:
        return [*self.workers, *self.trainers]

    def tend(self) -> None:
        """Note who ended, and start whom it is time for."""
        while not self._nursery.exits.empty():
            pid, code = self._nursery.exits.get()
            actor = self._by_pid.pop(pid)
            actor.codes[code] += 1
            actor.pid, actor.stopped, actor.killed = 0, False, False
            actor.start_at = time.monotonic() + _PAUSE
            if self.finishing and actor.kind == "trainer" and code == 0:
                actor.start_at = float("inf")
        for actor in self.all:
            if not actor.pid and time.monotonic() >= actor.start_at:
                self._start(actor)

    def _start(self, actor: Actor) -> None:
        actor.starts += 1
        actor.name = f"{actor.link}-{actor.starts}"
        url = f"redis://127.0.0.1:{self._proxy.port(actor.link)}"
        log = self._directory / f"{actor.link}.log"
        if actor.kind == "worker":
            arguments = {"options": self._worker(actor, url), "board": str(self.board(actor.name))}
            actor.pid = self._nursery.spawn("worker", arguments, log)
        else:
            settings = dataclasses.replace(self._settings[actor.link], url=url)
            actor.pid = self._nursery.spawn("trainer", dataclasses.asdict(settings), log)
        self._by_pid[actor.pid] = actor

    def board(self, name: str) -> Path:
        """Where a worker writes how far its engine is."""
        return self._directory / f"{name}.board"

    def _worker(self, actor: Actor, url: str) -> list[str]:
        rng = random.Random(f"{self._seed} {actor.name}")
        sim = {
            f.name: getattr(SIM, f.name)
            for f in dataclasses.fields(SIM)
            if getattr(SIM, f.name) != f.default
        }
        sim["fail_versions"] = "+".join(map(str, SIM.fail_versions))
        sim["load_seconds"] = rng.choice((0.02, 0.02, 0.1, 1.0))
        sim["start_seconds"] = rng.uniform(0.0, 0.1)
        sim["late_seconds"] = rng.choice((0.0, 0.02))
        options = {
            "engine": "sim",
            "sim": ",".join(f"{k}={v}" for k, v in sim.items()),
            "redis": url,
            "queue": QUEUE,
            "name": actor.name,
            "weights-dir": self._directory / "weights",
            "checkpoint-tokens": CHECKPOINT,
            "fetch-seconds": 0.5,
            "checkpoint-seconds": 0.5,
            "grace-seconds": 5,
            "stall-seconds": 10,
            "load-seconds": 20,
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def close(self) -> None:
        self._nursery.close()
