"""Rollouts as tensors: padded on the right side, masked, with versions and staleness a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer import Batch, InvalidSample, Rollout, RolloutGroup
from producer.contract.codec import pack, pack_ids
from producer.contract.messages import Chunk
from producer.results import build_group

PAD = 99


def group(name: str, prompt: list[int], *members: tuple[str, list[tuple[int, int]]]) -> Any:
    """Members of (state, [(version, tokens), ...])."""
    job = pack({"prompt": None, "params": {}, "metadata": pack(None, "x")}, "x")
    replies: list[Any] = [{b"job": job, b"prompt_ids": pack_ids(np.array(prompt, np.int32))}]
    for index, (state, runs) in enumerate(members):
        texts = {"state": state, "group": name, "index": index, "finish_reason": "stop",
                 "started_at": 1000, "finished_at": 3500}  # fmt: skip
        chunks = []
        for version, count in runs:
            ids = np.arange(count, dtype=np.int32) + 10 * version
            chunks.append(Chunk(version, "w", 1, ids, -ids.astype(np.float32)).to_wire())
        replies += [{k.encode(): str(v).encode() for k, v in texts.items()}, chunks]
    return build_group("1-1", name, replies)


GROUPS: tuple[RolloutGroup, ...] = (
    group("a", [1, 2, 3], ("finished", [(1, 2), (3, 1)]), ("finished", [(3, 1)])),
    group("b", [4], ("finished", [(2, 1)]), ("cancelled", [])),
)


def batch(groups: tuple[RolloutGroup, ...] = GROUPS, version: int = 4) -> Batch:
    return Batch(groups, version, lambda taken: len(taken))


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    padded = batch().to_padded(pad_token_id=PAD)

    assert padded["prompt_ids"].tolist() == [[1, 2, 3], [1, 2, 3], [PAD, PAD, 4], [PAD, PAD, 4]]
    assert padded["response_ids"].tolist() == [
        [10, 11, 30], [30, PAD, PAD], [20, PAD, PAD], [PAD, PAD, PAD],
    ]  # fmt: skip
    assert padded["input_ids"].tolist() == [
        p + r
        for p, r in zip(padded["prompt_ids"].tolist(), padded["response_ids"].tolist(), strict=True)
    ]


def test_prompts_can_be_padded_on_the_right() -> None:
    padded = batch().to_padded(pad_token_id=PAD, side="right")

    assert padded["prompt_ids"].tolist()[2] == [4, PAD, PAD]
    assert padded["attention_mask"].tolist()[2] == [1, 0, 0, 1, 0, 0]
    assert padded["response_ids"].tolist()[1] == [30, PAD, PAD]


def test_masks_cover_tokens_and_nothing_else() -> None:
    padded = batch().to_padded(pad_token_id=PAD)

    assert padded["attention_mask"].tolist() == [
        [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0],
    ]  # fmt: skip
    assert padded["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert padded["response_logprobs"].tolist() == [
        [-10, -11, -30], [-30, 0, 0], [-20, 0, 0], [0, 0, 0],
    ]  # fmt: skip


def test_a_token_that_no_policy_sampled_is_attended_to_and_has_no_loss() -> None:
    GROUPS[0].rollouts[0].response_mask[1] = 0
    try:
        padded = batch().to_padded(pad_token_id=PAD)
    finally:
        GROUPS[0].rollouts[0].response_mask[1] = 1

    assert padded["response_mask"].tolist()[0] == [1, 0, 1]
    assert padded["attention_mask"].tolist()[0] == [1] * 6


def test_staleness_is_counted_from_the_batchs_version_or_a_given_one() -> None:
    padded = batch().to_padded(pad_token_id=PAD)

    assert padded["versions"].tolist() == [[1, 1, 3], [3, -1, -1], [2, -1, -1], [-1, -1, -1]]
    assert padded["staleness"].tolist() == [[3, 3, 1], [1, 0, 0], [2, 0, 0], [0, 0, 0]]
    later = batch().to_padded(pad_token_id=PAD, version=6)
    assert later["staleness"].tolist() == [[5, 5, 3], [3, 0, 0], [4, 0, 0], [0, 0, 0]]


def test_rows_know_their_group_and_whether_it_is_whole() -> None:
    padded = batch().to_padded(pad_token_id=PAD)

    assert padded["group_index"].tolist() == [0, 0, 1, 1]
    assert padded["trainable"].tolist() == [True, True, False, False]


def test_kinds_are_as_documented() -> None:
    kinds = {name: a.dtype for name, a in batch().to_padded(pad_token_id=PAD).items()}

    assert kinds.pop("response_logprobs") == np.float32
    assert kinds.pop("trainable") == np.bool_
    assert set(kinds.values()) == {np.dtype(np.int64)}


def test_torch_tensors_hold_the_same() -> None:
    torch = pytest.importorskip("torch")
    arrays = batch().to_padded(pad_token_id=PAD)
    tensors = batch().to_padded(pad_token_id=PAD, to="torch")

    assert {n: t.tolist() for n, t in tensors.items()} == {n: a.tolist() for n, a in arrays.items()}
    assert tensors["response_ids"].dtype == torch.int64
    assert tensors["response_logprobs"].dtype == torch.float32


def test_what_cannot_be_padded_is_refused() -> None:
    options: list[dict[str, Any]] = [{"side": "middle"}, {"to": "jax"}]
    for option in options:
        with pytest.raises(InvalidSample, match=f"{next(iter(option))}="):
            batch().to_padded(pad_token_id=PAD, **option)
    with pytest.raises(InvalidSample, match="no rollouts"):
        batch(()).to_padded(pad_token_id=PAD)


def test_a_rollout_becomes_tensors_of_its_own() -> None:
    torch = pytest.importorskip("torch")
    rollout: Rollout = GROUPS[0].rollouts[0]

    tensors = rollout.to_torch()

    assert {name: t.tolist() for name, t in tensors.items()} == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [10, 11, 30],
        "response_mask": [1, 1, 1],
        "versions": [1, 1, 3],
        "response_logprobs": [-10.0, -11.0, -30.0],
    }
    logprobs = tensors.pop("response_logprobs")
    assert logprobs.dtype == torch.float32
    assert {t.dtype for t in tensors.values()} == {torch.int64}
    logprobs[0] = 7
    assert rollout.response_logprobs[0] == -10


def test_verls_fields_have_its_names_and_plain_lists() -> None:
    fields = GROUPS[0].rollouts[0].to_verl()

    extra = fields.pop("extra_fields")
    assert fields == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [10, 11, 30],
        "response_mask": [1, 1, 1],
        "response_logprobs": [-10.0, -11.0, -30.0],
        "log_probs": [-10.0, -11.0, -30.0],
        "reward_score": None,
        "num_turns": 2,
        "metrics": {"generate_sequences": 2.5},
        "is_cancel": False,
        "param_version_start": 1,
        "param_version_end": 3,
    }
    assert (extra["is_cancel"], extra["param_version_end"], extra["id"]) == (False, 3, "a/0")
    assert GROUPS[1].rollouts[1].to_verl()["is_cancel"]
    assert type(fields["response_ids"][0]) is int
