"""A small driver over `Queue` for tests of the scripts, and a dump of a whole database.

The functions that return a `Call` build one call of one script with plain defaults; `Driver`
sends them and reads the structures. Versions, tokens and answers are plain integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from producer.contract import codec
from producer.contract.codec import pack_ids
from producer.contract.connection import Call, Queue
from producer.contract.keys import TRAINER_GROUP
from producer.contract.messages import Chunk, Claim, Job
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy

LOST = -1

_requests = itertools.count()


def job(
    group: str = "g",
    size: int = 1,
    *,
    max_tokens: int = 8,
    prompt: Sequence[int] | str = (1, 2, 3),
    max_staleness: int | None = None,
    policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
    restart: bool = False,
    reward: str = "",
) -> Job:
    text = isinstance(prompt, str)
    return Job(
        group_id=group,
        params=SamplingParams(
            n=size, max_tokens=max_tokens, presence_penalty=0.5 if restart else 0.0
        ),
        prompt=str(prompt) if text else None,
        prompt_ids=None if text else np.array(prompt, np.int32),
        metadata={"of": group},
        max_staleness=max_staleness,
        staleness_policy=StalenessPolicy(policy),
        reward=reward,
    )


def enqueue(*jobs: Job) -> Call:
    return "enqueue", {}, [j.to_item() for j in jobs]


def claim(
    worker: str = "w",
    limit: int = 256,
    *,
    version: int = 0,
    request: str | None = None,
    held: int = 0,
    share: bool = False,
    suspects: int = 1,
    room: int = 10**6,
    reserve: int = 16,
) -> Call:
    """Without a `request`, one of its own."""
    return (
        "claim",
        {
            "worker": worker,
            "request": request or f"r{next(_requests)}",
            "version": version,
            "limit": limit,
            "held": held,
            "share": int(share),
            "suspects": suspects,
            "alone": int(suspects > 0),
            "room": room,
            "reserve": reserve,
        },
        [],
    )


def chunk(
    offset: int, count: int, version: int = 0, *, worker: str = "w", attempt: int = 1
) -> Chunk:
    """Tokens that tell their position: offset, offset + 1, ..."""
    ids = np.arange(offset, offset + count, dtype=np.int32)
    return Chunk(version, worker, attempt, ids, (-ids / 8).astype(np.float32))


def checkpoint(c: Claim, offset: int, count: int, version: int = 0, worker: str = "w") -> Call:
    data = chunk(offset, count, version, worker=worker, attempt=c.attempts).to_wire()
    return "checkpoint", {"worker": worker}, [(c.id, c.lease_token, offset, count, version, data)]


def release(c: Claim, tokens: int, reason: str = "update", worker: str = "w") -> Call:
    return "release", {"worker": worker, "reason": reason}, [(c.id, c.lease_token, tokens)]


def finish(
    c: Claim,
    tokens: int,
    reason: str = "length",
    worker: str = "w",
    tail: tuple[int, int, int] = (0, 0, 0),
) -> Call:
    """`tail`: offset, count and version of the last tokens, if they come along."""
    data = checkpoint(c, *tail, worker)[2][0][-1] if tail[1] else b""
    return (
        "finish",
        {"worker": worker},
        [(c.id, c.lease_token, tokens, reason, "", "", *tail, data)],
    )


def fail(c: Claim, kind: str = "error", error: str = "too long", worker: str = "w") -> Call:
    return "fail", {"worker": worker, "kind": kind}, [(c.id, c.lease_token, error)]


def renew(c: Claim, worker: str = "w") -> Call:
    return "renew", {"worker": worker}, [(c.id, c.lease_token)]


def prompt(c: Claim, ids: Sequence[int], worker: str = "w") -> Call:
    data = pack_ids(np.array(ids, np.int32))
    return "prompt", {}, [(c.id, c.lease_token, len(ids), data)]


def cancel(group: str, index: int | str = "", reason: str = "not wanted") -> Call:
    return "cancel", {"reason": reason}, [(group, index)]


def reap(limit: int = 256) -> Call:
    return "reap", {"limit": limit}, []


def publish(
    request: str | None = None,
    digest: str | None = None,
    *,
    force: bool = False,
    floor: int = 0,
    max_updating: str = "50%",
) -> Call:
    """Without `request` and `digest`, a new call with new files."""
    name = request or f"p{next(_requests)}"
    return (
        "publish",
        {
            "request": name,
            "digest": digest or f"digest of {name}",
            "path": f"/weights/{digest or name}",
            "step": 1,
            "policy": "requeue",
            "deadline_ms": 0,
            "max_updating": max_updating,
            "force": int(force),
            "floor": floor,
        },
        [],
    )


def confirm(version: int, worker: str = "w", error: str = "") -> Call:
    return "confirm", {"worker": worker, "version": version, "error": error}, []


def turn(worker: str = "w", *, serves: int = 0, hold_ms: int = 60_000, waits: int = 1) -> Call:
    scalars: dict[str, Any] = {"worker": worker, "serves": serves}
    return "turn", scalars | {"hold_ms": hold_ms, "waits": waits}, []


def heartbeat(worker: str = "w", state: str = "serving", nonce: str = "n") -> Call:
    fields = [("state", state), ("in_flight", 0), ("nonce", nonce)]
    return "heartbeat", {"worker": worker}, fields


def leave(worker: str = "w") -> Call:
    return "leave", {"worker": worker}, []


def ack(entry: str, group: str = "g", consumer: str = "t0") -> Call:
    return "ack", {"group": TRAINER_GROUP, "consumer": consumer}, [(entry, group)]


def restate(
    group: str = "g", digest: str = "", consumer: str = "t0", *, acked: bool = True
) -> Call:
    scalars = {"group": TRAINER_GROUP, "consumer": consumer, "acked": int(acked)}
    return "restate", scalars, [(group, digest)]


def attend(consumer: str = "t0", nonce: str = "n", state: str = "") -> Call:
    scalars = {"consumer": consumer, "nonce": nonce, "place": f"at {nonce}", "state": state}
    return "attend", scalars, []


def adopt(consumer: str = "t1", gone: str = "t0", idle_ms: int = 0, limit: int = 256) -> Call:
    scalars = {"group": TRAINER_GROUP, "from": gone, "consumer": consumer}
    return "adopt", scalars | {"idle_ms": idle_ms, "limit": limit}, []


def due(limit: int = 256) -> Call:
    return "due", {"limit": limit}, []


def grade(group: str, digest: str, request: str = "r1") -> Call:
    return "grade", {"group": group, "digest": digest, "request": request}, []


def graded(
    group: str,
    digest: str,
    attempt: int = 1,
    rewards: Sequence[Any] | None = None,
    *,
    error: str = "",
    final: bool = False,
    request: str | None = None,
) -> Call:
    """The `request` of attempt n is rn."""
    data = b"" if rewards is None else codec.pack(list(rewards), "rewards")
    report: dict[str, Any] = {"attempt": attempt, "rewards": data, "error": error}
    report["request"] = request or f"r{attempt}"
    return "graded", {"group": group, "digest": digest, "final": int(final), **report}, []


class Driver:
    """Sends calls over one blocking `Queue` and reads what they did."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.keys = queue.keys
        self.redis: Any = queue.redis

    def send(self, call: Call) -> Any:
        """The reply, bare where it answers one item."""
        return answer(call, self.queue.call_many([call])[0])

    # what workers and trainers do, for calls that need no more than their defaults

    def enqueue(self, *jobs: Job) -> list[str]:
        return [w.decode() for w in self.queue.call_many([enqueue(*jobs)])[0]]

    def claim(self, worker: str = "w", limit: int = 256, **options: Any) -> list[Claim]:
        return claims(self.queue.call_many([claim(worker, limit, **options)])[0])

    def claim_one(self, worker: str = "w", **options: Any) -> Claim:
        (only,) = self.claim(worker, 1, **options)
        return only

    def generate(self, c: Claim, count: int, version: int = 0, worker: str = "w") -> Claim:
        """Store `count` tokens after those that are there."""
        at = int(self.sample(c.id)["tokens"])
        assert self.send(checkpoint(c, at, count, version, worker)) == at + count
        return c

    def complete(self, c: Claim, version: int = 0, tokens: int = 8) -> None:
        """Make the missing tokens and finish."""
        missing = tokens - int(self.sample(c.id)["tokens"])
        if missing:
            self.generate(c, missing, version)
        assert self.send(finish(c, tokens)) == tokens

    def read(self, consumer: str = "t0", start: str = ">") -> list[tuple[str, str]]:
        """Entry and group of closed groups; from `start` 0, those it read and did not ack."""
        key = self.keys["results"]
        reply = self.redis.xreadgroup(TRAINER_GROUP, consumer, {key: start}, count=1000)
        by_key = dict(reply.items() if isinstance(reply, dict) else reply or [])
        return [(entry.decode(), texts(f)["group"]) for entry, f in by_key.get(key.encode(), [])]

    def expire(self, *ids: str) -> None:
        """Let the leases of these samples be over."""
        self.redis.zadd(self.keys["leases"], dict.fromkeys(ids, 1), xx=True)

    def reap(self, limit: int = 256) -> int:
        """Reap as if somebody had reaped just before."""
        self.redis.hset(self.keys["config"], "last_reap", self.now())
        reaped, _ = self.send(reap(limit))
        return int(reaped)

    def crash(self, *held: Claim) -> None:
        """Let a worker that held these die."""
        self.expire(*(c.id for c in held))
        assert self.reap() == len(held)

    # the structures

    def now(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def ready(self) -> list[str]:
        return [i.decode() for i in self.redis.zrange(self.keys["ready"], 0, -1)]

    def leases(self) -> dict[str, int]:
        pairs = self.redis.zrange(self.keys["leases"], 0, -1, withscores=True)
        return {sid.decode(): int(score) for sid, score in pairs}

    def dead(self) -> list[str]:
        return [i.decode() for i in self.redis.zrange(self.keys["dead"], 0, -1)]

    def sample(self, sid: str) -> dict[str, str]:
        return sample_fields(self.redis.hgetall(self.keys.sample(sid)))

    def group(self, group: str = "g") -> dict[str, str]:
        return texts(self.redis.hgetall(self.keys.group(group)))

    def weights(self) -> dict[str, str]:
        return texts(self.redis.hgetall(self.keys["weights"]))

    def stats(self) -> dict[str, int]:
        return {k: int(v) for k, v in texts(self.redis.hgetall(self.keys["stats"])).items()}

    def chunks(self, sid: str) -> list[Chunk]:
        raw = self.redis.lrange(self.keys.chunks(sid), 0, -1)
        return [Chunk.from_wire(data, sid) for data in raw]

    def tokens(self, sid: str) -> list[int]:
        return [int(t) for c in self.chunks(sid) for t in c.token_ids]

    def versions(self, sid: str) -> list[int]:
        return [c.version for c in self.chunks(sid) for _ in c.token_ids]

    def results(self) -> list[tuple[str, list[str]]]:
        """Group and members' states of all entries in the stream."""
        entries = [texts(fields) for _, fields in self.redis.xrange(self.keys["results"])]
        return [(f["group"], f["states"].split(",")) for f in entries]

    def dump(self) -> dict[str, Any]:
        """Every key of the database, with its content and whether it expires."""
        keys = sorted(self.redis.scan_iter(count=1000))
        types = self.pipe([("TYPE", key) for key in keys])
        read = [_READ[kind.decode()](key) for key, kind in zip(keys, types, strict=True)]
        contents = self.pipe(read)
        expiries = self.pipe([("PTTL", key) for key in keys])
        rows = zip(keys, contents, expiries, strict=True)
        found = {key.decode(): (content, ttl >= 0) for key, content, ttl in rows}
        if self.keys["results"] in found:
            found["pending"] = (self._pending(), False)
        return found

    def _pending(self) -> list[tuple[bytes, bytes]]:
        key = self.keys["results"]
        pending = self.redis.xpending_range(key, TRAINER_GROUP, "-", "+", 1000)
        return [(p["message_id"], p["consumer"]) for p in pending]

    def pipe(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies to many commands, in one round trip."""
        pipe = self.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute()
        return replies


_READ: dict[str, Callable[[bytes], tuple[Any, ...]]] = {
    "string": lambda key: ("GET", key),
    "hash": lambda key: ("HGETALL", key),
    "list": lambda key: ("LRANGE", key, 0, -1),
    "zset": lambda key: ("ZRANGE", key, 0, -1, "WITHSCORES"),
    "stream": lambda key: ("XRANGE", key, "-", "+"),
}


def claims(reply: Any) -> list[Claim]:
    return Claim.from_reply(reply[2], reply[4])


def answer(call: Call, reply: Any) -> Any:
    """A reply without current and last_good where the script says them, an only item bare."""
    name, _, items = call
    if name in ("checkpoint", "release", "finish", "fail", "renew"):
        reply = reply[2]
    return reply[0] if len(items) == 1 and isinstance(reply, list) else reply


#: what a sample's hash need not say
_AT_FIRST = {
    **dict.fromkeys(("attempts", "crashes", "interruptions", "restarts"), "0"),
    **dict.fromkeys(("tokens", "recomputed_tokens"), "0"),
    **dict.fromkeys(("version_first", "version_last"), "-1"),
}


def sample_fields(flat: Any) -> dict[str, str]:
    return {**_AT_FIRST, **texts(flat)} if flat else {}


def texts(flat: Any) -> dict[str, str]:
    """A hash as text; the bytes of a binary field are replaced."""
    return {k.decode(): v.decode(errors="replace") for k, v in flat.items()}
