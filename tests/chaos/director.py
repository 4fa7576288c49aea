"""Runs the pool, does it the harm that the schedule says, and watches."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

import redis

from producer.contract.connection import Queue
from producer.contract.errors import RedisUnavailable
from producer.contract.scripts import SCRIPTS
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.chaos import board
from tests.chaos.actors import Actor, Actors
from tests.chaos.events import Event, schedule
from tests.chaos.proxy import Proxy
from tests.chaos.trainer import Settings
from tests.chaos.work import LIMITS, QUEUE, TRAINERS, Work

LEASE = LIMITS["lease_ms"] / 1000
#: whose replies are dropped
REPLIES = {
    "worker": ("checkpoint", "finish", "checkpoint", "claim", "release", "confirm"),
    "trainer": ("XREADGROUP", "ack", "enqueue"),
}
_TICK = 0.03
#: after a kill, so that what the worker had sent has arrived; well within a lease
_COUNT_AFTER = 0.5
#: how long after its link or Redis was in trouble a worker may still have something to make up for
_MAKES_UP = 3.0
_DRAIN_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. What comes first of `samples` submitted (0: no such end) and `seconds` ends
    it; `gap` is the mean between two events."""

    seed: int
    workers: int = 4
    seconds: float = 30.0
    samples: int = 0
    gap: float = 0.8
    poison: float = 0.01
    publish_seconds: float = 3.0
    prefer: Prefer | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Redis came back at `back_at` as it was at `copied_at`; times of the wall clock."""

    copied_at: float
    killed_at: float
    back_at: float


@dataclass(slots=True)
class Recovery:
    """What a killed worker held, and how long it took others to take it over."""

    worker: str
    killed_at: float
    tokens: dict[str, bytes]  # sample -> lease token
    made: dict[tuple[str, int], int]  # sample, attempt -> tokens of prompt and response
    counts: bool  # whether nothing kept it from storing what it made
    samples: int = 0
    unstored: dict[str, int] = field(default_factory=dict)
    reaped: float = -1.0
    leased: float = -1.0


@dataclass(slots=True)
class Evidence:
    """What the director saw; the trainers' logs are the rest."""

    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    restores: list[Restore] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    unstored: list[dict[str, int]] = field(default_factory=list)  # a kill: sample -> tokens
    void: int = 0  # recoveries that an outage of Redis made unmeasurable
    paths: dict[int, set[str]] = field(default_factory=dict)
    states: dict[int, set[str]] = field(default_factory=dict)
    crashes_of_actors: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    acks_restated: int = 0
    drained: bool = False
    stuck: str = ""


