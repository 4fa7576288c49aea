"""Watching a busy pool: `rollq status`, `rollq top`, and each redis-cli line of the README."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import redis

from producer.commands import inflight
from producer.contract.connection import Queue
from tests.integration import contract
from tests.integration.commands import Rollq
from tests.integration.contract import Driver, confirm, job, publish
from tests.integration.pool import QUEUE, ROOT, Pool
from tests.integration.stepper import StepEngine, sample_of
from tests.waiting import DEADLINE_S, async_wait_until, wait_until

README = (ROOT / "README.md").read_text()


@dataclass
class Busy:
    """g0 is closed, g1/0 has 3 tokens of version 1 and is with worker a, g2 and g3 wait, g9/0 is
    dead, and the trainer took its group and did not ack it."""

    pool: Pool
    driver: Driver
    rollq: Rollq


@pytest.fixture
async def busy(open_pool: Callable[..., Pool], driver: Driver) -> Busy:
    pool = open_pool(max_ready=1000)
    driver.enqueue(job("g9"))
    for _ in range(3):
        driver.crash(*driver.claim())
    driver.read(consumer="0")
    engine = StepEngine(lambda r: 3 if sample_of(r.request_id) == "g1/0" else None)
    worker = await pool.start(engine, name="a", max_samples=1)
    await pool.update(worker)
    pool.submit(4)
    await async_wait_until(lambda: pool.client.status().results == 2, "g0 is closed, as g9")
    await pool.made(3, "g1/0")
    await async_wait_until(lambda: heartbeat(pool) == 1, "the worker's heartbeat says so")
    return Busy(pool, driver, Rollq(pool.url))


def heartbeat(pool: Pool) -> int:
    return sum(w.in_flight for w in pool.client.status().workers)


# redis-cli, as in the README


def lines_of_readme() -> list[str]:
    lines = re.findall(r"^\| `(redis-cli [^`]+)` \|", README, flags=re.MULTILINE)
    assert len(lines) > 8, "the table of redis-cli lines is not where it was"
    return lines


def whole(text: str) -> int:
    assert re.fullmatch(r"\d+", text), text
    return int(text)


def pairs(lines: list[str]) -> dict[str, str]:
    return dict(zip(lines[::2], lines[1::2], strict=True))


def is_number(expected: int) -> Callable[[list[str]], None]:
    def check(lines: list[str]) -> None:
        assert [whole(line) for line in lines] == [expected]

    return check


def is_groups(lines: list[str]) -> None:
    found = pairs(lines)
    assert (found["name"], found["consumers"], found["pending"]) == ("trainer", "1", "1")
    assert found["lag"] == "1"


def is_stats(lines: list[str]) -> None:
    found = {name: whole(value) for name, value in pairs(lines).items()}
    assert (found["samples_enqueued"], found["groups_closed"], found["crashes"]) == (5, 2, 3)
    assert (found["dead"], found["finished"], found["published"]) == (1, 1, 1)


def is_config(lines: list[str]) -> None:
    found = pairs(lines)
    assert (found["schema"], found["max_ready"], found["max_crashes"]) == ("2", "1000", "3")
    assert re.fullmatch("[0-9a-f]{16}", found["incarnation"])


def is_weights(lines: list[str]) -> None:
    found = pairs(lines)
    assert (found["current"], found["last_good"], found["1:state"]) == ("1", "1", "good")
    assert found["1:path"].startswith("q/step0-")
    assert re.fullmatch("[0-9a-f]{32}", found["1:digest"])


def is_workers(lines: list[str]) -> None:
    ((name, at),) = pairs(lines).items()
    assert (name, len(str(whole(at)))) == ("a", 13)


def is_worker(lines: list[str]) -> None:
    found = pairs(lines)
    assert (found["version"], found["state"], found["in_flight"]) == ("1", "serving", "1")
    assert float(found["tokens_per_second"]) >= 0
    assert found["last_error"] == ""


def is_sample(lines: list[str]) -> None:
    assert lines == ["leased", "a", "3", "1"]


def is_group(lines: list[str]) -> None:
    assert lines == ["1", "0"]


def is_leases(lines: list[str]) -> None:
    ((sample, at),) = pairs(lines).items()
    assert (sample, len(str(whole(at)))) == ("g1/0", 13)


ANSWERS: dict[str, Callable[[list[str]], None]] = {
    "ZCARD ready": is_number(2),
    "ZCARD leases": is_number(1),
    "ZCARD dead": is_number(1),
    "XLEN results": is_number(2),
    "XINFO GROUPS results": is_groups,
    "ZCARD grading": is_number(0),
    "ZRANGE turns": lambda lines: None if lines in ([], [""]) else pytest.fail(str(lines)),
    "ZRANGE line": lambda lines: None if lines in ([], [""]) else pytest.fail(str(lines)),
    "HGETALL stats": is_stats,
    "HGETALL config": is_config,
    "HGETALL weights": is_weights,
    "ZRANGE workers": is_workers,
    "HGETALL worker": is_worker,
    "HMGET sample": is_sample,
    "HMGET group": is_group,
    "ZRANGE leases": is_leases,
}


def kind_of(line: str) -> str:
    """`COMMAND key`, the key without the queue and what an id follows."""
    found = re.search(r"redis-cli ([A-Z ]+) 'rollq:\{grpo\}:(\w+)", line)
    assert found, line
    return f"{found[1]} {found[2]}"


def test_each_line_of_the_readme_is_checked_here_and_each_check_is_of_one() -> None:
    assert {kind_of(line) for line in lines_of_readme()} == set(ANSWERS)


@pytest.mark.parametrize("line", lines_of_readme(), ids=kind_of)
async def test_a_line_of_the_readme_answers_as_it_says(busy: Busy, line: str) -> None:
    words = shlex.split(line.replace("{grpo}", f"{{{QUEUE}}}"))[1:]
    words = [w.replace(":NAME", ":a") for w in words]
    words = [w.replace("sample:ID", "sample:g1/0").replace("group:ID", "group:g1") for w in words]

    answer = redis_cli(busy.pool.url, words)

    assert all(c.isprintable() for answer_line in answer for c in answer_line), "binary"
    ANSWERS[kind_of(line)](answer)


def redis_cli(url: str, words: list[str]) -> list[str]:
    """What redis-cli prints into a pipe; where it is missing, the same by a connection."""
    if shutil.which("redis-cli"):
        command = ["redis-cli", "-s", unquote(urlsplit(url).path), *words]
        out = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S).stdout
        return out.decode().removesuffix("\n").split("\n")
    with redis.Redis.from_url(url, protocol=2) as client:
        client.response_callbacks.clear()
        return list(flat(client.execute_command(*words)))


def flat(answer: Any) -> list[str]:
    if isinstance(answer, list | tuple):
        return [line for item in answer for line in flat(item)]
    if isinstance(answer, dict):
        return [line for item in answer.items() for line in flat(item)]
    return [answer.decode() if isinstance(answer, bytes) else "" if answer is None else str(answer)]


# status


async def test_status_says_the_same_to_people_and_to_programs(busy: Busy) -> None:
    facts = json.loads(busy.rollq.ok("status", "--json"))
    assert (facts["queue"], facts["ready"], facts["leased"]) == ("q", 2, 1)
    assert (facts["dead"], facts["results"], facts["current"]) == (1, 2, 1)
    assert [(w["name"], w["version"], w["in_flight"]) for w in facts["workers"]] == [("a", 1, 1)]
    assert facts["config"]["max_ready"] == "1000"

    lines = busy.rollq.ok("status").splitlines()
    assert lines[0].startswith("queue q at unix://")
    assert lines[1] == "  samples   2 wait, 1 are with workers, 1 dead"
    assert lines[2] == "  groups    5 enqueued, 0 taken, 2 of 10,000 closed and not taken"
    assert re.fullmatch(r"  weights   version 1, good, step 0, published \d+s ago", lines[3])
    assert lines[-1].split()[:4] == ["a", "serving", "1", "1"]
    assert all(len(line) <= 80 for line in lines[1:])


async def test_status_says_what_is_wrong_with_a_version(busy: Busy) -> None:
    (live,) = busy.pool.workers.values()
    await live.drain()
    busy.driver.send(publish())
    busy.driver.send(confirm(2, worker="b", error="no such tensor"))

    assert "version 2 is bad: b: no such tensor" in busy.rollq.ok("status")


def test_status_has_whole_errors_below_the_table(driver: Driver) -> None:
    long = "the engine said " + "no " * 99 + "at last"
    short = "no tensor a.b of shape [1, 2]"
    driver.send(publish())
    driver.send(confirm(1, worker="w", error=long))
    for name, error in {"w1": long, "w2": short}.items():
        driver.send(contract.heartbeat(name))
        driver.redis.hset(driver.keys.worker(name), "last_error", error)

    lines = Rollq(driver.queue.url).ok("status").splitlines()

    table, whole = lines[:-2], lines[-2:]
    assert whole == [f"version 1 is bad: w: {long}", f"w1: {long}"]
    assert all(len(line) <= 80 for line in table[1:])
    assert any(re.match(rf"w2 +\w+ .*{re.escape(short)}$", line) for line in table), table


def test_a_misspelt_queue_is_no_empty_one(driver: Driver) -> None:
    rollq = Rollq(driver.queue.url, "grop")
    for command in (["status"], ["top", "--json"], ["dead", "list"], ["cancel", "a"]):
        result = rollq(*command)

        assert result.exit_code == 1
        assert "there is no queue 'grop' at unix://" in result.stderr
        assert result.stderr.count("\n") == 1
    assert driver.redis.exists("rollq:{grop}:config") == 0


def test_status_watches_until_ctrl_c(driver: Driver) -> None:
    process = Rollq(driver.queue.url).start(
        "status", "--watch", "--every", 0.1, "--json",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        seen = [json.loads(process.stdout.readline())["ready"]]
        driver.enqueue(job("g", 3))
        while seen[-1] != 3:
            seen.append(json.loads(process.stdout.readline())["ready"])
        process.send_signal(2)
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()

    assert process.returncode == 130
    assert seen[0] == 0


# top


async def test_top_in_a_pipe_is_one_plain_picture(busy: Busy) -> None:
    text = busy.rollq.ok("top")

    assert "\x1b" not in text
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    (worker,) = [line for line in lines if line.startswith("a ")]
    assert worker.split()[:4] == ["a", "serving", "1", "1"]
    assert any(re.match(r"0 +1 █+ *g1 +\d+s +0/1 +3", line) for line in lines), text


async def test_top_for_programs(busy: Busy) -> None:
    seen = json.loads(busy.rollq.ok("top", "--json"))["in_flight"]

    assert (seen["looked_at"], seen["staleness"], seen["no_tokens"]) == (1, {"0": 1}, 0)
    (slow,) = seen["slowest"]
    assert (slow["id"], slow["size"], slow["ended"], slow["tokens"]) == ("g1", 1, 0, 3)
    assert 0 <= slow["running_s"] < 60
    assert 0 <= seen["oldest_waiting_s"] < 60


def test_top_on_a_terminal_takes_keys(driver: Driver) -> None:
    driver.enqueue(job())
    ours, theirs = pty.openpty()
    process = Rollq(driver.queue.url).start("top", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        shown += os.read(ours, 65536)
        return text in shown

    try:
        wait_until(lambda: shows(b"WORKER*"), "it is sorted by name")
        os.write(ours, b"t")
        wait_until(lambda: shows(b"TOKENS/S*"), "it is sorted by tokens/s")
        os.write(ours, b"\x1b[A")
        os.write(ours, b"q")
        wait_until(lambda: shows(b"\x1b[?1049l"), "it leaves the screen")
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        os.close(ours)


# what a look costs


def test_a_look_at_samples_in_flight_is_bounded_and_walks_no_keys(driver: Driver) -> None:
    for group in range(10):
        driver.enqueue(job(f"g{group}", 60))
    for _ in range(2):
        driver.claim()
    [first, *_] = list(driver.leases())
    driver.redis.config_resetstat()

    queue = Queue(driver.queue.url, "q")
    seen = inflight.look(queue, current=3)
    queue.close()

    calls = {
        name.removeprefix("cmdstat_"): stat["calls"]
        for name, stat in driver.redis.info("commandstats").items()
    }
    assert seen.looked_at == seen.no_tokens == 256
    assert calls["hmget"] <= 256 + 32 + 16
    assert calls["zrange"] == 2
    assert {"keys", "scan", "hgetall", "zscan"} & set(calls) == set()
    assert first.startswith("g")


def test_staleness_is_of_the_first_token_and_what_was_handed_back_counts_as_slow(
    driver: Driver,
) -> None:
    driver.enqueue(job("old", 2), job("new", 1))
    a, b, c = driver.claim()
    driver.generate(a, 2, version=1)
    driver.generate(b, 3, version=1)
    driver.generate(c, 1, version=4)
    driver.send(("release", {"worker": "w", "reason": "update"}, [(b.id, b.lease_token, 3)]))
    queue = Queue(driver.queue.url, "q")

    seen = inflight.look(queue, current=4)

    queue.close()
    assert (seen.looked_at, seen.staleness, seen.no_tokens) == (2, {0: 1, 3: 1}, 0)
    assert sorted((g.id, g.size, g.tokens) for g in seen.slowest) == [("new", 1, 1), ("old", 2, 3)]
    assert seen.oldest_waiting_s is not None


# cancel


def test_cancel_by_id_by_age_and_all(driver: Driver) -> None:
    rollq = Rollq(driver.queue.url)
    driver.enqueue(job("a", 2), job("b", 2), job("c"), job("d"))
    driver.redis.hset(driver.keys.sample("b/0"), "enqueued_at", driver.now() - 7200_000)
    driver.claim(limit=3)  # both of a, and b/0

    assert rollq.ok("cancel", "a/0", "nobody") == "1 sample cancelled\n"
    assert rollq.ok("cancel", "--older-than", "1h", "--dry-run") == "b\n"
    assert rollq.ok("cancel", "--older-than", "1h", "--yes") == "2 samples cancelled\n"
    assert [g for g, _ in driver.results()] == ["b"]
    unsure = rollq("cancel", "--all")
    assert (unsure.exit_code, "give --yes" in unsure.stderr) == (2, True)
    assert driver.ready() == ["c/0", "d/0"]

    facts = json.loads(rollq.ok("cancel", "--all", "--yes", "--json", "--reason", "enough"))

    assert facts == {"ids": ["c", "d", "a"], "samples_cancelled": 3}
    assert driver.sample("d/0")["error"] == "enough"
    assert (driver.ready(), driver.leases()) == ([], {})


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["nobody"], 1, "none of these waits or is with a worker"),
        (["a/b"], 1, "'a/b' is no sample"),
        ([], 2, "give IDS, or --all, or --older-than"),
        (["a", "--all"], 2, "give IDS, or --all, or --older-than"),
        (["--older-than", "1x"], 2, "'1x' is no time: write 90s, 10m, 2h or 1d"),
    ],
)
def test_a_wrong_cancel_is_said(
    driver: Driver, arguments: list[str], code: int, reason: str
) -> None:
    result = Rollq(driver.queue.url)("cancel", *arguments)

    assert (result.exit_code, reason in result.stderr) == (code, True), result.output


# publish


async def test_publish_says_the_version_and_waits_for_it(busy: Busy, tmp_path: Path) -> None:
    files = busy.pool.files()
    command = ["publish", files, "--weights-dir", busy.pool.weights_dir, "--step", 5]

    assert busy.rollq.ok(*command) == f"{files} is version 2 of queue q\n"

    assert busy.driver.weights()["2:step"] == "5"
    again = json.loads(busy.rollq.ok(*command, "--json"))
    assert again == {"version": 2, "step": 5, "served": False}
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    result = busy.rollq("publish", nothing, "--weights-dir", busy.pool.weights_dir)
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: {nothing} holds no safetensors files\n",
    )
    refused = busy.rollq("publish", nothing)
    assert (refused.exit_code, "ROLLQ_WEIGHTS_DIR" in refused.stderr) == (2, True)
