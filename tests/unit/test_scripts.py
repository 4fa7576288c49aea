"""The Lua scripts as text: their headers are their types, and must not lie."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest

from producer.contract.keys import NAMES, QueueKeys
from producer.contract.scripts import SCRIPTS, Script, _read

FOLDER = resources.files("producer.contract") / "lua"
TEXTS = {f.name.removesuffix(".lua"): f.read_text() for f in FOLDER.iterdir()}
LIBRARY = TEXTS.pop("lib")
NAMES_OF_ALL = sorted(TEXTS)
KEYS = QueueKeys("q")

#: commands that look at keys which no header names, or at all of them
FORBIDDEN = {"KEYS", "SCAN", "HSCAN", "SSCAN", "ZSCAN", "RANDOMKEY", "FLUSHALL", "FLUSHDB", "EVAL"}


def code(text: str) -> str:
    return re.sub(r"--.*", "", text)


FUNCTIONS = {
    m[1]: m[2]
    for m in re.finditer(
        r"^local function (\w+)\((.*?)^end$", code(LIBRARY), re.DOTALL | re.MULTILINE
    )
}


def key_names(body: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Each `K.name` in this body, and in the library's functions that it calls."""
    names = set(re.findall(r"\bK\.(\w+)", body))
    for name in set(re.findall(r"\b(\w+)\(", body)) & FUNCTIONS.keys() - seen:
        names |= key_names(FUNCTIONS[name], seen | {name})
    return names


def test_the_library_is_read_whole() -> None:
    assert set(FUNCTIONS) == set(re.findall(r"^local function (\w+)", LIBRARY, re.MULTILINE))
    assert key_names("crashed(s)") >= {"ready", "leases", "group", "results", "stats"}
    assert key_names("now()") == set()


def test_a_script_an_operation() -> None:
    assert set(SCRIPTS) == {
        "enqueue", "claim", "checkpoint", "release", "finish", "fail", "cancel", "reap", "renew",
        "prompt", "publish", "confirm", "heartbeat", "leave", "ack", "configure", "drop", "turn",
        "restate", "attend", "adopt", "due", "grade", "graded",
    }  # fmt: skip
    assert set(SCRIPTS) == set(TEXTS)


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_the_header_names_the_keys_that_are_used(name: str) -> None:
    assert set(SCRIPTS[name].keys) == key_names(code(TEXTS[name]))
    assert len(set(SCRIPTS[name].keys)) == len(SCRIPTS[name].keys)


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_the_header_names_the_arguments_that_are_used(name: str) -> None:
    used = set(re.findall(r"\bA\.(\w+)", code(TEXTS[name] + LIBRARY)))

    assert used <= set(SCRIPTS[name].scalars)
    assert ("item(" in code(TEXTS[name])) == bool(SCRIPTS[name].item)


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_the_header_says_the_reply_and_the_invariant(name: str) -> None:
    header = TEXTS[name].partition("\nlocal ")[0]

    assert re.search(r"^-- REPLY: \S", header, re.MULTILINE)
    assert re.search(r"^-- INVARIANT: \S", header, re.MULTILINE)


@pytest.mark.parametrize("name", [*NAMES_OF_ALL, "lib"])
def test_no_script_looks_at_keys_that_it_did_not_name(name: str) -> None:
    body = code({**TEXTS, "lib": LIBRARY}[name])
    commands = set(re.findall(r"\bp?call\('(\w+)'", body))

    assert commands.isdisjoint(FORBIDDEN)
    assert commands == {c.upper() for c in commands}
    assert "rollq:" not in body
    assert "KEYS[" not in body
    for command, key in re.findall(r"\bp?call\('(\w+)'(?:, '\w+')?,? ?(\S*)", body):
        made = {"s.key", "s.list", "key", "..."} if name == "lib" else set()
        allowed = command in ("TIME", "INFO") or key.startswith("K.") or key.strip(",)") in made
        assert allowed, f"{command} of {key}"


def test_no_client_says_what_time_it_is() -> None:
    """Invariant 7: Redis TIME decides. A duration may be an argument, a moment may not."""
    names = {n for s in SCRIPTS.values() for n in (*s.scalars, *s.item)}

    assert [n for n in names if re.search(r"(^|_)(now|at|time|clock|until)$", n)] == []
    assert "'TIME'" in FUNCTIONS["now"]


@pytest.mark.parametrize("name", NAMES_OF_ALL)
def test_a_call_is_checked_before_it_is_sent(name: str) -> None:
    script = SCRIPTS[name]
    scalars: dict[str, Any] = dict.fromkeys(script.scalars, "1")
    item = ["1"] * len(script.item)

    arguments = script.arguments(KEYS, scalars, [item, item] if item else [])
    assert arguments[0] == len(script.keys)
    assert arguments[1 : 1 + len(script.keys)] == [KEYS[k] for k in script.keys]
    assert len(arguments) == 1 + len(script.keys) + len(scalars) + 2 * len(item)

    with pytest.raises(TypeError, match=name):
        script.arguments(KEYS, {**scalars, "extra": "1"})
    for missing in script.scalars:
        with pytest.raises(TypeError, match=name):
            script.arguments(KEYS, {k: v for k, v in scalars.items() if k != missing})
    for bad in ([*item, "1"], item[:-1]):
        if len(bad) != len(item):
            with pytest.raises(TypeError, match=f"item of {name}"):
                script.arguments(KEYS, scalars, [bad])


def test_arguments_go_in_the_order_of_the_header() -> None:
    script = read("-- probe: x.\n-- KEYS: ready stats\n-- ARGV: b a | d c\n")

    assert script.arguments(KEYS, {"a": 1, "b": 2}, [(3, 4), (5, 6)]) == [
        2, "rollq:{q}:ready", "rollq:{q}:stats", 2, 1, 3, 4, 5, 6,
    ]  # fmt: skip
    assert script.source.startswith("local K = {ready = KEYS[1], stats = KEYS[2]}\n"
                                    "local A = {b = ARGV[1], a = ARGV[2]}\n")  # fmt: skip


def read(text: str) -> Script:
    return _read("probe", text, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- probe: x.\n-- KEYS: ready redy\n-- ARGV: a |\n", "unknown keys.*redy"),
        ("-- probe: x.\n-- KEYS: ready\nlocal x = 1\n", "no header"),
        ("-- other: x.\n-- KEYS: ready\n-- ARGV: a |\n", "no header"),
        ("-- probe: x.\n-- ARGV: a |\n", "no header"),
        ("local x = 1\n", "no header"),
        ("", "no header"),
    ],
)
def test_a_header_that_is_wrong_fails_at_import(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"probe\.lua.*{reason}"):
        read(text)


def test_every_key_has_a_user() -> None:
    assert {k for s in SCRIPTS.values() for k in s.keys} == set(NAMES)
