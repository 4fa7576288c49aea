"""`rollq bench partial` runs, and its policies are what they say: no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from producer.aio import AsyncRolloutClient
from producer.bench.partial_loop import publish
from producer.demo.trainers import write_safetensors


@pytest.mark.timeout(240)
def test_bench_partial(tmp_path: Path) -> None:
    """What depends on how many samples are in flight at the one update is not judged either."""
    chart = tmp_path / "chart.png"
    policies = [a for p in ("wait", "restart", "keep", "requeue") for a in ("--policy", p)]
    command = [sys.executable, "-m", "producer.cli", "bench", "partial", "--json", *policies]
    command += ["--shape", "lognormal", "--steps", "4", "--batch", "16", "--slots", "8"]
    command += ["--longest", "4096", "--speed", "12", "--train-seconds", "0"]
    command += ["--chart", str(chart)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    figures: dict[str, float] = json.loads(done.stdout)

    def of(policy: str, *names: str) -> list[float]:
        return [figures[f"lognormal_{policy}_{name}"] for name in names]

    assert of("wait", "times_wait", "staleness_max", "length_first_half") == [1, 0, 1]
    assert of("wait", "share_thrown_away", "share_prefilled_again") == [0, 0]
    for policy in ("keep", "requeue"):
        assert of(policy, "updates", "share_thrown_away") == [1, 0]
        assert of(policy, "tokens_per_second")[0] > 0
    assert chart.stat().st_size > 0


@pytest.mark.parametrize(
    ("policy", "published"),
    [("finish", "finish"), ("restart", "requeue"), ("keep", "keep"), ("requeue", "requeue")],
)
async def test_an_update_has_the_policy_of_the_case(
    redis_url: str, tmp_path: Path, policy: str, published: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", "none", np.zeros(1, np.int32))
    (tmp_path / "weights").mkdir()
    async with AsyncRolloutClient(redis_url, "q", weights_dir=tmp_path / "weights") as client:
        await publish(client, policy, tmp_path, 1)

        status = await client.status()
    assert status.of_version(1, "policy") == published
