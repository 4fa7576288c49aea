"""`rollq bench engine` on real vLLM: both ways make the same work. No speed is judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_bench_engine() -> None:
    command = [sys.executable, "-m", "producer.cli", "bench", "engine", "--json"]
    command += ["--groups", "2", "--tokens", "32", "--concurrency", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    figures: dict[str, float] = json.loads(done.stdout)

    assert figures["pool_tokens_per_second"] > 0
    assert figures["share_of_bare_least"] == figures["share_of_bare"] > 0
    # The same tokens, of which a step makes one a sample.
    assert 0.7 < figures["share_of_bare_steps"] < 1.3
    assert figures["pool_host_cpu_us_per_token"] >= figures["pool_loop_cpu_us_per_token"] > 0
