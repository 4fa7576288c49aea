"""`rollq doctor`: each thing that is not well is a line of its own that says what to do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import redis

from producer import RolloutClient
from producer.commands.doctor_redis import _PROBES, RIGHTS
from producer.server import EmbeddedServer
from tests.deploy.test_acl import (
    CONNECTING,
    LUA,
    SCRIPTS_OF,
    SENT_BY,
    allowed,
    commands_in,
    library,
    server,
    url_of,
)
from tests.deploy.test_acl import (
    rights as rules_of,
)
from tests.integration import contract
from tests.integration.commands import Rollq
from tests.integration.contract import Driver, job
from tests.integration.pool import Pool

__all__ = ["server"]  # a fixture: a server with the users of deploy/redis/users.acl


def checks(rollq: Rollq, *arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    """Name -> check; at least one has failed where `code` is 1."""
    result = rollq("doctor", "--json", "--role", "trainer", *arguments)
    assert result.exit_code == code, result.output
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert any(c["state"] == "fail" for c in found.values()) is (code == 1)
    assert all(c["todo"] for c in found.values() if c["state"] in ("warn", "fail"))
    return found


def test_all_is_well(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.commands.doctor_redis._SLOW_MS", math.inf)  # of a busy machine
    pool.publish()

    found = checks(Rollq(pool.url), "--weights-dir", pool.weights_dir)

    assert {name for name, check in found.items() if check["state"] != "ok"} == {"workers"}
    assert found["workers"]["found"] == "none is alive"
    assert "readable and writable" in found["weights dir"]["found"]
    assert "digest as published" in found["weights"]["found"]
    assert list(pool.weights_dir.iterdir()) == [pool.weights_dir / "q"]


def test_people_get_a_line_a_check_and_what_to_do(pool: Pool) -> None:
    result = Rollq(pool.url)("doctor", "--role", "trainer")

    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok    redis        answers at unix://")
    assert "WARN  workers      none is alive" in lines
    assert "                   → start one: rollq worker MODEL" in lines


def test_it_leaves_no_key_behind(redis_url: str, redis_client: redis.Redis) -> None:
    found = checks(Rollq(redis_url))

    assert redis_client.dbsize() == 0
    assert found["queue"]["state"] == "warn"


def test_groups_without_rewards_need_somebody_to_grade_them(driver: Driver) -> None:
    driver.enqueue(job(reward="m:f"))
    driver.complete(driver.claim_one())

    found = checks(Rollq(driver.queue.url))

    assert found["queue"]["found"].endswith("0 closed, 1 wait for rewards")
    assert (found["rewards"]["state"], found["rewards"]["found"]) == (
        "warn",
        "1 group not graded yet",
    )
    assert " rq worker -c producer.rewards.settings " in found["rewards"]["todo"]
    driver.send(contract.grade("g", driver.group()["digest"]))
    driver.send(contract.graded("g", driver.group()["digest"], rewards=[1.0]))
    assert "rewards" not in checks(Rollq(driver.queue.url))


@pytest.mark.parametrize(
    ("setting", "value", "name", "state"),
    [
        ("maxmemory-policy", "allkeys-lru", "eviction", "fail"),
        ("maxmemory-policy", "noeviction", "eviction", "ok"),
        ("appendonly", "no", "persistence", "warn"),
    ],
)
def test_a_wrong_setting_of_the_server(
    own_server: EmbeddedServer, setting: str, value: str, name: str, state: str
) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        admin.config_set("maxmemory", 2**30)
        admin.config_set(setting, value)

    found = checks(Rollq(own_server.url), code=int(state == "fail"))

    assert found[name]["state"] == state


def test_a_replica_takes_no_writes(own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        admin.replicaof("127.0.0.1", 1)

    assert checks(Rollq(own_server.url), code=1)["role"]["state"] == "fail"


def test_a_redis_that_is_away_is_the_one_thing_said_of_it(tmp_path: Path) -> None:
    found = checks(Rollq(f"unix://{tmp_path}/none.sock"), "--weights-dir", tmp_path, code=1)

    assert set(found) == {"redis", "weights dir"}
    assert "No such file or directory" in found["redis"]["found"]


def test_a_refused_password_is_said_to_be_that(server: EmbeddedServer) -> None:
    url = url_of(server, "trainer").replace("change-me", "wrong")

    found = checks(Rollq(url), code=1)["redis"]

    assert "the password is refused" in found["todo"]
    assert "start it" not in found["todo"]


# rights


@pytest.mark.parametrize("role", sorted(RIGHTS))
def test_the_rights_it_asks_for_are_granted_and_are_all_that_the_scripts_need(role: str) -> None:
    rights = set(RIGHTS[role].split())
    functions = library()
    scripts = [(LUA / f"{name}.lua").read_text() for name in SCRIPTS_OF.get(role, "").split()]
    needed = set[str]().union(*(commands_in(text, functions) for text in scripts))

    assert needed | SENT_BY.get(role, set()) <= rights <= allowed(rules_of(role)[0]) - CONNECTING
    assert rights <= set(_PROBES)


@pytest.mark.parametrize("role", sorted(RIGHTS))
def test_each_role_has_its_rights(
    server: EmbeddedServer, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing_vllm(monkeypatch, "print('vllm 1')")  # the real one takes half a minute and more

    found = checks(Rollq(url_of(server, role)), "--role", role)

    assert found["rights"]["state"] == "ok"
    assert found["clock"]["state"] == "ok"


def test_rights_that_are_missing_are_named(server: EmbeddedServer) -> None:
    found = checks(Rollq(url_of(server, "monitor")), code=1)

    assert found["rights"]["state"] == "fail"
    assert " +evalsha +script|load " in found["rights"]["todo"]
    assert "+zcard" not in found["rights"]["todo"]


def test_status_and_top_need_no_more_than_the_monitor_may(server: EmbeddedServer) -> None:
    RolloutClient(url_of(server, "trainer"), "q").close()
    rollq = Rollq(url_of(server, "monitor"))

    assert json.loads(rollq.ok("status", "--json"))["ready"] == 0
    assert json.loads(rollq.ok("top", "--json"))["in_flight"]["looked_at"] == 0


# weights


def test_weights_that_are_not_what_was_published(pool: Pool) -> None:
    pool.publish()
    rollq = Rollq(pool.url)
    arguments = ("--weights-dir", pool.weights_dir)
    (file,) = pool.weights_dir.glob("q/*/model.safetensors")
    content = file.read_bytes()

    file.write_bytes(content[:-1] + b"X")
    assert "does not have the digest" in checks(rollq, *arguments, code=1)["weights"]["found"]
    assert checks(rollq, *arguments, "--no-digest")["weights"]["state"] == "ok"

    file.unlink()
    assert "cannot be read" in checks(rollq, *arguments, code=1)["weights"]["found"]

    elsewhere = checks(rollq, "--weights-dir", pool.directory, code=1)["weights"]
    assert "rollq-manifest.json cannot be read" in elsewhere["found"]
    assert "is it the directory that the trainer publishes to" in elsewhere["todo"]


def test_a_weights_directory_that_is_none(pool: Pool) -> None:
    rollq = Rollq(pool.url)

    assert checks(rollq)["weights dir"]["state"] == "warn"
    missing = checks(rollq, "--weights-dir", pool.directory / "no", code=1)["weights dir"]
    assert missing["found"] == f"{pool.directory / 'no'} is no directory here"


# this machine


def importing_vllm(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """vLLM is installed, and its import is this."""
    monkeypatch.setattr("producer.commands.doctor_host.find_spec", lambda name: object())
    monkeypatch.setattr("producer.commands.doctor_host._IMPORT", code)


@pytest.mark.parametrize(
    ("files", "state", "reason"),
    [
        (["config.json", "model.safetensors", "tokenizer_config.json"], "ok", "1 files"),
        (["config.json", "model.safetensors"], "warn", "has no tokenizer"),
        (["config.json"], "fail", "no config.json with safetensors"),
    ],
)
def test_a_model_directory(
    pool: Pool, tmp_path: Path, files: list[str], state: str, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    for name in files:
        (model / name).touch()
    importing_vllm(monkeypatch, "print('vllm 1')")

    found = checks(Rollq(pool.url), "--role", "worker", "--model", model, code=state == "fail")

    assert (found["model"]["state"], reason in found["model"]["found"]) == (state, True)
    assert found["vllm"]["found"] == "imports: vllm 1"


def test_a_vllm_that_cannot_be_imported(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    importing_vllm(monkeypatch, "raise RuntimeError('operator torchvision::nms does not exist')")

    found = checks(Rollq(pool.url), "--role", "worker", code=1)["vllm"]

    assert found["state"] == "fail"
    assert "torchvision::nms does not exist" in found["found"]
