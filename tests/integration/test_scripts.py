"""What a worker's scripts do, and that only the holder of a lease can do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from producer.contract.connection import Call
from producer.contract.messages import Claim
from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import LOST, Driver, checkpoint, finish, job, release

# claim


def test_a_claim_hands_out_whole_samples_once(driver: Driver) -> None:
    driver.enqueue(job("g", 2, prompt=(5, 6)))

    first, second = driver.claim("a")

    assert (first.id, first.group_id, first.index) == ("g/0", "g", 0)
    assert (second.id, second.index) == ("g/1", 1)
    assert (first.attempts, first.crashes, first.interruptions, first.tokens) == (1, 0, 0, 0)
    assert first.prompt_ids == b"\5\0\0\0\6\0\0\0"
    assert first.lease_token.startswith("1:")
    assert driver.claim("b") == []
    assert driver.sample("g/0")["state"] == "leased"
    assert driver.sample("g/0")["worker"] == "a"


def test_a_claim_says_a_prompt_once_a_group(driver: Driver) -> None:
    driver.enqueue(job("g", 3, prompt=(5, 6)), job("h", 1, prompt=(7,)))

    for _ in range(2):  # also when it is asked again
        _, _, headers, _, groups = driver.queue.call_many([contract.claim(request="once")])[0]
        assert [h[0] for h in headers] == [b"g/0", b"g/1", b"g/2", b"h/0"]
        assert [(g[0], g[2]) for g in groups] == [(b"g", b"\5\0\0\0\6\0\0\0"), (b"h", b"\7\0\0\0")]


def test_a_claim_asked_again_gets_the_same_answer(driver: Driver) -> None:
    driver.enqueue(job("g", 3))

    first = driver.claim("a", 2, request="once")
    assert driver.claim("a", 2, request="once") == first
    driver.complete(first[0])
    assert driver.claim("a", 2, request="once") == first[1:]
    assert [c.id for c in driver.claim("a", 2, request="twice")] == ["g/2"]


def test_a_claim_takes_no_more_than_its_room(driver: Driver) -> None:
    driver.enqueue(job("g", 5, max_tokens=8, prompt=range(10)))

    assert len(driver.claim(room=36, reserve=100, held=1)) == 2, "18 tokens each"
    assert len(driver.claim(room=14, reserve=4, held=1)) == 1, "14 tokens with a reserve of 4"
    assert driver.claim(room=17, reserve=100, held=1) == []
    assert len(driver.claim(room=1, held=0)) == 1, "an empty worker always gets one"


def test_what_is_handed_back_goes_before_fresh_samples(driver: Driver) -> None:
    """Case 22."""
    driver.enqueue(job("old", 2), job("new", 2))
    held = driver.claim(limit=2)
    for c in held:
        driver.generate(c, 3)
        assert driver.send(release(c, 3)) == 3

    again = driver.claim(limit=3)

    assert [c.id for c in again] == ["old/0", "old/1", "new/0"]
    assert [c.tokens for c in again] == [3, 3, 0]
    assert again[0].interruptions == 1
    assert driver.sample("old/0")["recomputed_tokens"] == str(3 + 3)


def test_an_update_every_two_tokens_ends_in_four_segments(driver: Driver) -> None:
    """Case 22."""
    driver.enqueue(job("old"), job("new"))
    for version in range(1, 5):
        driver.send(contract.publish())
        c = driver.claim_one(version=version)
        assert c.id == "old/0"
        driver.generate(c, 2, version)
        if version < 4:
            driver.send(release(c, 2 * version))
    driver.complete(c, 4)

    assert driver.versions("old/0") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert driver.tokens("old/0") == list(range(8))
    assert driver.sample("old/0")["interruptions"] == "3"


def test_a_claim_at_another_version_gets_nothing(driver: Driver) -> None:
    driver.enqueue(job("g", 3))
    driver.send(contract.publish())

    assert len(driver.claim(version=0, limit=1)) == 1, "1 is unproven, 0 is the last good"
    driver.send(contract.confirm(1))
    assert driver.claim(version=0) == []
    assert driver.claim(version=2) == []
    assert len(driver.claim(version=1)) == 2


def test_a_full_results_stream_stops_new_groups_only(open_driver: OpenDriver) -> None:
    """Case 27."""
    driver = open_driver(max_results=1)
    driver.enqueue(job("done"), job("half", 2), job("fresh"))
    done, half = driver.claim(limit=2)
    driver.complete(done)

    (other,) = driver.claim()
    assert other.id == "half/1", "a group that is started goes on"
    driver.generate(half, 2)
    driver.send(release(half, 2))
    assert [c.id for c in driver.claim()] == ["half/0"]
    driver.complete(other)
    assert driver.claim() == []

    ((entry, _),) = driver.read()
    assert driver.send(contract.ack(entry, "done")) == 1
    assert [c.id for c in driver.claim()] == ["fresh/0"]


# checkpoint


def test_tokens_are_stored_once_and_in_order(driver: Driver) -> None:
    driver.enqueue(job())
    c = driver.claim_one()

    assert driver.send(checkpoint(c, 0, 3)) == 3
    assert driver.send(checkpoint(c, 0, 3)) == 3, "again"
    assert driver.send(checkpoint(c, 5, 2)) == 3, "a gap: send from 3"
    assert driver.send(checkpoint(c, 2, 3)) == 3, "an overlap: send from 3"
    assert driver.send(checkpoint(c, 3, 2, version=1)) == 5

    assert driver.tokens(c.id) == [0, 1, 2, 3, 4]
    sample = driver.sample(c.id)
    assert (sample["tokens"], sample["version_first"], sample["version_last"]) == ("5", "0", "1")
    assert driver.stats()["tokens"] == 5


def test_several_chunks_of_a_sample_go_in_one_call(driver: Driver) -> None:
    driver.enqueue(job("g", 2))
    a, b = driver.claim()
    items = [i for c, at in ((a, 0), (b, 0), (a, 2), (b, 3)) for i in checkpoint(c, at, 2)[2]]

    answers = driver.queue.call("checkpoint", items, worker="w")[2]

    assert answers == [2, 2, 4, 2]


def test_a_checkpoint_renews_the_lease(driver: Driver) -> None:
    driver.enqueue(job("g", 3))
    a, b, c = driver.claim()
    driver.expire(a.id, b.id, c.id)

    driver.generate(a, 1)
    assert driver.send(contract.renew(b)) == 1

    leases = driver.leases()
    assert min(leases[a.id], leases[b.id]) > driver.now()
    assert leases[c.id] == 1


# release and finish


@pytest.mark.parametrize("end", [release, finish], ids=["release", "finish"])
def test_a_sample_ends_only_with_all_its_tokens(driver: Driver, end: Any) -> None:
    driver.enqueue(job())
    c = driver.generate(driver.claim_one(), 3)

    assert driver.send(end(c, 5)) == 3
    assert driver.sample(c.id)["state"] == "leased"
    driver.generate(c, 2)
    assert driver.send(end(c, 5)) == 5
    assert driver.sample(c.id)["state"] != "leased"
    assert driver.leases() == {}


def test_a_sample_handed_back_unstarted_is_as_fresh(driver: Driver) -> None:
    """Case 11: no empty segment."""
    driver.enqueue(job())
    driver.send(release(driver.claim_one(), 0))

    c = driver.claim_one()
    assert (c.tokens, c.attempts, c.interruptions) == (0, 2, 1)
    assert driver.chunks(c.id) == []
    assert driver.sample(c.id)["recomputed_tokens"] == "0"


# fencing: an attempt that does not hold the lease changes nothing, and is told so


def writes(c: Claim) -> dict[str, Call]:
    return {
        "checkpoint": checkpoint(c, c.tokens, 2),
        "checkpoint from the start": checkpoint(c, 0, 2),
        "release": release(c, 0),
        "finish": finish(c, 0),
        "error": contract.fail(c, "error"),
        "crash": contract.fail(c, "crash"),
        "renew": contract.renew(c),
        "prompt": contract.prompt(c, [7, 7]),
    }


def refuses_all(driver: Driver, old: Claim) -> None:
    before = driver.dump()
    for name, call in writes(old).items():
        assert driver.send(call) == (b"" if name == "prompt" else LOST), name
        assert driver.dump() == before, name


def test_a_zombie_is_refused_also_under_the_name_of_the_newcomer(driver: Driver) -> None:
    """Case 24: its late partial and its late final, in every state of the sample."""
    driver.enqueue(job(prompt="text"))
    old = driver.generate(driver.claim_one("w"), 3)
    driver.crash(old)
    refuses_all(driver, old)
    new = driver.claim_one("w")
    refuses_all(driver, old)
    driver.generate(new, 2)
    refuses_all(driver, old)
    driver.complete(new)
    refuses_all(driver, old)
    ((entry, _),) = driver.read()
    driver.send(contract.ack(entry))
    refuses_all(driver, old)


@pytest.mark.parametrize("token", ["", "1:", "2:x", "1"])
def test_a_made_up_token_is_refused(driver: Driver, token: str) -> None:
    driver.enqueue(job("g", 2))
    held, _ = driver.claim()
    refuses_all(driver, replace(held, lease_token=token))
    driver.crash(held)
    refuses_all(driver, replace(held, lease_token=token))
    driver.send(contract.cancel("g"))
    refuses_all(driver, replace(held, lease_token=token))


def test_a_sample_given_back_is_not_the_workers_any_more(driver: Driver) -> None:
    driver.enqueue(job())
    c = driver.generate(driver.claim_one(), 2)
    driver.send(release(c, 2))

    before = driver.dump()
    assert driver.send(finish(c, 2)) == LOST
    assert driver.send(contract.fail(c)) == LOST
    assert driver.send(checkpoint(c, 2, 1)) == LOST
    assert driver.send(contract.renew(c)) == LOST
    assert driver.dump() == before


def test_an_older_state_of_redis_does_not_bring_a_token_back(driver: Driver) -> None:
    """Case 37: attempts begin again from the older state, so the nonce must tell them apart."""
    driver.enqueue(job())
    old_state = {key: driver.redis.dump(key) for key in driver.redis.scan_iter()}
    before = driver.generate(driver.claim_one("w"), 3)
    driver.redis.flushall()
    for key, value in old_state.items():
        driver.redis.restore(key, 0, value)

    after = driver.claim_one("w")

    assert after.attempts == before.attempts
    refuses_all(driver, before)
    assert driver.send(checkpoint(after, 0, 2)) == 2


# a prompt that came as text


def test_the_first_prompt_that_is_settled_counts_for_the_group(driver: Driver) -> None:
    """Case 6: the template may say another date tomorrow."""
    driver.enqueue(job("g", 2, prompt="What day is it?"))
    a, b = driver.claim()
    assert a.prompt_ids == b""

    first = driver.send(contract.prompt(a, [1, 2, 3]))
    assert first == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert driver.send(contract.prompt(b, [9, 9])) == first
    driver.crash(a)
    assert driver.claim_one().prompt_ids == first
    assert driver.group()["prompt_tokens"] == "3"
