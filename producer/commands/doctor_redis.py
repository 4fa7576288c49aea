"""What `rollq doctor` asks of the Redis: version, settings, rights, clock, the pool."""

from __future__ import annotations

import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any

from producer.commands.common import counted
from producer.commands.doctor import Check, Checks, guarded
from producer.contract.errors import QueueUnusable
from producer.contract.url import redact
from producer.pipeline import read_all, read_status

if TYPE_CHECKING:
    from producer.contract.connection import Queue

_OLDEST = (6, 2)
_SKEW_SECONDS = 2.0
_SLOW_MS = 10.0
_RQ = "rq worker -c producer.rewards.settings --serializer producer.rewards.Serializer"

#: What a role sends, in scripts and by itself; `deploy/redis/users.acl` grants just this.
RIGHTS = {
    "trainer": "info evalsha script|load exists get hdel hexists hget hgetall hincrby hmget hset "
    "hsetnx set time unlink xack xadd xclaim xdel xgroup|create xinfo|consumers xpending "
    "xrange zadd zcard zrange zrangebyscore zrem zscore lrange xlen xreadgroup zrevrange",
    "worker": "info evalsha script|load del get hexists hget hgetall hincrby hmget hset "
    "hsetnx pexpire rpush set time xadd xgroup|create xlen zadd zcard zrange zrangebyscore zrem "
    "zremrangebyscore zscore lrange xread",
    "monitor": "info hgetall hmget xinfo|groups xlen zcard zcount zrange",
}

#: Each with arguments that do nothing: `KEY` is a string that lives for a minute, so that a
#: command that may be sent is answered with a value or with WRONGTYPE, and one that may not
#: with NOPERM.
_PROBES = {
    "info": "INFO server",
    "evalsha": f"EVALSHA {'0' * 40} 0",
    "script|load": "SCRIPT LOAD return",
    "del": "DEL KEY:none",
    "exists": "EXISTS KEY",
    "get": "GET KEY",
    "hdel": "HDEL KEY f",
    "hexists": "HEXISTS KEY f",
    "hget": "HGET KEY f",
    "hgetall": "HGETALL KEY",
    "hincrby": "HINCRBY KEY f 0",
    "hmget": "HMGET KEY f",
    "hset": "HSET KEY f v",
    "hsetnx": "HSETNX KEY f v",
    "lrange": "LRANGE KEY 0 0",
    "pexpire": "PEXPIRE KEY 60000",
    "rpush": "RPUSH KEY v",
    "set": "SET KEY v XX PX 60000",
    "time": "TIME",
    "unlink": "UNLINK KEY:none",
    "xack": "XACK KEY g 0-1",
    "xadd": "XADD KEY * f v",
    "xclaim": "XCLAIM KEY g c 0 0-1",
    "xdel": "XDEL KEY 0-1",
    "xgroup|create": "XGROUP CREATE KEY g 0",
    "xinfo|consumers": "XINFO CONSUMERS KEY g",
    "xinfo|groups": "XINFO GROUPS KEY",
    "xlen": "XLEN KEY",
    "xpending": "XPENDING KEY g",
    "xrange": "XRANGE KEY - +",
    "xread": "XREAD STREAMS KEY 0",
    "xreadgroup": "XREADGROUP GROUP g c STREAMS KEY >",
    "zadd": "ZADD KEY 0 m",
    "zcard": "ZCARD KEY",
    "zcount": "ZCOUNT KEY 0 0",
    "zrange": "ZRANGE KEY 0 0",
    "zrangebyscore": "ZRANGEBYSCORE KEY 0 0",
    "zrem": "ZREM KEY m",
    "zremrangebyscore": "ZREMRANGEBYSCORE KEY 0 0",
    "zrevrange": "ZREVRANGE KEY 0 0",
    "zscore": "ZSCORE KEY m",
}


def server(queue: Queue) -> Checks:
    """The first one is `redis`: with anything but ok there is nothing to ask."""
    todo = "start it, or give --redis or ROLLQ_REDIS_URL; a password: ROLLQ_REDIS_PASSWORD_FILE"
    yield from guarded("redis", todo, lambda: _server(queue))


def _server(queue: Queue) -> Checks:
    from redis.exceptions import AuthenticationError

    try:
        [info] = read_all(queue, [("INFO", "everything")])
    except QueueUnusable as error:
        if not isinstance(error.__cause__, AuthenticationError):
            raise
        yield Check("redis", "fail", str(error), "it runs, but the password is refused: give the "
                    "right one in ROLLQ_REDIS_PASSWORD_FILE or the URL")  # fmt: skip
        return
    yield Check("redis", "ok", f"answers at {redact(queue.url)}")
    yield _version(info)
    yield _role(info)
    yield _eviction(info)
    yield _persistence(info)


def _version(info: dict[str, Any]) -> Check:
    found = str(info["redis_version"])
    name = f"Redis {found}"
    if valkey := info.get("valkey_version"):
        name = f"Valkey {valkey}"
    old = tuple(int(p) for p in found.split(".")[:2]) < _OLDEST
    todo = "install Redis 6.2 or newer, or Valkey" if old else ""
    return Check("version", "fail" if old else "ok", name, todo)


def _role(info: dict[str, Any]) -> Check:
    role = str(info.get("role", "master"))
    if role != "master":
        todo = "give the URL of its master, or redis+sentinel://host:port/service"
        return Check("role", "fail", f"this is a {role}, which takes no writes", todo)
    return Check("role", "ok", f"a {role}, with {info.get('connected_slaves', 0)} replicas")


