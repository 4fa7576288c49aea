"""Rollouts as one block of padded arrays: what a policy-gradient loss works on.

Each array is made once and filled row by row; no token ever becomes a Python object. Called
through `Batch.to_padded`; `pad` does the same for any list of rollouts. torch is imported only
when tensors are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidSample
from producer.contract.messages import Rollout

Side = Literal["left", "right"]


def pad(
    rollouts: Sequence[Rollout],
    *,
    pad_token_id: int,
    version: int,
    side: Side = "left",
    to: Literal["numpy", "torch"] = "numpy",
) -> dict[str, Any]:
    """Rollouts of B rows, prompts padded to P and responses to R tokens.

    | name | shape | dtype | holds |
    |---|---|---|---|
    | `prompt_ids` | [B, P] | int64 | padded on `side` with `pad_token_id` |
    | `response_ids` | [B, R] | int64 | padded on the right with `pad_token_id` |
    | `input_ids` | [B, P+R] | int64 | both, side by side |
    | `attention_mask` | [B, P+R] | int64 | 1 for each token, 0 for padding |
    | `response_mask` | [B, R] | int64 | 1 for each token that a policy sampled: where loss is |
    | `response_logprobs` | [B, R] | float32 | of the policy that sampled it; 0.0 in padding |
    | `versions` | [B, R] | int64 | that computed the token; -1 in padding |
    | `staleness` | [B, R] | int64 | `version` minus that; 0 in padding |
    | `group_index` | [B] | int64 | 0, 1, ... : rows of one prompt have the same |
    | `trainable` | [B] | bool | every member of the row's group finished |

    Raises:
        InvalidSample: there is no rollout, or an argument is not one of those named.
    """
    if side not in ("left", "right"):
        raise InvalidSample(f"side={side!r} must be 'left' or 'right'")
    if to not in ("numpy", "torch"):
        raise InvalidSample(f"to={to!r} must be 'numpy' or 'torch'")
    if not rollouts:
        raise InvalidSample("there are no rollouts to pad")
    rows, responses = len(rollouts), [r.response_ids for r in rollouts]
    prompt_ids, prompt_mask = _block([r.prompt_ids for r in rollouts], pad_token_id, side)
    response_ids, is_token = _block(responses, pad_token_id)
    versions, _ = _block([r.versions for r in rollouts], -1)
    logprobs = np.zeros(response_ids.shape, np.float32)
    for row, rollout in enumerate(rollouts):
        logprobs[row, : len(rollout.response_logprobs)] = rollout.response_logprobs
    numbers: dict[str, int] = {}
    group_index = [numbers.setdefault(r.group_id, len(numbers)) for r in rollouts]
    spoilt = {r.group_id for r in rollouts if not r.trainable}
    arrays: dict[str, NDArray[Any]] = {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "input_ids": np.concatenate([prompt_ids, response_ids], axis=1),
        "attention_mask": np.concatenate([prompt_mask, is_token], axis=1),
        "response_mask": _block([r.response_mask for r in rollouts], 0)[0],
        "response_logprobs": logprobs,
        "versions": versions,
        "staleness": np.where(is_token == 1, version - versions, 0),
        "group_index": np.array(group_index, np.int64),
        "trainable": np.fromiter((r.group_id not in spoilt for r in rollouts), bool, rows),
    }
    if to == "numpy":
        return arrays
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _block(
    rows: Sequence[NDArray[np.int32]], fill: int, side: Side = "right"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows padded to the longest, and 1 where a row has an entry."""
    width = max(len(row) for row in rows)
    block = np.full((len(rows), width), fill, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for at, row in enumerate(rows):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        block[at, where] = row
        mask[at, where] = 1
    return block, mask
