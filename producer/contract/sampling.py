"""How one response is sampled: vLLM's field names, as an allow-list.

What is not a field here cannot be asked for: a resumed sample must mean the same as an
uninterrupted one, and an option that was accepted and ignored would be a lie.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from producer.contract.errors import InvalidSample

#: Parameters whose state in the engine cannot be handed to another worker.
STATEFUL = ("presence_penalty", "frequency_penalty", "bad_words")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with the names and defaults of `vllm.SamplingParams`.

    `n` is the number of samples of each prompt, the size of the group; it is never sent
    to the engine. `max_tokens=None` means as many as the model's length allows.

    Raises:
        InvalidSample: a value is out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()

    def __new__(cls, *args: object, **fields: object) -> SamplingParams:
        # The generated __init__ would say no more than "unexpected keyword argument".
        _refuse_unknown(fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed"):
                continue
            put(name, _integer(name, value, low, high))
        for name, least, most in _FLOATS:
            put(name, _number(name, getattr(self, name), least, most))
        if self.top_p == 0.0:
            raise InvalidSample("top_p must be above 0")
        if self.repetition_penalty == 0.0:
            raise InvalidSample("repetition_penalty must be above 0")
        for name in ("stop", "bad_words"):
            put(name, _strings(name, getattr(self, name)))
        ids = _sequence("stop_token_ids", self.stop_token_ids)
        put("stop_token_ids", tuple(_integer("stop_token_ids", i, 0, 2**31 - 1) for i in ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSample(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSample(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )

    @property
    def stateful(self) -> tuple[str, ...]:
        """The fields set here that an interrupted sample cannot carry to a new attempt."""
        default = _DEFAULTS
        return tuple(f for f in STATEFUL if getattr(self, f) != getattr(default, f))

    def to_wire(self) -> dict[str, Any]:
        """Only what differs from the defaults."""
        wire: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if value != getattr(_DEFAULTS, name):
                wire[name] = list(value) if isinstance(value, tuple) else value
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """Read fields by name.

        Raises:
            InvalidSample: a name that is not on the allow-list, or a bad value.
        """
        _refuse_unknown(wire)
        return cls(**wire)


_NAMES = tuple(f.name for f in dataclasses.fields(SamplingParams))
_INTEGERS: tuple[tuple[str, int, int], ...] = (
    ("n", 1, 4096),
    ("top_k", -1, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("seed", -(2**63), 2**63 - 1),
)
_FLOATS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, math.inf),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
        raise InvalidSample(f"{name} must be an integer, not {value!r}")
    number = int(value)
    if not low <= number <= high:
        raise InvalidSample(f"{name}={number} is outside {low} to {high}")
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise InvalidSample(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (low <= number <= high and math.isfinite(number)):
        raise InvalidSample(f"{name}={number} is outside {low} to {high}")
    return number


def _sequence(name: str, value: Iterable[Any] | None) -> tuple[Any, ...]:
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise InvalidSample(f"{name} must be a list, not {value!r}") from None


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _sequence(name, value)
    for item in strings:
        if not isinstance(item, str) or not item:
            raise InvalidSample(f"{name} must hold non-empty strings, not {item!r}")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise InvalidSample(f"{name} holds a lone surrogate: {item!r}") from None
    return strings


def _refuse_unknown(fields: Iterable[Any]) -> None:
    unknown = sorted(str(name) for name in fields if name not in _NAMES)
    if not unknown:
        return
    import difflib

    close = difflib.get_close_matches(unknown[0], _NAMES, n=1)
    advice = _ADVICE.get(unknown[0]) or (f"did you mean {close[0]}?" if close else "leave it out")
    raise InvalidSample(
        f"sampling parameter {', '.join(unknown)} is not supported: {advice}; "
        f"supported are {', '.join(_NAMES)}"
    )


_RESUME = "its state cannot be handed over when a sample is interrupted; leave it out"
#: what to do instead
_ADVICE = {
    "logprobs": "the logprob of each sampled token always comes back, as response_logprobs",
    "prompt_logprobs": "only the response has logprobs; leave it out",
    "max_new_tokens": "vLLM's name is max_tokens",
    "max_completion_tokens": "vLLM's name is max_tokens",
    "num_generations": "vLLM's name is n",
    "num_return_sequences": "vLLM's name is n",
    "best_of": "take n samples and choose among them",
    "structured_outputs": _RESUME,
    "guided_decoding": _RESUME,
    "logits_processors": _RESUME,
    "stop_strings": "vLLM's name is stop",
    "eos_token_id": "vLLM's name is stop_token_ids, a list",
    "do_sample": "temperature=0 is greedy",
    "output_kind": "partials() shows samples as they grow; leave it out",
    "detokenize": "every rollout has its text; leave it out",
}

_DEFAULTS = SamplingParams()
