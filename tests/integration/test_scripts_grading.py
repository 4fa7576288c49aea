"""Grading in the scripts: a group with a reward function is not to be read before it is graded,
and always comes to be read, whoever dies in between."""

from __future__ import annotations

import pytest

from producer.contract.errors import InvalidSample
from tests.integration import contract
from tests.integration.conftest import OpenDriver
from tests.integration.contract import Driver, job

REWARD = "m:f"


def closed(driver: Driver, size: int = 1) -> str:
    """The group `g`, closed and waiting for its rewards; returns its digest."""
    driver.enqueue(job("g", size, reward=REWARD))
    for c in driver.claim():
        driver.complete(c)
    return driver.group()["digest"]


def begin(driver: Driver, digest: str) -> int:
    request = f"r{int(driver.group().get('grades', 0)) + 1}"
    attempt, *_ = driver.send(contract.grade("g", digest, request))
    return int(attempt)


def lapse(driver: Driver) -> None:
    """Let the time of whoever sees to `g` be over."""
    assert driver.redis.zadd(driver.keys["grading"], {"g": 1}, xx=True, ch=True) == 1


def grading(driver: Driver) -> list[str]:
    return [g.decode() for g in driver.redis.zrange(driver.keys["grading"], 0, -1)]


def test_a_group_is_not_to_be_read_before_it_is_graded(driver: Driver) -> None:
    digest = closed(driver, 2)

    assert (grading(driver), driver.results()) == (["g"], [])
    assert driver.send(contract.due()) == [[b"g", digest.encode(), 0, b"m:f", 60_000]]
    assert driver.send(contract.grade("g", digest)) == [1, 2, b"m:f", 60_000]
    assert driver.send(contract.graded("g", digest, 1, [1.0, 0.5])) == 1

    assert (grading(driver), driver.results()) == ([], [("g", ["finished", "finished"])])
    assert driver.stats()["groups_graded"] == driver.stats()["groups_closed"] == 1


def test_a_group_without_a_reward_function_is_not_graded(driver: Driver) -> None:
    driver.enqueue(job("g"))
    driver.complete(driver.claim_one())

    assert (grading(driver), len(driver.results())) == ([], 1)


def test_nor_is_one_without_a_finished_member(driver: Driver) -> None:
    driver.enqueue(job("none", 2, reward=REWARD), job("some", 2, reward=REWARD))
    none, *_ = driver.claim("w", 1)
    driver.send(contract.fail(none))
    driver.send(contract.cancel("none"))
    driver.complete(driver.claim_one())
    driver.send(contract.cancel("some"))

    assert driver.results() == [("none", ["failed", "cancelled"])]
    assert grading(driver) == ["some"]


def test_who_is_told_of_a_group_has_a_lease_time_for_it(driver: Driver) -> None:
    closed(driver)

    assert len(driver.send(contract.due())) == 1
    assert driver.send(contract.due()) == []
    lapse(driver)
    assert len(driver.send(contract.due())) == 1


def test_an_attempt_has_its_time_before_the_next_is_due(driver: Driver) -> None:
    digest = closed(driver)
    before = driver.now()
    begin(driver, digest)

    due_at = driver.redis.zscore(driver.keys["grading"], "g")
    assert before + 92_000 <= due_at <= driver.now() + 92_000


def test_a_failed_attempt_is_followed_by_another_at_once(driver: Driver) -> None:
    digest = closed(driver)
    for attempt in (1, 2):
        assert begin(driver, digest) == attempt
        assert driver.send(contract.graded("g", digest, attempt, error=f"e{attempt}")) == 0
        assert driver.send(contract.due())[0][2] == attempt
        assert driver.results() == []
    assert begin(driver, digest) == 3
    assert driver.send(contract.graded("g", digest, 3, error="e3")) == 1

    assert (grading(driver), driver.group()["reward_error"]) == ([], "e3")
    assert driver.results() == [("g", ["finished"])]
    assert driver.stats()["grading_failed"] == 1


