"""What a prompt may be, and what of it becomes the job; the refusals have a module of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from producer.contract.errors import InvalidSample
from producer.contract.messages import Job
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy
from producer.prompts import make_jobs

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def job(prompt: Any, **options: Any) -> Job:
    (only,) = make_jobs([prompt], SamplingParams(), **options)
    return only


def test_a_text_stays_text() -> None:
    made = job("hi")

    assert (made.prompt, made.prompt_ids, made.metadata) == ("hi", None, None)


def test_a_bare_string_is_one_prompt_and_not_its_letters() -> None:
    assert [j.prompt for j in make_jobs("hi", SamplingParams())] == ["hi"]


def test_chat_messages_stay_as_they_are_with_all_their_fields() -> None:
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]

    made = job(messages)

    assert (made.prompt, made.prompt_ids) == (messages, None)
    made.to_item()


def test_torch_tensors_are_token_ids() -> None:
    torch = pytest.importorskip("torch")

    made = job(torch.tensor([5, 6]))

    assert made.prompt_ids is not None
    assert made.prompt_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("row", "prompt", "ids"),
    [
        ({"prompt": "hi"}, "hi", None),
        ({"messages": CHAT}, CHAT, None),
        ({"prompt_ids": [5]}, None, [5]),
        ({"prompt_token_ids": [5], "prompt": "its text"}, None, [5]),
        ({"prompt_ids": [5], "prompt_token_ids": [6], "messages": CHAT}, None, [5]),
    ],
    ids=range(5),
)
def test_a_row_is_read_by_its_field_and_the_rest_is_metadata(
    row: dict[str, Any], prompt: Any, ids: list[int] | None
) -> None:
    made = job(row | {"answer": 42})

    assert made.prompt == prompt
    assert (None if made.prompt_ids is None else made.prompt_ids.tolist()) == ids
    assert made.metadata["answer"] == 42
    used = "prompt_ids" if "prompt_ids" in row else next(iter(row))
    assert made.metadata == {k: v for k, v in row.items() if k != used} | {"answer": 42}


def test_given_metadata_wins_over_a_rows_fields() -> None:
    assert job({"prompt": "hi", "answer": 42}, metadata=["mine"]).metadata == "mine"


def test_ids_are_given_or_random() -> None:
    given = [j.group_id for j in make_jobs(["x", "y"], SamplingParams(), ids=["a", "b"])]
    made = [j.group_id for j in make_jobs(["x"] * 100, SamplingParams())]

    assert given == ["a", "b"]
    assert len(set(made)) == 100


def test_staleness_travels() -> None:
    made = job("x", max_staleness=2, staleness_policy="drop")

    assert (made.max_staleness, made.staleness_policy) == (2, StalenessPolicy.DROP)


def test_prompts_are_read_one_by_one() -> None:
    read: list[int] = []

    def rows() -> Iterator[list[int]]:
        for i in range(10):
            read.append(i)
            yield [i]

    jobs = make_jobs(rows(), SamplingParams())

    assert read == []
    next(jobs)
    next(jobs)
    assert read == [0, 1]


def test_a_batch_of_ids_in_one_array_is_a_prompt_a_row() -> None:
    jobs = list(make_jobs(np.array([[1, 2], [3, 4]]), SamplingParams()))

    assert [j.prompt_ids.tolist() for j in jobs if j.prompt_ids is not None] == [[1, 2], [3, 4]]


ROWS = [{"prompt": "hi", "answer": 1}, {"prompt": "ho", "answer": 2}]


class Rows:
    """Iterates as a `datasets.Dataset` does: sized, rows as dicts, and no `Sequence`."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def a_dataset() -> Any:
    try:
        import datasets
    except ImportError:
        return Rows()
    return datasets.Dataset.from_list(ROWS)


def test_a_dataset_is_read_row_by_row() -> None:
    jobs = list(make_jobs(a_dataset(), SamplingParams()))

    assert [(j.prompt, j.metadata) for j in jobs] == [("hi", {"answer": 1}), ("ho", {"answer": 2})]


def test_arrays_and_tensors_in_a_row_become_lists() -> None:
    torch = pytest.importorskip("torch")
    row = {
        "prompt_ids": torch.tensor([5, 6]),
        "answer": torch.tensor(7),
        "weights": torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        "table": np.array([[1, 2], [3, 4]]),
    }

    made = job(row)

    assert made.metadata == {"answer": 7, "weights": [0.5, 1.0], "table": [[1, 2], [3, 4]]}
    made.to_item()


def test_what_the_first_prompt_is_called_can_be_said() -> None:
    with pytest.raises(InvalidSample, match="prompt 7 is empty"):
        list(make_jobs(["x", ""], SamplingParams(), first=6))
