"""What an attempt asks of the engine: the rest of a sample, never more and never again.

Pure functions; the rules are the README's table of what a resume preserves.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams


def budget(params: SamplingParams, prompt: int, max_model_len: int) -> int:
    """Response tokens that a sample may have in all.

    Raises:
        InvalidSample: the prompt alone fills the model's length.
    """
    room = max_model_len - prompt
    if room <= 0:
        raise InvalidSample(
            f"the prompt has {prompt} tokens; the model's length of {max_model_len} "
            "(max_model_len) leaves no room for a response"
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)


@functools.lru_cache(maxsize=1024)
def rest(params: SamplingParams, budget: int, index: int, done: int) -> SamplingParams | None:
    """Parameters for the tokens still to be made after `done`; None when none are.

    A seed is never replayed: each (seed, index in the group, tokens done) has its own, so
    members differ, and the same interruptions give the same tokens.
    """
    left = budget - done
    if left <= 0:
        return None
    return dataclasses.replace(
        params,
        n=1,
        max_tokens=left,
        min_tokens=min(left, max(0, params.min_tokens - done)),
        seed=None if params.seed is None else _seed(params.seed, index, done),
    )


def _seed(seed: int, index: int, done: int) -> int:
    text = f"{seed} {index} {done}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
