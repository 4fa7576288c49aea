"""`rollq bench partial` runs, and its policies do what they say: no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_bench_partial(tmp_path: Path) -> None:
    """Slow enough for samples to be in flight at the one update, whatever the machine does."""
    chart = tmp_path / "chart.png"
    policies = [a for p in ("wait", "restart", "keep", "requeue") for a in ("--policy", p)]
    command = [sys.executable, "-m", "producer.cli", "bench", "partial", "--json", *policies]
    command += ["--shape", "lognormal", "--steps", "4", "--batch", "16", "--slots", "8"]
    command += ["--longest", "8192", "--speed", "12", "--train-seconds", "0", "--chart", str(chart)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    figures: dict[str, float] = json.loads(done.stdout)

    def of(policy: str, *names: str) -> list[float]:
        return [figures[f"lognormal_{policy}_{name}"] for name in names]

    assert of("wait", "times_wait", "staleness_max", "length_first_half") == [1, 0, 1]
    assert of("wait", "share_thrown_away", "share_prefilled_again") == [0, 0]
    assert of("keep", "updates", "share_thrown_away") == [1, 0]
    assert of("requeue", "updates", "share_thrown_away") == [1, 0]
    assert figures["lognormal_restart_share_thrown_away"] > 0
    for policy in ("keep", "requeue"):
        assert min(of(policy, "share_prefilled_again", "staleness_max")) > 0
    assert chart.stat().st_size > 0
