"""What `rollq bench partial` makes of its runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from producer.bench.partial import Plan, flat
from producer.bench.partial_loop import POLICIES, SHAPES, Told, Work, draw_lengths, job_at
from producer.bench.partial_report import chart, figures, table

WORK = Work(
    np.array([4, 1, 1, 2, 4, 1, 1, 2]), 3, batch=2, update_every=2, slots=3, train_seconds=1
)


def told(seconds: float, delivered: list[int], waited: float = 4.0, wasted: int = 0) -> Told:
    gaps = [np.array([0] * 12 + [3] * 4)]
    return Told(seconds, waited, 3, wasted, 8, delivered, gaps)


def some_figures(
    wait_seconds: float = 8.0, seconds: float = 8.0
) -> dict[tuple[str, str], dict[str, float]]:
    runs = {
        ("lognormal", "wait"): told(wait_seconds, [1, 4, 1, 2, 1, 4, 1, 2], waited=4.5),
        ("lognormal", "restart"): told(seconds, [1, 1, 2, 1, 1, 2, 4, 4], waited=5.0, wasted=32),
    }
    return figures(runs, lambda shape: WORK, coarse=10, speed=2.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_have_the_same_mean_at_any_time(shape: str) -> None:
    lengths = draw_lengths(shape, 1024, 1000, block=128)
    blocks = lengths.reshape(8, 128)

    assert lengths.min() >= 1
    assert lengths.max() == 1000
    np.testing.assert_allclose(blocks.mean(1), lengths.mean(), rtol=0.05)
    assert np.median(lengths) < 0.7 * lengths.mean()
    assert (draw_lengths(shape, 1024, 1000, block=128) == lengths).all()
    # in no order within a block
    assert abs(np.corrcoef(np.arange(128), blocks.mean(0))[0, 1]) < 0.3


def test_reasoning_lengths_have_a_spike_at_the_end() -> None:
    lengths = draw_lengths("reasoning", 4096, 10_000, block=256)

    assert 0.04 < np.mean(lengths == 10_000) < 0.09
    assert np.mean(lengths > 9_000) - np.mean(lengths == 10_000) < 0.02


def test_a_synchronous_trainer_submits_what_an_update_needs_and_others_more() -> None:
    assert [WORK.stock("wait", step) for step in range(4)] == [4, 4, 8, 8]
    assert [WORK.stock("requeue", step) for step in range(3)] == [7, 8, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_what_is_to_start_again_does(policy: str) -> None:
    job = job_at(WORK, policy, 4)

    assert job.params.max_tokens == 4
    assert job.metadata == 4
    assert bool(job.params.stateful) == (policy == "restart")


def test_figures_are_of_what_was_simulated() -> None:
    found = some_figures(wait_seconds=16.0)["lognormal", "restart"]

    assert found["times_wait"] == 2.0
    assert found["seconds"] == 16.0
    assert found["tokens_per_second"] == 16 * 10 / 16
    assert found["share_thrown_away"] == 2.0
    assert found["share_prefilled_again"] == 0.5
    assert found["share_trainer_waits"] == 5 / 8
    assert found["share_trainer_other"] == 0.0  # it trains three times until the last batch
    assert found["staleness_mean"] == 0.75
    assert found["staleness_max"] == 3
    assert found["length_first_quarter"] == 1 / 2.5
    assert found["length_first_half"] == 1.25 / 2


def test_the_table_says_when_the_machine_was_too_busy() -> None:
    quiet = table(some_figures())

    assert "restart           1.00        10         200%        50%    62%" in quiet
    assert "busy" not in quiet
    assert "20% of a trainer's time" in table(some_figures(seconds=10.0))


def test_figures_are_named_by_shape_and_policy() -> None:
    assert flat(some_figures())["lognormal_restart_length_first_half"] == 0.625


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    chart(tmp_path / "chart.png", some_figures(), Plan().title)

    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policies": ("wait", "abort")}, "abort: there are wait, finish"),
        ({"shapes": ("uniform",)}, "uniform: there are lognormal"),
        ({"steps": 1}, "no update in 1 steps"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**settings)


def test_every_policy_is_run_by_default() -> None:
    assert len(Plan().cases) == len(POLICIES) * len(SHAPES)
