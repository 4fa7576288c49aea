"""A short chaos run; `make chaos` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from producer.server import Prefer
from tests.chaos.director import Plan
from tests.chaos.events import DECK, schedule
from tests.chaos.run import run, table
from tests.chaos.tokens import Flat
from tests.chaos.work import SIM, Work
from workers import resume
from workers.engines import sim_model


@pytest.mark.timeout(240)
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
