"""`rollq enqueue`: what becomes of each kind of line, and what is said of a bad one."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from producer.commands.enqueue import enqueue
from producer.contract.codec import unpack_ids
from producer.contract.messages import Claim, read_job
from producer.contract.sampling import SamplingParams
from tests.integration.commands import Rollq, write_lines
from tests.integration.conftest import OpenDriver
from tests.integration.contract import Driver, ack
from tests.waiting import DEADLINE_S, wait_until

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def rollq(driver: Driver) -> Rollq:
    return Rollq(driver.queue.url)


def batch_line(custom_id: str = "r-1", url: str = "/v1/chat/completions", **body: Any) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line)


def told(claim: Claim) -> tuple[Any, Any, SamplingParams]:
    """Prompt or its ids, metadata and parameters of a claimed sample."""
    prompt, params, metadata = read_job(claim.job, claim.id)
    ids = unpack_ids(claim.prompt_ids, "prompt").tolist()
    return ids or prompt, metadata, params


# kinds of lines


@pytest.mark.parametrize(
    ("line", "prompt", "metadata"),
    [
        ('"a text"', "a text", None),
        ("[1, 2, 3]", [1, 2, 3], None),
        (json.dumps(CHAT), CHAT, None),
        ('{"prompt": "hi"}', "hi", None),
        ('{"prompt": "hi", "answer": 42, "id": 7}', "hi", {"answer": 42, "id": 7}),
        ('{"prompt": "hi", "metadata": [1]}', "hi", [1]),
        ('{"prompt": "hi", "metadata": 1, "x": 2}', "hi", {"metadata": 1, "x": 2}),
        (json.dumps({"messages": CHAT}), CHAT, None),
        ('{"prompt_ids": [4, 5]}', [4, 5], None),
        (batch_line(messages=CHAT, model="m"), CHAT, {"model": "m"}),
        (batch_line(url="/v1/completions", prompt="hi", stream=False), "hi", None),
    ],
)
def test_a_json_line_becomes_a_group(
    driver: Driver, rollq: Rollq, tmp_path: Path, line: str, prompt: Any, metadata: Any
) -> None:
    rollq.ok("enqueue", write_lines(tmp_path / "p.jsonl", line))

    (claim,) = driver.claim()
    assert told(claim)[:2] == (prompt, metadata)


def test_plain_text_packed_or_from_stdin_is_a_prompt_a_line_without_the_blank_ones(
    driver: Driver, rollq: Rollq, tmp_path: Path
) -> None:
    lines = ["[brackets] are text here", "", " é and spaces "]
    packed = tmp_path / "p.txt.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    expected = [lines[0], lines[2]]

    assert rollq.ok("enqueue", packed) == "2 groups enqueued (2 samples)\n"
    assert [told(c)[0] for c in driver.claim()] == expected
    assert rollq.ok("enqueue", "-", "--format", "text", input=packed.read_bytes())
    assert [told(c)[0] for c in driver.claim()] == expected


def test_flags_params_and_a_batch_line_say_how_to_sample_each_over_the_one_before(
    driver: Driver, rollq: Rollq, tmp_path: Path
) -> None:
    body = batch_line(messages=CHAT, max_completion_tokens=7, n=2, temperature=None)
    file = write_lines(tmp_path / "p.jsonl", body, '"a"')
    flags = ["--params", '{"top_k": 5, "temperature": 0.1}', "--temperature", "0.5"]
    flags += ["--stop", "x", "--stop", "y", "--ignore-eos", "--max-tokens", "9"]

    rollq.ok("enqueue", file, *flags)

    params = [told(c)[2] for c in driver.claim()]
    common = SamplingParams(top_k=5, temperature=0.5, stop=("x", "y"), ignore_eos=True)
    theirs = dataclasses.replace(common, max_tokens=7, n=2)
    assert params == [theirs, theirs, dataclasses.replace(common, max_tokens=9)]


def test_every_sampling_parameter_is_an_option() -> None:
    options = {flag for parameter in enqueue.params for flag in parameter.opts}

    for field in dataclasses.fields(SamplingParams):
        assert "--" + field.name.replace("_", "-") in options


# what is refused

BAD_LINES = [
    ('{"prompt": "x"', "is no JSON"),
    ('{"text": "x"}', "a row needs one of the fields prompt_ids, prompt_token_ids, prompt"),
    ("[1, -2]", "token id -2 is outside 0 to 2**31-1"),
    ('""', "is empty; a prompt has at least one token"),
    ("true", "is a bool; a prompt is a text, token ids, chat messages or a row"),
    (batch_line(messages=CHAT, tools=[]), "tools=[] of the body cannot be honoured; leave it out"),
    (batch_line(messages=CHAT, stream=True), "stream=true of the body cannot be honoured"),
    (batch_line(messages=CHAT, n=0), "n=0 is outside 1 to 4096"),
    (batch_line(url="/v1/embeddings", input="x"), "POST '/v1/embeddings' cannot be served"),
    (batch_line(prompt="x"), "the body of a request to /v1/chat/completions needs 'messages'"),
    (batch_line("no spaces, please", messages=CHAT), "group id 'no spaces, please' must be"),
    (json.dumps({"prompt": "\ud800"}), "lone surrogate"),
    (json.dumps({"prompt": "a", "big": 2**70}), "metadata of group"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_of_a_file_is_named_and_nothing_of_the_file_is_sent(
    driver: Driver, rollq: Rollq, tmp_path: Path, line: str, reason: str
) -> None:
    file = write_lines(tmp_path / "p.jsonl", '"good"', "", line, '"good"')

    result = rollq("enqueue", file)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {file}:3")
    assert reason in result.stderr
    assert result.stderr.endswith("\nnothing was enqueued\n")
    assert driver.ready() == []


def test_a_bad_line_of_stdin_comes_after_those_before_it_and_the_rest_can_follow(
    driver: Driver, rollq: Rollq
) -> None:
    lines = ['"a"', '"b"', "{", '"d"']
    result = rollq("enqueue", "-", "--n", 2, input="\n".join(lines))
    assert result.exit_code == 1
    assert "Error: stdin:3 is no JSON" in result.stderr
    assert "2 groups enqueued (4 samples): all up to line 2; go on with --from-line 3\n" in (
        result.stderr
    )

    lines[2] = '"c"'
    rollq.ok("enqueue", "-", "--from-line", 3, input="\n".join(lines))

    assert [told(c)[0] for c in driver.claim()] == ["a", "a", "b", "b", "c", "d"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'"a"\n"\xff"\n', "p.jsonl:1 or after is not UTF-8"),
        (gzip.compress(b'"a"\n' * 10_000)[:-20], "p.jsonl is a broken gzip file after line"),
    ],
)
def test_broken_bytes_are_one_line_of_words(
    rollq: Rollq, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)

    result = rollq("enqueue", tmp_path / "p.jsonl")

    assert (result.exit_code, reason in result.stderr) == (1, True), result.output


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["nowhere.jsonl"], 2, "File 'nowhere.jsonl' does not exist"),
        (["-", "--params", "{"], 2, "'{' is no JSON"),
        (["-", "--params", '{"beams": 2}'], 1, "stdin:1: sampling parameter beams is not"),
        (["-", "--presence-penalty", "1"], 1, "pass allow_restart=True"),
        (["-", "--ids-from", "id"], 1, "stdin:1 is no object, so it has no field 'id'"),
        (["-", "--staleness-policy", "drop"], 1, "staleness_policy=drop needs max_staleness"),
    ],
)
def test_a_wrong_command_line_is_said_without_a_traceback(
    driver: Driver, rollq: Rollq, arguments: list[str], code: int, reason: str
) -> None:
    result = rollq("enqueue", *arguments, input='"a"')

    assert result.exit_code == code, result.output
    assert reason in result.stderr
    assert driver.ready() == []


# again


def test_the_same_ids_again_change_nothing_also_after_the_delivery(
    driver: Driver, rollq: Rollq, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "k": "x"}', '{"prompt": "b", "k": 2}')
    command = ["enqueue", file, "--ids-from", "k", "--max-tokens", 8]
    rollq.ok(*command)
    assert driver.ready() == ["x/0", "2/0"]
    (first,) = driver.claim(limit=1)
    driver.complete(first)
    assert driver.send(ack(driver.read()[0][0], "x")) == 1

    again = rollq.ok(*command, "--json")

    assert json.loads(again) == {"new": 0, "same": 1, "done": 1, "samples": 0}
    assert driver.ready() == ["2/0"]
    result = rollq(*command, "--max-tokens", 9)
    assert result.exit_code == 1
    assert f"{file}:1: the id 'x' was enqueued before with another prompt" in result.stderr


def test_a_full_queue_says_what_found_room(open_driver: OpenDriver, tmp_path: Path) -> None:
    driver = open_driver(max_ready=3)
    rollq = Rollq(driver.queue.url)
    large = batch_line("large", messages=CHAT, n=2)
    file = write_lines(
        tmp_path / "p.jsonl",
        *(batch_line(i, messages=CHAT) for i in "ab"),
        large,
        batch_line("small", messages=CHAT),
    )

    result = rollq("enqueue", file, "--no-wait")

    assert result.exit_code == 1
    assert "max_ready=3 samples are waiting already" in result.stderr
    assert "2 groups enqueued (2 samples): all up to line 2; go on with --from-line 3" in (
        result.stderr
    )


def test_it_waits_for_room_and_counts_each_group_once(
    open_driver: OpenDriver, tmp_path: Path
) -> None:
    driver = open_driver(max_ready=3)
    sizes = {"a": 2, "large": 2, "small": 1}
    lines = [batch_line(i, messages=CHAT, n=n) for i, n in sizes.items()]
    process = Rollq(driver.queue.url).start(
        "enqueue", write_lines(tmp_path / "p.jsonl", *lines), stdout=subprocess.PIPE
    )
    try:
        wait_until(lambda: "small/0" in driver.ready(), "the small one found room")
        assert len(driver.claim()) == 3
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()

    assert out.decode() == "3 groups enqueued (5 samples)\n"
    assert driver.ready() == ["large/0", "large/1"]
