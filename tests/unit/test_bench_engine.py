"""What `rollq bench engine` makes of what it measured."""

from __future__ import annotations

import pytest

from producer.bench.engine import Load, Round, figures, prompts_for

CPU = {"host": 0.1, "loop": 0.05, "core": 0.8, "trainer": 0.06, "redis": 0.04}


def test_a_slower_pool_has_a_share_below_one() -> None:
    pool = [Round(2.0, 110, CPU, 30.0), Round(4.0, 110, CPU, 10.0), Round(2.0, 110, CPU, 20.0)]
    bare = [Round(1.0, 99, {**CPU, "trainer": 0.0, "redis": 0.0}) for _ in range(3)]

    found = figures(1000, pool, bare)

    assert found["pool_tokens_per_second"] == 500
    assert found["bare_tokens_per_second"] == 1000
    assert found["share_of_bare"] == 0.5
    assert found["share_of_bare_least"] == 0.25
    assert found["share_of_bare_most"] == 0.5
    assert found["share_of_bare_cpu"] == pytest.approx(0.9)
    assert found["share_of_bare_steps"] == 0.9
    assert found["share_loop_busy"] == 0.025
    assert found["pool_start_ms"] == 20
    assert found["pool_core_cpu_us_per_token"] == pytest.approx(800)
    assert found["bare_host_cpu_us_per_token"] == pytest.approx(100)


def test_both_ways_and_all_runs_have_the_same_prompts() -> None:
    prompts, lengths = prompts_for("tiny", Load(groups=64, tokens=100, concurrency=8))

    assert (prompts, lengths) == prompts_for("tiny", Load(64, 100, 1))
    assert len(prompts) == len(lengths) == 64
    assert len(set(map(tuple, prompts))) == 64
    assert all(0 < i < 512 for prompt in prompts for i in prompt)
    assert 50 <= min(lengths) < 70
    assert 130 < max(lengths) <= 150
