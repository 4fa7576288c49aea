"""The "model" and "tokenizer" of the simulated engine: pure functions of ids and numbers.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in unsigned
64-bit arithmetic, so it is the same on every machine. A prefix is summed up in one number,
`sum(mix(id * A + index * B))`, which grows by one term a token: each id and its place count.

Ids: 0 pad, 1 begin, 2 end of sequence, 3 to 258 the bytes of UTF-8, then filler, which
decodes to `<id>`, so that, as with real tokenizers, ids that were sampled need not be
the ids that their text encodes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidSample
from workers.engines.protocol import Response, Stop

EOS = 2
BYTE_0 = 3
FIRST_FILLER = BYTE_0 + 256

_MASK = 2**64 - 1
_ID = np.uint64(0xD6E8FEB86659FD93)
_INDEX = np.uint64(0xA0761D6478BD642F)
_UNIT = 2.0**-53

U64 = NDArray[np.uint64]


def mix(x: U64) -> U64:
    """splitmix64's finaliser; arrays only, since numpy warns of overflow on scalars."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt(*parts: int) -> int:
    """One 64-bit number out of integers of any size and sign."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state + np.array([part & _MASK], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return int(state[0])


def prefix_terms(ids: NDArray[Any], first_index: NDArray[np.int64] | int) -> U64:
    """What each id adds to the number of its prefix."""
    index = np.asarray(first_index, np.int64)
    if index.ndim == 0:
        index = index + np.arange(len(ids), dtype=np.int64)
    return mix(ids.astype(np.uint64) * _ID + index.astype(np.uint64) * _INDEX)


def prefix_number(ids: NDArray[Any]) -> int:
    """The number that stands for a whole prefix."""
    return int(prefix_terms(ids, 0).sum(dtype=np.uint64))


@dataclass(frozen=True)
class HashModel:
    """Next tokens for many sequences at once.

    `stop_probability` is the chance of EOS at each position: lengths are geometric with
    mean `1 / stop_probability`. `never` are ids that are not sampled.
    """

    vocab_size: int
    stop_probability: float = 0.0
    never: frozenset[int] = frozenset()
    ids: NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = [i for i in range(BYTE_0, self.vocab_size) if i not in self.never]
        if not ids:
            raise ValueError(f"vocab_size={self.vocab_size} leaves no token to sample")
        object.__setattr__(self, "ids", np.array(ids, np.int32))

    def next(
        self, prefix: U64, seeds: U64, version: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
        """`(token, logprob, stops)` of each sequence; where it stops EOS takes the place."""
        x = mix(prefix ^ seeds ^ np.uint64(salt(version)))
        tokens = self.ids[(x % np.uint64(len(self.ids))).astype(np.int64)]
        x = mix(x)
        logprobs = -4.0 * ((x >> np.uint64(11)).astype(np.float64) * _UNIT)
        if self.stop_probability > 0.0:
            x = mix(x)
            stops = (x >> np.uint64(11)).astype(np.float64) * _UNIT < self.stop_probability
        else:
            stops = np.zeros(len(x), np.bool_)
        return tokens, logprobs.astype(np.float32), stops


def seed_number(seed: int | None, temperature: float) -> int:
    """The part of a request's randomness: none of it is left at temperature 0."""
    return 0 if temperature == 0.0 else salt(1, seed or 0)


def encode(text: str, vocab_size: int) -> NDArray[np.int32]:
    if vocab_size < FIRST_FILLER:
        raise InvalidSample(
            f"the simulated model has no tokenizer: vocab_size={vocab_size} is less than "
            f"{FIRST_FILLER}; send token ids"
        )
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + BYTE_0


def token_bytes(token: int, skip_special_tokens: bool) -> bytes:
    if token >= FIRST_FILLER:
        return b"<%d>" % token
    if token >= BYTE_0:
        return bytes([token - BYTE_0])
    return b"" if skip_special_tokens else (b"<pad>", b"<s>", b"</s>")[token]


def bytes_of(ids: NDArray[np.int32], skip_special_tokens: bool) -> bytes:
    return b"".join([token_bytes(token, skip_special_tokens) for token in ids.tolist()])


def decode(ids: NDArray[np.int32], *, skip_special_tokens: bool) -> str:
    return bytes_of(ids, skip_special_tokens).decode(errors="replace")


def completed(text: bytes, new: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first within the last `new` bytes of a text, and where."""
    found = []
    for stop in stops:
        string = stop.encode()
        at = text.find(string, max(len(text) - new - len(string) + 1, 0))
        if at >= 0:
            found.append((stop, at + len(string)))
    return min(found, key=lambda f: f[1], default=None)


def stop_of(response: Response) -> Stop | None:
    """What stops a response at its last token; below `min_tokens` only EOS does."""
    params, ids = response.params, response.token_ids.tolist()
    if ids[-1] == EOS and not params.ignore_eos:
        return Stop(None)
    if len(ids) <= params.min_tokens:
        return None
    if ids[-1] in params.stop_token_ids:
        return Stop(ids[-1])
    end = _string_end(response)
    return Stop(end[0]) if end else None


def text_of(response: Response) -> str:
    """Text of an ended response, without what stopped it unless that was asked for."""
    params, ids = response.params, response.token_ids
    skip, include = params.skip_special_tokens, params.include_stop_str_in_output
    stop = stop_of(response) if len(ids) else None
    if stop is None or not isinstance(stop.reason, str):
        return decode(ids if stop is None or include else ids[:-1], skip_special_tokens=skip)
    end = _string_end(response)
    assert end is not None
    cut = 0 if include else len(stop.reason.encode())
    return bytes_of(ids, skip)[: end[1] - cut].decode(errors="replace")


def _string_end(response: Response) -> tuple[str, int] | None:
    params, ids = response.params, response.token_ids
    new = len(token_bytes(int(ids[-1]), params.skip_special_tokens))
    return completed(bytes_of(ids, params.skip_special_tokens), new, params.stop)


def chat_text(messages: Sequence[Any]) -> str:
    """Messages in a fixed form, ending where the assistant begins."""
    lines = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidSample(f"a chat message needs the texts role and content: {message!r}")
        lines.append(f"{role}: {content}\n")
    return "".join(lines) + "assistant: "


def replay(
    model: HashModel,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    versions: Sequence[int],
    *,
    seed: int | None = None,
    temperature: float = 1.0,
) -> tuple[list[int], list[float]]:
    """The tokens and logprobs that the engine makes after a prompt, token i under versions[i].

    For requests without stop strings, stop ids and min_tokens.
    """
    ids = np.asarray(prompt_ids, np.int32)
    prefix = np.array([prefix_number(ids)], np.uint64)
    seeds = np.array([seed_number(seed, temperature)], np.uint64)
    tokens: list[int] = []
    logprobs: list[float] = []
    for index, version in enumerate(versions, start=len(ids)):
        token, logprob, stops = model.next(prefix, seeds, version)
        if stops[0]:
            token = np.array([EOS], np.int32)
        tokens.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        prefix = prefix + prefix_terms(token, index)
    return tokens, logprobs
