"""`rollq bench all`: goals, the baseline, and that nothing is left out in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import producer.bench.every
from producer.bench import peer_environments, task_queues
from producer.bench.baseline import LEAST, STORED, Baseline, Change, save
from producer.bench.cli import bench
from producer.bench.goals import GOALS, Goal
from producer.bench.machine import Machine
from producer.bench.report import table
from producer.bench.suite import BENCHES, Bench, Results
from producer.contract.errors import RollqError

MACHINE = Machine("EPYC", 2, 24, "Linux 6", "3.11.7", "redis 7.0.15", "0.32.0", "2.13.0")
#: holds every goal of the bench
QUEUE = {
    "times_best_peer": 12.0,
    "times_rq": 50.0,
    "share_of_floor": 0.7,
    "commands_per_sample": 2.5,
    "redis_cpu_us_per_sample": 40.0,
    "bytes_per_token": 8.3,
    "slow_commands": 0.0,
}


def results(machine: Machine = MACHINE, **figures: float) -> Results:
    return Results(machine, {"queue": {**QUEUE, **figures}})


def verdicts(changes: list[Change]) -> dict[str, str]:
    return {c.goal.figure: c.verdict for c in changes if c.verdict != "same"}


def shown(of: Results, changes: list[Change] | None = None) -> dict[str, str]:
    """The row of each figure, or of each bench that failed."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(of, changes or []))
    rows = [line.strip("│┃ ") for line in captured.get().splitlines()]
    cells = [[cell.strip() for cell in row.split("│")] for row in rows]
    return {row[1] or row[0]: " ".join(filter(None, row[2:])) for row in cells if len(row) > 1}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A baseline of three runs whose share of the floor moved a little."""
    path = tmp_path / "baseline.json"
    for share in (0.70, 0.68, 0.71):
        save(path, results(share_of_floor=share))
    return path


@pytest.mark.parametrize(
    ("bound", "holds", "misses", "by"), [("at least", 10, 8, 2), ("at most", 60, 75, 15)]
)
def test_a_goal_holds_at_its_value_and_is_missed_beyond_it(
    bound: str, holds: float, misses: float, by: float
) -> None:
    goal = Goal("queue", "any", "ratio", bound, holds)  # type: ignore[arg-type]

    assert goal.missed_by(holds) == 0
    assert goal.missed_by(misses) == by
    assert goal.missed_by(2 * holds - misses) == 0
    assert replace(goal, value=None).missed_by(misses) == 0


def test_every_goal_is_of_a_bench_that_runs_and_named_once() -> None:
    assert {goal.bench for goal in GOALS} <= {bench.name for bench in BENCHES}
    assert len({(goal.bench, goal.figure) for goal in GOALS}) == len(GOALS)
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)


def test_every_bench_is_a_command() -> None:
    assert {bench.command[0] for bench in BENCHES} <= set(bench.commands)


def test_the_table_says_what_holds_by_how_much_it_is_missed_and_what_is_not_there() -> None:
    of = results(times_rq=30.0, slow_commands=3.0)
    del of.figures["queue"]["times_best_peer"]
    of.failed["interrupt"] = "exit code 1: Error: no Redis"

    rows = shown(of)

    assert rows["share_of_floor"] == "0.7 at least 0.6 holds"
    assert rows["times_rq"] == "30 at least 40 missed by 25%"
    assert rows["slow_commands"] == "3 at most 0 missed by 3"
    assert rows["times_best_peer"] == "- at least 10 not measured"
    assert rows["interrupt"] == "exit code 1: Error: no Redis"
    assert [goal.figure for goal in of.missed()] == [
        *("times_best_peer", "times_rq", "slow_commands", "interrupt_ms")
    ]


def test_a_run_like_the_baselines_has_not_changed(stored: Path) -> None:
    changes = Baseline.read(stored).changes(results(share_of_floor=0.66))

    assert verdicts(changes) == {}
    assert {change.goal.figure for change in changes} == set(QUEUE)


def test_what_became_worse_and_what_became_better_is_said_each_in_its_direction(
    stored: Path,
) -> None:
    now = results(share_of_floor=0.5, times_rq=60.0, commands_per_sample=2.7, bytes_per_token=8.0)

    changes = Baseline.read(stored).changes(now)

    assert verdicts(changes) == {
        "share_of_floor": "worse",
        "times_rq": "better",
        "commands_per_sample": "worse",
        "bytes_per_token": "better",
    }
    rows = shown(now, changes)
    assert rows["share_of_floor"].endswith("0.7 worse by 29% (noise 10%)")
    assert rows["times_rq"].endswith("50 better by 20% (noise 10%)")


def test_noise_is_twice_the_spread_of_the_runs_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    for share in (0.1, 0.60, 0.70, 0.68):  # the first is not kept
        save(path, results(share_of_floor=share))
    before = Baseline.read(path)

    assert len(before.runs) == 3
    assert verdicts(before.changes(results(share_of_floor=0.49))) == {}
    assert verdicts(before.changes(results(share_of_floor=0.47))) == {"share_of_floor": "worse"}
    assert LEAST["ratio"] * 0.68 < 0.19


def test_a_count_of_nothing_is_compared_too(stored: Path) -> None:
    changes = Baseline.read(stored).changes(results(slow_commands=1.0))

    assert verdicts(changes) == {"slow_commands": "worse"}
    assert shown(results(), changes)["slow_commands"].endswith("worse by 1 (noise 0)")


def test_a_figure_that_is_gone_is_worse(stored: Path) -> None:
    now = results()
    del now.figures["queue"]["times_best_peer"]

    changes = Baseline.read(stored).changes(now)

    assert verdicts(changes) == {"times_best_peer": "worse"}
    assert shown(now, changes)["times_best_peer"].endswith("gone")


def test_another_class_of_machine_is_compared_without_its_cpu_time(stored: Path) -> None:
    other = replace(MACHINE, cpu="Xeon")

    changes = Baseline.read(stored).changes(
        results(other, redis_cpu_us_per_sample=90.0, bytes_per_token=9.0)
    )

    assert verdicts(changes) == {"bytes_per_token": "worse"}
    same = Baseline.read(stored).changes(results(redis_cpu_us_per_sample=90.0))
    assert verdicts(same) == {"redis_cpu_us_per_sample": "worse"}


def test_saving_on_another_class_of_machine_begins_anew(stored: Path) -> None:
    other = replace(MACHINE, cores=64)

    assert save(stored, results(other)) == 1
    assert Baseline.read(stored).machine == other


def test_times_are_not_kept_and_a_run_with_a_failure_is_not(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    of = results()
    of.figures["interrupt"] = {"interrupt_ms": 30.0}

    save(path, of)
    assert list(Baseline.read(path).runs[0]) == ["queue"]

    of.failed["engine"] = "not installed: vllm"
    with pytest.raises(RollqError, match="engine"):
        save(path, of)


def test_a_baseline_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with pytest.raises(RollqError, match=r"no baseline .*--save"):
        Baseline.read(path)
    path.write_text('{"machine": {"cpu": "x"}, "runs": []}')
    with pytest.raises(RollqError, match="is not a baseline"):
        Baseline.read(path)


def test_the_baseline_of_the_source_tree_has_only_what_is_compared() -> None:
    runs = Baseline.read(STORED).runs

    compared = {(goal.bench, goal.figure) for goal in GOALS if goal.kind != "time"}
    assert runs
    for run in runs:
        stored = {(name, figure) for name, figures in run.items() for figure in figures}
        assert stored
        assert stored - compared == set()


def test_the_table_leaves_out_what_only_the_json_is_for() -> None:
    figures = dict.fromkeys(("lognormal_wait_seconds", "lognormal_keep_times_wait"), 1.8)
    of = Results(MACHINE, {"partial": figures | {"lognormal_requeue_times_wait": 1.8}})

    assert set(shown(of)) >= {"lognormal_keep_times_wait", "lognormal_requeue_times_wait"}
    assert "lognormal_wait_seconds" not in shown(of)


def test_a_figure_that_no_baseline_has_is_said(tmp_path: Path) -> None:
    path, before = tmp_path / "baseline.json", results()
    del before.figures["queue"]["bytes_per_token"]
    save(path, before)
    now = results()
    now.figures["interrupt"] = {"interrupt_ms": 30.0}

    assert [goal.figure for goal in Baseline.read(path).unknown(now)] == ["bytes_per_token"]


def run_all(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["all", *arguments])


def test_a_bench_that_fails_or_cannot_run_here_is_said_and_exits_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Bench("engine", ["queue"], ("no_such_package",), "pip install 'rollq[cpu]'")
    monkeypatch.setattr(
        producer.bench.every, "BENCHES", (Bench("broken", ["no-such-bench"]), missing)
    )

    result = run_all("--json")

    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["load_before"] >= 0
    assert shown["failed"] == {
        "broken": "exit code 2: Error: No such command 'no-such-bench'.",
        "engine": "not installed: no_such_package; pip install 'rollq[cpu]'",
    }
    assert run_all("--only", "engine").exit_code == 1
    assert "no_such_package" in run_all("--only", "engine").stdout


def test_a_bench_or_baseline_that_is_not_there_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer.bench.every, "BENCHES", (Bench("queue", ["no-such-bench"]),))
    unknown = run_all("--only", "quue")
    assert unknown.exit_code == 2
    assert "no bench quue; there are queue" in unknown.stderr

    without = run_all("--check", "/nonexistent.json")
    assert isinstance(without.exception, RollqError)
    assert "rollq bench" not in without.stderr


def test_a_peer_is_installed_when_all_that_it_asks_for_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = peer_environments.Peer("arq", ("arq~=0.28",))
    assert not peer.installed
    assert peer_environments.compare("unix:///none", 64, 8, lambda: 1.0) == {}

    peer.home.mkdir(parents=True)
    (peer.home / "installed").write_text("arq~=0.27")
    assert not peer.installed
    (peer.home / "installed").write_text("arq~=0.28")
    assert peer.installed
    assert tmp_path in peer.home.parents


def test_a_peer_without_all_of_its_answers_is_not_measured() -> None:
    task_queues._check(["xx", "xx"], 2, 2)
    for answers in (["xx"], ["xx", "x"], ["xx", "xx", "xx"]):
        with pytest.raises(SystemExit, match="answers of 2"):
            task_queues._check(answers, 2, 2)
