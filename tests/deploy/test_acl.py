"""deploy/redis/users.acl: each role can do its work under its user, and nothing else."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import redis

from producer.contract.keys import QueueKeys
from producer.contract.rewards import Dispatcher
from producer.exporter import Exporter
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration.pool import QUEUE, Pool, Process
from tests.integration.stepper import StepEngine
from tests.waiting import DEADLINE_S, async_wait_until

ROOT = Path(__file__).parents[2]
LUA = ROOT / "producer" / "contract" / "lua"
ACL = ROOT / "deploy" / "redis" / "users.acl"

FUNCTIONS = "tests.integration.reward_functions"

CONNECTING = {"hello", "auth", "ping", "client|setname", "select"}
SCRIPTS = {"evalsha", "script|load", "info"}
SCRIPTS_OF = {
    "trainer": "configure enqueue cancel reap publish ack restate attend adopt drop due",
    "worker": "configure claim prompt checkpoint renew release finish fail reap confirm heartbeat"
    " leave turn due",
    "rewards": "configure due grade graded",
}
#: what RQ sends on its keys to enqueue a job, and beyond that in its workers and `rq info`
RQ_ENQUEUES = {"del", "evalsha", "exec", "exists", "hset", "lrange", "multi", "rpush", "sadd"}
RQ_WORKS = {
    *("blmove", "client|info", "expire", "get", "hdel", "hget", "hgetall", "hincrby"),
    *("hincrbyfloat", "hmget", "hsetnx", "llen", "lrem", "persist", "publish", "set", "smembers"),
    *("srem", "subscribe", "time", "unsubscribe", "unwatch", "watch", "xadd", "xlen", "xrange"),
    *("zadd", "zcard", "zrange", "zrangebyscore", "zrem", "zremrangebyscore", "zscore"),
}
#: what `settle` sends for a script that calls these of lib.lua
GATHERED = {
    "add": "zadd",
    "append": "rpush",
    "count": "hincrby",
    "remove": "zrem",
    "renew": "zadd",
    "reset": "del",
    "set": "hset",
}
#: what a role sends itself, outside of scripts
SENT_BY = {
    "trainer": {"exists", "hgetall", "lrange", "xlen", "xreadgroup"}
    | {"zcard", "zrange", "zrevrange", "zscore"},
    "worker": {"hexists", "hmget", "lrange", "xread"},
    "rewards": {"hgetall", "lrange"},
}
RQ_SENDS = {"trainer": RQ_ENQUEUES, "worker": RQ_ENQUEUES, "rewards": RQ_ENQUEUES | RQ_WORKS}


def roles() -> dict[str, list[str]]:
    """User -> its rules."""
    lines = [line.split() for line in ACL.read_text().splitlines() if line]
    assert all(line[0] == "user" for line in lines), "an ACL file holds users and nothing else"
    return {line[1]: line[2:] for line in lines}


def rights(role: str) -> tuple[str, str]:
    """Its rules for rollq's keys, and those of its selector, for RQ's."""
    own, _, rq = " ".join(roles()[role]).partition(" (")
    return own, rq.removesuffix(")")


def allowed(rules: str) -> set[str]:
    return {rule[1:] for rule in rules.split() if rule.startswith("+")}


def commands_in(text: str, library: dict[str, str], seen: frozenset[str] = frozenset()) -> set[str]:
    """Commands that a script sends, itself or through functions of lib.lua."""
    found = set(re.findall(r"call\('(\w+)'(?:, '(\w+)')?", text))
    names = {
        f"{c.lower()}|{sub.lower()}" if c in ("XGROUP", "XINFO") else c.lower() for c, sub in found
    }
    for name, body in library.items():
        if name not in seen and re.search(rf"\b{name}\(", text):
            names |= commands_in(body, library, seen | {name})
            names |= {GATHERED[name]} if name in GATHERED else set()
    return names


def library() -> dict[str, str]:
    parts = re.split(r"^local function (\w+)", (LUA / "lib.lua").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("role", ["trainer", "worker", "rewards"])
def test_a_role_may_send_exactly_what_its_scripts_and_reads_need(role: str) -> None:
    functions = library()
    texts = [(LUA / f"{name}.lua").read_text() for name in SCRIPTS_OF[role].split()]
    needed = set[str]().union(*(commands_in(text, functions) for text in texts))

    own, rq = rights(role)
    assert allowed(own) == needed | SENT_BY[role] | CONNECTING | SCRIPTS
    assert allowed(rq) == RQ_SENDS[role]


def test_every_script_belongs_to_a_role() -> None:
    names = {path.stem for path in LUA.glob("*.lua")} - {"lib"}
    assert names == set(" ".join(SCRIPTS_OF.values()).split())


# on a real server


@pytest.fixture
def server(server_kind: Prefer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with start_embedded(tmp_path / "redis", prefer=server_kind) as server:
        with redis.Redis.from_url(server.url) as admin:
            for user, rules in roles().items():
                if user != "default":  # the tests themselves look as the default user
                    admin.execute_command("ACL", "SETUSER", user, *rules)
        yield server


def url_of(server: EmbeddedServer, role: str) -> str:
    path = urlsplit(server.url).path
    return f"unix://{role}:{quote(f'change-me-{role}')}@{path}"


@pytest.fixture
async def pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    """A trainer under its user; the workers get theirs when they start."""
    (tmp_path / "pool").mkdir()
    pool = Pool(url_of(server, "trainer"), tmp_path / "pool", {})
    pool.url = url_of(server, "worker")
    yield pool
    await pool.close()


async def test_trainer_and_worker_do_all_their_work_under_their_users(pool: Pool) -> None:
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine, name="a")
    pool.submit(3)
    await pool.made(3, "g0/0", "g1/0", "g2/0")
    pool.client.cancel(["g2"])
    engine.plan = lambda r: None
    version = await pool.update(worker)
    await pool.groups(3)
    pool.client.wait_for_version(version, timeout=DEADLINE_S)
    text = pool.client.submit(["a text"])
    assert [g.id for g in await pool.groups(1)] == text

    assert await worker.drain() == 0
    assert pool.client.status().workers == ()


async def test_groups_are_graded_under_the_users(
    server: EmbeddedServer, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLQ_REDIS_URL", url_of(server, "rewards"))
    monkeypatch.setenv("ROLLQ_QUEUE", QUEUE)
    monkeypatch.setenv("ROLLQ_REWARD_MODULES", FUNCTIONS)
    options = "-c producer.rewards.settings --serializer producer.rewards.Serializer"
    command = [sys.executable, "-m", "rq.cli", "worker", *options.split()]
    rq = Process(command, tmp_path / "rq.log")
    try:
        await pool.start(StepEngine(), name="a")
        for function in ("length", "raises"):
            pool.client.submit([[1]], reward=f"{FUNCTIONS}:{function}")
            (group,) = await pool.batch(1)
            group_error = "ValueError: no such answer" if function == "raises" else ""
            assert group.reward_error == group_error, rq.log()
            assert pool.client.ack([group]) == 1
        rq.send(signal.SIGTERM)
        assert rq.ended() in (0, -signal.SIGTERM), rq.log()
        assert "NOPERM" not in rq.log()
        assert "No permissions" not in rq.log()
    finally:
        rq.close()


def test_who_may_not_use_rq_leaves_rewards_to_others(server: EmbeddedServer) -> None:
    due = [[b"g", b"digest", 0, b"m:f", 1000]]
    for role, refused in (("scaler", True), ("monitor", True), ("trainer", False)):
        dispatcher = Dispatcher(url_of(server, role), QUEUE)
        dispatcher.send(due)
        dispatcher.close()
        assert bool(dispatcher.refused) is refused, (role, dispatcher.refused)


async def test_monitor_can_export(server: EmbeddedServer, pool: Pool) -> None:
    """With a worker on the list and a sample that waits: each has commands of its own."""
    await pool.start(StepEngine(lambda r: 1), name="a", max_samples=1)
    pool.submit(2)
    exporter = Exporter(url_of(server, "monitor"), [QUEUE])
    for seen in (
        'rollq_pool_workers{queue="q",state="serving",version="0"} 1.0',
        'rollq_pool_samples_waiting{queue="q"} 1.0',
    ):
        await async_wait_until(partial(lambda s: s in exporter.metrics().decode(), seen), seen)
    exporter.close()


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("worker", ("XACK", QueueKeys(QUEUE)["results"], "trainer", "0-1")),
        ("worker", ("UNLINK", QueueKeys(QUEUE)["results"])),
        ("worker", ("FLUSHALL",)),
        ("worker", ("SET", "other", "1")),
        ("rewards", ("FLUSHALL",)),
        ("rewards", ("KEYS", "*")),
        ("rewards", ("SET", "other", "1")),
        ("rewards", ("PUBLISH", "other", "1")),
        ("rewards", ("XACK", QueueKeys(QUEUE)["results"], "trainer", "0-1")),
        ("trainer", ("FLUSHALL",)),
        ("trainer", ("KEYS", "*")),
        ("trainer", ("CONFIG", "SET", "maxmemory", "1")),
        ("trainer", ("RPUSH", QueueKeys(QUEUE).chunks("g/0"), "x")),
        ("monitor", ("ZREM", QueueKeys(QUEUE)["ready"], "g/0")),
        ("monitor", ("EVALSHA", "0" * 40, "0")),
        ("scaler", ("HGETALL", QueueKeys(QUEUE)["stats"])),
        ("scaler", ("ZCARD", QueueKeys(QUEUE)["dead"])),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(v[:1]),
)
def test_a_role_may_do_no_more(server: EmbeddedServer, role: str, command: tuple[str, ...]) -> None:
    with (
        redis.Redis.from_url(url_of(server, role)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)


async def test_monitor_and_scaler_can_look(server: EmbeddedServer, pool: Pool) -> None:
    pool.submit(2)
    keys = QueueKeys(QUEUE)
    engine = StepEngine(lambda r: 1)
    await pool.start(engine, name="a")
    await async_wait_until(lambda: len(engine.live) == 2, "the engine has both")
    with redis.Redis.from_url(url_of(server, "scaler")) as scaler:
        assert (scaler.zcard(keys["ready"]), scaler.zcard(keys["leases"])) == (0, 2)
    with redis.Redis.from_url(url_of(server, "monitor")) as monitor:
        assert monitor.hgetall(keys["stats"])[b"samples_enqueued"] == b"2"
        assert monitor.hmget(keys.sample("g0/0"), "state", "worker") == [b"leased", b"a"]
        assert monitor.zrange(keys["workers"], 0, -1) == [b"a"]
        assert monitor.xinfo_groups(keys["results"])[0]["name"] == b"trainer"
    engine.allow(7)
    await pool.groups(2)
