"""`rollq results`: rows on the disk before the ack, so that no kill loses or doubles a group."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute
import pyarrow.parquet
import pytest

from producer import Batch, RolloutClient
from producer.commands import export
from tests.integration import contract
from tests.integration.commands import Rollq
from tests.integration.contract import Driver, job
from tests.waiting import wait_until

Table = list[dict[str, Any]]


@pytest.fixture
def rollq(driver: Driver) -> Rollq:
    return Rollq(driver.queue.url)


def close_groups(driver: Driver, *groups: str, size: int = 2) -> None:
    """Groups with a token for each place: 0, 1, ... 7."""
    driver.enqueue(*(job(g, size, prompt="What day is it?") for g in groups))
    for claim in driver.claim():
        driver.complete(claim, version=0)


class Sink:
    """Where the results go: the arguments of the command, and the rows that are there."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path / ("out.jsonl" if kind == "jsonl" else "out")
        self.arguments = [f"--{kind}", self.path]

    def rows(self) -> Table:
        if not self.path.exists():
            return []
        if self.kind == "jsonl":
            return [json.loads(line) for line in self.path.read_text().splitlines()]
        files = sorted(self.path.glob("part-*.parquet"))
        return [row for f in files for row in pyarrow.parquet.read_table(f).to_pylist()]

    def ids(self) -> list[str]:
        return [row["id"] for row in self.rows()]


