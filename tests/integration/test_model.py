"""Invariants 1, 2, 4, 5 and 8 under random interleavings, against a plain model.

Two workers, one of them twice under the same name, a reaper, a canceller, two trainers and a
publisher take turns; a worker also writes under every token that it ever held. Now and then
Redis comes back with an older state. After every step all structures must equal the model's.
`ROLLQ_HYPOTHESIS=deep` searches longer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from producer.contract.connection import Call
from producer.contract.keys import TRAINER_GROUP
from producer.contract.messages import Chunk, Claim
from producer.contract.states import StalenessPolicy
from tests.fuzz import search
from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import Driver
from tests.integration.model import MAX_CRASHES, TERMINAL, Group, Model, Sample

MAX_READY = 10
MAX_RESULTS = 4
WORKERS = ("a", "b")
TRAINERS = ("t0", "t1")

#: counters that other tests look at
NOT_MODELLED = (
    "acks_restated",
    "interrupted_",
    "restarted_le",
    "stale_le",
    "recomputed_tokens",
    "resumed",
)

#: how often each move is tried
MOVES = {
    "enqueue": 8, "cancel": 1, "read": 3, "ack": 5, "restate": 1, "take_over": 1, "publish": 2,
    "confirm": 2,
    "claim": 14, "claim_again": 1, "checkpoint": 14, "release": 4, "finish": 6, "fail": 4,
    "renew": 1, "die": 4, "reap": 4, "reap_after_an_absence": 1, "save": 1, "come_back": 1,
}  # fmt: skip


class Interleaving(RuleBasedStateMachine):
    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.driver = driver
        driver.redis.flushall()
        driver.queue.open()
        for worker in WORKERS:
            driver.send(contract.heartbeat(worker))
        self.model = Model(WORKERS, MAX_READY, MAX_RESULTS)
        self.random = Random()
        self.asked = itertools.count()
        self.known: list[str] = []
        self.first: dict[str, tuple[Group, str]] = {}  # name -> its first job, and the digest
        #: each claim that was ever handed out, with the version its worker served
        self.claims: list[tuple[Claim, int]] = []
        self.last_claim: Any = None
        self.entries: dict[str, str] = {}
        self.snapshot: Any = None

    # Hypothesis draws the seed of the whole walk, and finds a seed that fails after few steps.
    # Drawing each move, it repeats itself too much to bring a sample all its long way.
    @initialize(seed=st.integers(0, 2**64 - 1))
    def start(self, seed: int) -> None:
        self.random = Random(seed)
        for size in (3, 1):
            self.put(Group(size, StalenessPolicy.ALLOW, restart=False))

    @rule()
    def step(self) -> None:
        (move,) = self.random.choices(list(MOVES), list(MOVES.values()))
        getattr(self, move)()

    def now_and_then(self) -> bool:
        return self.random.random() < 0.25

    def one_of(self, things: Iterable[Any]) -> Any:
        """One of the last few of them."""
        return self.random.choice(list(things)[-8:])

    def send(self, call: Call) -> Any:
        reply = self.driver.send(call)
        note(f"{call[0]} {call[1]} {[item[:5] for item in call[2]]} -> {reply}")
        return reply

    def one_claim(self) -> tuple[Claim, int]:
        """Mostly one that holds its sample still, now and then any that was ever made."""
        tokens = {s.token for s in self.model.leased()}
        held = [k for k in self.claims if k[0].lease_token in tokens]
        zombie = self.now_and_then() or not held
        chosen: tuple[Claim, int] = self.one_of(self.claims if zombie else held)
        return chosen

    # the trainer's side

    def put(self, group: Group, name: str | None = None) -> None:
        if name is None:
            name = f"g{len(self.known)}"
            self.known.append(name)
        if name not in self.model.groups and name in self.first:
            group, _ = self.first[name]  # Redis has lost it: its trainer offers it again
        job = contract.job(
            name, group.size, policy=group.policy, restart=group.restart, max_staleness=0
        )
        self.first.setdefault(name, (group, str(job.to_item()[2])))
        assert self.driver.enqueue(job) == [self.model.enqueue(name, group)]

    def enqueue(self) -> None:
        again = self.now_and_then()
        group = Group(
            size=self.random.randint(1, 3),
            policy=self.random.choice(list(StalenessPolicy)),
            restart=self.now_and_then(),
        )
        self.put(group, self.one_of(self.known) if again else None)

    def cancel(self) -> None:
        if self.known:
            name, index = self.one_of(self.known), self.random.choice([None, 0, 1, 2, 3])
            got = self.send(contract.cancel(name, "" if index is None else index))
            assert got == self.model.cancel(name, index)

    def read(self) -> None:
        trainer = self.random.choice(TRAINERS)
        assert [g for _, g in self.driver.read(trainer)] == self.model.read(trainer)

    def ack(self) -> None:
        if self.entries:
            name, trainer = self.one_of(self.entries), self.random.choice(TRAINERS)
            if self.model.pending and not self.now_and_then():
                name, trainer = self.one_of(self.model.pending.items())
            got = self.send(contract.ack(self.entries[name], name, trainer))
            assert got == self.model.ack(trainer, name)

    def restate(self) -> None:
        """Of any group that there ever was, also one that Redis has lost."""
        name, trainer, acked = (
            self.one_of(self.known), self.random.choice(TRAINERS), self.now_and_then()
        )  # fmt: skip
        got = self.send(contract.restate(name, self.first[name][1], trainer, acked=acked))
        assert got == self.model.restate(trainer, name, acked=acked)

    def take_over(self) -> None:
        if self.model.pending:
            name, trainer = self.one_of(self.model.pending), self.random.choice(TRAINERS)
            key = self.driver.keys["results"]
            self.driver.redis.xclaim(key, TRAINER_GROUP, trainer, 0, [self.entries[name]])
            self.model.pending[name] = trainer

    def publish(self) -> None:
        files, force = self.random.choice("xy"), self.now_and_then()
        if len(self.model.weights) < 12:  # the oldest of more are forgotten
            got = self.send(contract.publish(digest=files, force=force))
            assert got == list(self.model.publish(files, force))

    # the workers' side

    def claim(self) -> None:
        model = self.model
        versions = [model.current] * 4 + [model.good, model.current - 1]
        facts = (
            f"q{next(self.asked)}",
            self.random.choice(versions),
            self.random.randint(1, 4),
            self.random.choice([0, 1, 3]),
        )
        request, version, limit, suspects = facts
        call = contract.claim(
            self.random.choice(WORKERS), limit, request=request, version=version, suspects=suspects
        )
        self.last_claim = call, facts
        self.claim_again()

    def claim_again(self) -> None:
        if self.last_claim is None:
            return
        call, facts = self.last_claim
        got = contract.claims(self.driver.queue.call_many([call])[0])
        assert [c.id for c in got] == self.model.claim(*facts)
        for c in got:
            s = self.model.samples[c.id]
            assert (c.lease_token, c.tokens, c.crashes) == (s.token, len(s.versions), s.crashes)
            if all(c.lease_token != known.lease_token for known, _ in self.claims):
                self.claims.append((c, facts[1]))

    def checkpoint(self) -> None:
        if self.claims:
            c, version = self.one_claim()
            count, shift = self.random.randint(1, 3), self.random.choice([0, 0, 0, 0, -1, 1])
            offset = max(0, self.stored(c) + shift)
            got = self.send(contract.checkpoint(c, offset, count, version))
            assert got == self.expect("checkpoint", c, offset, count, version)

    def release(self) -> None:
        self.end("release", contract.release)

    def finish(self) -> None:
        if self.claims:
            c, version = self.one_claim()
            offset = self.stored(c) + self.random.choice([0, 0, 0, -1, 1])
            tail = (max(0, offset), self.random.randint(0, 3), version)
            tokens = self.stored(c) + tail[1] + self.now_and_then()
            got = self.send(contract.finish(c, tokens, tail=tail))
            assert got == self.expect("finish", c, tokens, tail)

    def end(self, script: str, call: Callable[[Claim, int], Call]) -> None:
        if self.claims:
            c, _ = self.one_claim()
            tokens = self.stored(c) + self.now_and_then()
            assert self.send(call(c, tokens)) == self.expect(script, c, tokens)

    def fail(self) -> None:
        if self.claims:
            c, _ = self.one_claim()
            kind = self.random.choice(["error", "crash", "crash"])
            assert self.send(contract.fail(c, kind)) == self.expect("fail", c, kind)

    def renew(self) -> None:
        if self.claims:
            c, _ = self.one_claim()
            assert self.send(contract.renew(c)) == self.expect("renew", c)

    def confirm(self) -> None:
        if self.model.weights:
            version, worker = self.one_of(self.model.weights), self.random.choice(WORKERS)
            error = self.random.random() < 0.5
            got = self.send(contract.confirm(version, worker, "digest" if error else ""))
            state = self.model.confirm(worker, version, error)
            assert got == [self.model.current, self.model.good, state.encode()]

    def knows(self, c: Claim) -> bool:
        """False for a claim of a future that Redis has lost, and for a group that is gone."""
        return c.id in self.model.samples and c.group_id not in self.model.done

    def stored(self, c: Claim) -> int:
        return len(self.model.samples[c.id].versions) if self.knows(c) else 0

    def expect(self, script: str, c: Claim, *arguments: Any) -> int:
        if not self.knows(c):
            return contract.LOST
        answer: int = getattr(self.model, script)(c.id, c.lease_token, *arguments)
        return answer

    # time, and Redis itself

    def die(self) -> None:
        """All leases of one claim call are over."""
        if self.claims:
            request = self.one_of(self.claims)[0].lease_token.split(":")[1]
            over = [s for s in self.model.leased() if s.token.endswith(f":{request}")]
            for s in over:
                s.expired = True
                self.driver.expire(s.id)

    def reap(self) -> None:
        assert self.driver.reap() == self.model.reap()

    def reap_after_an_absence(self) -> None:
        self.driver.redis.hset(self.driver.keys["config"], "last_reap", 1)
        assert self.send(contract.reap()) == [0, self.model.date_anew()]

    def save(self) -> None:
        redis = self.driver.redis
        keys = {key: redis.dump(key) for key in redis.scan_iter(count=1000)}
        self.snapshot = keys, copy.deepcopy(self.model)

    def come_back(self) -> None:
        """Redis, with the state that it had when it was saved."""
        if self.snapshot is not None:
            keys, model = self.snapshot
            self.driver.redis.flushall()
            for key, value in keys.items():
                self.driver.redis.restore(key, 0, value)
            self.model, self.snapshot = copy.deepcopy(model), None

    # after every step

    @invariant()
    def redis_equals_the_model(self) -> None:
        d, model = self.driver, self.model
        ready, leases = d.ready(), d.leases()
        assert ready == [s.id for s in model.ready()]
        assert leases.keys() == {s.id for s in model.leased()}
        expired = {sid for sid, until in leases.items() if until == 1}
        assert expired == {s.id for s in model.leased() if s.expired}
        assert set(d.dead()) == {s.id for s in model.samples.values() if s.state == "dead"}
        keys, samples = d.keys, model.samples
        hashes = d.pipe([("HGETALL", keys.sample(sid)) for sid in samples])
        chunks = d.pipe([("LRANGE", keys.chunks(sid), 0, -1) for sid in samples])
        for s, fields, raw in zip(samples.values(), hashes, chunks, strict=True):
            places = (s.id in ready, s.id in leases, s.state in TERMINAL)
            assert sum(places) == 1, f"{s.id} is in {places}"
            self.sample_is_as(s, contract.sample_fields(fields), raw)
        groups = d.pipe([("HGETALL", keys.group(name)) for name in model.groups])
        for name, fields in zip(model.groups, groups, strict=True):
            self.group_is_as(name, contract.texts(fields))
        self.results_are_as()
        stats = {k: v for k, v in d.stats().items() if not k.startswith(NOT_MODELLED)}
        assert stats == model.stats()

    def sample_is_as(self, s: Sample, there: dict[str, str], raw: list[bytes]) -> None:
        if s.group in self.model.done and s.state != "dead":
            assert (there, raw) == ({}, [])
            return
        assert there["state"] == s.state
        assert int(there["tokens"]) == len(s.versions)
        counts = [int(there[n]) for n in ("attempts", "crashes", "interruptions", "restarts")]
        assert counts == [s.attempts, s.crashes, s.interruptions, s.restarts]
        chunks = [Chunk.from_wire(data, s.id) for data in raw]
        assert [c.version for c in chunks for _ in c.token_ids] == s.versions
        assert [int(t) for c in chunks for t in c.token_ids] == list(range(len(s.versions)))
        assert sum(len(c.logprobs) for c in chunks) == len(s.versions)

    def group_is_as(self, name: str, there: dict[str, str]) -> None:
        if name in self.model.done:
            assert there == {}
            return
        members = self.model.members(name)
        ended = {str(m.index): m.state for m in members if m.state in TERMINAL}
        assert {k: v for k, v in there.items() if k.isdigit()} == ended
        assert (int(there["ended"]), int(there["size"])) == (len(ended), len(members))

    def results_are_as(self) -> None:
        key = self.driver.keys["results"]
        there = {
            fields[b"group"].decode(): (entry.decode(), fields[b"states"].decode())
            for entry, fields in self.driver.redis.xrange(key)
        }
        assert list(there) == self.model.stream
        assert self.driver.redis.xlen(key) == len(self.model.stream), "an entry a group"
        for name, (_, states) in there.items():
            assert states.split(",") == [m.state for m in self.model.members(name)]
        self.entries |= {name: entry for name, (entry, _) in there.items()}
        pending = self.driver.redis.xpending_range(key, TRAINER_GROUP, "-", "+", 1000)
        owners = {p["message_id"].decode(): p["consumer"].decode() for p in pending}
        assert owners == {self.entries[g]: t for g, t in self.model.pending.items()}


def test_any_interleaving_leaves_redis_as_the_model_says(open_driver: OpenDriver) -> None:
    driver = open_driver(
        max_ready=MAX_READY,
        max_results=MAX_RESULTS,
        max_crashes=MAX_CRASHES,
        lease_ms=10**9,
        worker_ttl_ms=10**9,
    )
    run_state_machine_as_test(
        lambda: Interleaving(driver),  # type: ignore[arg-type]
        settings=search(60, steps=100),
    )