def test_an_error_that_would_come_again_is_the_last(driver: Driver) -> None:
    digest = closed(driver)
    begin(driver, digest)

    assert driver.send(contract.graded("g", digest, 1, error="not allowed", final=True)) == 1
    assert driver.results() == [("g", ["finished"])]


def test_rewards_leave_no_earlier_error(driver: Driver) -> None:
    digest = closed(driver)
    begin(driver, digest)
    driver.send(contract.graded("g", digest, 1, error="once"))
    begin(driver, digest)
    driver.send(contract.graded("g", digest, 2, [1.0]))

    assert "reward_error" not in driver.group()


def test_attempts_that_never_end_are_counted(driver: Driver) -> None:
    digest = closed(driver)
    assert begin(driver, digest) == 1
    driver.send(contract.graded("g", digest, 1, error="first"))
    for attempt in (2, 3):
        assert begin(driver, digest) == attempt
        assert driver.results() == []
        lapse(driver)
    assert driver.send(contract.due()) == []

    assert driver.results() == [("g", ["finished"])]
    assert driver.group()["reward_error"] == (
        "the grader was killed or took too long, 3 attempts were made; before that: first"
    )


def test_a_fourth_attempt_does_not_begin(driver: Driver) -> None:
    digest = closed(driver)
    for _ in range(3):
        begin(driver, digest)

    assert begin(driver, digest) == 0
    assert driver.results() == [("g", ["finished"])]


def test_a_late_attempt_may_give_rewards_but_no_error(driver: Driver) -> None:
    digest = closed(driver)
    begin(driver, digest)
    begin(driver, digest)

    assert driver.send(contract.graded("g", digest, 1, error="late", final=True)) == -1
    assert driver.results() == []
    assert driver.send(contract.graded("g", digest, 1, [1.0])) == 1
    assert driver.send(contract.graded("g", digest, 2, [0.0])) == -1
    assert len(driver.results()) == 1
    assert driver.group()["graded"] == "1"


def test_a_grader_of_what_redis_forgot_says_nothing_of_what_was_made_instead(
    driver: Driver,
) -> None:
    """Redis came back from before a member had ended, and its end was made again."""
    digest = closed(driver)
    driver.send(contract.grade("g", digest, "before"))
    driver.redis.hdel(driver.keys.group("g"), "grades", "graded_by", "grader:1")
    late = contract.graded("g", digest, 1, [0.0], request="before")

    assert driver.send(late) == -1
    begin(driver, digest)
    assert driver.send(late) == -1
    assert driver.results() == []
    assert driver.send(contract.graded("g", digest, 1, [1.0])) == 1


def test_a_job_of_another_group_under_the_same_id_does_nothing(driver: Driver) -> None:
    closed(driver)

    assert begin(driver, "other") == 0
    assert driver.send(contract.graded("g", "other", 1, [1.0])) == -1
    assert begin(driver, "") == 0
    assert (grading(driver), driver.results()) == (["g"], [])


def test_a_group_that_is_gone_is_not_due(driver: Driver) -> None:
    driver.redis.zadd(driver.keys["grading"], {"gone": 1})

    assert driver.send(contract.due()) == []
    assert grading(driver) == []


def test_ungraded_groups_count_as_results_that_nobody_took(open_driver: OpenDriver) -> None:
    driver = open_driver(max_results=1)
    closed(driver)
    driver.enqueue(job("next"))

    assert driver.claim() == []


def test_the_reward_function_is_part_of_the_job(driver: Driver) -> None:
    assert driver.enqueue(job("g", reward="m:f"), job("g", reward="m:g")) == ["new", "conflict"]
    assert driver.enqueue(job("g", reward="m:f")) == ["same"]


@pytest.mark.parametrize(("rewards", "error"), [([1.0], "both"), (None, "")])
def test_a_grader_says_rewards_or_an_error(
    driver: Driver, rewards: list[float] | None, error: str
) -> None:
    digest = closed(driver)
    begin(driver, digest)

    with pytest.raises(InvalidSample, match="rewards or with an error"):
        driver.send(contract.graded("g", digest, 1, rewards, error=error))
    assert grading(driver) == ["g"]
