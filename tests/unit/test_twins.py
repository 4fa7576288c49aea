"""The two clients are twins: the same methods, with the same arguments and the same words."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, get_origin, get_type_hints

import pytest

from producer import AsyncBatch, AsyncRolloutClient, Batch, RolloutClient


def methods(cls: type) -> dict[str, Any]:
    return {name: m for name, m in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"}


NAMES = sorted(methods(RolloutClient))


def arguments(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_they_have_the_same_methods() -> None:
    assert sorted(methods(AsyncRolloutClient)) == NAMES
    assert sorted(methods(AsyncBatch)) == sorted(methods(Batch))
    assert {"submit", "generate", "batches", "rollouts", "partials", "cancel"} <= set(NAMES)


@pytest.mark.parametrize("name", [*NAMES, "__init__"])
def test_a_method_takes_the_same_arguments(name: str) -> None:
    blocking, awaited = getattr(RolloutClient, name), getattr(AsyncRolloutClient, name)

    assert arguments(awaited) == arguments(blocking)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_the_same_words(name: str) -> None:
    blocking, awaited = methods(RolloutClient)[name], methods(AsyncRolloutClient)[name]

    assert awaited.__doc__ == blocking.__doc__
    assert blocking.__doc__, f"{name} says what it does"


@pytest.mark.parametrize("name", NAMES)
def test_what_iterates_iterates_and_the_rest_is_awaited(name: str) -> None:
    blocking, awaited = methods(RolloutClient)[name], methods(AsyncRolloutClient)[name]

    iterates = get_origin(get_type_hints(blocking)["return"]) is Iterator
    assert (get_origin(get_type_hints(awaited)["return"]) is AsyncIterator) == iterates
    assert inspect.iscoroutinefunction(awaited) != iterates
