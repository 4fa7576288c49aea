"""What a reviewer found, each as a short run of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer import IdConflict, InvalidSample, QueueUnusable, RolloutClient, SamplingParams
from producer.contract.errors import WeightsError
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine, attempts
from tests.waiting import async_wait_until, wait_until
from workers.settings import WorkerSettings


async def test_weights_that_show_up_late_are_waited_for(pool: Pool) -> None:
    """On a network file system they are late for everybody, which is no reason to give them up."""
    worker = await pool.start(StepEngine(), fetch_seconds=30)
    path, _ = pool.write()
    directory = pool.weights_dir / path
    version = pool.client.publish_weights(directory)
    hidden = directory.rename(directory.with_name("hidden"))
    await async_wait_until(lambda: "cannot be read" in worker.state.last_error, "it looked")
    assert pool.client.status().weights[f"{version}:state"] == "new"

    hidden.rename(directory)

    await pool.serving(version, worker)


async def test_an_update_that_waits_for_samples_gives_way_to_a_newer_one(pool: Pool) -> None:
    engine = StepEngine(attempts(1))
    worker = await pool.start(engine)
    pool.submit()
    await pool.in_engine(engine, 1)
    pool.publish(policy="finish", deadline_s=600)
    await async_wait_until(lambda: worker.state.phase == "updating", "it waits for the sample")

    version = pool.publish(policy="requeue")

    await pool.serving(version, worker)
    assert engine.loads == [version]
    await pool.one()


def test_a_conflict_forgets_none_of_the_groups_beside_it(
    pool: Pool, redis_client: redis.Redis
) -> None:
    pool.new_client(consumer="1").submit([[9]], ids=["taken"])
    with pytest.raises(IdConflict, match="taken"):
        pool.client.submit([[1], [2], [3]], ids=["a", "taken", "b"])
    redis_client.flushall()

    def offered() -> bool:
        pool.client.submit([[4]], ids=["c"])  # notices, and when all have settled offers again
        return pool.client.status().ready == 3

    wait_until(offered, "all that was lost is there again")


def test_publishing_removes_nothing_of_the_user_s(pool: Pool) -> None:
    mine = pool.weights_dir / "q" / "step_100"
    mine.mkdir(parents=True)
    os.utime(mine, (0, 0))

    pool.publish()

    assert mine.is_dir()


def test_a_refused_publication_is_not_made_later(pool: Pool, redis_client: redis.Redis) -> None:
    version = pool.publish()
    with pytest.raises(WeightsError, match="policy='requue' must be one of"):
        pool.publish(policy="requue")
    redis_client.flushall()

    pool.client.submit([[1]])

    assert pool.client.status().current == version + 1


def call(method: str, *arguments: Any, **options: Any) -> Any:
    return lambda client: getattr(client, method)(*arguments, **options)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (call("submit", {"prompt": "hello", "answer": 3}), "prompts is one row"),
        (call("submit", [[1], [2]], ids="ab"), "ids is a list"),
        (call("submit", [[1]], {"n": 2}), "sampling_params must be SamplingParams"),
        (call("submit", [[1]], max_staleness="2"), "max_staleness='2' must be"),
        (call("cancel", "gg"), "takes a list of ids"),
        (call("cancel", ["a/b"]), "'a/b' is no sample"),
        (call("peek", "a/b"), "'a/b' is no sample"),
        (call("batch", 0), "groups=0 must be at least 1"),
        (lambda client: next(client.batches(ack="none")), "ack='none' must be"),
    ],
)
def test_a_wrong_argument_is_named(pool: Pool, wrong: Any, words: str) -> None:
    with pytest.raises(InvalidSample, match=words):
        wrong(pool.client)
    assert pool.client.status().ready == 0


def test_numpy_integers_are_integers(pool: Pool, tmp_path: Path) -> None:
    pool.publish(step=np.int64(3))
    pool.client.submit([[1]], SamplingParams(), max_staleness=np.int64(2), staleness_policy="drop")
    pool.new_client(consumer="1", limits={"max_ready": np.int64(5)})

    assert pool.client.config()["max_ready"] == "5"
    assert pool.client.status().weights["1:step"] == "3"


@pytest.mark.parametrize("url", ["localhost:6379", "redis://host:port", "http://host"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(QueueUnusable, match="is no Redis URL"):
        RolloutClient(url)


@pytest.mark.parametrize("name", ["max_samples", "checkpoint_tokens", "grace_seconds"])
def test_a_worker_is_not_told_to_do_nothing(name: str) -> None:
    with pytest.raises(InvalidSample, match=name):
        WorkerSettings(url="unix:///x", **{name: -1})
