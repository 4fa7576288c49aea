"""Groups: taken in whole, closed whole in any order, delivered until acked, taken once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from producer.contract.errors import InvalidSample
from producer.contract.keys import TRAINER_GROUP
from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import Driver, ack, cancel, job

# enqueue


def test_a_group_is_taken_in_whole(driver: Driver) -> None:
    assert driver.enqueue(job("g", 3), job("h")) == ["new", "new"]

    assert driver.ready() == ["g/0", "g/1", "g/2", "h/0"]
    assert driver.stats() == {"groups_enqueued": 2, "samples_enqueued": 4}
    sample = driver.sample("g/2")
    assert (sample["state"], sample["attempts"], sample["tokens"]) == ("ready", "0", "0")
    assert (sample["version_first"], sample["version_last"]) == ("-1", "-1")


def test_an_id_is_taken_in_once_while_it_is_here_and_after(driver: Driver) -> None:
    first, other = job("g"), job("g", prompt=[9])
    assert driver.enqueue(first, first, other) == ["new", "same", "conflict"]
    driver.complete(driver.claim_one())
    assert driver.enqueue(first, other) == ["same", "conflict"]
    ((entry, _),) = driver.read()
    driver.send(ack(entry))
    assert driver.enqueue(first, other) == ["done", "conflict"]
    assert driver.ready() == []

    driver.redis.delete(driver.keys["done"] + "g")
    assert driver.enqueue(other) == ["new"]


def test_a_tombstone_is_kept_for_its_time(open_driver: OpenDriver) -> None:
    driver = open_driver(tombstone_ms=60_000)
    driver.enqueue(job("g"))
    driver.send(cancel("g"))
    ((entry, _),) = driver.read()
    driver.send(ack(entry))

    assert 50_000 < driver.redis.pttl(driver.keys["done"] + "g") <= 60_000


def test_no_more_is_taken_in_than_max_ready(open_driver: OpenDriver) -> None:
    """Case 27."""
    driver = open_driver(max_ready=10)
    words = driver.enqueue(*(job(f"g{i}") for i in range(25)))
    assert words == ["new"] * 10 + ["full"] * 15

    driver.claim(limit=3)
    assert driver.enqueue(job("big", 4), job("fits", 3)) == ["full", "new"]
    assert len(driver.ready()) == 10


def test_a_group_that_can_never_be_taken_in_is_refused(open_driver: OpenDriver) -> None:
    driver = open_driver(max_ready=10)

    with pytest.raises(InvalidSample, match="group big has 11 samples, max_ready is 10"):
        driver.enqueue(job("ok"), job("big", 11))
    assert driver.ready() == []


# closing

END = ("finished", "failed", "cancelled", "stale", "dead")


def end(driver: Driver, sid: str, state: str) -> None:
    """Bring a ready sample with one token of version 0 to a terminal state; the level is 1."""
    if state == "cancelled":
        assert driver.send(cancel(*sid.split("/"))) == 1
        return
    for _ in range(3 if state == "dead" else 1):
        driver.redis.zadd(driver.keys["ready"], {sid: -(2**51)})  # it is the next
        c = driver.claim_one(version=1)
        assert c.id == sid
        if state == "failed":
            driver.send(contract.fail(c))
        elif state == "dead":
            driver.crash(c)
        else:
            group = driver.keys.group("g")
            driver.redis.hset(group, "staleness_policy", "drop" if state == "stale" else "allow")
            driver.complete(c, 1)
            driver.redis.hset(group, "staleness_policy", "allow")


@pytest.mark.parametrize("turn", range(5))
def test_a_group_of_every_end_closes_once(driver: Driver, turn: int) -> None:
    """Cases 26 and 41: one finished, failed, cancelled, stale and dead member, in mixed order."""
    driver.enqueue(job("g", 8, max_staleness=0))
    for c in driver.claim():
        driver.generate(c, 1)
        driver.send(contract.release(c, 1))
    driver.send(contract.publish())
    states = [*END, "finished", "finished", "finished"]
    order = list(itertools.permutations(range(8)))[turn * 8000]
    for count, index in enumerate(order):
        assert driver.results() == [], f"closed after {count}"
        end(driver, f"g/{index}", states[index])

    assert driver.results() == [("g", states)]
    assert [driver.sample(f"g/{i}")["state"] for i in range(8)] == states
    reasons = [driver.sample(f"g/{i}")["finish_reason"] for i in range(5)]
    assert reasons == ["length", "error", "cancelled", "stale", "error"]
    assert driver.tokens("g/1") == [0], "tokens that were made are delivered"
    assert driver.ready() == []
    assert driver.leases() == {}
    stats = driver.stats()
    assert {s: stats[s] for s in END} == dict.fromkeys(END, 1) | {"finished": 4}
    assert stats["groups_closed"] == 1


def test_a_group_of_thousands_closes(driver: Driver) -> None:
    driver.enqueue(job("g", 4096))

    assert driver.send(cancel("g", reason="enough")) == 4096
    assert driver.results() == [("g", ["cancelled"] * 4096)]


def test_cancelling_ends_a_sample_wherever_it_is(driver: Driver) -> None:
    driver.enqueue(job("g", 3))
    held = driver.generate(driver.claim_one(), 2)
    assert driver.send(cancel("g", 0, "no use")) == 1
    assert driver.send(cancel("g", 0)) == 0
    assert driver.send(contract.checkpoint(held, 2, 1)) == contract.LOST
    assert driver.send(cancel("g")) == 2
    assert driver.send(cancel("g")) == 0
    assert driver.send(cancel("unknown")) == 0
    assert driver.send(cancel("g", 3)) == 0

    assert driver.sample("g/0")["error"] == "no use"
    assert driver.tokens("g/0") == [0, 1]
    assert driver.results() == [("g", ["cancelled"] * 3)]


# delivery


def closed_group(driver: Driver, group: str = "g", consumer: str = "t0") -> str:
    """Close a group, read it, and return its entry."""
    driver.enqueue(job(group))
    driver.complete(driver.claim_one())
    ((entry, name),) = driver.read(consumer)
    assert name == group
    return entry


def test_a_group_comes_again_until_it_is_acked(driver: Driver) -> None:
    """Case 42: the trainer died, or the reply of its read was lost."""
    entry = closed_group(driver)

    assert driver.read("t0") == []
    assert driver.read("t0", start="0") == [(entry, "g")]
    assert driver.send(ack(entry)) == 1
    assert driver.read("t0", start="0") == []
    assert driver.send(ack(entry)) == 1, "the same ack again"


def test_only_an_ack_deletes_and_it_leaves_nothing_but_the_tombstone(driver: Driver) -> None:
    entry = closed_group(driver)
    assert driver.redis.xlen(driver.keys["results"]) == 1
    driver.send(ack(entry))

    streams = {driver.keys["results"], driver.keys["updates"], "pending"}
    left = {key: expires for key, (_, expires) in driver.dump().items() if key not in streams}
    assert {key for key, expires in left.items() if not expires} == {
        driver.keys["config"],
        driver.keys["stats"],
    }
    assert {key for key, expires in left.items() if expires} >= {driver.keys["done"] + "g"}
    assert driver.redis.xlen(driver.keys["results"]) == 0
    assert driver.stats()["groups_acked"] == 1


def test_a_group_is_taken_by_one_trainer(driver: Driver) -> None:
    entry = closed_group(driver)
    before = driver.dump()
    assert driver.send(ack(entry, consumer="t1")) == 0
    assert driver.dump() == before

    driver.redis.xclaim(driver.keys["results"], TRAINER_GROUP, "t1", 0, [entry])
    assert driver.send(ack(entry, consumer="t0")) == 0
    assert driver.send(ack(entry, consumer="t1")) == 1
    assert driver.send(ack(entry, consumer="t0")) == 0
    assert driver.send(ack(entry, consumer="t1")) == 1


def test_a_group_that_nobody_read_cannot_be_acked(driver: Driver) -> None:
    driver.enqueue(job())
    driver.complete(driver.claim_one())
    ((entry, _),) = driver.redis.xrange(driver.keys["results"])

    assert driver.send(ack(entry.decode())) == 0
    assert driver.results() == [("g", ["finished"])]


def test_several_groups_are_acked_in_one_call(driver: Driver) -> None:
    entries = [(closed_group(driver, g), g) for g in ("a", "b")]
    other = (closed_group(driver, "c", consumer="t1"), "c")
    never = ("5-5", "never")

    answers = driver.queue.call(
        "ack", [*entries, other, never, entries[0]], group=TRAINER_GROUP, consumer="t0"
    )
    assert answers == [1, 1, 0, 0, 1]
    assert driver.results() == [("c", ["finished"])]


def test_a_dead_sample_can_be_looked_at_after_its_group_is_gone(driver: Driver) -> None:
    first = job("g", 2)
    driver.enqueue(first)
    driver.complete(driver.claim_one())
    for attempt in range(3):
        c = driver.claim_one()
        if attempt == 0:
            driver.generate(c, 2)
        driver.crash(c)
    ((entry, _),) = driver.read()
    driver.send(ack(entry))

    sample = driver.redis.hgetall(driver.keys.sample("g/1"))
    assert sample[b"state"] == b"dead"
    assert sample[b"job"] == c.job
    assert sample[b"prompt_ids"] == c.prompt_ids
    assert driver.tokens("g/1") == [0, 1]
    assert driver.sample("g/0") == {}

    driver.redis.delete(driver.keys["done"] + "g")
    assert driver.enqueue(first) == ["new"]
    assert driver.dead() == []
    assert driver.chunks("g/1") == []
    assert driver.sample("g/1")["state"] == "ready"
    assert "job" not in driver.sample("g/1")


# counters


def test_counters_equal_the_structures_after_kills_and_zombies(driver: Driver) -> None:
    """Case 36: 100 jobs, 30 kills, 10 zombie commits."""
    driver.enqueue(*(job(f"g{i}") for i in range(100)))
    killed = [driver.generate(c, 2) for c in driver.claim("dead", 30)]
    driver.crash(*killed)
    for c in killed[:10]:
        assert driver.send(contract.finish(c, 2)) == contract.LOST
    while held := driver.claim("alive", 8):
        for c in held:
            driver.complete(c)

    assert driver.leases() == {}
    assert driver.ready() == []
    assert len(driver.results()) == 100
    stats = driver.stats()
    assert min(stats.values()) > 0
    assert stats == {
        "groups_enqueued": 100,
        "samples_enqueued": 100,
        "claimed": 130,
        "tokens": 800,
        "crashes": 30,
        "reaped": 30,
        "resumed": 30,
        "recomputed_tokens": 30 * (3 + 2),
        "finished": 100,
        "groups_closed": 100,
    }


def test_a_job_is_the_same_only_with_the_same_facts(driver: Driver) -> None:
    driver.enqueue(job("g", 2))

    assert driver.enqueue(job("g", 2)) == ["same"]
    for other in (
        job("g", 3),
        job("g", 2, max_tokens=9),
        job("g", 2, max_staleness=1),
        replace(job("g", 2), metadata="other"),
    ):
        assert driver.enqueue(other) == ["conflict"]
