"""Weight versions: allocated by Redis, proven by workers, and what they do to old samples."""

from __future__ import annotations

import pytest

from producer.contract.messages import Claim
from producer.publish import failures
from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import LOST, Driver, confirm, heartbeat, job, publish


def level(driver: Driver) -> list[int]:
    """Current and last good, as a worker is told."""
    current, good, _ = driver.queue.call("renew", (), worker="w")
    return [current, good]


def state(driver: Driver, version: int) -> str:
    return driver.weights()[f"{version}:state"]


# publish


def test_a_publication_is_a_new_version_and_tells_the_stream(driver: Driver) -> None:
    assert level(driver) == [0, 0]

    assert driver.send(publish("r1", "files")) == [1, 1]

    weights = driver.weights()
    assert weights["1:path"] == "/weights/files"
    assert (weights["1:digest"], weights["1:policy"], weights["1:state"]) == (
        "files",
        "requeue",
        "new",
    )
    assert level(driver) == [1, 0]
    assert driver.redis.xlen(driver.keys["updates"]) == 1


def test_the_same_call_is_one_version_also_after_the_next(driver: Driver) -> None:
    assert driver.send(publish("r1")) == [1, 1]
    assert driver.send(publish("r1")) == [1, 1]
    assert driver.send(publish("r2")) == [2, 1]
    before = driver.dump()
    assert driver.send(publish("r1")) == [1, 1], "a late repeat does not take the pool back"
    assert driver.dump() == before


def test_the_same_files_are_the_same_version_unless_forced(driver: Driver) -> None:
    """Case 16."""
    driver.send(publish("r1", "files"))
    before = driver.dump()

    assert driver.send(publish("r2", "files")) == [1, 0]
    assert driver.dump() == before
    assert driver.send(publish("r3", "files", force=True)) == [2, 1]


def test_going_back_is_a_new_version_of_old_files(driver: Driver) -> None:
    for request, digest in (("r1", "old"), ("r2", "new"), ("r3", "old")):
        driver.send(publish(request, digest))

    assert level(driver)[0] == 3
    assert driver.weights()["3:digest"] == "old"


def test_versions_grow_past_what_the_trainer_saw(driver: Driver) -> None:
    """Redis lost its memory, the trainer did not."""
    assert driver.send(publish(floor=10**6)) == [10**6 + 1, 1]
    assert driver.send(publish(floor=3)) == [10**6 + 2, 1]


def test_old_versions_are_forgotten_but_not_the_last_good_one(driver: Driver) -> None:
    driver.send(publish())
    driver.send(confirm(1))
    for _ in range(60):
        driver.send(publish())

    kept = sorted({int(f.split(":")[0]) for f in driver.weights() if ":" in f})
    assert kept == [1, *range(46, 62)]
    assert driver.redis.xlen(driver.keys["updates"]) == 61


# confirm


def test_the_first_worker_that_serves_a_version_proves_it(driver: Driver) -> None:
    driver.send(publish())
    assert driver.send(confirm(1, "a")) == [1, 1, b"good"]
    assert driver.send(confirm(1, "b", "disk full")) == [1, 1, b"good"]
    assert driver.send(confirm(7, "a")) == [1, 1, b""]


def test_a_version_is_bad_when_every_live_worker_failed(driver: Driver) -> None:
    """Case 40, and case 17: one of three is not all."""
    driver.send(publish())
    driver.send(confirm(1))
    for worker in "abc":
        driver.send(heartbeat(worker))
    driver.send(publish())

    for worker in "aab":
        assert driver.send(confirm(2, worker, "digest differs")) == [2, 1, b"new"]
    assert driver.send(confirm(2, "c", "digest differs")) == [1, 1, b"bad"]
    assert driver.weights()["2:error"] == "c: digest differs"
    assert failed(driver, 2) == dict.fromkeys("abc", "digest differs")
    assert level(driver) == [1, 1]
    assert driver.redis.xlen(driver.keys["updates"]) == 3, "the fall back is told as well"
    assert driver.send(confirm(2, "a")) == [1, 1, b"bad"]

    assert driver.send(publish()) == [3, 1], "the next good one is taken"
    assert driver.send(confirm(3, "a")) == [3, 3, b"good"]


