"""The tree of errors: what its docstring draws is what there is, and a trainer can catch it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import producer
from producer.contract import errors
from producer.contract.errors import EngineError, InvalidPayload, RollqError, WeightsMissing


def tree(root: type, depth: int = 0) -> Iterator[tuple[int, str]]:
    yield depth, root.__name__
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child, depth + 1)


def test_the_docstring_draws_the_tree() -> None:
    drawn = re.findall(r"^(?:    )([│ ├└─]*)(\w+)(?: {2,}|$)", errors.__doc__ or "", re.MULTILINE)

    assert sorted((len(indent) // 4, name) for indent, name in drawn) == sorted(tree(RollqError))


def test_what_a_trainer_may_see_is_exported() -> None:
    workers_only = {InvalidPayload, WeightsMissing, *EngineError.__subclasses__(), EngineError}
    seen = {
        name
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, RollqError) and error not in workers_only
    }

    assert seen <= set(producer.__all__)
    assert all(inspect.getdoc(getattr(producer, name)) for name in seen)
