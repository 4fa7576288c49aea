"""Judges a chaos run by what the trainers wrote down and what is left in Redis."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis
from numpy.typing import NDArray

from producer.contract.keys import NAMES, TRAINER_GROUP, QueueKeys
from producer.inbox import SETTLE_SECONDS
from tests.chaos.director import LEASE, Evidence
from tests.chaos.tokens import Flat
from tests.chaos.trainer import Journal
from tests.chaos.work import CHECKPOINT, FAIL_VERSIONS, QUEUE, TRAINERS, Work

#: counters of the ways in which a sample ends
ENDS = ("finished", "failed", "cancelled", "stale", "dead", "restated")
MOST_UNSTORED = 3 * CHECKPOINT


@dataclass(slots=True)
class Shown:
    """A group as it was shown to a trainer's process, and the ack of it, if it is known."""

    line: dict[str, Any]
    rank: int
    process: int
    acked_at: float = 0.0

    @property
    def id(self) -> str:
        return str(self.line["id"])

    @property
    def at(self) -> float:
        return float(self.line["at"])


@dataclass(slots=True)
class Verdict:
    """One invariant: it holds where `broken` is empty.

    One that is `timed` depends on how busy the machine is: shown, and not judged.
    """

    name: str
    broken: list[str] = field(default_factory=list)
    remark: str = ""
    timed: bool = False


@dataclass(slots=True)
class Report:
    facts: dict[str, object]
    verdicts: list[Verdict]

    @property
    def sound(self) -> bool:
        return not any(v.broken for v in self.verdicts if not v.timed)