class Director:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self.work = Work(plan.seed, plan.poison)
        self.evidence = Evidence()
        (directory / "weights").mkdir()
        self.server: EmbeddedServer = start_embedded(
            directory / "redis",
            prefer=plan.prefer,
            config={"auto-aof-rewrite-min-size": "24mb"},
        )
        # The limits are set before a worker could set others.
        queue = Queue(self.server.url, QUEUE, limits=LIMITS)
        queue.open()
        self._keys = queue.keys
        queue.close()
        self.redis = redis.Redis.from_url(self.server.url)
        self._proxy = Proxy(unquote(urlsplit(self.server.url).path))
        slices = self.work.slices_for(plan.samples) if plan.samples else 0
        self._actors = Actors(
            directory,
            self._proxy,
            plan.seed,
            plan.workers,
            [
                Settings(
                    directory=str(directory),
                    url="",
                    rank=rank,
                    seed=plan.seed,
                    poison=plan.poison,
                    slices=slices,
                    publish_seconds=plan.publish_seconds if rank == 0 else 0.0,
                )
                for rank in range(TRAINERS)
            ],
        )
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._restated = 0
        self._reaped_at = 0.0
        self._watched: list[Recovery] = []
        self._troubled_until: dict[str, float] = {}  # link -> monotonic
        self._look_at = 0.0
        self._log = (directory / "events.log").open("w")

    def run(self) -> None:
        """The whole run, until the queue is drained."""
        started = time.monotonic()
        events = schedule(self._plan.seed, self._plan.gap)
        event = next(events)
        due = started + 2.0
        while not self._is_over(time.monotonic() - started):
            self._tick()
            if time.monotonic() >= due:
                self._do(event)
                event = next(events)
                due = time.monotonic() + event.gap
        self._finish()
        self.evidence.seconds = time.monotonic() - started

    def close(self) -> None:
        self._log.close()
        self._actors.close()
        self._proxy.close()
        self.redis.close()
        self.server.stop()

    def _is_over(self, elapsed: float) -> bool:
        if elapsed >= self._plan.seconds:
            return True
        return self._plan.samples > 0 and all(
            (self._directory / f"submitted-{r}").exists() for r in range(TRAINERS)
        )

    def _finish(self) -> None:
        """No more harm; let the trainers take all there is."""
        for _, undo in self._later:
            undo()
        self._later.clear()
        self._actors.finishing = True
        (self._directory / "finish").touch()
        deadline = time.monotonic() + _DRAIN_SECONDS
        trainers = self._actors.trainers
        while not self.evidence.drained and time.monotonic() < deadline:
            self._tick()
            self.evidence.drained = all(not a.pid and a.codes[0] for a in trainers)
        if not self.evidence.drained:
            self.evidence.stuck = str([(a.name, a.pid, dict(a.codes)) for a in self._actors.all])
        for actor in self._actors.all:
            for code, times in actor.codes.items():
                self.evidence.codes[f"{actor.kind} {code}"] += times

    def _tick(self) -> None:
        time.sleep(_TICK)
        now = time.monotonic()
        for item in [i for i in self._later if i[0] <= now]:
            self._later.remove(item)
            item[1]()
        self._actors.tend()
        self._watch_recoveries(now)
        if now >= self._look_at:
            self._look_at = now + 0.5
            self._look_at_weights()

    def _note(self, text: str) -> None:
        self._log.write(f"{time.time():.3f} {text}\n")
        self._log.flush()

    # harm

    def _do(self, event: Event) -> None:
        self._note(f"{event.step} {event.kind} {event.who} {event.much:.3f}")
        self.evidence.events[event.kind] += 1
        kind, _, what = event.kind.partition("-")
        if what == "worker":
            self._to_worker(event, kind)
        elif event.kind == "kill-trainer":
            rank = event.who % TRAINERS
            if event.much < 0.5:
                # By its own hand, between a reading and its ack.
                (self._directory / f"die-{rank}").touch()
            else:
                self._actors.trainers[rank].send(signal.SIGKILL)
        elif event.kind == "kill-redis":
            self._kill_redis(0.1 + 2.0 * event.much)
        elif event.kind == "restore-redis":
            self._copy_redis(event)
        elif event.kind == "kill-clients":
            # The director's own connection is a normal one, too: it reconnects.
            with contextlib.suppress(redis.RedisError):
                self.redis.execute_command("CLIENT", "KILL", "TYPE", "normal")
        elif event.kind == "flush-scripts":
            self._asked(lambda: self.redis.script_flush())
        else:
            self._to_link(event)

    def _to_worker(self, event: Event, kind: str) -> None:
        awake = [a for a in self._actors.workers if a.pid and not a.stopped]
        if not awake or (kind == "stop" and len(awake) < 2):
            return
        actor = awake[event.who % len(awake)]
        if kind == "kill":
            self._kill_worker(actor)
        elif kind == "drain":
            actor.send(signal.SIGTERM)
        else:
            pid = actor.pid
            actor.send(signal.SIGSTOP)
            actor.stopped = True

            def wake() -> None:
                if actor.pid == pid:
                    actor.send(signal.SIGCONT)
                    actor.stopped = False

            self._later.append((time.monotonic() + LEASE * (1.1 + 0.6 * event.much), wake))

    def _to_link(self, event: Event) -> None:
        actors = self._actors.all
        link = actors[event.who % len(actors)].link
        self._troubled_until[link] = time.monotonic() + 2 * LEASE + _MAKES_UP
        self._note(f"  {link}")
        if event.kind == "cut":
            self._proxy.cut(link)
        elif event.kind == "delay":
            self._proxy.hold(link, 0.1 + event.much)
        elif event.kind == "hold":
            self._proxy.hold(link, LEASE * (1.1 + event.much))
        else:
            kind = link.partition("-")[0]
            script = REPLIES[kind][event.who // 64 % len(REPLIES[kind])]
            word = SCRIPTS[script].sha if script in SCRIPTS else script
            self._note(f"  {script}")
            self._proxy.drop_reply(link, word.encode(), max(0.0, 2.0 * event.much - 1.0))

    def _kill_redis(self, away: float, data: Path | None = None) -> None:
        killed_at = time.time()
        self.server.kill()
        self._void()
        files = self.server.directory / "appendonlydir"
        if data is not None:
            shutil.rmtree(files)
            data.rename(files)
        time.sleep(away)
        self._start_redis()
        self._void()
        for actor in self._actors.all:
            later = max(self._troubled_until.get(actor.link, 0.0), time.monotonic() + _MAKES_UP)
            self._troubled_until[actor.link] = later
        if data is not None:
            copied_at = float(data.name.partition("-")[2])
            self.evidence.restores.append(Restore(copied_at, killed_at, time.time()))

    def _start_redis(self) -> None:
        for _ in range(5):
            # It may load for long on a machine that has much to do.
            with contextlib.suppress(RedisUnavailable):
                return self.server.start()
        raise RedisUnavailable(self.server.log_tail())

    def _copy_redis(self, event: Event) -> None:
        """Put the data aside, and a while later kill the server and go back to it."""
        if self._asked(lambda: self.redis.info("persistence")["aof_rewrite_in_progress"]) != 0:
            return
        copy = self._directory / f"copy-{time.time():.3f}"
        shutil.copytree(self.server.directory / "appendonlydir", copy)
        after = 0.7 + 1.3 * event.much
        self._later.append((time.monotonic() + after, lambda: self._kill_redis(0.3, copy)))

    # watching

    def _asked(self, ask: Callable[[], object]) -> object:
        try:
            return ask()
        except redis.RedisError:
            with contextlib.suppress(redis.RedisError):
                return ask()
        return None

    def _kill_worker(self, actor: Actor) -> None:
        actor.send(signal.SIGKILL)
        actor.killed = True
        killed_at = time.monotonic()

        def held() -> dict[str, bytes]:
            found = cast(list[bytes], self.redis.zrange(self._keys["leases"], 0, -1))
            ids = [i.decode() for i in found]
            states = self._states(ids)
            return {
                i: token
                for i, (state, token, worker) in zip(ids, states, strict=True)
                if state == b"leased" and worker == actor.name.encode()
            }

        tokens = self._asked(held)
        if isinstance(tokens, dict) and tokens:
            recovery = Recovery(
                actor.name,
                killed_at,
                tokens,
                board.read(self._actors.board(actor.name)),
                counts=killed_at > self._troubled_until.get(actor.link, 0.0),
                samples=len(tokens),
            )
            self._watched.append(recovery)

    def _states(self, ids: list[str]) -> list[list[bytes]]:
        pipe = self.redis.pipeline(transaction=False)
        for sample in ids:
            pipe.hmget(self._keys.sample(sample), "state", "lease_token", "worker")
        return list(pipe.execute())

    def _count_unstored(self, watch: Recovery) -> None:
        """What the killed worker made and Redis does not have, of each sample it held."""
        ids = list(watch.tokens)

        def stored() -> list[list[bytes]]:
            pipe = self.redis.pipeline(transaction=False)
            for sample in ids:
                pipe.hmget(self._keys.sample(sample), "lease_token", "tokens")
            return list(pipe.execute())

        rows = self._asked(stored)
        for sample, (token, tokens) in zip(
            ids, rows if isinstance(rows, list) else (), strict=False
        ):
            attempt = int(watch.tokens[sample].partition(b":")[0])
            length = watch.made.get((sample, attempt))
            if token == watch.tokens[sample] and length is not None:
                _, group = self.work.slice_of(sample.partition("/")[0])
                watch.unstored[sample] = length - len(group.prompt) - int(tokens or 0)

    def _watch_recoveries(self, now: float) -> None:
        """A sample is taken back when it is not leased under the old token any more, and taken
        over when it is leased anew or has ended."""
        reaped = self._asked(lambda: self.redis.hget(self._keys["config"], "last_reap"))
        at = int(cast(bytes, reaped or 0)) / 1000
        if at - self._reaped_at > LEASE / 2:
            self._void()  # nobody reaped for half a lease, so all leases were dated anew
        self._reaped_at = at
        for watch in list(self._watched):
            if watch.counts and now - watch.killed_at > _COUNT_AFTER:
                watch.counts = False
                self._count_unstored(watch)
            ids = list(watch.tokens)
            states = self._asked(lambda ids=ids: self._states(ids))  # type: ignore[misc]
            if not isinstance(states, list):
                continue
            waiting = False
            for sample, (state, token, _) in zip(ids, states, strict=True):
                if state == b"leased" and token == watch.tokens[sample]:
                    waiting = True
                elif state != b"ready":
                    del watch.tokens[sample]
            if not waiting and watch.reaped < 0:
                watch.reaped = now - watch.killed_at
            if not watch.tokens:
                watch.leased = now - watch.killed_at
            if not watch.tokens or now - watch.killed_at > 60.0:
                self._watched.remove(watch)
                self.evidence.recoveries.append(watch)
                self.evidence.unstored += [watch.unstored] if watch.unstored else []

    def _void(self) -> None:
        """Leases are dated anew after an outage: how long a recovery took says nothing."""
        self.evidence.void += len(self._watched)
        self.evidence.unstored += [w.unstored for w in self._watched if w.unstored]
        self._watched.clear()

    def _look_at_weights(self) -> None:
        fields = self._asked(lambda: self.redis.hgetall(self._keys["weights"]))
        said = self._asked(lambda: self.redis.hget(self._keys["stats"], "acks_restated"))
        # Another restore takes the counter back, too.
        self.evidence.acks_restated += max(0, int(cast(bytes, said or 0)) - self._restated)
        self._restated = int(cast(bytes, said or 0))
        for name, value in fields.items() if isinstance(fields, dict) else ():
            version, _, what = name.decode().partition(":")
            if what == "path":
                self.evidence.paths.setdefault(int(version), set()).add(value.decode())
            elif what == "state":
                self.evidence.states.setdefault(int(version), set()).add(value.decode())
