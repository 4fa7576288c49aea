"""The fleet bench plays workers: what it sends is counted, what it costs is not judged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from click.testing import CliRunner

from producer.bench.cli import bench
from producer.bench.fleet import Pool, ending, generating, open_pool
from producer.contract.states import State
from producer.pipeline import read_status


def test_every_part_says_its_figures_and_nothing_stays_behind(redis_url: str) -> None:
    sizes = {"workers": 2, "samples": 8, "tokens": 64, "rate": 64, "length": 128}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    ran = CliRunner().invoke(bench, ["fleet", "--redis", redis_url, "--no-proof", *options])

    assert ran.exit_code == 0, ran.output
    lines, table = ran.output.split("\n\n")
    figures = {
        name: float(value.replace(",", "")) for name, value in map(str.split, lines.splitlines())
    }
    assert figures["samples_in_flight"] == 2 * 8
    assert figures["update_asks_per_worker"] >= 1
    assert figures["of_1_workers_tokens_per_second"] > 0
    assert table.splitlines()[-1].split()[0] == "128"
    workers = float(table.splitlines()[-1].split()[1].replace(",", ""))
    assert workers == round(figures["workers_at_128_tokens"])
    with redis.Redis.from_url(redis_url) as server:
        assert [key for key in server.scan_iter() if server.ttl(key) < 0] == []


def test_a_played_worker_reports_and_beats_as_often_as_a_real_one(redis_url: str) -> None:
    """64 samples at 64 tokens a second: each stores a chunk of 64 tokens once a second."""
    with open_pool(redis_url, 1, 64, 64.0) as pool:
        figures = generating(pool)
        beats = 3  # heartbeat, reap, due; and leases are renewed after a quarter of 30 s
        status = read_status(pool.queue)
        chunks = pool.queue.redis.llen(pool.queue.keys.chunks(f"{pool.trainer.ids[0]}/0"))

    assert beats < figures["scripts_per_worker_second"] <= 64 + beats + 1
    # 8 bytes a token, and what names the chunk, its sample and its lease
    assert 8 < figures["bytes_in_per_token"] < 14
    # what it came to in half a second and four more, but for what is not due yet
    assert 4 <= chunks <= 5
    assert 64 * 64 * 4 < status.stats["tokens"] < 64 * 64 * 5
    assert status.workers[0].in_flight == 64


def test_samples_end_as_a_trainer_wants_them(redis_url: str) -> None:
    """Two calls, a finish and a claim; those of the trainer are of many samples each."""
    figures = ending(redis_url, 256, 50.0)

    assert 2 <= figures["scripts_per_sample"] < 2.2
    # chunks of 8 bytes a token, and 4 bytes of text
    assert 12 < figures["bytes_out_per_token"] < 24


@pytest.fixture
def pool(redis_url: str) -> Iterator[Pool]:
    with open_pool(redis_url, 3, 16, 50.0) as opened:
        yield opened


def test_a_fleet_hands_everything_back_and_claims_it_again(pool: Pool) -> None:
    fleet = pool.fleet
    fleet.claim(range(3))
    fleet.store(64)
    fleet.release(range(3))

    assert read_status(pool.queue).ready == 3 * 16
    fleet.claim(range(3))
    fleet.store(64)
    status = read_status(pool.queue)
    assert (status.ready, status.leased, status.stats["tokens"]) == (0, 3 * 16, 2 * 64 * 3 * 16)
    sample = pool.queue.keys.sample(f"{pool.trainer.ids[0]}/0")
    assert pool.queue.redis.hget(sample, "state") == State.LEASED.encode()
