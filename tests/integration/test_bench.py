"""The benches run, and count what they say: no figure that depends on the machine is judged."""

from __future__ import annotations

import json
import subprocess
import sys


def bench(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "producer.cli", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def test_bench_queue() -> None:
    """At most three commands a sample, and 8.5 bytes a token with its logprob."""
    figures = bench("queue", "--samples", "512", "--rounds", "1", "--no-peers")

    assert figures["samples_per_second"] > 0
    assert 2 < figures["commands_per_sample"] <= 3
    assert 8 < figures["bytes_per_token"] <= 8.5


def test_bench_interrupt() -> None:
    figures = bench("interrupt", "--samples", "32")

    assert figures["interrupt_ms"] >= figures["release_ms"] > 0
