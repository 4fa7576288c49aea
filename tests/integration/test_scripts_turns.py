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


def granted(driver: Driver, worker: str, version: int = 1, **options: int) -> bool:
    reply = driver.send(turn(version, worker, **options))
    asked = driver.now()
    wait_until(lambda: driver.now() > asked, "the next one asks later")
    assert reply[:2] == [1, 0]
    return bool(reply[2])


def give_back(driver: Driver, worker: str) -> None:
    assert not granted(driver, worker, hold_ms=0)


def notices(driver: Driver) -> int:
    """Turns that the stream was told to be free."""
    entries = driver.redis.xrange(driver.keys["updates"])
    return sum(fields == {b"turn": b"free"} for _, fields in entries)


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
    assert notices(driver) == 0

    give_back(driver, "a")
    assert notices(driver) == 1
    assert [granted(driver, w) for w in "bc"] == [False, True]
    give_back(driver, "c")
    assert granted(driver, "b")
    give_back(driver, "b")

    assert notices(driver) == 2, "nobody waits for the last one"
    assert driver.redis.exists(driver.keys["turns"]) == 0


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

    assert notices(driver) == 1
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
    assert not driver.redis.hexists(driver.keys["turns"], "a")
    assert granted(driver, "b")
    driver.redis.zadd(driver.keys["workers"], {"b": driver.now() - 15_001})
    assert granted(driver, "c")
    over, *rest = driver.redis.hget(driver.keys["turns"], "c").split()
    assert 30_000 < int(over) - driver.now() <= 60_000
    driver.redis.hset(driver.keys["turns"], "c", b" ".join([b"%d" % (driver.now() - 1), *rest]))
    assert granted(driver, "d")

    assert driver.redis.hkeys(driver.keys["turns"]) == [b"d"]


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


def test_one_that_is_alive_and_asks_no_more_stands_in_nobody_s_way(driver: Driver) -> None:
    pool(driver, "abc", "1")
    assert [granted(driver, w) for w in "abc"] == [True, False, False]
    *turn, _ = driver.redis.hget(driver.keys["turns"], "b").split()
    seen = b"%d" % (driver.now() - 15_001)
    driver.redis.hset(driver.keys["turns"], "b", b" ".join([*turn, seen]))
    give_back(driver, "a")

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


def test_a_turn_counts_whatever_version_it_is_for(driver: Driver) -> None:
    pool(driver, "ab", "1")
    assert granted(driver, "a")
    driver.send(publish(max_updating="1"))

    assert driver.send(turn(2, "b")) == [2, 0, 0]
    driver.send(publish(max_updating="2"))
    assert driver.send(turn(3, "b")) == [3, 0, 1]


def test_a_version_that_is_not_known_any_more_is_loaded_in_turns_as_well(driver: Driver) -> None:
    pool(driver, "ab", "2")

    assert driver.send(turn(99, "a")) == [1, 0, 1]
    assert driver.send(turn(99, "b")) == [1, 0, 0]


def test_one_that_is_not_on_the_list_yet_gets_a_turn_when_there_is_none_else(
    driver: Driver,
) -> None:
    """Redis lost its memory, and no heart has beaten since."""
    driver.send(publish())

    assert granted(driver, "a")


def test_the_reply_says_the_level(driver: Driver) -> None:
    pool(driver, "a")
    driver.send(confirm(1, "a"))

    assert driver.send(turn(1, "a")) == [1, 1, 1]
