"""Workers that die: whose samples go on, who is blamed, and what is found to be poison."""

from __future__ import annotations

import pytest

from tests.integration import contract
from tests.integration.contract import Driver, job, release


def test_a_dead_workers_samples_go_on_from_their_last_checkpoint(driver: Driver) -> None:
    """Case 23: killed after the claim, after a partial write, before the commit."""
    driver.enqueue(*(job(f"g{i}") for i in range(100)))
    held = driver.claim("dead", 100)
    for i, c in enumerate(held):
        driver.generate(c, i % 8 + 1) if i % 2 else None
    driver.crash(*held)

    assert len(driver.ready()) == 100
    for _ in range(100):
        c = driver.claim_one("alive")
        assert c.crashes == 1
        driver.complete(c)
    assert sorted(g for g, _ in driver.results()) == sorted(f"g{i}" for i in range(100))
    assert all(driver.tokens(c.id) == list(range(8)) for c in held)


def test_only_an_expired_lease_is_reaped(driver: Driver) -> None:
    driver.enqueue(job("g", 3))
    a, b, c = driver.claim()
    driver.expire(a.id, b.id)

    assert driver.reap(limit=1) == 1
    assert driver.reap() == 1
    assert driver.reap() == 0
    assert driver.leases().keys() == {c.id}
    assert driver.sample(a.id)["error"] == "worker w stopped renewing its lease"


@pytest.mark.parametrize("minutes", [None, -60, 60], ids=["first", "long ago", "time went back"])
def test_nobody_is_blamed_after_redis_was_away(driver: Driver, minutes: int | None) -> None:
    """Case 38, with more leases than go into one command."""
    driver.enqueue(job("g", 1300))
    held = [c for _ in range(6) for c in driver.claim()]
    driver.expire(*(c.id for c in held))
    at = driver.now()
    if minutes is not None:
        driver.redis.hset(driver.keys["config"], "last_reap", at + minutes * 60_000)

    assert driver.send(contract.reap()) == [0, 1300]

    assert min(driver.leases().values()) >= at + 30_000
    assert driver.send(contract.reap()) == [0, 0]
    assert "crashes" not in driver.stats()


def test_three_crashes_are_one_too_many_but_interruptions_are_none(driver: Driver) -> None:
    """Case 25."""
    driver.enqueue(job())
    for _ in range(10):
        driver.send(release(driver.claim_one(), 0))
    for crash in range(1, 4):
        assert driver.sample("g/0")["state"] == "ready"
        c = driver.claim_one(f"w{crash}")
        driver.crash(c)

    sample = driver.sample("g/0")
    assert (sample["state"], sample["finish_reason"]) == ("dead", "error")
    assert (sample["crashes"], sample["interruptions"]) == ("3", "10")
    assert sample["error"] == "its worker died 3 times; last: worker w3 stopped renewing its lease"
    assert driver.results() == [("g", ["dead"])]
    assert driver.dead() == ["g/0"]
    assert driver.claim() == []


def test_a_share_leaves_the_other_workers_theirs(driver: Driver) -> None:
    for name in "abc":
        driver.send(contract.heartbeat(name))
    driver.enqueue(job("g", 8))

    assert len(driver.claim("a", share=True)) == 3
    assert driver.claim("a", share=True, held=3) == []
    assert len(driver.claim("b", share=True)) == 3
    assert len(driver.claim("c", share=True)) == 2
    driver.enqueue(job("h", 4))
    assert len(driver.claim("a", share=True, held=3)) == 1
    assert len(driver.claim("a", held=4)) == 3, "what nobody comes for is not left"


def test_after_a_second_crash_a_suspect_is_held_alone(driver: Driver) -> None:
    """Few at a time after one crash, one after two, and never both kinds together."""
    driver.enqueue(job("g", 6), job("fresh", 1))
    driver.crash(*driver.claim(limit=6))
    once = driver.claim("a", 3, suspects=3)
    assert [c.crashes for c in once] == [1, 1, 1]
    driver.crash(*once)

    (twice,) = driver.claim("a", suspects=3)
    assert twice.crashes == 2, "and nothing beside it"
    assert [c.id for c in driver.claim("b", suspects=3)] == ["g/1"]
    driver.crash(twice)

    assert driver.sample(twice.id)["state"] == "dead"
    assert [driver.sample(f"g/{i}")["state"] for i in range(1, 6)] == [
        "leased", "ready", "ready", "ready", "ready"
    ]  # fmt: skip


def test_a_suspect_is_held_alone(driver: Driver) -> None:
    """Case 39: neighbours of a poison sample are cleared one by one."""
    driver.enqueue(job("g", 4), job("fresh", 2))
    driver.crash(*driver.claim(limit=4))

    (suspect, *rest) = driver.claim("a")
    assert suspect.crashes == 1
    assert [c.id for c in rest] == ["fresh/0", "fresh/1"], "the other suspects wait"
    assert driver.claim("a", suspects=0) == []
    assert [c.id for c in driver.claim("b")] == ["g/1"]
    assert driver.send(contract.fail(suspect, "crash", "engine died")) == 1
    assert driver.sample(suspect.id)["crashes"] == "2"
    assert driver.sample(suspect.id)["error"] == "engine died"


def test_one_poison_sample_of_256_is_found_and_the_others_finish(driver: Driver) -> None:
    """Case 39: whoever holds it dies with all that he holds."""
    poison = "g7/0"
    driver.enqueue(*(job(f"g{i}") for i in range(256)))
    while held := driver.claim(limit=64):
        deadly = any(c.id == poison for c in held)
        for c in held:
            if deadly:
                driver.send(contract.fail(c, "crash", "engine died"))
            else:
                driver.complete(c)

    assert driver.dead() == [poison]
    assert driver.sample(poison)["crashes"] == "3"
    stats = driver.stats()
    assert (stats["finished"], stats["dead"]) == (255, 1)
    assert max(int(driver.sample(f"g{i}/0")["crashes"]) for i in range(256) if i != 7) == 1
