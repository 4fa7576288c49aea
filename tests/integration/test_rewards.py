"""Rewards on real `rq worker` processes: whatever a grader does, its group is delivered, with
rewards or with the grader's error, and never silently without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from producer import InvalidSample, RolloutClient, RolloutGroup, SamplingParams
from producer.contract.connection import Queue
from producer.contract.keys import rewards_queue
from producer.contract.rewards import JOB, Dispatcher, Serializer
from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.integration import contract
from tests.integration.contract import Driver
from tests.integration.pool import QUEUE, ROOT, Pool, Process
from tests.integration.stepper import StepEngine
from tests.servers import require_server
from tests.waiting import DEADLINE_S, async_wait_until, wait_until

RQ_QUEUE = rewards_queue(QUEUE)
FUNCTIONS = "tests.integration.reward_functions"

StartRq = Callable[..., Process]


@pytest.fixture(scope="session")
def server_kind() -> Prefer:
    """One server: what is tried here are processes, and that takes a while."""
    return "path" if shutil.which("redis-server") else require_server("valkey")


class RqWorker(Process):
    """An ordinary `rq worker`; a child that hangs is ended with it."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        with log.open("w") as file:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def children(self) -> list[int]:
        path = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def close(self) -> None:
        children = self.children
        super().close()
        for pid in children:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def rq(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rq.cli", *arguments]


@pytest.fixture
def start_rq(redis_url: str, tmp_path: Path) -> Iterator[StartRq]:
    """Starts `rq worker` as the README says; `url` is RQ's Redis, if it is another."""
    started: list[RqWorker] = []

    def start(*, url: str = "", modules: str = FUNCTIONS) -> Process:
        env = {**os.environ, "ROLLQ_REDIS_URL": redis_url, "ROLLQ_QUEUE": QUEUE}
        env |= {"ROLLQ_REWARD_MODULES": modules} | ({"ROLLQ_REWARDS_URL": url} if url else {})
        options = "-c producer.rewards.settings --serializer producer.rewards.Serializer"
        command = rq("worker", *options.split())
        started.append(RqWorker(command, tmp_path / f"rq-{len(started)}.log", env))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[RolloutClient]:
    """Quick to look again, and with little time for a grader."""
    limits = {"lease_ms": 1000, "grade_ms": 2000, "max_grades": 2}
    with RolloutClient(redis_url, QUEUE, patience=DEADLINE_S, limits=limits) as client:
        yield client


@pytest.fixture
def driver(client: RolloutClient, redis_url: str) -> Iterator[Driver]:
    queue = Queue(redis_url, QUEUE, patience=DEADLINE_S)
    queue.open()
    yield Driver(queue)
    queue.close()


def closed(
    client: RolloutClient, driver: Driver, function: str, n: int = 2, **metadata: Any
) -> str:
    """Submit a group, and let a worker generate all of it; returns its id."""
    reward = function if ":" in function else f"{FUNCTIONS}:{function}"
    [group] = client.submit(
        [[1, 2, 3]], SamplingParams(n=n, max_tokens=4), metadata=[metadata], reward=reward
    )
    for c in driver.claim():
        driver.complete(c, tokens=4)
    assert driver.results() == []
    return group


def delivered(client: RolloutClient, seconds: float = DEADLINE_S) -> RolloutGroup:
    batch = client.batch(1, timeout=seconds)
    (group,) = batch
    assert batch.ack() == 1
    assert len(client.batch(1)) == 0, "it came twice"
    assert client.status().grading == 0
    return group


def dispatch(driver: Driver) -> None:
    """What a client or worker that tends does, once."""
    dispatcher = Dispatcher(driver.queue.url, QUEUE)
    dispatcher.send(driver.send(contract.due()))
    dispatcher.close()


def jobs_waiting(redis_url: str) -> list[str]:
    with redis.Redis.from_url(redis_url) as client:
        return [i.decode() for i in client.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1)]


def test_a_group_comes_with_its_rewards(
    client: RolloutClient, driver: Driver, start_rq: StartRq
) -> None:
    start_rq()
    closed(client, driver, "length")
    group = delivered(client)

    assert [r.reward for r in group.rollouts] == [4.0, 4.0]
    assert (group.reward_error, group.trainable) == ("", True)

    closed(client, driver, "facts", of="x")
    group = delivered(client)
    assert group.metadata == {"of": "x"}
    assert [r.reward for r in group.rollouts] == [
        {"index": 0.0, "ok": True, "of": "x"},
        {"index": 1.0, "ok": True, "of": "x"},
    ]


def test_a_group_without_a_reward_function_has_none(client: RolloutClient, driver: Driver) -> None:
    client.submit([[1, 2, 3]], SamplingParams(max_tokens=4))
    driver.complete(driver.claim_one(), tokens=4)
    (group,) = client.batch(1)

    assert (group.rollouts[0].reward, group.reward_error, group.trainable) == (None, "", True)


