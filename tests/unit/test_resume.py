"""What an attempt asks for, as pure functions: budget, rest, seeds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams
from tests.fuzz import search
from workers import resume


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "length", "budget"),
    [(8, 3, 100, 8), (8, 6, 10, 4), (8, 9, 10, 1), (None, 3, 10, 7), (8, 2, 10, 8)],
)
def test_the_budget_fits_the_models_length(
    max_tokens: int | None, prompt: int, length: int, budget: int
) -> None:
    assert resume.budget(SamplingParams(max_tokens=max_tokens), prompt, length) == budget


@pytest.mark.parametrize("prompt", [10, 11])
def test_a_prompt_that_leaves_no_room_is_refused(prompt: int) -> None:
    with pytest.raises(InvalidSample, match=rf"{prompt} tokens.* 10 \(max_model_len\)"):
        resume.budget(SamplingParams(), prompt, 10)


@pytest.mark.parametrize(
    ("done", "asks"), [(0, (8, 5)), (3, (5, 2)), (6, (2, 0)), (7, (1, 0)), (8, None), (9, None)]
)
def test_the_rest_is_what_is_not_there(done: int, asks: tuple[int, int] | None) -> None:
    params = SamplingParams(n=4, max_tokens=8, min_tokens=5)

    rest = resume.rest(params, 8, 0, done)

    assert (rest and (rest.max_tokens, rest.min_tokens)) == asks
    assert rest is None or rest.n == 1


def test_min_tokens_never_exceeds_a_budget_that_the_model_cut() -> None:
    params = SamplingParams(max_tokens=8, min_tokens=8)

    rest = resume.rest(params, 4, 0, 1)

    assert rest is not None
    assert (rest.max_tokens, rest.min_tokens) == (3, 3)


def test_all_other_fields_stay_as_they_are() -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=8, stop=("x",),
        stop_token_ids=(7,), include_stop_str_in_output=True, ignore_eos=True,
        skip_special_tokens=False, repetition_penalty=1.1,
    )  # fmt: skip

    assert resume.rest(params, 8, 3, 2) == dataclasses.replace(params, max_tokens=6)


def test_no_seed_stays_none() -> None:
    rest = resume.rest(SamplingParams(max_tokens=8), 8, 3, 2)

    assert rest is not None
    assert rest.seed is None


@search(200)
@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 4095), st.integers(0, 10**6), st.integers(1, 9)
)
def test_seeds_repeat_only_for_the_same_seed_member_and_place(
    seed: int, index: int, done: int, more: int
) -> None:
    def seed_of(seed: int, index: int, done: int) -> int:
        rest = resume.rest(SamplingParams(seed=seed, max_tokens=None), done + 1, index, done)
        assert rest is not None
        assert rest.seed is not None
        return rest.seed

    first = seed_of(seed, index, done)

    assert first == seed_of(seed, index, done)
    others = {seed_of(seed, index + more, done), seed_of(seed, index, done + more)}
    assert first not in others
    assert len(others) == 2
    assert 0 <= first < 2**63
