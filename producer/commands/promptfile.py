"""A file of prompts, line by line: plain text, JSON lines, OpenAI batch lines.

Every line is judged here, and a bad one raises with `file:line` and what to do about it.
Used by `rollq enqueue` alone.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TextIO

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams

Format = Literal["text", "jsonl"]

#: the names of a request body's prompt, by the path of its URL
_ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
#: fields of a request body that come back as metadata; the pool serves one model
_ABOUT = ("model", "user", "metadata")
#: fields of a request body that ask for what every rollout has, by the values that do
_GRANTED: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprobs": (False, True, 0),
    "echo": (False,),
}
_PARAMS = {f.name for f in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt: what `producer.prompts.make_jobs` takes, and where it stood.

    `group_id` is None where the file gives no id, `params` what the line itself asks for.
    """

    where: str
    number: int
    prompt: Any
    metadata: Any
    group_id: str | None
    params: Mapping[str, Any]


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    """A file, or stdin for `-`, as text; gzip is known by its first bytes.

    Raises:
        OSError: it cannot be read.
    """
    with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
        peeked: Any = file if hasattr(file, "peek") else io.BufferedReader(file)
        packed = peeked.peek(2)[:2] == b"\x1f\x8b"
        raw: BinaryIO = gzip.GzipFile(fileobj=peeked) if packed else peeked  # type: ignore[assignment]
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")


def read_lines(
    file: TextIO, name: str, format: Format | None, ids_from: str | None
) -> Iterator[Line]:
    """The prompts of a file, blank lines left out.

    Args:
        name: what messages call the file.
        format: text or JSON lines; by its name, else by its first line, where None.
        ids_from: the field of a row that is its group's id.

    Raises:
        InvalidSample: naming `file:line`.
    """
    if format is None and name.removesuffix(".gz").endswith(".txt"):
        format = "text"
    if format is None and name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json")):
        format = "jsonl"
    for number, text in _numbered(file, name):
        where = f"{name}:{number}"
        if format is None:
            format = "jsonl" if text[0] in '{["' else "text"
        if format == "text":
            if ids_from:
                raise InvalidSample(f"{where} is plain text; --ids-from needs JSON lines")
            yield Line(where, number, text, None, None, {})
        else:
            yield _line(text, where, number, ids_from)


def _numbered(file: TextIO, name: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            text = line.rstrip("\r\n")
            if text.strip():
                yield number, text
    except UnicodeDecodeError as error:
        raise InvalidSample(f"{name}:{number + 1} or after is not UTF-8: {error.reason}") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise InvalidSample(f"{name} is a broken gzip file after line {number}: {error}") from None


def _line(text: str, where: str, number: int, ids_from: str | None) -> Line:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSample(
            f"{where} is no JSON ({error}); one prompt a line, or give --format text"
        ) from None
    if isinstance(row, dict) and "custom_id" in row and "body" in row:
        return _batch_line(row, where, number)
    if not isinstance(row, dict):
        if ids_from:
            raise InvalidSample(f"{where} is no object, so it has no field {ids_from!r} for its id")
        return Line(where, number, row, None, None, {})
    group_id = _id(row, ids_from, where) if ids_from else None
    # A row that has a `metadata` of its own and nothing else means that.
    rest = set(row) - {"prompt", "prompt_ids", "prompt_token_ids", "messages", "metadata"}
    if "metadata" in row and not rest:
        prompt = {k: v for k, v in row.items() if k != "metadata"}
        return Line(where, number, prompt, row["metadata"], group_id, {})
    return Line(where, number, row, None, group_id, {})


def _batch_line(row: dict[str, Any], where: str, number: int) -> Line:
    """`{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`."""
    url, body = row.get("url", "/v1/chat/completions"), row["body"]
    if row.get("method", "POST") != "POST" or url not in _ENDPOINTS:
        raise InvalidSample(
            f"{where}: {row.get('method')} {url!r} cannot be served; these can: POST "
            + ", POST ".join(_ENDPOINTS)
        )
    field = _ENDPOINTS[url]
    if not isinstance(body, dict) or field not in body:
        raise InvalidSample(f"{where}: the body of a request to {url} needs {field!r}")
    about, params = {}, {}
    for name, value in body.items():
        known = "max_tokens" if name == "max_completion_tokens" else name
        if name in _ABOUT:
            about[name] = value
        elif name == field or value is None or value in _GRANTED.get(name, ()):
            continue
        elif known in _PARAMS:
            params[known] = value
        else:
            raise InvalidSample(
                f"{where}: {name}={json.dumps(value)} of the body cannot be honoured; "
                "leave it out of the line"
            )
    group_id = _id(row, "custom_id", where)
    return Line(where, number, body[field], about or None, group_id, params)


def _id(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InvalidSample(f"{where} has no text or number {field!r} to be its id")
    return value