#: what a grader does, what its group says then, and whether a second attempt could help
BAD = {
    "raises": "ValueError: no such answer",
    "exits": "SystemExit: 0",
    "loops": "JobTimeoutException: Task exceeded maximum timeout value",
    "is_late": "TimeoutError: tests.integration.reward_functions:is_late took over 2 s",
    "is_killed": "the grader was killed or took too long, 2 attempts were made",
    "too_few": f"{FUNCTIONS}:too_few returned 1 rewards for 2 rollouts",
    "missing": f"reward {FUNCTIONS}:missing cannot be imported",
    "os:getpid": "reward os:getpid is not allowed here: start this `rq worker` with "
    "ROLLQ_REWARD_MODULES=os; it allows producer.rewards.graders, tests.integration",
    f"{FUNCTIONS}:Path": "is of the module pathlib, which is not allowed here",
}
FINAL = {"too_few", "missing", "os:getpid", f"{FUNCTIONS}:Path"}


@pytest.mark.parametrize("function", BAD)
def test_a_bad_grader_delivers_its_error(
    client: RolloutClient, driver: Driver, start_rq: StartRq, function: str
) -> None:
    start_rq()
    group_id = closed(client, driver, function)
    wait_until(lambda: client._tend() or driver.results(), "it is delivered")
    attempts = driver.group(group_id)["grades"]
    group = delivered(client)

    assert BAD[function] in group.reward_error
    assert not group.trainable
    assert [r.reward for r in group.rollouts] == [None, None]
    assert [len(r.response_ids) for r in group.rollouts] == [4, 4]
    assert attempts == ("1" if function in FINAL else "2")
    # and the worker goes on with the next
    closed(client, driver, "length")
    assert delivered(client).reward_error == ""


def test_a_grader_that_cannot_be_stopped_holds_up_only_its_worker(
    client: RolloutClient, driver: Driver, start_rq: StartRq
) -> None:
    first, second = start_rq(), start_rq()
    closed(client, driver, "loops_on")
    group = delivered(client)
    assert "2 attempts were made" in group.reward_error

    start_rq()
    closed(client, driver, "length")
    assert delivered(client).reward_error == ""
    assert first.running
    assert second.running


def test_a_passing_error_is_tried_again(
    client: RolloutClient, driver: Driver, start_rq: StartRq, tmp_path: Path
) -> None:
    start_rq()
    closed(client, driver, "raises_once", marker=str(tmp_path / "marker"))
    group = delivered(client)

    assert (group.reward_error, group.rollouts[1].reward) == ("", 1.0)


def test_a_retry_needs_nobody_but_the_grader(
    client: RolloutClient, driver: Driver, start_rq: StartRq, tmp_path: Path
) -> None:
    """No client and no worker tends after the first job was made."""
    closed(client, driver, "raises_once", marker=str(tmp_path / "marker"))
    dispatch(driver)
    start_rq()

    wait_until(driver.results, "the second attempt graded it")


def test_a_killed_rq_worker_costs_an_attempt(
    client: RolloutClient, driver: Driver, start_rq: StartRq, tmp_path: Path
) -> None:
    doomed, other = start_rq(), start_rq()
    closed(client, driver, "kills_its_worker", marker=str(tmp_path / "marker"))
    group = delivered(client)

    assert (group.reward_error, group.rollouts[0].reward) == ("", 1.0)
    wait_until(lambda: not (doomed.running and other.running), "one was killed")


# who enqueues the job


def test_a_job_is_enqueued_once(client: RolloutClient, driver: Driver, redis_url: str) -> None:
    closed(client, driver, "length")
    [due] = driver.send(contract.due())
    for _ in range(2):
        dispatcher = Dispatcher(redis_url, QUEUE)
        dispatcher.send([due])
        dispatcher.close()

    assert len(jobs_waiting(redis_url)) == 1


def test_a_job_that_runs_twice_grades_once(
    client: RolloutClient, driver: Driver, start_rq: StartRq, redis_url: str
) -> None:
    group_id = closed(client, driver, "length")
    [due] = driver.send(contract.due())
    dispatcher = Dispatcher(redis_url, QUEUE)
    dispatcher.send([due, [*due[:2], 7, *due[3:]]])
    dispatcher.close()
    assert len(jobs_waiting(redis_url)) == 2
    start_rq()
    wait_until(lambda: not jobs_waiting(redis_url), "both were taken")
    assert delivered(client).id == group_id

    assert driver.stats()["groups_graded"] == driver.stats()["groups_closed"] == 1


def test_who_dies_before_it_enqueues_is_stood_in_for(
    client: RolloutClient, driver: Driver, start_rq: StartRq
) -> None:
    start_rq()
    closed(client, driver, "length")
    assert len(driver.send(contract.due())) == 1

    assert delivered(client).rollouts[0].reward == 4.0


def test_a_job_that_rq_lost_is_enqueued_again(
    client: RolloutClient, driver: Driver, start_rq: StartRq, redis_url: str
) -> None:
    """Taken from its list by a worker that died before it began."""
    closed(client, driver, "length")
    dispatch(driver)
    [job] = jobs_waiting(redis_url)
    driver.redis.delete(f"rq:queue:{RQ_QUEUE}")
    assert driver.redis.exists(f"rq:job:{job}")
    start_rq()

    assert delivered(client).rollouts[0].reward == 4.0


