"""Invariant 3: each script can be sent twice and has the effect of once.

First from many states, straight to the server; then through a proxy that loses the reply of
each script in turn, so that it is our own retry that sends it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from producer.contract.connection import AsyncQueue, Call, Queue
from producer.contract.messages import Claim
from producer.contract.scripts import SCRIPTS
from tests.integration import contract
from tests.integration.contract import Driver, job
from tests.proxy import Proxy
from tests.waiting import DEADLINE_S

_TIMES = re.compile(
    rb"(enqueued|started|finished|heartbeat|\d+:published)_at|last_reap|state_at|entry"
)

_BY_TIME = ("leases", "workers", "starting", "turns", "line", "dead", "grading")


def steady(driver: Driver) -> dict[str, Any]:
    """A dump without what two runs cannot have in common: times, and ids made of them."""
    keys = driver.keys
    dump = driver.dump()
    entries = [entry for entry, _ in dump.get(keys["results"], ([], False))[0]]
    for key, (content, expires) in dump.items():
        if key == keys["trainers"]:
            content = sorted(content)
        elif isinstance(content, dict):
            content = {k: v for k, v in content.items() if not _TIMES.fullmatch(k)}
        elif key in [keys[name] for name in _BY_TIME]:
            content = sorted(member for member, _ in content)
        elif key in (keys["results"], keys["updates"]) or key.startswith(keys["turn"]):
            content = [fields for _, fields in content]
        elif key == "pending":
            content = [(entries.index(entry), consumer) for entry, consumer in content]
        dump[key] = (content, expires)
    return dump


@dataclass
class Scene:
    """A queue in some state, and what its worker and trainer hold."""

    driver: Driver
    old: Claim
    held: Claim
    tokens: int = 0
    entry: str = "1-1"
    digest: str = "none"


def claim(driver: Driver, request: str, **options: Any) -> Claim:
    (c,) = driver.claim("w", 1, request=request, **options)
    return c


def leased(driver: Driver, **options: Any) -> Scene:
    """Claimed for the second time, by the same worker, after a release with 2 tokens."""
    driver.send(contract.heartbeat("w"))
    driver.enqueue(job("g", prompt="text", **options), job("next", 2))
    old = driver.generate(claim(driver, "first"), 2)
    driver.send(contract.release(old, 2))
    return Scene(driver, old, claim(driver, "second"), tokens=0 if options.get("restart") else 2)


def partial(driver: Driver) -> Scene:
    scene = leased(driver)
    driver.generate(scene.held, 3)
    scene.tokens = 5
    return scene


def cannot_resume(driver: Driver) -> Scene:
    return leased(driver, restart=True)


def too_old(policy: str) -> Callable[[Driver], Scene]:
    def build(driver: Driver) -> Scene:
        scene = leased(driver, policy=policy, max_staleness=0)
        driver.send(contract.publish("p1", "files"))
        return scene

    build.__name__ = f"too_old_{policy}"
    return build


def released_too_old(driver: Driver) -> Scene:
    scene = too_old("restart")(driver)
    driver.send(contract.release(scene.held, 2))
    return scene


def expired(driver: Driver) -> Scene:
    scene = leased(driver)
    driver.expire("g/0")
    driver.redis.hset(driver.keys["config"], "last_reap", driver.now())
    return scene


def crashed_twice(driver: Driver) -> Scene:
    scene = partial(driver)
    driver.crash(scene.held)
    scene.held = claim(driver, "third")
    driver.crash(scene.held)
    scene.held = claim(driver, "fourth")
    return scene


def then(build: Callable[[Driver], Scene], name: str, *calls: Callable[[Scene], Call]) -> Any:
    def built(driver: Driver) -> Scene:
        scene = build(driver)
        for call in calls:
            driver.send(call(scene))
        return scene

    built.__name__ = name
    return built


def closed(driver: Driver) -> Scene:
    scene = partial(driver)
    driver.send(contract.finish(scene.held, 5))
    ((scene.entry, _),) = driver.read()
    return scene


def closed_for_grading(driver: Driver) -> Scene:
    """Closed, with a reward function; its first attempt has begun."""
    driver.enqueue(job("g", reward="m:f"), job("next", 2))
    held = driver.claim_one(request="first")
    driver.complete(held, tokens=2)
    scene = Scene(driver, held, held, 2, digest=driver.group("g")["digest"])
    driver.send(contract.due())
    driver.send(contract.grade("g", scene.digest, "r1"))
    return scene


def waits_for_grading(driver: Driver) -> Scene:
    scene = closed_for_grading(driver)
    driver.redis.zadd(driver.keys["grading"], {"g": 1})
    return scene


dead = then(crashed_twice, "dead", lambda s: contract.fail(s.held, "crash"))


def proven(driver: Driver) -> Scene:
    scene = partial(driver)
    driver.send(contract.publish("p1", "files"))
    driver.send(contract.confirm(1))
    driver.send(contract.heartbeat("v"))
    driver.send(contract.publish("p2", "other files"))
    return scene


STATES: list[Callable[[Driver], Scene]] = [
    leased,
    partial,
    cannot_resume,
    too_old("allow"),
    too_old("restart"),
    too_old("drop"),
    released_too_old,
    expired,
    crashed_twice,
    then(partial, "released", lambda s: contract.release(s.held, 5)),
    then(partial, "failed", lambda s: contract.fail(s.held)),
    then(partial, "cancelled", lambda s: contract.cancel("g")),
    dead,
    closed,
    then(closed, "acked", lambda s: contract.ack(s.entry)),
    proven,
    then(proven, "in turn", lambda s: contract.turn(), lambda s: contract.turn("v")),
    then(proven, "in the line", lambda s: contract.turn("v"), lambda s: contract.turn()),
    closed_for_grading,
    waits_for_grading,
    then(closed_for_grading, "graded", lambda s: contract.graded("g", s.digest, 1, [0.5])),
    then(proven, "bad", lambda s: contract.confirm(2, "v", "x"), lambda s: contract.confirm(2)),
]


def calls(scene: Scene) -> Iterator[tuple[str, Call]]:
    """Every script, with arguments that do something in some state."""
    c, at = scene.held, scene.tokens
    yield "enqueue", contract.enqueue(job("new", 2))
    yield "enqueue the same", contract.enqueue(job("next", 2))
    yield "enqueue another", contract.enqueue(job("g", prompt=[9]))
    for version in (0, 1, 2):
        yield f"claim at {version}", contract.claim("w", 2, request="last", version=version)
    yield "claim again", contract.claim("w", 1, request="second")
    yield "checkpoint", contract.checkpoint(c, at, 2)
    yield "checkpoint with a gap", contract.checkpoint(c, at + 1, 2)
    yield "release", contract.release(c, at)
    yield "finish", contract.finish(c, at)
    yield "finish too early", contract.finish(c, at + 1)
    yield "finish with its tail", contract.finish(c, at + 2, tail=(at, 2, 0))
    yield "finish with a part of it", contract.finish(c, at + 3, tail=(at, 2, 0))
    yield "finish behind a gap", contract.finish(c, at + 3, tail=(at + 1, 2, 0))
    yield "fail", contract.fail(c)
    yield "crash", contract.fail(c, "crash")
    yield "renew", contract.renew(c)
    yield "prompt", contract.prompt(c, [4, 5])
    for name, call in (("finish", contract.finish), ("release", contract.release)):
        yield f"{name} of a zombie", call(scene.old, 2)
    yield "cancel", contract.cancel("g")
    yield "cancel one", contract.cancel("next", 1)
    yield "reap", contract.reap()
    yield "publish", contract.publish("p3", "new files")
    yield "publish the same", contract.publish("p4", "files")
    yield "publish again", contract.publish("p1", "files")
    yield "publish by force", contract.publish("p5", "files", force=True)
    for version in (1, 2):
        yield f"confirm {version}", contract.confirm(version)
        yield f"fail to load {version}", contract.confirm(version, "w", "digest")
    yield "turn", contract.turn()
    yield "turn given back", contract.turn(hold_ms=0)
    yield "heartbeat", contract.heartbeat("w")
    yield "first heartbeat", contract.heartbeat("w", "starting", "another process")
    yield "leave", contract.leave("w")
    yield "ack", contract.ack(scene.entry, "g")
    digest = str(job("g", prompt="text").to_item()[2])
    yield "restate", contract.restate("g", digest)
    yield "restate what is in hand", contract.restate("g", digest, acked=False)
    yield "restate for another", contract.restate("g", digest, "t1", acked=False)
    yield "attend", contract.attend()
    yield "adopt", contract.adopt()
    yield "drop", ("drop", {}, [("g/0", "g")])
    yield "due", contract.due()
    yield "grade", contract.grade("g", scene.digest, "r2")
    yield "grade again", contract.grade("g", scene.digest, "r1")
    yield "graded", contract.graded("g", scene.digest, 1, [1.0])
    yield "graded with an error", contract.graded("g", scene.digest, 1, error="x")
    yield "graded with the last error", contract.graded("g", scene.digest, 1, error="x", final=True)
    yield "configure", scene.driver.queue._configure()


def agree(name: str, first: Any, second: Any) -> bool:
    """Do both replies mean the same? A few say what this very call did, and the rest is equal."""
    if name == "enqueue":
        return first == second or (first, second) == (b"new", b"same")
    if name in ("attend", "first heartbeat"):
        return bool(first[:2] == second[:2])  # the age, and whose mark was there before
    if name in ("cancel", "cancel one", "leave", "drop"):
        return bool(second == 0)
    if name == "crash":
        return bool(second == contract.LOST)
    if name == "adopt":
        return bool(second[0] == 0)
    if name == "reap":
        return bool(second == [0, 0])
    if name == "due":
        return bool(second == [])
    return bool(first == second)


def fresh(driver: Driver, build: Callable[[Driver], Scene]) -> Scene:
    driver.redis.flushall()
    driver.queue.open()
    driver.redis.hset(driver.keys["config"], "incarnation", "the same")
    return build(driver)


@pytest.mark.parametrize("build", STATES, ids=lambda b: b.__name__)
def test_twice_is_as_once(driver: Driver, build: Callable[[Driver], Scene]) -> None:
    scene = fresh(driver, build)
    for name, _ in list(calls(scene)):
        before = driver.dump()
        call = dict(calls(scene))[name]

        first = driver.send(call)
        once = steady(driver)
        second = driver.send(call)

        assert steady(driver) == once, name
        assert agree(name, first, second), f"{name}: {first}, then {second}"
        if driver.dump() != before:
            scene = fresh(driver, build)


def test_every_script_is_sent(driver: Driver) -> None:
    assert {call[0] for _, call in calls(leased(driver))} == set(SCRIPTS)


#: for each script a state in which it does something
EFFECTS: dict[str, Callable[[Driver], Scene]] = {
    "enqueue": leased,
    "claim at 0": leased,
    "checkpoint": leased,
    "release": partial,
    "finish": partial,
    "fail": partial,
    "crash": crashed_twice,
    "renew": expired,
    "prompt": leased,
    "cancel": partial,
    "reap": expired,
    "publish": proven,
    "confirm 1": too_old("allow"),
    "fail to load 1": too_old("allow"),
    "turn": proven,
    "heartbeat": leased,
    "leave": leased,
    "ack": closed,
    "restate": closed,
    "attend": leased,
    "adopt": closed,
    "drop": dead,
    "due": waits_for_grading,
    "grade": closed_for_grading,
    "graded": closed_for_grading,
    "graded with an error": closed_for_grading,
    "configure": leased,
}


def undisturbed(driver: Driver, name: str) -> tuple[Any, dict[str, Any], Call]:
    """Reply and state after a call that nothing befell, and the call for the same scene anew."""
    call = dict(calls(fresh(driver, EFFECTS[name])))[name]
    before = steady(driver)
    reply = driver.send(call)
    after = steady(driver)
    assert after != before or name in ("renew", "heartbeat", "configure", "due"), (
        f"{name} did nothing"
    )
    return reply, after, dict(calls(fresh(driver, EFFECTS[name])))[name]


@pytest.fixture
def proxy(redis_url: str, tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(redis_url, tmp_path) as proxy:
        yield proxy


@pytest.fixture
def through(driver: Driver, proxy: Proxy) -> Iterator[Queue]:
    """A queue behind the proxy, connected; its server has the scripts."""
    for script in SCRIPTS.values():
        driver.redis.script_load(script.source)
    queue = Queue(proxy.url, "q", patience=DEADLINE_S)
    queue.redis.ping()
    yield queue
    queue.close()


def test_a_lost_reply_is_asked_for_again(driver: Driver, proxy: Proxy, through: Queue) -> None:
    for name in EFFECTS:
        expected, after, call = undisturbed(driver, name)
        sha = SCRIPTS[call[0]].sha
        before = proxy.requests(sha)

        proxy.lose(sha)
        reply = contract.answer(call, through.call_many([call])[0])

        assert proxy.requests(sha) == before + 2, name
        assert agree(name, expected, reply), f"{name}: {expected}, then {reply}"
        assert steady(driver) == after, name
    assert proxy.lost == len(EFFECTS)


@pytest.mark.usefixtures("through")
async def test_the_asyncio_twin_asks_again_as_well(driver: Driver, proxy: Proxy) -> None:
    queue = AsyncQueue(proxy.url, "q", patience=DEADLINE_S)
    try:
        await queue.redis.ping()
        for name in EFFECTS:
            expected, after, call = undisturbed(driver, name)

            proxy.lose(SCRIPTS[call[0]].sha)
            reply = contract.answer(call, (await queue.call_many([call]))[0])

            assert agree(name, expected, reply), f"{name}: {expected}, then {reply}"
            assert steady(driver) == after, name
        assert proxy.lost == len(EFFECTS)
    finally:
        await queue.close()


def test_a_whole_flush_of_calls_is_repeated_after_a_lost_reply(
    driver: Driver, proxy: Proxy, through: Queue
) -> None:
    """A worker sends its checkpoints and ends in one round trip."""
    scene = leased(driver)

    proxy.lose(SCRIPTS["finish"].sha)
    replies = through.call_many(
        [contract.checkpoint(scene.held, 2, 6), contract.finish(scene.held, 8)]
    )

    assert proxy.lost == 1
    assert replies[1][2] == [8]
    assert driver.tokens("g/0") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert driver.results() == [("g", ["finished"])]
