"""Every key name, spelled by hand: operators and `redis-cli` know them by these."""

from __future__ import annotations

import pytest

from producer.contract.errors import InvalidSample
from producer.contract.keys import (
    NAMES,
    TRAINER_GROUP,
    QueueKeys,
    check_group_id,
    rewards_queue,
    sample_id,
    split_sample_id,
)
from workers.settings import WorkerSettings

KEYS = {
    "ready": "rollq:{grpo}:ready",
    "leases": "rollq:{grpo}:leases",
    "sample": "rollq:{grpo}:sample:",
    "chunks": "rollq:{grpo}:chunks:",
    "group": "rollq:{grpo}:group:",
    "results": "rollq:{grpo}:results",
    "grading": "rollq:{grpo}:grading",
    "done": "rollq:{grpo}:done:",
    "dead": "rollq:{grpo}:dead",
    "weights": "rollq:{grpo}:weights",
    "updates": "rollq:{grpo}:updates",
    "turns": "rollq:{grpo}:turns",
    "line": "rollq:{grpo}:line",
    "turn": "rollq:{grpo}:turn:",
    "workers": "rollq:{grpo}:workers",
    "starting": "rollq:{grpo}:starting",
    "worker": "rollq:{grpo}:worker:",
    "trainers": "rollq:{grpo}:trainers",
    "request": "rollq:{grpo}:request:",
    "stats": "rollq:{grpo}:stats",
    "config": "rollq:{grpo}:config",
}


def test_every_name_is_spelled_here() -> None:
    keys = QueueKeys("grpo")

    assert {name: keys[name] for name in NAMES} == KEYS


def test_keys_of_one_thing() -> None:
    keys = QueueKeys("grpo")

    assert keys.sample("g/0") == "rollq:{grpo}:sample:g/0"
    assert keys.chunks("g/0") == "rollq:{grpo}:chunks:g/0"
    assert keys.group("g") == "rollq:{grpo}:group:g"
    assert keys.worker("host-1") == "rollq:{grpo}:worker:host-1"
    assert keys.turn("host-1") == "rollq:{grpo}:turn:host-1"
    assert TRAINER_GROUP == "trainer"
    assert rewards_queue("grpo") == "rollq-rewards-grpo"


def test_an_unknown_name_is_no_key() -> None:
    with pytest.raises(KeyError):
        QueueKeys("grpo")["redy"]


@pytest.mark.parametrize("name", ["default", "a", "A-b_c.9", "x" * 64])
def test_queue_names(name: str) -> None:
    assert QueueKeys(name)["ready"] == f"rollq:{{{name}}}:ready"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a}b", "{a}", "a\n", "ä", "x" * 65])
def test_bad_queue_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSample, match="queue name"):
        QueueKeys(name)


@pytest.mark.parametrize("group", ["g", "step-12:0", "a=b+c@d.e_f", "x" * 128])
def test_group_ids(group: str) -> None:
    assert check_group_id(group) == group


@pytest.mark.parametrize("group", ["", "a/0", "a b", "a\n", "a{b}", "é", "x" * 129, b"g", 5, None])
def test_bad_group_ids_are_refused_by_name(group: str) -> None:
    with pytest.raises(InvalidSample, match="group id"):
        check_group_id(group)


def test_a_sample_id_tells_its_group_and_index() -> None:
    assert sample_id("step:1", 7) == "step:1/7"
    assert split_sample_id("step:1/7") == ("step:1", 7)
    assert split_sample_id("step:1") == ("step:1", None)


def test_a_worker_with_a_name_that_lists_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidSample, match="worker name 'a,b' must be"):
        WorkerSettings(url="unix:///x", name="a,b")
