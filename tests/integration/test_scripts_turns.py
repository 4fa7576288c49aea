"""Turns: so many workers load a version at once, and none waits for one that is gone."""

from __future__ import annotations

import pytest

from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import Driver, confirm, heartbeat, publish, turn
from tests.waiting import wait_until


def pool(driver: Driver, workers: str, max_updating: str = "50%") -> None:
    """Workers with names of one letter, and version 1."""
    for worker in workers:
        driver.send(heartbeat(worker))
    driver.send(publish(max_updating=max_updating))


def granted(driver: Driver, worker: str, **options: int) -> bool:
    reply = driver.send(turn(worker, **options))
    asked = driver.now()
    wait_until(lambda: driver.now() > asked, "the next one asks later")
    assert reply[:2] == [1, 0]
    return bool(reply[2])


def give_back(driver: Driver, worker: str) -> None:
    assert not granted(driver, worker, hold_ms=0)


def told(driver: Driver, workers: str) -> str:
    """Those that were told that they have their turn; what they were told is forgotten."""
    return "".join(w for w in workers if driver.redis.delete(driver.keys.turn(w)))


def in_turn(driver: Driver) -> list[str]:
    """Those that have their turn, until when last."""
    return [name.decode() for name in driver.redis.zrange(driver.keys["turns"], 0, -1)]


@pytest.mark.parametrize(
    ("workers", "max_updating", "at_once"),
    [
        ("a", "50%", 1),
        ("ab", "50%", 1),
        ("abc", "50%", 1),
        ("abcd", "50%", 2),
        ("abcde", "3", 3),
        ("abc", "7", 3),
        ("abcd", "100%", 4),
        ("abcdef", "33.33333333%", 2),
        ("abcd", "10%", 1),
        ("abcd", "0.0001%", 1),
    ],
)
def test_so_many_workers_load_at_once(
    driver: Driver, workers: str, max_updating: str, at_once: int
) -> None:
    pool(driver, workers, max_updating)

    assert [granted(driver, w) for w in workers] == [i < at_once for i in range(len(workers))]


def test_workers_that_still_start_are_no_part_of_the_share(driver: Driver) -> None:
    pool(driver, "ab")
    for name in ("starts-1", "starts-2"):
        driver.send(heartbeat(name, state="starting"))

    assert [granted(driver, w) for w in "ab"] == [True, False]


def test_a_turn_that_is_given_back_goes_to_who_asked_first(driver: Driver) -> None:
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "acb"] == [True, False, False]
    assert told(driver, "abc") == ""

    give_back(driver, "a")
    assert told(driver, "abc") == "c"
    assert [granted(driver, w) for w in "bc"] == [False, True]
    give_back(driver, "c")
    assert told(driver, "abc") == "b"
    assert granted(driver, "b")
    give_back(driver, "b")

    assert told(driver, "abc") == "", "nobody waits for the last one"
    assert driver.redis.exists(driver.keys["turns"], driver.keys["line"]) == 0


def test_only_those_are_told_that_have_their_turn_now(driver: Driver) -> None:
    pool(driver, "abcdefgh", "50%")
    assert [granted(driver, w) for w in "abcdefgh"] == [True] * 4 + [False] * 4
    for worker, next_one in zip("abcd", "efgh", strict=True):
        give_back(driver, worker)
        assert told(driver, "abcdefgh") == next_one
    assert sorted(in_turn(driver)) == list("efgh")


def test_a_call_costs_the_same_in_any_pool(driver: Driver) -> None:
    """Else an update of n workers costs n * n."""

    def commands() -> int:
        return sum(int(c["calls"]) for c in driver.redis.info("commandstats").values())

    costs = []
    for workers in (range(4), range(200)):
        driver.redis.flushall()
        driver.queue.open()
        for i in workers:
            driver.send(heartbeat(f"w{i}"))
        driver.send(publish())
        before = commands()
        for i in workers:
            driver.send(turn(f"w{i}"))
        for i in workers:
            driver.send(turn(f"w{i}", hold_ms=0))
        costs.append((commands() - before) / len(workers))

    assert costs[1] < 1.2 * costs[0]


def test_the_oldest_weights_go_first(driver: Driver) -> None:
    """Else, where publications come faster than the pool loads, the same ones always win."""
    pool(driver, "abc", "1")
    assert granted(driver, "a", serves=0)
    assert not granted(driver, "b", serves=5)
    assert not granted(driver, "c", serves=4)
    give_back(driver, "a")

    assert not granted(driver, "b", serves=5)
    assert granted(driver, "c", serves=4)


