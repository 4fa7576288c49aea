"""Rewards without Redis: what a function may be and answer, and what is ready to use."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.contract.errors import InvalidPayload, QueueUnusable, RewardError
from producer.contract.rewards import JOB, Serializer, read_rewards
from producer.rewards import allowed, graders, settings
from producer.rewards.job import check_rewards
from tests.waiting import DEADLINE_S

# what a function answers


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ((True, False), [1.0, 0.0]),
        (np.array([1, 2], np.int64), [1.0, 2.0]),
        ([np.float32(0.5), np.int64(2)], [0.5, 2.0]),
        (
            [{"score": np.float64(1), "why": "exact", "ok": np.bool_(True)}, {"score": 0}],
            [{"score": 1.0, "why": "exact", "ok": True}, {"score": 0.0}],
        ),
    ],
)
def test_numbers_and_dicts_are_rewards(answer: Any, rewards: list[Any]) -> None:
    assert check_rewards(answer, 2, "m:f") == rewards


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "returned a NoneType, not a list"),
        (1.0, "returned a float, not a list"),
        ("12", "returned a str, not a list"),
        ({0: 1.0, 1: 2.0}, "returned a dict, not a list"),
        ([1.0], "returned 1 rewards for 2 rollouts"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 rollouts"),
        (np.ones((2, 2)), "rollout 0 is a list, not a number"),
        ([1.0, math.nan], "rollout 1 is nan, not a finite number"),
        ([math.inf, 1.0], "rollout 0 is inf"),
        ([1.0, "good"], "rollout 1 is a str, not a number"),
        ([1.0, None], "rollout 1 is a NoneType"),
        ([1.0, 2j], "rollout 1 is a complex"),
        ([1.0, {}], "rollout 1 is a dict without names"),
        ([1.0, {1: 2.0}], "rollout 1 is a dict without names"),
        ([1.0, {"a": math.nan}], "rollout 1, 'a', is nan"),
        ([1.0, {"a": [1]}], "rollout 1, 'a', is a list"),
    ],
)
def test_nonsense_is_an_error_with_words(answer: Any, words: str) -> None:
    with pytest.raises(RewardError, match=f"^m:f.*{words}"):
        check_rewards(answer, 2, "m:f")


def test_stored_rewards_that_are_none_are_refused() -> None:
    data = Serializer.dumps([1.0, {"a": 2.0}])
    assert read_rewards(data, 2, "g") == [1.0, {"a": 2.0}]
    for bad in (Serializer.dumps([1.0]), Serializer.dumps({"a": 1}), b"\xc1", b"\x80\x04."):
        with pytest.raises(InvalidPayload, match="rewards of g"):
            read_rewards(bad, 2, "g")


# which functions may run


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda names: monkeypatch.setenv(allowed.MODULES, names)


def test_a_module_or_its_package_is_allowed(allow: Any) -> None:
    for names in ("json.decoder", "json", " csv , json "):
        allow(names)
        assert callable(allowed.find("json.decoder:JSONDecoder"))


@pytest.mark.parametrize("names", ["", "js", "jsonx", "json.decoders", "json.decoder.x", ",,"])
def test_no_other_module_is(allow: Any, names: str) -> None:
    allow(names)
    with pytest.raises(
        RewardError, match=r"not allowed here: .*ROLLQ_REWARD_MODULES=json\.decoder"
    ):
        allowed.find("json.decoder:JSONDecoder")


def test_what_an_allowed_module_imported_is_not_its_own(allow: Any) -> None:
    allow("tests.unit.test_rewards")
    with pytest.raises(RewardError, match="of the module pathlib, which is not allowed"):
        allowed.find("tests.unit.test_rewards:Path")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("json:nothing", "cannot be imported: .*nothing"),
        ("json.nowhere:f", "cannot be imported: .*nowhere"),
        ("json.scanner:NUMBER_RE", "is no function"),
    ],
)
def test_what_is_no_function_is_said(allow: Any, reward: str, words: str) -> None:
    allow("json")
    with pytest.raises(RewardError, match=words):
        allowed.find(reward)


def test_a_module_that_cannot_be_preloaded_is_said(
    allow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    allow("json,nowhere.at.all")
    with caplog.at_level(logging.WARNING, "rollq"):
        allowed.preload()
    assert "nowhere.at.all cannot be imported" in caplog.text


@pytest.mark.parametrize(
    ("modules", "options", "says"),
    [
        ("json,nowhere.at.all", ["--serializer", "producer.rewards.Serializer"],
         "ROLLQ_REWARD_MODULES: nowhere.at.all cannot be imported: ModuleNotFoundError"),
        ("json", [], "rq worker would unpickle what it reads: add --serializer producer.rewards.S"),
        ("json", ["-S", "json"], "rq worker would unpickle what it reads"),
    ],
)  # fmt: skip
def test_a_worker_that_would_do_harm_does_not_start(
    modules: str, options: list[str], says: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rq.cli", "worker", "-c", "producer.rewards.settings", *options],
        env={**os.environ, allowed.MODULES: modules, "ROLLQ_REDIS_URL": "unix:///nowhere.sock"},
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_what_jobs_need_is_there_before_the_fork() -> None:
    """Each job runs in a fork of the process that imported the serializer."""
    code = "import sys, producer.rewards; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, allowed.MODULES: "tests.integration.reward_functions"},
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip

    assert {
        "producer.rewards.job",
        "producer.rewards.graders",
        "tests.integration.reward_functions",
    } <= set(loaded)


# what RQ may read


@pytest.mark.parametrize(
    "call",
    [
        ["os.system", None, ["true"], {}],
        [JOB, "producer.rewards", ["q", "g", "d"], {}],
        [JOB, None, ["q", "g", "d"], {"more": 1}],
        [JOB, None, ["q", "g", "d"]],
        [],
    ],
)
def test_the_serializer_reads_no_other_call(call: list[Any]) -> None:
    with pytest.raises(InvalidPayload, match=r"may call producer\.rewards\.job\.grade and nothing"):
        Serializer.loads(Serializer.dumps(call))


@pytest.mark.parametrize("value", [None, {}, {"meta": 1}, [JOB, None, ["q", "g", "d"], {}]])
def test_what_rq_writes_is_read(value: Any) -> None:
    assert Serializer.loads(Serializer.dumps(value)) == value


# where RQ is


@pytest.mark.parametrize(
    ("url", "rq_url"),
    [
        ("redis://host:6379/2", "redis://:p%40ss@host:6379/2"),
        ("rediss://rewards@host:6379", "rediss://rewards:p%40ss@host:6379"),
        ("unix:///run/redis.sock", "unix://:p%40ss@/run/redis.sock"),
    ],
)
def test_rq_gets_the_password_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, rq_url: str
) -> None:
    monkeypatch.setenv("ROLLQ_REDIS_URL", url)
    monkeypatch.delenv("ROLLQ_REWARDS_URL", raising=False)
    assert settings._url() == url
    monkeypatch.setenv("ROLLQ_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    with pytest.raises(QueueUnusable, match="cannot be read"):
        settings._url()
    (tmp_path / "password").write_text("p@ss\n")
    assert settings._url() == rq_url
    monkeypatch.setenv("ROLLQ_REWARDS_URL", "redis://other")
    assert settings._url() == "redis://:p%40ss@other"


# graders


@dataclass
class Said:
    """As much of a rollout as graders look at."""

    text: str


def said(*texts: str) -> Sequence[Any]:
    return [Said(text) for text in texts]


def test_exact_match() -> None:
    texts = said("42", " 42\n", "420", "", "The answer is 42")

    assert graders.exact_match(texts, {"answer": "42 "}) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert graders.exact_match(texts, {"answer": 42}) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("answer", ["1/2", "\\frac{1}{2}", "$0.5$", "\\boxed{\\frac{2}{4}}", 0.5])
def test_math_answer(answer: Any) -> None:
    pytest.importorskip("math_verify")
    texts = said("So it is $\\frac{1}{2}$.", "\\boxed{0.5}", "0.50", "It is 2.", "no idea", "")

    assert graders.math_answer(texts, {"answer": answer}) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_math_answer_leaves_the_alarm_of_rq_on() -> None:
    pytest.importorskip("math_verify")
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        signal.alarm(1000)
        graders.math_answer(said("\\boxed{1}"), {"answer": "1"})
        assert 900 < signal.alarm(0) <= 1000
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("grader", [graders.exact_match, graders.math_answer])
@pytest.mark.parametrize("metadata", [None, {}, {"answer": None}, {"answer": True}, "42"])
def test_a_group_without_an_answer_is_an_error(grader: Any, metadata: Any) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="no `answer`"):
        grader(said("42"), metadata)


def test_an_answer_that_is_no_mathematics_is_an_error() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="no mathematical expression"):
        graders.math_answer(said("1"), {"answer": " "})