@pytest.fixture(params=["jsonl", "parquet"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    return Sink(request.param, tmp_path)


def members(*groups: str, size: int = 2) -> list[str]:
    return [f"{g}/{i}" for g in groups for i in range(size)]


# rows


def test_a_row_is_a_rollout_with_its_fields_and_what_is_written_leaves_the_queue(
    driver: Driver, rollq: Rollq, sink: Sink
) -> None:
    close_groups(driver, "a", "b")

    result = rollq("results", *sink.arguments)

    assert (result.exit_code, result.stderr) == (0, "2 groups written\n")
    rows = sink.rows()
    assert [row["id"] for row in rows] == members("a", "b")
    assert all(list(row) == export.columns() for row in rows)
    first = rows[0]
    assert (first["group_id"], first["index"], first["group_size"]) == ("a", 0, 2)
    assert (first["prompt"], first["finish_reason"]) == ("What day is it?", "length")
    assert (first["trainable"], first["is_cancel"], first["stop_reason"]) == (True, False, None)
    assert first["response_ids"] == list(range(8))
    assert first["response_logprobs"] == [-i / 8 for i in range(8)]
    assert first["versions"] == [0] * 8
    assert first["segments"] == [{"version": 0, "tokens": 8, "worker": "w", "attempt": 1}]
    metadata = first["metadata"]
    assert (json.loads(metadata) if sink.kind == "parquet" else metadata) == {"of": "a"}
    assert driver.results() == []
    assert driver.group("a") == {}


def test_members_without_a_token_are_rows_too(driver: Driver, rollq: Rollq, sink: Sink) -> None:
    driver.enqueue(job("a", 1))
    rollq.ok("cancel", "a")

    rollq.ok("results", *sink.arguments)

    (row,) = sink.rows()
    assert (row["state"], row["trainable"], row["response_ids"]) == ("cancelled", False, [])
    assert (row["param_version_start"], row["error"]) == (-1, "cancelled by the operator")


def test_a_reward_has_columns_of_one_type_and_a_failed_grader_its_words(
    driver: Driver, rollq: Rollq, sink: Sink
) -> None:
    graded = {"number": 0.5, "dict": {"format": 1.0}, "failed": None}
    for group, reward in graded.items():
        driver.enqueue(job(group, reward="m:f"))
        driver.complete(driver.claim_one())
        digest = driver.group(group)["digest"]
        driver.send(contract.grade(group, digest))
        rewards = None if reward is None else [reward]
        error = "" if rewards else "no answer"
        driver.send(contract.graded(group, digest, rewards=rewards, error=error, final=True))

    result = rollq("results", *sink.arguments)

    assert result.stderr == "3 groups written, 1 not trainable\n"
    rows = {row["group_id"]: row for row in sink.rows()}
    assert {name: row["reward"] for name, row in rows.items()} == {
        "number": 0.5, "dict": None, "failed": None,
    }  # fmt: skip
    parts = rows["dict"]["reward_parts"]
    assert (json.loads(parts) if sink.kind == "parquet" else parts) == {"format": 1.0}
    assert rows["number"]["reward_parts"] is rows["failed"]["reward_parts"] is None
    assert [row["reward_error"] for row in rows.values()] == ["", "", "no answer"]
    if sink.kind == "parquet":
        frame = pyarrow.parquet.read_table(sink.path)
        assert pyarrow.compute.mean(frame["reward"]).as_py() == 0.5


def test_it_ends_after_as_many_groups_as_asked(driver: Driver, rollq: Rollq, sink: Sink) -> None:
    close_groups(driver, *"abcde", size=1)

    rollq.ok("results", *sink.arguments, "--groups", 2)
    assert sink.ids() == ["a/0", "b/0"]
    assert [g for g, _ in driver.results()] == ["c", "d", "e"]

    rollq.ok("results", *sink.arguments)
    assert sink.ids() == members(*"abcde", size=1), "added to what is there"


def test_parts_have_as_many_groups_as_asked(driver: Driver, rollq: Rollq, tmp_path: Path) -> None:
    close_groups(driver, *"abcde", size=1)

    rollq.ok("results", "--parquet", tmp_path / "out", "--part-groups", 1)

    parts = sorted(p.name for p in (tmp_path / "out").glob("*.parquet"))
    assert parts[:2] == ["part-000001.parquet", "part-000002.parquet"]
    assert Sink("parquet", tmp_path).ids() == members(*"abcde", size=1)


def test_stdout_is_json_lines(driver: Driver, rollq: Rollq) -> None:
    close_groups(driver, "a")

    rows = [json.loads(line) for line in rollq.ok("results").splitlines()]

    assert [row["id"] for row in rows] == members("a")


# kills and failures


def test_what_was_written_and_not_acked_comes_again_and_is_not_doubled(
    driver: Driver, rollq: Rollq, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_groups(driver, "a", "b")

    def die(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutClient, "ack", die)
        assert rollq("results", *sink.arguments).exit_code == 9
    assert sink.ids()
    assert [g for g, _ in driver.results()] == ["a", "b"]
    close_groups(driver, "c")

    rollq.ok("results", *sink.arguments)

    assert sink.ids() == members("a", "b", "c")
    assert driver.results() == []


@pytest.mark.parametrize("left", [1, 30, -1])
def test_half_a_group_that_a_kill_left_in_the_file_is_written_anew(
    driver: Driver, rollq: Rollq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """`left`: bytes of its second line; -1 for the first line without its end."""
    sink = Sink("jsonl", tmp_path)
    close_groups(driver, "a")
    rollq.ok("results", *sink.arguments)
    whole = sink.path.read_bytes()
    close_groups(driver, "b")
    lines = whole.replace(b'"a', b'"b').splitlines(keepends=True)
    torn = lines[0] + lines[1][:left] if left > 0 else lines[0][:-1]
    sink.path.write_bytes(whole + torn)
    monkeypatch.setattr(export, "_FIRST_WINDOW", 256)

    rollq.ok("results", *sink.arguments)

    assert sink.ids() == members("a", "b")


def test_a_disk_that_is_full_takes_nothing_out_of_the_queue(driver: Driver, rollq: Rollq) -> None:
    close_groups(driver, "a")

    result = rollq("results", "--jsonl", "/dev/full")

    assert result.exit_code == 1
    assert result.stderr == (
        "Error: results cannot be written; what was not is still queued: No space left on device\n"
    )
    assert [g for g, _ in driver.results()] == ["a"]


def test_killed_again_and_again_while_groups_close_it_loses_and_doubles_none(
    driver: Driver, rollq: Rollq, sink: Sink
) -> None:
    names = iter(f"g{i}" for i in itertools.count())
    closed: list[str] = []
    for round_ in range(4):
        process = rollq.start(
            "results", "--follow", *sink.arguments, "--part-seconds", 0.2, "--part-groups", 3
        )
        try:
            for _ in range(10):
                closed.append(next(names))
                close_groups(driver, closed[-1])
            wait_until(partial(written, sink, 16 * round_), "some are written")
        finally:
            process.kill()
            process.wait()

    rollq.ok("results", *sink.arguments)

    assert sorted(sink.ids()) == sorted(members(*closed))
    assert driver.results() == []


def written(sink: Sink, more_than: int) -> bool:
    """While it is being written: the last line may be half a one."""
    if sink.kind == "parquet":
        return len(sink.ids()) > more_than
    return sink.path.exists() and len(sink.path.read_text().splitlines()) - 1 > more_than


def test_ctrl_c_leaves_what_was_taken_on_the_disk(
    driver: Driver, rollq: Rollq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink("parquet", tmp_path)
    close_groups(driver, "a")
    take = RolloutClient.batch

    def once(client: RolloutClient, *arguments: Any, **options: Any) -> Batch:
        monkeypatch.setattr(RolloutClient, "batch", ctrl_c)
        return take(client, *arguments, **options)

    def ctrl_c(*_: object, **__: object) -> Batch:
        raise KeyboardInterrupt

    monkeypatch.setattr(RolloutClient, "batch", once)
    result = rollq("results", "--follow", *sink.arguments)

    assert (result.exit_code, result.stderr) == (130, "1 group written\ninterrupted\n")
    assert sink.ids() == members("a")
    assert driver.results() == []


def test_a_reader_that_leaves_is_no_error_to_talk_about(
    driver: Driver, rollq: Rollq, tmp_path: Path
) -> None:
    close_groups(driver, "a", size=1)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with rollq.start("results", "--follow", **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        wait_until(lambda: driver.results() == [], "it acked what was read")
        process.stdout.close()
        close_groups(driver, "b")
        words = process.stderr.read()

    assert (process.returncode, words) == (1, b"")
    assert [g for g, _ in driver.results()] == ["b"], "what nobody read stays"


def test_somebody_who_waits_in_vain_is_told_what_for(
    driver: Driver, rollq: Rollq, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.enqueue(job("a"))
    monkeypatch.setattr("producer.commands.results._SAY_SECONDS", 0.0)

    result = rollq("results", "--timeout", 3)

    assert result.exit_code == 1
    assert (
        "waiting: 1 samples wait, 0 are with workers, 0 closed groups are not acked"
        in result.stderr
    )


# refusals


def test_a_file_with_other_lines_is_left_alone(
    driver: Driver, rollq: Rollq, tmp_path: Path
) -> None:
    close_groups(driver, "a")
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nhalf")

    result = rollq("results", "--jsonl", file)

    assert result.exit_code == 1
    assert "holds other lines than those of `rollq results`: name another file" in result.stderr
    assert file.read_text() == "my notes\nhalf"
    assert [g for g, _ in driver.results()] == ["a"]


@pytest.fixture
def follower(rollq: Rollq, sink: Sink) -> Iterator[Callable[[], None]]:
    process = rollq.start("results", "--follow", *sink.arguments)
    yield lambda: wait_until(sink.path.exists, "it writes")
    process.kill()
    process.wait()


def test_two_do_not_write_to_one_file(
    rollq: Rollq, sink: Sink, follower: Callable[[], None]
) -> None:
    follower()
    lock = sink.path / ".lock" if sink.kind == "parquet" else sink.path
    wait_until(lock.exists, "it has its lock")

    def refused() -> bool:
        result = rollq("results", *sink.arguments)
        return "is being written by another `rollq results`" in result.stderr

    wait_until(refused, "the second is refused")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--jsonl", "a", "--parquet", "b"], 2, "give --jsonl or --parquet"),
        (["--jsonl", "/nowhere/a"], 1, "/nowhere/a: No such file or directory"),
        (["--queue", "grop"], 1, "there is no queue 'grop' at"),
        (["--follow", "--timeout", "0.1"], 1, "no group closed within 0.1 s; 0 samples wait"),
    ],
)
def test_a_mistake_is_said_without_a_traceback(
    rollq: Rollq, arguments: list[str], code: int, reason: str
) -> None:
    result = rollq("results", *arguments)

    assert result.exit_code == code, result.output
    assert reason in result.stderr
