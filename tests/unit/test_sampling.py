"""Sampling parameters: vLLM's names as an allow-list, checked where they are made."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.codec import pack, unpack
from producer.contract.errors import InvalidSample
from producer.contract.sampling import STATEFUL, SamplingParams
from tests.fuzz import search

FIELDS = [f.name for f in dataclasses.fields(SamplingParams)]

#: one value a field that is not its default
OTHER: dict[str, Any] = {
    "n": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "max_tokens": 1024,
    "min_tokens": 4,
    "seed": 2**63 - 1,
    "stop": ("\n\n", "</s>"),
    "stop_token_ids": (2, 3),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "bad_words": ("darn it",),
}


def test_every_field_has_a_case_here() -> None:
    assert list(OTHER) == FIELDS


def test_only_what_differs_travels_and_comes_back() -> None:
    params = SamplingParams(**OTHER)

    assert SamplingParams().to_wire() == {}
    assert SamplingParams.from_wire({}) == SamplingParams()
    assert set(params.to_wire()) == set(FIELDS)
    assert SamplingParams.from_wire(unpack(pack(params.to_wire(), "x"), "x")) == params
    assert SamplingParams(max_tokens=None).to_wire() == {"max_tokens": None}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_travels_alone(name: str) -> None:
    params = SamplingParams(**{name: OTHER[name]})

    assert set(params.to_wire()) == {name}
    assert SamplingParams.from_wire(params.to_wire()) == params


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("max_tokens", np.int64(5), 5),
        ("n", np.int32(2), 2),
        ("seed", np.uint64(7), 7),
        ("stop_token_ids", [np.int64(2)], (2,)),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_p", np.int64(1), 1.0),
        ("stop", "###", ("###",)),
        ("stop", ["a", np.str_("b")], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", None, ()),
        ("bad_words", None, ()),
    ],
)
def test_numpy_and_loose_values_become_plain(name: str, value: Any, plain: Any) -> None:
    params = SamplingParams(**{name: value})

    assert getattr(params, name) == plain
    assert type(getattr(params, name)) is type(plain)
    pack(params.to_wire(), "params")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 4097),
        ("n", None),
        ("n", True),
        ("n", 1.0),
        ("n", "8"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 2**64),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("top_k", -2),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", False),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("stop", [""]),
        ("stop", ["ok", 5]),
        ("stop", "\ud800"),
        ("bad_words", [b"x"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5279552648203111001]),
        ("stop_token_ids", [1.5]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSample, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name", ["logprobs", "best_of", "structured_outputs", "guided_json", "logits_processors", "N"]
)
def test_what_is_not_on_the_list_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSample, match=f"sampling parameter {name} is not supported"):
        SamplingParams.from_wire({name: 1})
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(InvalidSample, match=f"sampling parameter {name} is not supported"):
        SamplingParams(**unknown)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("logprobs", "always comes back, as response_logprobs"),
        ("max_new_tokens", "vLLM's name is max_tokens"),
        ("guided_json", "leave it out"),
        ("max_token", "did you mean max_tokens?"),
    ],
)
def test_a_refused_name_says_what_to_do(name: str, advice: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(InvalidSample, match=re.escape(advice)):
        SamplingParams(**unknown)


def test_params_can_still_be_copied_and_replaced() -> None:
    params = SamplingParams(n=2, stop="x")

    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=3).n == 3


@pytest.mark.parametrize("name", FIELDS)
def test_what_cannot_be_carried_over_an_interruption_is_known(name: str) -> None:
    stateful = SamplingParams(**{name: OTHER[name]}).stateful

    assert stateful == ((name,) if name in STATEFUL else ())
    assert {"presence_penalty", "frequency_penalty", "bad_words"} == set(STATEFUL)


def test_two_requests_of_one_object_cannot_change_each_other() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)  # type: ignore[arg-type]
    stop.append("b")

    assert params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [("stop_token_ids", np.array([2, 3]), (2, 3)), ("stop", np.array(["a", "b"]), ("a", "b"))],
    ids=["ids", "strings"],
)
def test_arrays_are_sequences(name: str, value: Any, plain: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == plain


def test_a_number_that_no_float_can_hold_is_refused_by_name() -> None:
    with pytest.raises(InvalidSample, match="temperature"):
        SamplingParams(temperature=10**400)


wild = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)  # fmt: skip


@search(600)
@given(
    st.dictionaries(st.sampled_from([*FIELDS, "logprobs"]) | st.text(max_size=3), wild, max_size=3)
)
def test_parameters_off_the_wire_are_sound_or_refused(wire: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_wire(wire)
    except InvalidSample:
        return
    assert SamplingParams.from_wire(params.to_wire()) == params