def _eviction(info: dict[str, Any]) -> Check:
    policy, limit = str(info.get("maxmemory_policy", "?")), int(info.get("maxmemory", 0))
    used = int(info.get("used_memory", 0))
    size = f"{used / 2**20:,.0f} MiB used"
    if not limit:
        return Check("eviction", "ok", f"no maxmemory, so nothing is evicted ({policy}); {size}")
    size += f" of {limit / 2**20:,.0f}"
    if policy != "noeviction":
        return Check("eviction", "fail", f"{policy}; {size}", "set maxmemory-policy noeviction")
    if used > 0.8 * limit:
        return Check(
            "eviction", "warn", f"noeviction; {size}", "raise maxmemory, or lower max_ready"
        )
    return Check("eviction", "ok", f"noeviction; {size}")


def _persistence(info: dict[str, Any]) -> Check:
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return Check("persistence", "fail", "the last write to the append-only file failed",
                     "look at the server's disk and log")  # fmt: skip
    if info.get("aof_enabled"):
        return Check("persistence", "ok", "appendonly yes")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Check("persistence", "fail", "the last snapshot failed, so writes may be refused",
                     "look at the server's disk and log")  # fmt: skip
    return Check(
        "persistence",
        "warn",
        "appendonly no: a restart loses what is since the last snapshot, or all",
        "set appendonly yes for a pool that matters",
    )


def rights(queue: Queue, role: str) -> Checks:
    """Every command of a role is tried on a key of our own."""
    yield from guarded("rights", "see deploy/redis/users.acl", lambda: _rights(queue, role))


def _rights(queue: Queue, role: str) -> Checks:
    key = f"{queue.keys['request']}doctor-{secrets.token_hex(8)}"
    names = RIGHTS[role].split()
    pipe = queue.redis.pipeline(transaction=False)
    if "set" in names:
        pipe.execute_command("SET", key, "1", "PX", 60_000)
    for name in names:
        pipe.execute_command(*(w.replace("KEY", key) for w in _PROBES[name].split()))
    if role != "monitor":
        pipe.execute_command("UNLINK" if role == "trainer" else "DEL", key)
    from redis.exceptions import NoPermissionError

    answers = pipe.execute(raise_on_error=False)[int("set" in names) :]
    missing = [n for n, a in zip(names, answers, strict=False) if isinstance(a, NoPermissionError)]
    if missing:
        todo = f"give the user the rights of `{role}` in deploy/redis/users.acl: " + " ".join(
            f"+{name}" for name in missing
        )
        yield Check("rights", "fail", f"{len(missing)} commands of a {role} are refused", todo)
    else:
        yield Check("rights", "ok", f"all {len(names)} commands of a {role}, on the queue's keys")


def clock(queue: Queue) -> Checks:
    yield from guarded("clock", "look at the network", lambda: _clock(queue))


def _clock(queue: Queue) -> Checks:
    trips, skews = [], []
    for _ in range(5):
        before = time.time()
        [info] = read_all(queue, [("INFO", "server")])
        after = time.time()
        trips.append((after - before) * 1000)
        skews.append(int(info.get("server_time_usec", before * 1e6)) / 1e6 - (before + after) / 2)
    trip, skew = statistics.median(trips), statistics.median(skews)
    slow = trip > _SLOW_MS
    todo = "put Redis nearer: a worker and a trainer wait for it often" if slow else ""
    yield Check("latency", "warn" if slow else "ok", f"{trip:.1f} ms a round trip", todo)
    off = abs(skew) > _SKEW_SECONDS
    todo = "run NTP; rollq itself goes by Redis's clock alone, but logs and ages are off"
    yield Check(
        "clock",
        "warn" if off else "ok",
        f"Redis's is {round(skew, 1) + 0.0:+.1f} s off this one",  # no -0.0
        todo if off else "",
    )


def pool(queue: Queue, weights: dict[str, str]) -> Checks:
    """The queue and who works on it; fills in the hash `weights`."""
    yield from guarded("queue", "see the check of rights", lambda: _pool(queue, weights))


def _pool(queue: Queue, weights: dict[str, str]) -> Checks:
    name = queue.keys.queue
    status = read_status(queue)
    weights.update(status.weights)
    if not status.config:
        yield Check("queue", "warn", f"there is no queue {name!r} yet",
                    "the first trainer or worker makes it; is --queue right?")  # fmt: skip
        return
    counts = f"{status.ready:,} wait, {status.leased:,} in flight, {status.results:,} closed"
    if status.grading:
        counts += f", {status.grading:,} wait for rewards"
    if status.results >= int(status.config["max_results"]):
        yield Check("queue", "warn", f"{name}: {counts}: no new group is started",
                    "take and ack results: rollq results")  # fmt: skip
    elif status.dead:
        yield Check("queue", "warn", f"{name}: {counts}, {status.dead:,} dead", "rollq dead list")
    else:
        yield Check("queue", "ok", f"{name}: {counts}")
    if status.grading:
        variables = f"ROLLQ_QUEUE={name} ROLLQ_REWARD_MODULES=MODULE"
        yield Check("rewards", "warn", f"{counted(status.grading, 'group')} not graded yet",
                    f"start one if none runs: {variables} {_RQ}")  # fmt: skip
    behind = [w for w in status.workers if w.version < status.last_good]
    if not status.workers:
        yield Check("workers", "warn", "none is alive", "start one: rollq worker MODEL")
    elif wrong := [w for w in status.workers if w.last_error]:
        yield Check("workers", "warn", f"{wrong[0].name}: {wrong[0].last_error}", "see its log")
    else:
        words = f", {len(behind)} not at version {status.last_good} yet" if behind else ""
        yield Check("workers", "ok", f"{len(status.workers):,} alive{words}")
