"""`rollq dead`: what was given up can be looked at, tried again and forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from producer.cli import main
from tests.integration.contract import Driver, ack, grade, graded, job


class Command:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __call__(self, *arguments: str) -> Result:
        target = ["--redis", self._driver.queue.url, "--queue", "q"]
        return CliRunner().invoke(main, ["dead", *target, *arguments])


@pytest.fixture
def command(driver: Driver) -> Command:
    return Command(driver)


def kill(driver: Driver, *, acked: bool, **options: Any) -> None:
    """g/0 finishes, g/1 kills three workers."""
    driver.enqueue(replace(job("g", 2, prompt="What day is it?", **options), metadata={"row": 7}))
    a, b = driver.claim()
    driver.complete(a)
    for _ in range(2):
        driver.crash(b)
        (b,) = driver.claim()
    driver.crash(b)
    if "reward" in options:
        digest = driver.group()["digest"]
        driver.send(grade("g", digest))
        driver.send(graded("g", digest, 1, [1.0, 0.0]))
    ((entry, _),) = driver.read()
    if acked:
        assert driver.send(ack(entry)) == 1


@pytest.mark.parametrize("acked", [False, True])
def test_the_dead_are_listed_with_their_reason_also_after_their_delivery(
    driver: Driver, command: Command, acked: bool
) -> None:
    assert command("list").output == "no dead samples\n"
    kill(driver, acked=acked)

    line = command("list").output
    assert "g/1  3 crashes  0 tokens  its worker died 3 times; last: worker w" in line
    shown = json.loads(command("show", "g/1").output)
    assert (shown["prompt"], shown["metadata"]) == ("What day is it?", {"row": 7})
    assert (shown["state"], shown["crashes"]) == ("dead", "3")


@pytest.mark.parametrize("acked", [False, True])
def test_one_that_is_tried_again_becomes_a_group_of_its_own(
    driver: Driver, command: Command, acked: bool
) -> None:
    kill(driver, acked=acked)

    assert "g/1 waits as group g-" in command("retry", "g/1").output

    (again,) = driver.claim()
    assert (again.group_id[:2], again.index, again.crashes, again.tokens) == ("g-", 0, 0, 0)
    assert driver.dead() == []
    assert bool(driver.sample("g/1")) is not acked, "what is not acked is still delivered"


@pytest.mark.parametrize("acked", [False, True])
def test_one_that_is_tried_again_is_graded_and_judged_as_before(
    driver: Driver, command: Command, acked: bool
) -> None:
    kill(driver, acked=acked, max_staleness=3, policy="drop", reward="m:f")

    group = command("retry", "g/1").output.split()[-1]

    fields = driver.group(group)
    names = ("reward", "max_staleness", "staleness_policy")
    assert [fields[n] for n in names] == ["m:f", "3", "drop"]


def test_one_that_is_dropped_leaves_nothing(driver: Driver, command: Command) -> None:
    kill(driver, acked=True)

    assert command("drop", "g/1").output == "g/1 is forgotten\n"

    assert driver.sample("g/1") == {}
    assert command("list").output == "no dead samples\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nobody/0"), "Error: nobody/0 is not among the dead; see `rollq dead list`\n"),
        (("drop", "nobody/0"), "Error: nobody/0 is not among the dead; see `rollq dead list`\n"),
        (("retry", "g"), "Error: 'g' is a group; a sample is g/0 and so on\n"),
    ],
)
def test_a_wrong_id_is_named(command: Command, arguments: tuple[str, ...], message: str) -> None:
    result = command(*arguments)

    assert result.exit_code == 1
    assert result.output == message
