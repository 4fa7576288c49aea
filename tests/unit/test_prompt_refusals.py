"""Case 33, the producer's side: each bad prompt is refused alone, by its position and reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams
from producer.prompts import make_jobs


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "is empty"),
        ([], "is empty"),
        (np.array([], np.int32), "is empty"),
        ([1, -1], "token id -1"),
        ([5279552648203111001], "token id 5279552648203111001"),
        ([2**31], "token id 2147483648"),
        ([2**70], "token id"),
        ([1.5, 2.0], "integers"),
        ([True, False], "integers"),
        ([[1, 2], [3, 4]], "flat"),
        ([[1, 2], [3]], "cannot be read"),
        ([1, None], "integers"),
        ("a\ud800", "lone surrogate"),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
        ([{"content": "no role"}], "role"),
        ({"answer": 5}, "prompt_ids"),
        (5, "int"),
        (None, "NoneType"),
        (b"bytes", "integers"),
        ({"role": "user", "content": "hi"}, "is one chat message"),
    ],
    ids=range(20),
)
def test_a_bad_prompt_is_refused_by_position_and_reason(prompt: Any, reason: str) -> None:
    jobs = make_jobs([[1, 2], prompt], SamplingParams())

    assert next(jobs).prompt_ids is not None
    with pytest.raises(InvalidSample, match=f"prompt 1.*{reason}"):
        next(jobs)


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(5), 6],
        np.array([5, 6], np.uint16),
        (5, 6),
        {"prompt_ids": [5, 6], "answer": 42},
        {"prompt_token_ids": np.array([5, 6])},
    ],
    ids=range(5),
)
def test_integers_of_any_kind_are_token_ids(prompt: Any) -> None:
    (job,) = make_jobs([prompt], SamplingParams())

    assert job.prompt_ids is not None
    assert job.prompt_ids.dtype == np.int32
    assert job.prompt_ids.tolist() == [5, 6]
    job.to_item()


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_what_an_interruption_loses_is_refused_unless_it_may_restart(name: str) -> None:
    value: dict[str, Any] = {name: 0.5}
    params = SamplingParams(**value)

    with pytest.raises(InvalidSample, match=f"{name}.*allow_restart=True"):
        next(make_jobs(["x"], params))
    (job,) = make_jobs(["x"], params, allow_restart=True)
    assert job.to_item()[7] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ids": ["a/b"]}, "group id"),
        ({"ids": []}, "`ids` has no entry"),
        ({"metadata": []}, "`metadata` has no entry"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"staleness_policy": "drop"}, "needs max_staleness"),
        ({"staleness_policy": "sometimes", "max_staleness": 1}, "must be one of"),
    ],
    ids=range(6),
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSample, match=reason):
        list(make_jobs(["x"], SamplingParams(), **options))


def test_a_table_is_not_taken_for_the_names_of_its_columns() -> None:
    class Table(list[str]):
        """Iterates over its columns' names, as pandas' does."""

        def iterrows(self) -> None:
            """What it is known by."""

    with pytest.raises(InvalidSample, match=r"to_dict\('records'\)"):
        next(make_jobs(Table(["prompt", "answer"]), SamplingParams()))