def test_each_worker_s_reason_is_kept_until_it_serves_the_version(driver: Driver) -> None:
    """Also when others made it good already: one of them may still wait for its files."""
    driver.send(publish())
    for worker in "ab":
        driver.send(heartbeat(worker))
    driver.send(confirm(1, "a", 'no "file"\n'))
    driver.send(confirm(1, "b"))
    driver.send(confirm(1, "c", "x" * 1000))
    assert failed(driver, 1) == {"a": 'no "file"\n', "c": "x" * 500}

    driver.send(confirm(1, "a"))
    assert failed(driver, 1) == {"c": "x" * 500}


def test_reasons_do_not_grow_without_end(driver: Driver) -> None:
    """Workers that start under new names, and fail, again and again."""
    driver.send(publish())
    driver.send(confirm(1))
    for i in range(100):
        driver.send(confirm(1, f"w{i}", "reason"))
    assert len(failed(driver, 1)) == 64

    for worker in range(100):
        driver.send(heartbeat(f"live-{worker}"))
    driver.send(publish())
    for i in range(199):
        assert driver.send(confirm(2, f"w{i}", "reason"))[2] == b"new"
    assert driver.send(confirm(2, "w199", "reason"))[2] == b"bad", "twice as many as live"
    assert sum(bool(reason) for reason in failed(driver, 2).values()) == 64


def failed(driver: Driver, version: int) -> dict[str, str]:
    return failures(driver.weights(), version)


def test_a_worker_that_left_or_died_has_no_vote(open_driver: OpenDriver) -> None:
    driver = open_driver(worker_ttl_ms=15_000)
    for worker in ("left", "died", "lives"):
        driver.send(heartbeat(worker))
    driver.send(contract.leave("left"))
    driver.redis.zadd(driver.keys["workers"], {"died": driver.now() - 15_001})
    driver.send(publish())

    assert driver.send(confirm(1, "lives", "no such file")) == [0, 0, b"bad"]


def test_an_older_version_that_fails_late_does_not_move_the_level(driver: Driver) -> None:
    driver.send(publish())
    driver.send(publish())
    assert driver.send(confirm(1, "a", "gone")) == [2, 0, b"bad"]
    assert level(driver) == [2, 0]


def test_an_older_version_that_is_proven_late_does_not_take_the_last_good_back(
    driver: Driver,
) -> None:
    driver.send(publish())
    driver.send(publish())
    driver.send(confirm(2, "a"))
    assert driver.send(confirm(1, "b")) == [2, 2, b"good"]


# heartbeats


def test_a_worker_is_on_the_list_while_its_heart_beats(open_driver: OpenDriver) -> None:
    """Case 36: a dead worker leaves the list within its time to live."""
    driver = open_driver(worker_ttl_ms=14_000)
    driver.send(heartbeat("a"))
    driver.send(heartbeat("b"))
    driver.redis.zadd(driver.keys["workers"], {"a": driver.now() - 14_001})

    assert driver.send(heartbeat("b")) == [0, 0, b""]
    assert driver.redis.zrange(driver.keys["workers"], 0, -1) == [b"b"]
    assert 0 < driver.redis.pttl(driver.keys.worker("a")) <= 14_000
    assert driver.redis.hget(driver.keys.worker("b"), "state") == b"serving"
    assert driver.send(contract.leave("b")) == 1
    assert driver.send(contract.leave("b")) == 0
    assert driver.redis.exists(driver.keys["workers"], driver.keys.worker("b")) == 0


def test_a_late_heartbeat_makes_nobody_start_again(driver: Driver) -> None:
    driver.send(heartbeat("a", "starting", "n1"))
    driver.send(heartbeat("a", "serving", "n1"))
    driver.send(heartbeat("a", "starting", "n1"))
    assert driver.redis.hget(driver.keys.worker("a"), "state") == b"serving"

    driver.send(heartbeat("a", "starting", "n2"))  # another process under that name
    assert driver.redis.hget(driver.keys.worker("a"), "state") == b"starting"


def test_a_first_heartbeat_that_comes_late_takes_no_turn(driver: Driver) -> None:
    """That a worker serves is said at once, and not by its process."""
    driver.send(("heartbeat", {"worker": "a"}, [("state", "serving")]))
    driver.send(contract.turn("a"))
    driver.send(heartbeat("a", "starting", "n1"))

    assert driver.redis.hget(driver.keys.worker("a"), "state") == b"serving"
    assert driver.redis.zrange(driver.keys["turns"], 0, -1) == [b"a"]
    assert driver.redis.exists(driver.keys["starting"]) == 0


# staleness