class Auditor:
    def __init__(
        self, directory: Path, work: Work, evidence: Evidence, client: redis.Redis
    ) -> None:
        self._work = work
        self._evidence = evidence
        self._redis = client
        self._keys = QueueKeys(QUEUE)
        self._submitted: set[str] = set()
        self._cancelled: set[str] = set()
        self._published: dict[int, int] = {}  # version -> publication, as the trainer heard
        self._shown: dict[str, list[Shown]] = defaultdict(list)
        self._arrays: list[NDArray[np.uint8]] = []
        self._publications: set[int] = set()
        self._trainer_starts = 0
        self._last_word: dict[tuple[int, int], float] = {}  # rank, process -> when
        for rank in range(TRAINERS):
            self._read(Journal(directory, rank), rank)

    def _read(self, journal: Journal, rank: int) -> None:
        process = 0
        open_here: dict[str, Shown] = {}
        for line in journal.read():
            what = line["what"]
            if what != "start":
                self._last_word[rank, process] = line["at"]
            if what == "start":
                process += 1
                open_here = {}
                self._trainer_starts += 1
            elif what == "submit":
                self._submitted |= {g.id for g in self._work.slice(line["slice"]).groups}
            elif what == "cancel":
                self._cancelled.add(line["id"])
            elif what == "publish":
                self._publications.add(line["number"])
            elif what == "published":
                self._published[line["version"]] = line["number"]
            elif what == "shown":
                shown = open_here[line["id"]] = Shown(line, rank, process)
                self._shown[shown.id].append(shown)
            elif what == "acked":
                for group_id in line["ids"]:
                    open_here[group_id].acked_at = line["at"]
        self._arrays.append(np.fromfile(journal.arrays, np.uint8))

    def report(self) -> Report:
        verdicts = [
            self._drained(),
            self._lost(),
            *self._twice(),
            self._acked(),
            self._members(),
            self._arrays_fit(),
            self._same_again(),
            *self._tokens(),
            *self._states(),
            self._left_over(),
            self._counters(),
            self._recovery(),
            self._unstored(),
        ]
        return Report(self._facts(), verdicts)

    # delivery

    def _drained(self) -> Verdict:
        return Verdict("drained", [] if self._evidence.drained else [self._evidence.stuck])

    def _lost(self) -> Verdict:
        return Verdict("none lost", sorted(self._submitted - self._shown.keys()))

    def _twice(self) -> Iterator[Verdict]:
        """Shown again after its ack: never to the same process; to another one only where Redis
        forgot the ack and the process that knew of it had died before it could say so."""
        same = Verdict("none twice to a process")
        other = Verdict("none twice by id")
        forgiven = 0
        for group_id, all_shown in self._shown.items():
            for first in all_shown:
                for again in all_shown:
                    if not first.acked_at or again.at <= first.acked_at or again is first:
                        continue
                    what = f"{group_id} acked at {first.acked_at:.3f} shown at {again.at:.3f}"
                    if (first.rank, first.process) == (again.rank, again.process):
                        same.broken.append(what)
                    elif self._forgotten(first, again):
                        forgiven += 1
                    else:
                        other.broken.append(what)
        other.remark = f"{forgiven} after a restore, their taker dead"
        yield same
        yield other

    def _forgotten(self, first: Shown, again: Shown) -> bool:
        """Did Redis come back from before the ack, or from before the group had closed, and the
        taker not live long enough to restate it?"""
        last_word = self._last_word[first.rank, first.process]
        return any(
            first.at <= r.killed_at + 1.0
            and first.acked_at >= r.copied_at - 1.0
            and again.at >= r.killed_at
            and last_word < r.back_at + SETTLE_SECONDS[1]
            for r in self._evidence.restores
        )

    def _acked(self) -> Verdict:
        """By the log, or, where the trainer was killed before it wrote so, by Redis."""
        unknown = [i for i, s in self._shown.items() if not any(x.acked_at for x in s)]
        pipe = self._redis.pipeline(transaction=False)
        for group_id in unknown:
            pipe.exists(self._keys["done"] + group_id)
        there = pipe.execute()
        missing = [i for i, known in zip(unknown, there, strict=True) if not known]
        return Verdict("all acked", missing, f"{len(unknown)} known from Redis only")

    def _members(self) -> Verdict:
        verdict = Verdict("groups whole")
        for shown in self._each():
            part, group = self._work.slice_of(shown.id)
            expected = [f"{shown.id}/{i}" for i in range(part.params.n)]
            if (
                [r["id"] for r in shown.line["rollouts"]] != expected
                or shown.line["prompt"] != group.prompt
                or shown.line["metadata"] != {"slice": part.number, "group": group.id}
            ):
                verdict.broken.append(shown.id)
        return verdict

    def _arrays_fit(self) -> Verdict:
        return Verdict(
            "arrays of one length",
            [
                f"{r['id']} {r['lengths']}"
                for shown in self._each()
                for r in shown.line["rollouts"]
                if len(set(r["lengths"])) != 1
                or sum(s[1] for s in r["segments"]) != r["lengths"][0]
            ],
        )

    def _same_again(self) -> Verdict:
        """Shown again without a restore: the same tokens and states."""
        broken = []
        for group_id, all_shown in self._shown.items():
            if len(all_shown) > 1 and not self._evidence.restores:
                contents = {
                    (self._bytes(s), str([r["state"] for r in s.line["rollouts"]]))
                    for s in all_shown
                }
                if len(contents) > 1:
                    broken.append(group_id)
        return Verdict("the same when shown again", broken)

    # tokens

    def _bytes(self, shown: Shown) -> bytes:
        size = sum(r["lengths"][0] for r in shown.line["rollouts"])
        at = shown.line["array"]
        return self._arrays[shown.rank][at : at + 12 * size].tobytes()

    def _tokens(self) -> Iterator[Verdict]:
        """Each token and logprob of each group ever shown, made again by the model."""
        flat = Flat()
        for shown in self._each():
            part, group = self._work.slice_of(shown.id)
            flat.add_group(
                shown.line["rollouts"], self._bytes(shown), part.params.seed, group.prompt
            )
        yield Verdict("tokens right", flat.wrong(), f"all {flat.size} recomputed")
        yield Verdict("texts are those of the tokens", flat.other_texts())
        yield Verdict("attempts follow each other", flat.mixed())
        known = self._good_versions()
        used = set(np.unique(flat.versions).tolist())
        yield Verdict(
            "versions published and good",
            [f"{v} of {self._evidence.paths.get(v)}" for v in sorted(used - known)]
            + [f"{v} is {paths}" for v, paths in self._evidence.paths.items() if len(paths) > 1],
            f"{len(used)} versions",
        )
        back = flat.backwards()
        restored = bool(self._evidence.restores)
        yield Verdict(
            "versions only grow in a sample",
            [] if restored else back,
            f"{len(back)} went back after restores" if restored else "",
        )

    def _good_versions(self) -> set[int]:
        """By the publication's number in the path."""
        good = {0}
        for version, paths in self._evidence.paths.items():
            numbers = {int(p.rpartition("step")[2].partition("-")[0]) for p in paths}
            sound = all(not self._work.publication(n).sabotage for n in numbers)
            if sound and version not in FAIL_VERSIONS:
                good.add(version)
        for version, number in self._published.items():
            if not self._work.publication(number).sabotage and version not in FAIL_VERSIONS:
                good.add(version)
        return good

    # ends

    def _states(self) -> Iterator[Verdict]:
        poison = Verdict("poison is dead-lettered")
        innocent = Verdict("innocents are not")
        ends = Verdict("ends are explained")
        for shown in self._last():
            part, group = self._work.slice_of(shown.id)
            for r in shown.line["rollouts"]:
                state, reason, length = r["state"], r["reason"], r["lengths"][0]
                cancelled = r["id"] in self._cancelled or shown.id in self._cancelled
                if state == "cancelled":
                    if not cancelled:
                        ends.broken.append(f"{r['id']} cancelled by nobody")
                elif group.poison:
                    if state != "dead":
                        poison.broken.append(f"{r['id']} {state}")
                elif state == "dead":
                    innocent.broken.append(f"{r['id']} {r['error']}")
                elif state != "finished" or reason not in ("stop", "length"):
                    ends.broken.append(f"{r['id']} {state} {reason} {r['error']}")
                elif reason == "length" and length != part.params.max_tokens:
                    ends.broken.append(f"{r['id']} length {length} of {part.params.max_tokens}")
        yield poison
        yield innocent
        yield ends

    # what is left

    def _left_over(self) -> Verdict:
        prefix = self._keys["config"].removesuffix("config")
        names = {prefix + n for n in NAMES.values() if not n.endswith(":")}
        dead = {
            i.decode() for i in cast(list[bytes], self._redis.zrange(self._keys["dead"], 0, -1))
        }
        names |= {self._keys.sample(i) for i in dead} | {self._keys.chunks(i) for i in dead}
        found = [k.decode() for k in self._redis.scan_iter(count=5000)]
        pipe = self._redis.pipeline(transaction=False)
        rest = [k for k in found if k not in names]
        for key in rest:
            pipe.pttl(key)
        forever = [k for k, ttl in zip(rest, pipe.execute(), strict=True) if ttl == -1]
        return Verdict("no key is left over", forever, f"{len(found)} keys")

    def _counters(self) -> Verdict:
        keys, client = self._keys, self._redis
        fields = cast(dict[bytes, bytes], client.hgetall(keys["stats"]))
        stats = {k.decode(): int(v) for k, v in fields.items()}
        get = stats.get
        ended = sum(get(s, 0) for s in ENDS)
        pending = client.xpending(keys["results"], TRAINER_GROUP)["pending"]
        equal = {
            "ready": (client.zcard(keys["ready"]), 0),
            "leases": (client.zcard(keys["leases"]), 0),
            "results": (client.xlen(keys["results"]), 0),
            "pending": (pending, 0),
            "groups closed": (get("groups_closed", 0), get("groups_enqueued", 0)),
            "groups acked": (get("groups_acked", 0), get("groups_enqueued", 0)),
            "samples ended": (ended, get("samples_enqueued", 0)),
            "dead": (client.zcard(keys["dead"]), get("dead", 0)),
        }
        return Verdict(
            "counters equal structures",
            [f"{name}: {a}, not {b}" for name, (a, b) in equal.items() if a != b],
        )

    def _recovery(self) -> Verdict:
        seen = self._evidence.recoveries
        late = [
            f"{r.worker}: {r.samples} samples after {r.reaped:.2f} s, {list(r.tokens)[:3]}"
            for r in seen
            if not 0 <= r.reaped <= LEASE + 1.0
        ]
        leased = sorted(r.leased for r in seen)
        worst = f"{max((r.reaped for r in seen), default=0.0):.2f}"
        return Verdict(
            "recovery within lease + 1 s",
            late,
            f"{len(seen)} kills measured, {self._evidence.void} void; taken back {worst} s at most"
            + (f", leased again median {leased[len(leased) // 2]:.2f} s" if leased else ""),
            timed=True,
        )

    def _unstored(self) -> Verdict:
        """What a kill costs a sample: what the engine has not given out yet, the checkpoint that
        is on its way, and what is made in the meantime: long where the machine is busy."""
        kills = self._evidence.unstored
        each = sorted(n for kill in kills for n in kill.values())
        return Verdict(
            "a kill costs a checkpoint",
            [
                f"{sample}: {n} tokens"
                for k in kills
                for sample, n in k.items()
                if n > MOST_UNSTORED
            ],
            f"{len(kills)} kills counted, {len(each)} samples: {sum(each)} tokens lost"
            + (f", median {each[len(each) // 2]}, most {each[-1]} a sample" if each else ""),
            timed=True,
        )

    def _facts(self) -> dict[str, object]:
        events = self._evidence.events
        last = [r for s in self._last() for r in s.line["rollouts"]]
        states = Counter(r["state"] for r in last)
        bad = {v for v, s in self._evidence.states.items() if "bad" in s}
        again = sum(
            len([x for x in s if not x.acked_at]) - int(not any(x.acked_at for x in s))
            for s in self._shown.values()
        )
        return {
            "seed": self._work.seed,
            "seconds": round(self._evidence.seconds, 1),
            "groups": len(self._submitted),
            "samples": len(last),
            "tokens": sum(r["lengths"][0] for r in last),
            "states": dict(states),
            "worker kills": events["kill-worker"],
            "worker stops": events["stop-worker"],
            "kills and stops": sum(
                events[k] for k in ("kill-worker", "stop-worker", "kill-trainer")
            ),
            "worker drains": events["drain-worker"],
            "trainer kills": events["kill-trainer"],
            "proxy faults": sum(events[k] for k in ("cut", "delay", "hold", "drop-reply")),
            "redis kills": events["kill-redis"] + len(self._evidence.restores),
            "of them restored older": len(self._evidence.restores),
            "acks restated": self._evidence.acks_restated,
            "clients killed, scripts flushed": events["kill-clients"] + events["flush-scripts"],
            "publications": len(self._publications),
            "versions, bad": f"{len(self._evidence.paths)}, {len(bad)}",
            "interruptions": sum(r["counts"][1] for r in last),
            "crashes": sum(r["counts"][2] for r in last),
            "recomputed tokens": sum(r["counts"][3] for r in last),
            "shown again before an ack": again,
            "exit codes": dict(self._evidence.codes),
        }

    def _each(self) -> Iterable[Shown]:
        return (s for all_shown in self._shown.values() for s in all_shown)

    def _last(self) -> Iterable[Shown]:
        """Of each group what was acked, or shown last."""
        for all_shown in self._shown.values():
            yield max(all_shown, key=lambda s: (bool(s.acked_at), s.at))
