"""`rollq bench all` on a real Redis, with a tiny `queue`; and the peers that are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import producer.bench.every
from producer.bench.cli import bench
from producer.bench.peer_environments import PEERS, Peer
from producer.bench.suite import Bench
from producer.contract.errors import RollqError


def test_a_run_is_saved_and_the_next_says_what_became_worse(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Bench("queue", ["queue", "--samples", "512", "--rounds", "1"])
    monkeypatch.setattr(producer.bench.every, "BENCHES", (tiny,))
    path, run = tmp_path / "baseline.json", ["all", "--redis", redis_url]

    saved = CliRunner().invoke(bench, [*run, "--save", str(path), "--json"])

    figures = json.loads(saved.stdout)["figures"]["queue"]
    baseline = json.loads(path.read_text())
    [kept] = baseline["runs"]
    assert kept["queue"]["commands_per_sample"] == pytest.approx(
        figures["commands_per_sample"], rel=1e-3
    )
    assert "samples_per_second" not in kept["queue"]
    assert saved.exit_code == 1  # the peers leave keys behind, so were not measured here

    # As if all had been bad but the commands, of which there was one a sample.
    kept["queue"] = {name: 1e-3 if "_of_" in name or "times" in name else 1e6 for name in figures}
    kept["queue"]["commands_per_sample"] = 1.0
    path.write_text(json.dumps(baseline))
    checked = CliRunner().invoke(bench, [*run, "--check", str(path), "--json"])

    changes = json.loads(checked.stdout)["changes"]
    assert [c["figure"] for c in changes if c["verdict"] == "worse"] == [
        "queue.commands_per_sample"
    ]
    assert {c["verdict"] for c in changes} == {"worse", "better"}
    assert "worse: queue commands_per_sample was 1, is 2" in checked.stderr
    assert checked.exit_code == 1


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_gives_every_answer_back(peer: Peer, redis_url: str) -> None:
    if not peer.installed:
        pytest.skip(f"{peer.name} is not installed; rollq bench peers --install")

    assert peer.rate(redis_url, 64, 8000) > 0


def test_a_peer_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = Peer("celery", ())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", peer.home], check=True)

    with pytest.raises(RollqError, match="celery failed: ModuleNotFoundError"):
        peer.rate("unix:///none", 1, 1)
