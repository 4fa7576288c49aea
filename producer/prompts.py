"""From what a trainer holds to jobs: texts, token ids, chat messages, rows with metadata.

Every bad input is refused here, by name, where the producer can know; what only the model
knows (its length, its vocabulary) is judged by the worker.
"""

from __future__ import annotations

import numbers
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import InvalidSample
from producer.contract.keys import check_group_id
from producer.contract.messages import Job, Messages
from producer.contract.rewards import check_reward
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy

#: names of a row's fields, in the order they are looked for
_ROW_PROMPTS = ("prompt_ids", "prompt_token_ids", "prompt", "messages")

Prompt = Any


def make_jobs(
    prompts: Iterable[Prompt] | str,
    params: SamplingParams,
    *,
    ids: Iterable[str] | None = None,
    metadata: Iterable[Any] | None = None,
    max_staleness: int | None = None,
    staleness_policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
    allow_restart: bool = False,
    reward: str | None = None,
    first: int = 0,
) -> Iterator[Job]:
    """A job for each prompt, lazily.

    Args:
        prompts: each a text, token ids (list, numpy or torch), chat messages (a list of
            mappings), or a row: a mapping with one of `prompt_ids`, `prompt_token_ids`,
            `prompt`, `messages`; its other fields become the metadata.
        ids: group ids, one a prompt; random ones otherwise.
        metadata: any plain values, one a prompt, returned untouched with the group.
        allow_restart: accept parameters that an interrupted sample cannot carry over
            (`SamplingParams.stateful`); such samples start again after an interruption.
        reward: the function that grades each group, `package.module:function`; it runs in
            `rq worker` processes that allow its module.
        first: what the first prompt is called in messages.

    Raises:
        InvalidSample: naming the prompt's position and what is wrong.
    """
    if params.stateful and not allow_restart:
        raise InvalidSample(
            f"{', '.join(params.stateful)} cannot be carried over an interruption: "
            "pass allow_restart=True to have such samples start again, or leave it out"
        )
    if isinstance(prompts, Mapping):
        raise InvalidSample(
            "prompts is one row, or a dict of splits: put the row into a list, or choose a split"
        )
    if hasattr(prompts, "iterrows"):  # a pandas table, whose iteration gives its columns' names
        raise InvalidSample("prompts is a table: pass its rows, as table.to_dict('records')")
    if isinstance(ids, str):
        raise InvalidSample(f"ids is a list, one a prompt, not the text {ids!r}")
    policy = _policy(staleness_policy)
    if policy is not StalenessPolicy.ALLOW and max_staleness is None:
        raise InvalidSample(f"staleness_policy={policy} needs max_staleness")
    if max_staleness is not None:
        if not isinstance(max_staleness, numbers.Integral) or max_staleness < 0:
            raise InvalidSample(f"max_staleness={max_staleness!r} must be a number of versions")
        max_staleness = int(max_staleness)
    reward = check_reward(reward) if reward is not None else ""
    traceparent = _traceparent()
    given_ids = iter(ids) if ids is not None else None
    given_metadata = iter(metadata) if metadata is not None else None
    each = [prompts] if isinstance(prompts, str) else prompts
    for position, item in enumerate(each, first):
        where = f"prompt {position}"
        group_id = _next(given_ids, "ids", where) if given_ids else secrets.token_hex(8)
        prompt, prompt_ids, row = _read(item, where)
        extra = _next(given_metadata, "metadata", where) if given_metadata else row
        yield Job(
            group_id=check_group_id(group_id),
            params=params,
            prompt=prompt,
            prompt_ids=prompt_ids,
            metadata=extra,
            max_staleness=max_staleness,
            staleness_policy=policy,
            reward=reward,
            traceparent=traceparent,
        )


def token_ids(value: Any, where: str) -> NDArray[np.int32]:
    """Any sequence of integers as int32 [n].

    Raises:
        InvalidSample: empty, not one-dimensional, not integers, negative, or over 31 bits.
    """
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSample(f"{where}: token ids cannot be read: {error}") from None
    if array.size == 0:
        raise InvalidSample(f"{where} is empty; a prompt has at least one token")
    if array.ndim != 1 or not _integers(array):
        raise InvalidSample(f"{where}: token ids must be a flat sequence of integers")
    low, high = array.min(), array.max()
    if low < 0 or high >= 2**31:
        raise InvalidSample(f"{where}: token id {low if low < 0 else high} is outside 0 to 2**31-1")
    return array.astype(np.int32)


def _integers(array: NDArray[Any]) -> bool:
    if array.dtype.kind in "iu":
        return True
    # Integers over 64 bits make an object array: refused by their size, not by their kind.
    return array.dtype.kind == "O" and all(
        isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in array.flat
    )


def _read(item: Any, where: str) -> tuple[str | Messages | None, NDArray[np.int32] | None, Any]:
    if isinstance(item, str):
        return _text(item, where), None, None
    if isinstance(item, Mapping):
        for name in _ROW_PROMPTS:
            if name in item:
                prompt, ids, _ = _read(item[name], where)
                rest = {k: _plain(v) for k, v in item.items() if k != name}
                return prompt, ids, rest or None
        if "role" in item:
            raise InvalidSample(f"{where} is one chat message: a prompt is a list of them")
        raise InvalidSample(f"{where}: a row needs one of the fields {', '.join(_ROW_PROMPTS)}")
    if isinstance(item, Sequence) and len(item) and isinstance(item[0], Mapping):
        return _messages(item, where), None, None
    if isinstance(item, Sequence | np.ndarray) or hasattr(item, "detach"):
        return None, token_ids(item, where), None
    raise InvalidSample(
        f"{where} is a {type(item).__name__}; a prompt is a text, token ids, chat messages or a row"
    )


def _plain(value: Any) -> Any:
    """Lists for the arrays and tensors that rows of a dataset in such a format have."""
    return value.tolist() if isinstance(value, np.ndarray) or hasattr(value, "detach") else value


def _text(text: str, where: str) -> str:
    if not text:
        raise InvalidSample(f"{where} is empty; a prompt has at least one token")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidSample(f"{where} holds a lone surrogate, which is no text") from None
    return text


def _messages(messages: Sequence[Any], where: str) -> Messages:
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidSample(f"{where}: each chat message needs a `role` and its `content`")
        if isinstance(message.get("content"), str) and message["content"]:
            _text(message["content"], where)
    return [dict(m) for m in messages]


def _next(values: Iterator[Any], name: str, where: str) -> Any:
    try:
        return next(values)
    except StopIteration:
        raise InvalidSample(f"`{name}` has no entry for {where}: give one a prompt") from None


def _traceparent() -> str:
    """W3C context of the current OpenTelemetry span; '' where nobody traces."""
    if "opentelemetry.trace" not in sys.modules:
        return ""  # without its import there is no span; and it is not ours to import
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def _policy(value: StalenessPolicy | str) -> StalenessPolicy:
    try:
        return StalenessPolicy(value)
    except ValueError:
        raise InvalidSample(
            f"staleness_policy={value!r} must be one of {', '.join(StalenessPolicy)}"
        ) from None
