"""What the scripts promise, as plain Python: the queue that `test_model` compares Redis with.

Each method answers what the script must reply. There are no times and no bytes here: a lease
is over when the test says so, and a token is known by the version that made it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from producer.contract.states import StalenessPolicy

LOST = -1
MAX_CRASHES = 3
#: the last: it was open when a trainer said that it had taken its group before
TERMINAL = ("finished", "failed", "cancelled", "stale", "dead", "restated")


@dataclass
class Group:
    size: int
    policy: StalenessPolicy
    restart: bool
    max_staleness: int = 0
    started: bool = False


@dataclass
class Sample:
    group: str
    index: int
    seq: int
    state: str = "ready"
    token: str = ""
    expired: bool = False
    attempts: int = 0
    crashes: int = 0
    interruptions: int = 0
    restarts: int = 0
    versions: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.group}/{self.index}"

    def held_by(self, token: str) -> bool:
        return self.state == "leased" and self.token == token


@dataclass
class Model:
    workers: tuple[str, ...]
    max_ready: int
    max_results: int
    groups: dict[str, Group] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    requests: dict[str, list[str]] = field(default_factory=dict)
    #: closed groups in the order they closed, and who read or took them
    stream: list[str] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    wasted: int = 0
    reaped: int = 0
    closed: int = 0
    #: a version's state and files, its failures, the level
    weights: dict[int, str] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    failed: dict[int, set[str]] = field(default_factory=dict)
    current: int = 0
    good: int = 0

    # groups

    def enqueue(self, name: str, group: Group) -> str:
        here = self.groups.get(name)
        if here is None and name in self.done:
            return "done"
        if here is not None:
            facts = (here.size, here.policy, here.restart)
            if facts != (group.size, group.policy, group.restart):
                return "conflict"
            return "done" if name in self.done else "same"
        if len(self.ready()) + group.size > self.max_ready:
            return "full"
        self.groups[name] = group
        for index in range(group.size):
            sample = Sample(name, index, seq=len(self.samples) + 1)
            self.samples[sample.id] = sample
        return "new"

    def members(self, name: str) -> list[Sample]:
        return [self.samples[f"{name}/{i}"] for i in range(self.groups[name].size)]

    def ready(self) -> list[Sample]:
        """Those that were in most crashes first, then by age."""
        waiting = [s for s in self.samples.values() if s.state == "ready"]
        return sorted(waiting, key=lambda s: (-s.crashes, s.seq))

    def leased(self) -> list[Sample]:
        return [s for s in self.samples.values() if s.state == "leased"]

    def terminate(self, s: Sample, state: str, *, keep_token: bool = False) -> None:
        assert s.state not in TERMINAL
        s.state = state
        if not keep_token:
            s.token = ""
        if all(m.state in TERMINAL for m in self.members(s.group)):
            self.stream.append(s.group)
            self.closed += 1

    def cancel(self, name: str, index: int | None) -> int:
        if name not in self.groups or name in self.done:
            return 0
        chosen = [s for s in self.members(name) if index in (None, s.index)]
        alive = [s for s in chosen if s.state not in TERMINAL]
        for s in alive:
            self.terminate(s, "cancelled")
        return len(alive)

    # workers

    def serves(self, version: int) -> bool:
        unproven = self.weights.get(self.current) == "new"
        return version == self.current or (version == self.good and unproven)

    def claim(self, request: str, version: int, limit: int, suspects: int) -> list[str]:
        if request in self.requests:
            return [i for i in self.requests[request] if self.samples[i].token.endswith(request)
                    and self.samples[i].state == "leased"]  # fmt: skip
        if not self.serves(version):
            return []
        may_start = len(self.stream) < self.max_results
        alone = [s for s in self.ready() if s.crashes > 1][: 1 if suspects else 0]
        taken = self._offer(alone, request, may_start)
        if not taken:
            crashed = [s for s in self.ready() if s.crashes == 1][: min(suspects, limit)]
            taken = self._offer(crashed, request, may_start)
        alone_taken = bool(taken) and self.samples[taken[0]].crashes > 1
        fresh = [] if alone_taken else [s for s in self.ready() if not s.crashes]
        taken += self._offer(fresh[: limit - len(taken)], request, may_start)
        if taken:
            self.requests[request] = taken
        return taken

    def _offer(self, samples: list[Sample], request: str, may_start: bool) -> list[str]:
        taken = []
        for s in samples:
            group = self.groups[s.group]
            if not group.started and not may_start:
                break
            if self.judge(s) == "stale":
                self.terminate(s, "stale")
                continue
            if group.restart:
                self.reset(s)
            s.attempts += 1
            s.state, s.token, s.expired = "leased", f"{s.attempts}:{request}", False
            group.started = True
            taken.append(s.id)
        return taken

    def reset(self, s: Sample) -> None:
        self.wasted += len(s.versions)
        s.versions = []

    def judge(self, s: Sample) -> str:
        group = self.groups[s.group]
        age = self.current - s.versions[0] if s.versions else 0
        if group.policy is StalenessPolicy.ALLOW or age <= group.max_staleness:
            return "fresh"
        if group.policy is StalenessPolicy.RESTART and s.restarts < 2:
            s.restarts += 1
            self.reset(s)
            return "restarted"
        return "stale"

    def checkpoint(self, sid: str, token: str, offset: int, count: int, version: int) -> int:
        s = self.samples[sid]
        if not s.held_by(token):
            return LOST
        if offset == len(s.versions):
            s.versions += [version] * count
        s.expired = False
        return len(s.versions)

    def renew(self, sid: str, token: str) -> int:
        s = self.samples[sid]
        if not s.held_by(token):
            return LOST
        s.expired = False
        return 1

    def release(self, sid: str, token: str, tokens: int) -> int:
        s = self.samples[sid]
        if s.held_by(token):
            if len(s.versions) >= tokens:
                s.interruptions += 1
                s.state = "ready"
            return len(s.versions)
        return len(s.versions) if s.state == "ready" and s.token == token else LOST

    def finish(
        self, sid: str, token: str, tokens: int, tail: tuple[int, int, int] = (0, 0, 0)
    ) -> int:
        s = self.samples[sid]
        if not s.held_by(token):
            here = s.group not in self.done and s.state in ("finished", "stale")
            return tokens if here and s.token == token else LOST
        offset, count, version = tail
        if count and offset == len(s.versions):
            s.versions += [version] * count
        stored = len(s.versions)
        if stored < tokens:
            return stored
        verdict = self.judge(s)
        if verdict == "restarted":
            s.state, s.token = "ready", ""
            return LOST
        self.terminate(s, "finished" if verdict == "fresh" else "stale", keep_token=True)
        return stored

    def fail(self, sid: str, token: str, kind: str) -> int:
        s = self.samples[sid]
        if not s.held_by(token):
            again = kind == "error" and s.state == "failed" and s.token == token
            return 1 if again and s.group not in self.done else LOST
        if kind == "error":
            self.terminate(s, "failed", keep_token=True)
        else:
            self.crash(s)
        return 1

    def crash(self, s: Sample) -> None:
        s.crashes += 1
        s.token = ""
        if s.crashes >= MAX_CRASHES:
            self.terminate(s, "dead")
        else:
            s.state = "ready"

    def reap(self) -> int:
        over = [s for s in self.leased() if s.expired]
        for s in over:
            self.crash(s)
        self.reaped += len(over)
        return len(over)

    def date_anew(self) -> int:
        for s in self.leased():
            s.expired = False
        return len(self.leased())

    # trainers

    def read(self, trainer: str) -> list[str]:
        unread = [g for g in self.stream if g not in self.pending]
        self.pending.update(dict.fromkeys(unread, trainer))
        return unread

    def ack(self, trainer: str, name: str) -> int:
        if self.pending.get(name, trainer) != trainer:
            return 0  # also where only the entry is left of what this one has taken
        if self.pending.get(name) == trainer:
            del self.pending[name]
            self.stream.remove(name)
            self.done.setdefault(name, trainer)  # restated by another: only its entry was left
        return int(self.done.get(name) == trainer)

    def restate(self, trainer: str, name: str, *, acked: bool) -> int:
        if name in self.done:
            return int(self.done[name] == trainer)
        if name in self.groups:
            if self.pending.get(name, trainer) != trainer and not acked:
                return 0
            self.closed += name not in self.stream
            if name in self.pending:
                del self.pending[name]
                self.stream.remove(name)
            for s in self.members(name):
                if s.state not in TERMINAL:
                    s.state, s.token = "restated", ""
        self.done[name] = trainer
        return 1

    # weights

    def publish(self, files: str, force: bool) -> tuple[int, int]:
        if not force and self.current and self.files[self.current] == files:
            return self.current, 0
        self.current = len(self.weights) + 1
        self.weights[self.current] = "new"
        self.files[self.current] = files
        return self.current, 1

    def confirm(self, worker: str, version: int, error: bool) -> str:
        if self.weights[version] == "new" and not error:
            self.weights[version] = "good"
            self.good = max(self.good, version)
        elif self.weights[version] == "new":
            self.failed.setdefault(version, set()).add(worker)
            failed, live = self.failed[version], set(self.workers)
            if failed >= live or len(failed) >= 2 * len(live):
                self.weights[version] = "bad"
                if self.current == version:
                    self.current = self.good
        return self.weights[version]

    # what the counters must be

    def stats(self) -> dict[str, int]:
        samples = self.samples.values()
        counts = Counter(s.state for s in samples if s.state in TERMINAL)
        counts |= Counter(
            samples_enqueued=len(samples),
            groups_enqueued=len(self.groups),
            claimed=sum(s.attempts for s in samples),
            tokens=sum(len(s.versions) for s in samples) + self.wasted,
            wasted_tokens=self.wasted,
            interrupted=sum(s.interruptions for s in samples),
            crashes=sum(s.crashes for s in samples),
            reaped=self.reaped,
            groups_closed=self.closed,
            groups_acked=len(self.done.keys() & self.groups.keys()),
            published=len(self.weights),
            versions_bad=sum(s == "bad" for s in self.weights.values()),
        )
        return {name: n for name, n in counts.items() if n}
