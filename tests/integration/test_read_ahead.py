"""Reads of which the next is on its way while the caller works on this one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from producer import RolloutClient, SamplingParams
from producer.contract.connection import Queue
from producer.pipeline import read_ahead, read_all
from tests.integration.contract import Driver
from tests.proxy import Proxy

Batch = list[tuple[str, ...]]

#: its reply is not here yet when the next command is sent, so nobody can see that it is missing
LATE: Batch = [("BLPOP", "nothing", "0.2")]


@pytest.fixture
def queue(driver: Driver) -> Queue:
    driver.redis.hset("hash", mapping={"a": "1"})
    driver.redis.rpush("list", "x", "y")
    return driver.queue


def gets(*values: str) -> Batch:
    return [("ECHO", value) for value in values]


def test_each_batch_gets_its_replies(queue: Queue) -> None:
    batches: list[Batch] = [
        [("HGETALL", "hash"), ("LRANGE", "list", "0", "-1")],
        gets("1"),
        [],
        gets("2", "3"),
    ]

    replies = list(read_ahead(queue, batches))

    assert replies == [[{b"a": b"1"}, [b"x", b"y"]], [b"1"], [], [b"2", b"3"]]
    assert list(read_ahead(queue, [])) == []


def test_the_next_batch_is_sent_before_this_one_is_handed_out(queue: Queue) -> None:
    sent: list[str] = []

    def batches() -> Iterator[Batch]:
        for name in "abc":
            sent.append(name)
            yield gets(name)

    reading = read_ahead(queue, batches())

    assert [(next(reading), "".join(sent)) for _ in range(3)] == [
        ([b"a"], "ab"),
        ([b"b"], "abc"),
        ([b"c"], "abc"),
    ]


def test_who_gives_up_leaves_no_reply_to_the_next_command(queue: Queue) -> None:
    reading = read_ahead(queue, [gets("1"), LATE, gets("3")])
    next(reading)
    reading.close()

    assert read_all(queue, gets("mine")) == [b"mine"]


def test_a_refused_command_leaves_no_reply_to_the_next_one(queue: Queue) -> None:
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        list(read_ahead(queue, [[("LRANGE", "hash", "0", "-1"), *LATE], gets("2")]))

    assert read_all(queue, gets("mine")) == [b"mine"]


def test_groups_whose_replies_were_lost_on_the_way_are_read_again(
    driver: Driver, redis_url: str, tmp_path: Path
) -> None:
    with Proxy(redis_url, tmp_path) as proxy, RolloutClient(proxy.url, "q") as client:
        ids = client.submit([[1, 2]] * 40, SamplingParams(n=2, max_tokens=8))
        for claimed in driver.claim():
            driver.complete(claimed)
        proxy.lose(f"{ids[-1]}/1")  # which only the last batch asks for

        batch = client.batch(40)

        assert proxy.lost == 1
        assert sorted(g.id for g in batch) == sorted(ids)
        assert all(r.trainable for g in batch for r in g.rollouts)
        assert batch.ack() == 40


def test_one_connection_serves_all_batches(driver: Driver, redis_url: str) -> None:
    """A new one is how a client learns that Redis may have lost something: it looks at it all."""
    with RolloutClient(redis_url, "q") as client:

        def take() -> int:
            client.submit([[1, 2]] * 20, SamplingParams(max_tokens=8))
            for claimed in driver.claim():
                driver.complete(claimed)
            assert client.batch(20).ack() == 20
            return int(driver.redis.info("stats")["total_connections_received"])

        assert take() == take()
