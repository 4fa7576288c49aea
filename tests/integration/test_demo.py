"""`rollq demo` on simulated engines, as a user runs it: its verdict, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from producer import processes
from producer.contract.errors import EngineError
from producer.processes import WorkerProcesses, log_tail
from tests.waiting import DEADLINE_S, wait_until

StartDemo = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[StartDemo]:
    """Starts `rollq demo` in `tmp_path`; what a failed test left running is ended."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "producer.cli", "demo", "--engine", "sim"]
        demo = subprocess.Popen(
            [*command, "--dir", str(tmp_path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(demo)
        return demo

    yield start
    for demo in started:
        if demo.poll() is None:
            demo.terminate()
        demo.communicate(timeout=DEADLINE_S)


def processes_of(directory: Path) -> list[int]:
    """Every process whose command line names the directory: the demo and its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if os.fsencode(directory) in words:
                found.append(int(entry.name))
    return found


def workers_of(directory: Path) -> list[int]:
    """Without the demo, and without what a worker reads weights with."""
    return [
        pid
        for pid in processes_of(directory)
        if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def published(directory: Path) -> set[str]:
    """Names of the weights that lie there now; old ones are cleaned up."""
    return {path.name for path in directory.glob("weights/*/step*")}


def until_it_trains(demo: subprocess.Popen[str], directory: Path) -> None:
    wait_until(lambda: demo.poll() is not None or published(directory), "weights were published")
    assert demo.poll() is None, demo.communicate()


def socket_directory(output: str) -> Path:
    return Path(output.partition(" -s ")[2].partition("/redis.sock")[0])


def test_demo_passes_its_audit_and_prints_one_json_document(
    start_demo: StartDemo, tmp_path: Path
) -> None:
    demo = start_demo("--steps", "6", "--json")
    stdout, stderr = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["audit_ok"]
    assert report["steps"] == report["weight_version"] == len(report["rewards"]) == 6
    assert report["groups_lost"] == 0
    assert report["interrupted"] >= report["resumed"] > 0
    assert report["spanning_share"] > 0.0
    assert "shows the machinery" in stderr
    prose = [line for line in stderr.splitlines() if "/" not in line]
    assert max(map(len, prose)) <= 80
    assert processes_of(tmp_path) == []
    assert not socket_directory(stderr).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_leaves_nothing_behind_when_it_is_stopped(
    start_demo: StartDemo, tmp_path: Path, number: int
) -> None:
    demo = start_demo("--steps", "1000")
    until_it_trains(demo, tmp_path)
    assert len(processes_of(tmp_path)) >= 3
    demo.send_signal(number)
    stdout, _ = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode != 0
    assert processes_of(tmp_path) == []
    assert not socket_directory(stdout).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_workers_end_with_a_demo_that_is_killed(start_demo: StartDemo, tmp_path: Path) -> None:
    demo = start_demo("--steps", "1000")
    until_it_trains(demo, tmp_path)
    demo.kill()
    stdout, _ = demo.communicate()
    wait_until(lambda: not processes_of(tmp_path), "the workers have ended")
    shutil.rmtree(socket_directory(stdout))  # a killed owner cannot


def test_demo_goes_on_when_one_worker_is_killed_and_says_so(
    start_demo: StartDemo, tmp_path: Path
) -> None:
    demo = start_demo("--steps", "1000")
    until_it_trains(demo, tmp_path)
    os.kill(workers_of(tmp_path)[0], signal.SIGKILL)
    then = published(tmp_path)
    wait_until(lambda: len(published(tmp_path) - then) >= 10, "ten more steps were made")
    demo.send_signal(signal.SIGINT)
    stdout, _ = demo.communicate(timeout=DEADLINE_S)
    assert "was ended by signal 9" in stdout


def test_demo_on_a_given_redis_takes_a_queue_of_its_own(
    start_demo: StartDemo, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    demo = start_demo("--steps", "2", "--workers", "1", "--json", "--redis", redis_url)
    stdout, stderr = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 0, stderr
    queue = json.loads(stdout)["look"][0].partition("rollq:{")[2].partition("}")[0]
    assert queue.startswith("demo-")
    assert redis_client.zcard(f"rollq:{{{queue}}}:leases") == 0
    assert int(redis_client.hget(f"rollq:{{{queue}}}:stats", "finished")) >= 2 * 24 * 8
    assert processes_of(tmp_path) == []


def test_a_second_demo_in_the_same_directory_is_refused(
    start_demo: StartDemo, tmp_path: Path
) -> None:
    first = start_demo("--steps", "1000")
    until_it_trains(first, tmp_path)
    second = start_demo()
    _, stderr = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 1
    assert "another demo runs in" in stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=DEADLINE_S)
    assert processes_of(tmp_path) == []


def test_a_worker_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with WorkerProcesses(tmp_path) as workers:
        workers.start("worker-1", ["--engine", "sim", "--sim", "no_such_setting=1"], {})

        def ended() -> str:
            try:
                workers.newly_ended()
            except EngineError as error:
                return str(error)
            return ""

        words = wait_until(ended, "the worker has ended")
    assert "no worker is left" in words
    assert "no_such_setting" in words


def test_a_worker_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.1)
    with WorkerProcesses(tmp_path / "logs") as workers:
        workers.start("worker-1", ["--engine", "sim", "--weights-dir", str(tmp_path)], {})
        [worker] = wait_until(lambda: processes_of(tmp_path), "the worker runs")
        os.kill(worker, signal.SIGSTOP)
    assert processes_of(tmp_path) == []


def test_tail_of_a_long_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert log_tail(log, 2) == "line 99998\nline 99999"
    assert log_tail(tmp_path / "none") == ""