def partial(driver: Driver, policy: str, tokens: int = 5) -> Claim:
    """A ready sample with tokens of version 1, at most 1 version old, in a pool at version 3."""
    driver.send(publish())
    driver.enqueue(job("g", max_staleness=1, policy=policy), job("next"))
    c = driver.generate(driver.claim_one(version=1), tokens, 1)
    driver.send(contract.release(c, tokens))
    driver.send(publish())
    driver.send(publish())
    return c


def test_allow_goes_on_however_old(driver: Driver) -> None:
    partial(driver, "allow")
    c = driver.claim_one(version=3)
    assert (c.id, c.tokens) == ("g/0", 5)
    driver.complete(c, 3)
    assert driver.sample("g/0")["state"] == "finished"


def test_as_old_as_allowed_is_not_too_old(driver: Driver) -> None:
    partial(driver, "drop")
    driver.redis.hset(driver.keys.group("g"), "max_staleness", 2)
    c = driver.claim_one(version=3)
    driver.complete(c, 3)
    assert driver.sample("g/0")["state"] == "finished"


def test_drop_at_a_claim_delivers_it_as_stale(driver: Driver) -> None:
    former = partial(driver, "drop")

    assert [c.id for c in driver.claim(version=3)] == ["next/0"]

    sample = driver.sample("g/0")
    assert (sample["state"], sample["finish_reason"]) == ("stale", "stale")
    assert sample["error"] == "first token 2 versions old, allowed are 1"
    assert driver.tokens("g/0") == [0, 1, 2, 3, 4]
    assert driver.results() == [("g", ["stale"])]
    assert driver.stats()["stale_le_8"] == 1
    assert driver.send(contract.finish(former, 5)) == LOST, "it was not he who ended it"


def test_drop_at_the_finish_tells_the_worker_that_it_is_done(driver: Driver) -> None:
    driver.send(publish())
    driver.enqueue(job(max_staleness=0, policy="drop"))
    c = driver.generate(driver.claim_one(version=1), 8, 1)
    driver.send(publish())

    assert driver.send(contract.finish(c, 8)) == 8
    assert driver.send(contract.finish(c, 8)) == 8
    assert driver.results() == [("g", ["stale"])]


def test_restart_at_a_claim_begins_again_at_most_twice(driver: Driver) -> None:
    partial(driver, "restart")
    version = 3
    for restarts in (1, 2):
        c = driver.claim_one(version=version)
        assert (c.id, c.tokens) == ("g/0", 0)
        assert driver.chunks("g/0") == []
        assert driver.sample("g/0")["restarts"] == str(restarts)
        driver.generate(c, 3, version)
        driver.send(contract.release(c, 3))
        version += 2
        driver.send(publish())
        driver.send(publish())

    assert [c.id for c in driver.claim(version=version)] == ["next/0"]
    assert driver.results() == [("g", ["stale"])]
    assert driver.versions("g/0") == [5, 5, 5]
    stats = driver.stats()
    assert stats["wasted_tokens"] == 5 + 3
    assert (stats["restarted_le_8"], stats["restarted_le_4"], stats["stale_le_4"]) == (1, 1, 1)


def test_restart_at_the_finish_takes_the_sample_from_its_worker(driver: Driver) -> None:
    driver.send(publish())
    driver.enqueue(job(max_staleness=0, policy="restart"))
    c = driver.generate(driver.claim_one(version=1), 8, 1)
    driver.send(publish())

    assert driver.send(contract.finish(c, 8)) == LOST
    assert driver.send(contract.finish(c, 8)) == LOST
    assert driver.sample("g/0")["state"] == "ready"
    again = driver.claim_one(version=2)
    assert again.tokens == 0
    driver.complete(again, 2)
    assert driver.versions("g/0") == [2] * 8
    assert driver.results() == [("g", ["finished"])]


def test_what_cannot_be_resumed_starts_again_and_counts_as_wasted(driver: Driver) -> None:
    """Case 5."""
    driver.enqueue(job(restart=True))
    driver.send(publish())
    c = driver.generate(driver.claim_one(), 3, 0)
    driver.send(contract.release(c, 3))
    driver.send(confirm(1))

    again = driver.claim_one(version=1)
    assert again.tokens == 0
    assert driver.sample("g/0")["recomputed_tokens"] == "0"
    driver.complete(again, 1)
    assert driver.versions("g/0") == [1] * 8
    assert driver.stats()["wasted_tokens"] == 3


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (2, 2), (3, 4), (8, 8)])
def test_the_bias_is_counted_by_length(driver: Driver, tokens: int, bucket: int) -> None:
    partial(driver, "drop", tokens)
    driver.claim(version=3)

    assert driver.stats()[f"stale_le_{bucket}"] == 1