def test_to_ask_again_changes_nothing(driver: Driver) -> None:
    pool(driver, "abc", "1")
    for _ in range(2):
        assert [granted(driver, w) for w in "acb"] == [True, False, False]
    for _ in range(2):
        give_back(driver, "a")

    assert driver.redis.xlen(driver.keys.turn("c")) == 1
    assert [granted(driver, w) for w in "bcb"] == [False, True, False]


def test_one_that_leaves_the_line_stands_in_nobody_s_way(driver: Driver) -> None:
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "abc"] == [True, False, False]

    give_back(driver, "b")
    give_back(driver, "a")

    assert granted(driver, "c")


def test_a_holder_that_left_died_or_is_late_has_no_turn(open_driver: OpenDriver) -> None:
    driver = open_driver(worker_ttl_ms=15_000)
    pool(driver, "abcd", "1")
    assert granted(driver, "a")
    assert [granted(driver, w) for w in "bcd"] == [False, False, False]

    driver.send(contract.leave("a"))
    assert in_turn(driver) == []
    assert granted(driver, "b")
    driver.redis.zadd(driver.keys["workers"], {"b": driver.now() - 15_001})
    assert granted(driver, "c")
    until = driver.redis.zscore(driver.keys["turns"], "c")
    assert 30_000 < int(until) - driver.now() <= 60_000
    driver.redis.zadd(driver.keys["turns"], {"c": driver.now()})
    assert granted(driver, "d")

    assert in_turn(driver) == ["d"]


def test_the_turn_of_one_that_died_ends_with_another_s_heartbeat(open_driver: OpenDriver) -> None:
    driver = open_driver(worker_ttl_ms=15_000)
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "abc"] == [True, False, False]
    driver.redis.zadd(driver.keys["workers"], {"a": driver.now() - 15_001}, xx=True)
    driver.redis.zadd(driver.keys["workers"], {"b": driver.now() - 15_001}, xx=True)

    driver.send(heartbeat("c"))

    assert in_turn(driver) == []
    assert driver.redis.zrange(driver.keys["line"], 0, -1) == [b"c"]


def test_a_turn_is_not_inherited_by_one_that_starts_under_the_same_name(driver: Driver) -> None:
    pool(driver, "ab", "1")
    assert [granted(driver, w) for w in "ab"] == [True, False]

    driver.send(heartbeat("a", state="starting", nonce="another process"))

    assert granted(driver, "b")


def test_one_that_died_in_the_line_stands_in_nobody_s_way(driver: Driver) -> None:
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "abc"] == [True, False, False]
    driver.redis.zadd(driver.keys["workers"], {"b": 1})
    give_back(driver, "a")

    assert granted(driver, "c")


def test_one_that_is_alive_and_asks_no_more_has_its_turn_for_a_moment(
    open_driver: OpenDriver,
) -> None:
    """As long as a heart may not beat; who asks has it for as long as it said."""
    driver = open_driver(worker_ttl_ms=15_000)
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "abc"] == [True, False, False]
    give_back(driver, "a")
    until = driver.redis.zscore(driver.keys["turns"], "b")
    assert 14_000 < int(until) - driver.now() <= 15_000
    assert not granted(driver, "c")

    driver.redis.zadd(driver.keys["turns"], {"b": driver.now()})

    assert granted(driver, "c")


def test_one_that_nobody_misses_need_not_wait_and_the_others_wait_for_it(driver: Driver) -> None:
    """Else those that do generate would stop while it cannot take their place."""
    pool(driver, "abc", "1")

    assert granted(driver, "a")
    assert granted(driver, "b", waits=0)
    give_back(driver, "a")
    assert not granted(driver, "c")
    give_back(driver, "b")
    assert granted(driver, "c")


def test_the_newest_publication_says_how_many(driver: Driver) -> None:
    """A turn counts whatever version it is for."""
    pool(driver, "ab", "1")
    assert granted(driver, "a")
    driver.send(publish(max_updating="1"))

    assert driver.send(turn("b")) == [2, 0, 0]
    driver.send(publish(max_updating="2"))
    assert driver.send(turn("b")) == [3, 0, 1]


def test_one_that_is_not_on_the_list_yet_gets_a_turn_when_there_is_none_else(
    driver: Driver,
) -> None:
    """Redis lost its memory, and no heart has beaten since."""
    driver.send(publish())

    assert granted(driver, "a")
    until = driver.redis.zscore(driver.keys["turns"], "a")
    assert int(until) - driver.now() <= 15_000, "it could die unseen"
    assert not granted(driver, "b"), "half of none is one"
    driver.send(heartbeat("c"))
    give_back(driver, "a")
    assert told(driver, "b") == "", "nor is one told that is not on the list"


def test_the_reply_says_the_level(driver: Driver) -> None:
    pool(driver, "a")
    driver.send(confirm(1, "a"))

    assert driver.send(turn("a")) == [1, 1, 1]
