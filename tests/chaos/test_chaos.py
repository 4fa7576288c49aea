"""A short chaos run; `make chaos` runs longer ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from producer.server import Prefer
from tests.chaos.auditor import Auditor
from tests.chaos.board import Board
from tests.chaos.board import read as read_board
from tests.chaos.director import Evidence, Plan, Restore
from tests.chaos.events import DECK, schedule
from tests.chaos.run import run, table
from tests.chaos.tokens import Flat
from tests.chaos.trainer import Journal
from tests.chaos.work import SIM, Work
from workers import resume
from workers.engines import sim_model


@pytest.mark.timeout(900)
def test_a_pool_under_chaos_loses_and_doubles_nothing(tmp_path: Path, server_kind: Prefer) -> None:
    plan = Plan(seed=7, seconds=15.0, workers=3, gap=0.4, poison=0.002, prefer=server_kind)

    report = run(plan, tmp_path)

    assert report.sound, f"{table(report)}\nlogs are in {tmp_path}"
    assert int(str(report.facts["samples"])) > 500


def test_the_same_seed_gives_the_same_events_and_work() -> None:
    first, again, other = (schedule(seed, 0.5) for seed in (3, 3, 4))
    events = [next(first) for _ in range(sum(DECK.values()))]

    assert events == [next(again) for _ in events]
    assert events != [next(other) for _ in events]
    assert {e.kind for e in events} == DECK.keys()
    assert Work(3).slice(5) == Work(3).slice(5)
    assert Work(3).slice(5) != Work(4).slice(5)


def test_a_board_shows_the_newest_requests_of_a_process_that_is_gone(tmp_path: Path) -> None:
    board = Board(tmp_path / "w.board")
    for number in range(300):
        board.note(f"g{number}/0-2-ab", 5)
        board.note(f"g{number}/0-2-ab", number)

    found = read_board(tmp_path / "w.board")

    assert sorted(found.values()) == list(range(44, 300))
    assert found[("g299/0", 2)] == 299
    assert read_board(tmp_path / "none") == {}


@pytest.mark.parametrize("case", ["no restore", "taker lives", "taker died", "ack was kept"])
def test_the_auditor_forgives_a_second_delivery_only_where_nobody_knew(
    tmp_path: Path, case: str
) -> None:
    def say(rank: int, what: str, at: float, **facts: object) -> None:
        with Journal(tmp_path, rank).lines.open("a") as log:
            log.write(json.dumps({"what": what, "at": at, **facts}) + "\n")

    for rank in (0, 1):
        say(rank, "start", 0.0)
        Journal(tmp_path, rank).arrays.touch()
    say(0, "shown", 10.0, id="g000001")
    say(0, "acked", 11.0, ids=["g000001"])
    if case != "taker died":
        say(0, "submit", 60.0, slice=0)
    say(1, "shown", 20.0, id="g000001")
    evidence = Evidence()
    if case != "no restore":
        evidence.restores = [Restore(12.5 if case == "ack was kept" else 10.5, 13.0, 13.5)]
    auditor = Auditor(tmp_path, Work(1), evidence, redis.Redis())

    verdicts = {v.name: v for v in auditor._twice()}

    broken = verdicts["none twice by id"].broken
    assert len(broken) == (0 if case == "taker died" else 1)
    assert verdicts["none twice to a process"].broken == []


def test_the_auditor_sees_one_wrong_token_label_or_logprob() -> None:
    """Two attempts of a seeded sample under two versions, then each harm that may be done."""
    prompt, seed, versions = [7, 8, 9], 5, [1, 1, 1, 4, 4]
    model = SIM.model()
    ids, logprobs = sim_model.replay(model, prompt, versions[:3], seed=resume._seed(seed, 0, 0))
    rest = sim_model.replay(model, prompt + ids, versions[3:], seed=resume._seed(seed, 0, 3))
    sound = np.array([ids + rest[0], versions], np.int32)
    numbers = np.array(logprobs + rest[1], np.float32)

    def wrong(arrays: NDArray[np.int32], numbers: NDArray[np.float32]) -> list[str]:
        flat = Flat()
        rollout = {
            "id": "g/0",
            "lengths": [5],
            "reason": "length",
            "state": "finished",
            "text": sim_model.decode(arrays[0], skip_special_tokens=True),
            "segments": [[1, 3, 1], [4, 2, 2]],
        }
        for _ in range(2):  # the second is checked behind another
            flat.add_group([rollout], arrays.tobytes() + numbers.tobytes(), seed, prompt)
        return flat.wrong()

    assert wrong(sound, numbers) == []
    for row, column in ((0, 0), (0, 4), (1, 2), (1, 3)):
        harmed = sound.copy()
        harmed[row, column] += 1
        assert wrong(harmed, numbers), f"{row}, {column}"
    assert wrong(sound, numbers * np.float32(1.001))
