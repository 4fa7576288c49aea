"""What needs no Redis of the commands: the picture of `top`, words, exit codes, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import producer
import producer.cli
from producer.commands.common import Duration, ago, counted, cut
from producer.commands.inflight import InFlight, SlowGroup
from producer.commands.topview import SORTS, Picture, draw
from producer.status import Status, WorkerStatus

HUGE = 10**9

# top


def worker(name: str, **facts: Any) -> WorkerStatus:
    return WorkerStatus(
        **{
            "name": name,
            "version": 7,
            "loading": -1,
            "state": "serving",
            "in_flight": 64,
            "tokens_per_second": 3210.0,
            "last_error": "",
        }
        | facts
    )


def picture(*workers: WorkerStatus, size: int = 1, **facts: Any) -> Picture:
    """`size` is in every figure."""
    status = Status(
        ready=size,
        leased=size,
        dead=size,
        results=size,
        current=size,
        last_good=size,
        workers=workers,
        stats={"crashes": size, "failed": size, "groups_closed": size},
        weights={f"{size}:state": "good", f"{size}:step": str(size), f"{size}:published_at": "0"},
        config={"max_results": "10000"},
    )
    in_flight = InFlight(
        looked_at=min(size, 256),
        staleness={0: size, 9: 1} if size > 1 else {},
        no_tokens=size,
        slowest=tuple(SlowGroup("g" * 100, size, 4096, 4095, size) for _ in range(min(size, 16))),
        oldest_waiting_s=float(size),
    )
    shown = Picture("q", "redis://" + "h" * 99, status, in_flight, {}, [float(size)] * 3, at=size)
    return replace(shown, **facts)


def lines(shown: Picture, width: int = 80, height: int | None = 24) -> list[str]:
    console = Console(width=width, height=height or 100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(shown, width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(50, 24), (80, 24), (80, 60), (120, 30), (200, 50)])
@pytest.mark.parametrize(
    "shown",
    [
        picture(),
        picture(worker("a"), size=2),
        picture(*(worker(f"w{i}") for i in range(99)), size=HUGE),
        picture(
            worker("n" * 99, version=HUGE, loading=HUGE, last_error="e\n" * 99, in_flight=HUGE),
            size=HUGE,
            trouble="Redis at redis://host:6379 did not answer " * 5,
        ),
    ],
    ids=["idle", "small", "many", "huge"],
)
def test_the_picture_fills_the_screen_and_no_more(shown: Picture, width: int, height: int) -> None:
    found = lines(shown, width, height)

    assert len(found) == height
    assert max(map(len, found)) <= width
    wide = lines(shown, max(80, width), height)
    assert [line.rstrip() for line in found] == [line[:width].rstrip() for line in wide]


def test_nothing_moves_when_numbers_grow() -> None:
    """The columns begin where they began."""
    small, large = (
        lines(picture(worker("a"))),
        lines(picture(worker("a", in_flight=12345), size=9**9)),
    )

    for word in ("tokens/s", "VERSION", "IN FLIGHT", "LAST ERROR", "SLOWEST GROUPS", "RUNNING"):
        at = [[(i, line.find(word)) for i, line in enumerate(f) if word in line] for f in
              (small, large)]  # fmt: skip
        assert at[0] == at[1] != []
    row = next(line for line in large if line.startswith("a "))
    header = next(line for line in large if line.startswith("WORKER"))
    assert row.index("12,345") + len("12,345") == header.index("IN FLIGHT") + len("IN FLIGHT")


@pytest.mark.parametrize(
    ("sort", "turned", "names"),
    [
        ("n", False, ["a", "b", "c"]),
        ("n", True, ["c", "b", "a"]),
        ("t", False, ["b", "c", "a"]),
        ("f", True, ["c", "a", "b"]),
        ("v", False, ["c", "a", "b"]),
        ("s", False, ["b", "a", "c"]),
    ],
)
def test_workers_are_sorted_by_a_key(sort: str, turned: bool, names: list[str]) -> None:
    workers = (
        worker("a", tokens_per_second=1.0, in_flight=2, version=5),
        worker("b", tokens_per_second=9.0, in_flight=3, version=6, state="draining"),
        worker("c", tokens_per_second=5.0, in_flight=1, version=4),
    )

    found = lines(picture(*workers, sort=sort, turned=turned))

    assert [line[0] for line in found if line[:2] in ("a ", "b ", "c ")] == names
    title = SORTS[sort][0].upper().replace("NAME", "WORKER")
    assert any(f"{title}*" in line for line in found)


def test_what_does_not_fit_is_counted() -> None:
    found = lines(picture(*(worker(f"w{i:02d}") for i in range(20))))

    shown = [line for line in found if line.startswith("w")]
    assert f"and {20 - len(shown)} more" in "\n".join(found)
    assert len(lines(picture(*(worker(f"w{i:02d}") for i in range(20))), height=None)) > 30


def test_groups_that_wait_for_rewards_are_a_fact() -> None:
    idle = picture()
    waits = replace(idle, status=replace(idle.status, grading=1234))

    assert any(re.match(r"grading +1,234", line) for line in lines(waits))
    assert not any("grading" in line for line in lines(idle))
    assert len(lines(waits)) == len(lines(idle)) == 24


def test_short_names_leave_the_room_to_errors() -> None:
    error = "no tensor a.b of shape [1]"

    assert any(error in line for line in lines(picture(worker("w1", last_error=error))))


def test_a_long_name_keeps_both_ends() -> None:
    found = lines(picture(worker("gpu-node-17.example.com-12345-ab12")))

    assert any(line.startswith("gpu-node-17") and "12345-ab12 " in line for line in found)


# words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0s"), (59.9, "59s"), (61, "1m01s"), (7199, "1h59m"), (86400 * 3 + 7200, "3d02h")],
)
def test_times_are_short(seconds: float, words: str) -> None:
    assert ago(seconds) == words


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("1d", 86400.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds
    with pytest.raises(click.BadParameter):
        Duration().convert(f"{text}x", None, None)


def test_text_is_cut_to_one_line() -> None:
    assert [cut("a\n b", 9), cut("abcdef", 4)] == ["a b", "abc…"]
    assert [counted(1, "group"), counted(2048, "group")] == ["1 group", "2,048 groups"]


# the command itself


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("producer.commands.status.read_status", interrupted)

    result = CliRunner().invoke(producer.cli.main, ["status", "--redis", "unix:///nowhere"])

    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("words", "expected"), [("rollq st", "status"), ("rollq enqueue --top", "--top-p")]
)
def test_the_shell_completes(words: str, expected: str) -> None:
    environment = {
        "_ROLLQ_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-c", "from producer.cli import main; main(prog_name='rollq')"]
    found = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout

    assert expected in {line.partition(",")[2] for line in found.splitlines()}


def test_all_names_of_the_package_are_there_and_no_other() -> None:
    assert all(getattr(producer, name).__name__ == name for name in producer.__all__)
    assert set(producer.__all__) <= set(dir(producer))
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        _ = producer.nobody


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import producer", {"redis", "numpy", "msgpack", "rich", "click"}),
        ("import producer.commands.status", {"redis", "numpy", "msgpack", "rich"}),
        ("from producer.contract import connection", {"numpy", "msgpack", "rich"}),
    ],
)
def test_what_is_slow_to_import_waits_until_it_is_needed(code: str, absent: set[str]) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert absent & set(loaded) == set()


def test_the_help_of_worker_says_what_its_options_and_the_simulated_engine_take() -> None:
    text = " ".join(CliRunner().invoke(producer.cli.main, ["worker", "--help"]).stdout.split())

    assert "ROLLQ_CHECKPOINT_TOKENS" in text
    assert "token_rate=0.0" in text
    assert "`late_seconds` delays the last outputs" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--engine sim --nonsense 3", "--nonsense 3: the simulated engine takes --sim"),
        ("--engine null --nonsense", "--nonsense: the null engine takes no settings"),
        ("--dtype float32", "give the MODEL to serve, before vLLM's flags"),
        ("/no/such/model", "MODEL /no/such/model is no directory here"),
        ("./nomodel --dtype float32", "MODEL ./nomodel is no directory here"),
    ],
)
def test_a_wrong_command_line_of_worker_says_what_is_wrong(arguments: str, says: str) -> None:
    before = set(sys.modules)  # tests on real vLLM may have run in this process

    result = CliRunner().invoke(producer.cli.main, ["worker", *arguments.split()])

    assert result.exit_code == 2
    assert says in result.stderr
    assert "vllm" not in set(sys.modules) - before


def test_a_worker_warns_of_a_weights_directory_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".", "typo"):
        arguments = f"worker --engine null --wrong --weights-dir {tmp_path / name}".split()
        CliRunner().invoke(producer.cli.main, arguments)

    [record] = caplog.records
    assert f"{tmp_path}/typo does not exist here" in record.getMessage()