async def test_workers_have_groups_graded_while_no_trainer_waits(
    pool: Pool, start_rq: StartRq
) -> None:
    start_rq()
    await pool.start(StepEngine())
    pool.client.submit([[1, 2, 3]], SamplingParams(max_tokens=4), reward=f"{FUNCTIONS}:length")
    await async_wait_until(lambda: pool.client.status().results, "it is graded")

    (group,) = await pool.groups(1)
    assert group.rollouts[0].reward == 4.0


def test_rq_away(
    client: RolloutClient,
    driver: Driver,
    start_rq: StartRq,
    server_kind: Prefer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
) -> None:
    directory = tmp_path / "rq"
    with start_embedded(directory, prefer=server_kind) as server:
        url = server.url
    monkeypatch.setenv("ROLLQ_REWARDS_URL", url)
    with RolloutClient(redis_url, QUEUE, patience=DEADLINE_S) as trainer:
        closed(trainer, driver, "length")
        dispatch(driver)  # says so and goes on
        trainer.submit([[1]], SamplingParams(max_tokens=4), ids=["plain"])
        driver.complete(driver.claim_one(), tokens=4)
        assert [g.id for g in trainer.batch(1, timeout=DEADLINE_S)] == ["plain"]

        with restarted(directory, server_kind) as server:
            assert server.url == url
            start_rq(url=url)
            batch = trainer.batch(1, timeout=DEADLINE_S)
            assert batch[0].rollouts[0].reward == 4.0
            assert jobs_waiting(redis_url) == []


def restarted(directory: Path, kind: Prefer) -> EmbeddedServer:
    return start_embedded(directory, prefer=kind)


# what operators and strangers do


SETTINGS = ("-c", "producer.rewards.settings")


@pytest.mark.parametrize("options", [(), SETTINGS, ("--serializer", "producer.rewards.Serializer")])
def test_rq_info_shows_the_queue(
    client: RolloutClient, driver: Driver, redis_url: str, options: tuple[str, ...]
) -> None:
    for _ in range(3):
        closed(client, driver, "length")
    dispatch(driver)
    where = () if options == SETTINGS else ("--url", redis_url)
    shown = subprocess.run(
        rq("info", *where, *options), capture_output=True, text=True, check=True,
        env={**os.environ, "ROLLQ_REDIS_URL": redis_url, "ROLLQ_QUEUE": QUEUE},
    ).stdout  # fmt: skip

    assert RQ_QUEUE in shown
    assert "3 jobs total" in shown
    assert len(jobs_waiting(redis_url)) == 3, "looking changes nothing"


def test_a_job_that_names_another_function_is_not_run(
    client: RolloutClient, driver: Driver, start_rq: StartRq, redis_url: str, tmp_path: Path
) -> None:
    from rq import Queue as RqQueue
    from rq.serializers import JSONSerializer, PickleSerializer

    class Any_(Serializer):
        dumps = staticmethod(lambda value: __import__("msgpack").packb(value))

    made = [tmp_path / str(i) for i in range(3)]
    with redis.Redis.from_url(redis_url) as connection:
        for path, serializer in zip(made, (Any_, JSONSerializer, PickleSerializer), strict=True):
            queue = RqQueue(RQ_QUEUE, connection=connection, serializer=serializer)
            queue.enqueue_call("os.mkdir", (str(path),), job_id=path.name)
        start_rq()
        closed(client, driver, "length")
        assert delivered(client).reward_error == ""
        assert connection.hget("rq:job:0", "status") == b"failed"
    assert not any(path.exists() for path in made)
    assert {path.name for path in made}.isdisjoint(jobs_waiting(redis_url))


def test_a_call_of_the_job_itself_is_read(redis_url: str) -> None:
    call = (JOB, None, ("q", "g", "d"), {})
    assert Serializer.loads(Serializer.dumps(call)) == [JOB, None, ["q", "g", "d"], {}]


@pytest.mark.parametrize("reward", ["f", "m:", ":f", "m.f", "m:f:g", "m:_f", "a b:f", "", 5])
def test_what_names_no_function_is_refused_at_submit(client: RolloutClient, reward: Any) -> None:
    with pytest.raises(InvalidSample, match=r"package\.module:function"):
        client.submit([[1]], reward=reward)
    assert client.status().ready == 0


def test_a_trainer_that_waits_is_told_that_nobody_grades(
    client: RolloutClient, driver: Driver
) -> None:
    closed(client, driver, "length")
    with pytest.raises(TimeoutError, match=f"1 closed groups wait for their rewards.*{RQ_QUEUE}"):
        client.batch(1, timeout=0.1)


def test_the_trace_context_of_the_submit_comes_back(client: RolloutClient, driver: Driver) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(
        trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)
    )
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.submit([[1]], SamplingParams(max_tokens=4), ids=["traced"])
    client.submit([[1]], SamplingParams(max_tokens=4), ids=["traced"])  # the very same job
    driver.complete(driver.claim_one(), tokens=4)
    (group,) = client.batch(1)

    assert group.traceparent == f"00-{0xABC:032x}-{0xDEF:016x}-01"
