"""Redis does not roll a script back: what is refused is refused before the first write.

Also what becomes of a call when the script, the queue or the memory is gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from producer.contract.connection import AsyncQueue, Call, Queue
from producer.contract.errors import InvalidSample, QueueUnusable
from producer.contract.keys import TRAINER_GROUP
from producer.contract.messages import Claim
from producer.contract.scripts import SCRIPTS, Argument
from producer.server import EmbeddedServer
from tests.integration import contract
from tests.integration.contract import Driver, checkpoint, finish, job, release
from tests.waiting import DEADLINE_S


def busy(driver: Driver) -> tuple[Claim, str]:
    """A queue with something of everything; a lease and an entry that can be acked."""
    driver.send(contract.publish())
    driver.enqueue(job("closed"), job("g", 2, prompt="text"), job("dead"), job("ready", 2))
    closed, held, _, dead = driver.claim(limit=4)
    driver.complete(closed)
    driver.generate(held, 3)
    for _ in range(2):
        driver.crash(dead)
        dead = driver.claim_one("x")
    driver.crash(dead)
    ((entry, _), *_) = driver.read()
    return held, entry


def enqueue_item(**changes: Any) -> Sequence[Any]:
    names = SCRIPTS["enqueue"].item
    fields = dict(zip(names, job("new").to_item(), strict=True))
    return [{**fields, **changes}[name] for name in names]


W: dict[str, Argument] = {"worker": "w"}
BAD_NUMBERS = ("", "x", "1.5", "1e3", "0x10", "inf", "nan", " 1", "9007199254740994")


def bad_items(c: Claim, entry: str) -> Iterator[tuple[Call, str]]:
    """Calls whose first item is good and whose second is refused, with the words."""
    good = enqueue_item()
    for name in ("size", "max_tokens", "prompt_tokens", "max_staleness"):
        for n in BAD_NUMBERS:
            if (name, n) != ("max_staleness", ""):
                bad = enqueue_item(group="bad", **{name: n})
                yield ("enqueue", {}, [good, bad]), f"{name} must be a whole number, not {n}"
    for name, value, words in (
        ("size", 0, "a group has 1 to 4096 samples, not 0"),
        ("size", 4097, "a group has 1 to 4096 samples, not 4097"),
        ("staleness_policy", "no", "staleness_policy must be allow, restart or drop, not no"),
        ("restart", 2, "restart must be 0 or 1, not 2"),
    ):
        yield ("enqueue", {}, [good, enqueue_item(group="bad", **{name: value})]), words

    k = (c.id, c.lease_token)
    sound = checkpoint(c, 3, 2)[2][0]
    for at, name in ((2, "offset"), (3, "count"), (4, "version")):
        for n in BAD_NUMBERS:
            bad = [*sound[:at], n, *sound[at + 1 :]]
            yield ("checkpoint", W, [sound, bad]), f"{name} must be a whole number, not {n}"
    words = "a chunk needs offset >= 0, count >= 1 and version >= 0"
    for numbers in ((-1, 1, 0), (0, 0, 0), (0, 1, -1)):
        yield ("checkpoint", W, [sound, (*k, *numbers, b"x")]), words
    yield (
        ("checkpoint", W, [sound, (*k, 5, 1, 0, b"x" * 4194305)]),
        "a chunk has at most 4 MiB, this one 4194305",
    )
    for n in BAD_NUMBERS:
        words = f"tokens must be a whole number, not {n}"
        yield ("release", {**W, "reason": "drain"}, [(*k, 3), (*k, n)]), words
        ended = (*k, 3, "stop", "", "", 0, 0, 0, b"")
        yield ("finish", W, [ended, (*k, n, "stop", "", "", 0, 0, 0, b"")]), words
        yield ("prompt", {}, [(*k, 1, b"1234"), (*k, n, b"1234")]), words
    yield (
        ("finish", W, [ended, (*k, 3, "bored", "", "", 0, 0, 0, b"")]),
        "a sample finishes with stop or length, not bored",
    )
    yield (
        ("finish", W, [ended, (*k, 9, "stop", "", "", 5, 1, 0, b"x" * 4194305)]),
        "a chunk has at most 4 MiB, this one 4194305",
    )
    for tokens, ids in ((0, b""), (-1, b""), (1, b"123"), (2, b"1234")):
        words = f"a prompt of {tokens} tokens has 4 bytes for each, not {len(ids)}"
        yield ("prompt", {}, [(*k, 1, b"1234"), (*k, tokens, ids)]), words
    yield (
        ("configure", {"schema": "2", "incarnation": "x", "group": "g"},
         [("max_ready", 5, 1), ("lease_ms", 0, 1)]),
        "lease_ms must be 1 or more, not 0",
    )  # fmt: skip


def bad_scalars(c: Claim, entry: str) -> Iterator[tuple[Call, str]]:
    def change(call: Call, **changes: Any) -> Call:
        return call[0], {**call[1], **changes}, call[2]

    for call, names in (
        (contract.claim(), ("version", "limit", "held", "room", "reserve")),
        (contract.reap(), ("limit",)),
        (contract.publish(), ("floor", "step", "deadline_ms")),
        (contract.confirm(1), ("version",)),
        (contract.turn(), ("serves", "hold_ms", "waits")),
    ):
        for name in names:
            for n in BAD_NUMBERS:
                yield change(call, **{name: n}), f"{name} must be a whole number, not {n}"
    yield (
        change(contract.publish(), policy="pray"),
        "policy must be requeue, keep or finish, not pray",
    )
    for most in ("0", "-1", "", "1.5", "half", "%"):
        words = f"max_updating must be a number or a percentage, not {most}"
        yield change(contract.publish(), max_updating=most), words
    yield contract.fail(c, "whim"), "kind must be error or crash, not whim"
    configure: Call = ("configure", {"schema": "3", "incarnation": "x", "group": "g"}, [])
    yield configure, "this queue has schema 2, this program speaks 3"


def too_many(c: Claim, entry: str) -> Iterator[tuple[Call, str]]:
    for call in (
        contract.enqueue(job("new")),
        checkpoint(c, 3, 2),
        release(c, 3),
        finish(c, 3),
        contract.fail(c),
        contract.renew(c),
        contract.prompt(c, [1]),
        contract.cancel("g"),
        contract.ack(entry, "closed"),
    ):
        name, scalars, items = call
        words = f"{name} takes up to 256 items of {len(items[0])} fields"
        yield (name, scalars, list(items) * 257), words


@pytest.mark.parametrize("calls", [bad_items, bad_scalars, too_many])
def test_what_is_refused_has_changed_nothing(
    driver: Driver, calls: Callable[[Claim, str], Iterator[tuple[Call, str]]]
) -> None:
    before_all = busy(driver)
    before = driver.dump()
    for call, words in calls(*before_all):
        with pytest.raises(InvalidSample, match=f"^{re.escape(words)}$"):
            driver.queue.call_many([call])
        assert driver.dump() == before, call[:2]


def test_an_ack_of_what_is_no_entry_has_changed_nothing(driver: Driver) -> None:
    _, entry = busy(driver)
    before = driver.dump()
    for bad in ("", "x", "1-x", "99999999999999999999999-1"):
        with pytest.raises(QueueUnusable, match="Invalid stream ID"):
            driver.queue.call(
                "ack", [(entry, "closed"), (bad, "g")], group=TRAINER_GROUP, consumer="t0"
            )
        assert driver.dump() == before, bad
    with pytest.raises(InvalidSample, match=f"^entry {entry} is of group closed, not g$"):
        driver.queue.call(
            "ack", [(entry, "closed"), (entry, "g")], group=TRAINER_GROUP, consumer="t0"
        )
    assert driver.dump() == before


def test_an_error_halfway_has_changed_nothing(driver: Driver) -> None:
    """What a script writes, it writes at its end."""
    driver.enqueue(job("sound", 2), job("broken"))
    first, second, broken = driver.claim()
    driver.redis.delete(driver.keys.group("broken"))
    before = driver.dump()

    scalars, items = (
        {"worker": "w"},
        [finish(c, 3, tail=(0, 3, 0))[2][0] for c in (first, second, broken)],
    )
    with pytest.raises((QueueUnusable, InvalidSample)):
        driver.queue.call("finish", items, **scalars)

    assert driver.dump() == before


def test_a_call_without_items_is_no_call(driver: Driver) -> None:
    busy(driver)
    before = driver.dump()
    for name in ("enqueue", "checkpoint", "release", "finish", "fail", "renew", "cancel", "prompt"):
        scalars = dict.fromkeys(SCRIPTS[name].scalars, "error")
        driver.queue.call(name, (), **scalars)
        assert driver.dump() == before, name


# what is gone comes back


def all_calls(c: Claim, entry: str) -> list[Call]:
    return [
        contract.enqueue(job("after")),
        contract.claim(version=1),
        checkpoint(c, 3, 2),
        contract.prompt(c, [1, 2]),
        contract.renew(c),
        release(c, 3),
        finish(c, 3),
        contract.fail(c),
        contract.cancel("g"),
        contract.reap(),
        contract.publish(),
        contract.confirm(1),
        contract.heartbeat(),
        contract.leave(),
        contract.ack(entry, "closed"),
    ]


def test_scripts_that_were_flushed_are_loaded_again(driver: Driver) -> None:
    """Case 31."""
    for call in all_calls(*busy(driver)):
        driver.redis.script_flush()
        driver.queue.call_many([call])


def test_a_queue_that_was_flushed_is_set_up_again(driver: Driver) -> None:
    """Case 31: no error, and nobody is told that his write counted."""
    held, entry = busy(driver)
    incarnation = driver.queue.config["incarnation"]
    for call in all_calls(held, entry):
        driver.redis.flushall()
        reply = driver.send(call)
        if call[0] in ("checkpoint", "renew", "release", "finish", "fail"):
            assert reply == contract.LOST, call[0]
        if call[0] in ("enqueue", "claim", "checkpoint", "renew", "fail", "reap", "ack"):
            assert driver.redis.hlen(driver.keys["config"]) >= 8, call[0]
            assert driver.redis.xinfo_groups(driver.keys["results"])[0]["name"] == b"trainer"
            assert driver.queue.config["incarnation"] != incarnation
    driver.redis.flushall()
    assert driver.enqueue(job("g")) == ["new"]
    driver.complete(driver.claim_one())
    assert [g for _, g in driver.read()] == ["g"]


async def test_the_asyncio_twin_recovers_as_well(driver: Driver) -> None:
    twin = AsyncQueue(driver.queue.url, "q", patience=DEADLINE_S)
    await twin.open()
    try:
        driver.redis.flushall()
        driver.redis.script_flush()
        assert (await twin.call("reap", limit=1)) == [0, 0]
        assert twin.config["schema"] == "2"
        driver.redis.script_flush()
        assert await twin.call_many([contract.reap(), contract.enqueue(job("g"))]) == [
            [0, 0],
            [b"new"],
        ]
        with pytest.raises(InvalidSample, match=r"^limit must be a whole number, not x$"):
            await twin.call("reap", limit="x")
    finally:
        await twin.close()


def test_limits_that_are_set_stay_unless_they_are_given(driver: Driver) -> None:
    url = driver.queue.url
    for limits, seen in (({"max_ready": 5}, "5"), ({}, "5"), ({"max_ready": 6}, "6")):
        queue = Queue(url, "q", limits=limits)
        queue.open()
        assert queue.config["max_ready"] == seen
        assert queue.config["incarnation"] == driver.queue.config["incarnation"]
        queue.close()
    with pytest.raises(InvalidSample, match="max_redy"):
        Queue(url, "q", limits={"max_redy": 5})


def test_a_full_memory_refuses_whole_calls_and_loses_nothing(own_server: EmbeddedServer) -> None:
    """Case 28: the sample keeps its lease, the commit is tried again."""
    queue = Queue(own_server.url, "q", patience=0.0)
    queue.open()
    driver = Driver(queue)
    held, entry = busy(driver)
    calls = all_calls(held, entry)
    for call in calls:
        if call[0] not in ("ack", "finish"):
            driver.redis.script_load(SCRIPTS[call[0]].source)
    before = driver.dump()
    driver.redis.config_set("maxmemory", 1)

    for call in calls:
        if call[0] in ("checkpoint", "release", "enqueue", "publish", "reap", "prompt"):
            with pytest.raises(redis.RedisError) as refused:
                driver.redis.execute_command(*queue._evalsha(call))
            assert "OOM" in str(refused.value) or "maxmemory" in str(refused.value)
            assert driver.dump() == before, call[0]
    driver.redis.config_set("maxmemory", 0)

    assert driver.send(checkpoint(held, 3, 5)) == 8
    assert driver.send(finish(held, 8)) == 8
    queue.close()


def test_a_refusal_is_not_asked_again(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidSample):
        driver.queue.call("reap", limit="x")
    assert caplog.records == []
