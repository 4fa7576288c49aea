"""The demo's task: continue the alphabet a to f for as many laps as a number says, then stop.

The prompt `<bos> 3 c` asks for `d e f a b c d e f a b c d e f a b c` and the end. A lap is
six letters, so the number sets the length: most answers are short and a few are long, which
is the shape that holds up an update in real rollouts. The reward is local (a letter is right
when it follows on the token before it), so that one slip does not ruin the rest and a policy
that knows nothing has something to climb.

Used by `run.py`, which trains on it, and by `model.py`, which makes the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LETTERS = "abcdef"
MAX_LAPS = 24
#: Token by id: pad, bos, eos, the numbers 1 to 24, the letters a to f.
VOCABULARY = (
    "<pad>",
    "<bos>",
    "<eos>",
    *(str(n) for n in range(1, MAX_LAPS + 1)),
    *LETTERS,
)
PAD, BOS, EOS = 0, 1, 2
FIRST_NUMBER = 3
FIRST_LETTER = FIRST_NUMBER + MAX_LAPS
#: Longest right answer is 144 letters and the end; a little room beyond it.
MAX_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: `laps` from 1 to 24, `letter` from 0 (a) to 5 (f)."""

    laps: int
    letter: int

    @property
    def ids(self) -> list[int]:
        """Three token ids: bos, the number, the letter."""
        return [BOS, FIRST_NUMBER + self.laps - 1, FIRST_LETTER + self.letter]

    @property
    def target(self) -> int:
        """How many letters the right answer has."""
        return len(LETTERS) * self.laps


def prompt_of(ids: Sequence[int] | NDArray[np.int32]) -> Prompt:
    """The question that `Prompt.ids` came from."""
    return Prompt(laps=int(ids[1]) - FIRST_NUMBER + 1, letter=int(ids[2]) - FIRST_LETTER)


def lap_probabilities() -> NDArray[np.float64]:
    """P(laps = 1), ..., P(laps = 24): a log-normal of the length, cut at 24 laps.

    The median answer has about 20 letters, one in twenty has 90 or more.
    """
    weights: NDArray[np.float64] = np.array(
        [math.exp(-(math.log(6 * j / 24) ** 2) / 2) / j for j in range(1, MAX_LAPS + 1)]
    )
    return np.asarray(weights / weights.sum())


def draw(rng: np.random.Generator, count: int) -> list[Prompt]:
    """`count` questions; the same generator state gives the same questions."""
    laps = rng.choice(np.arange(1, MAX_LAPS + 1), size=count, p=lap_probabilities())
    letters = rng.integers(len(LETTERS), size=count)
    return [Prompt(int(n), int(letter)) for n, letter in zip(laps, letters, strict=True)]


def right_answer(prompt: Prompt) -> list[int]:
    """The token ids that earn a reward of 1, the end included."""
    letters = [(prompt.letter + i) % len(LETTERS) for i in range(1, prompt.target + 1)]
    return [FIRST_LETTER + letter for letter in letters] + [EOS]


def reward(prompt: Prompt, response_ids: Sequence[int] | NDArray[np.int32]) -> float:
    """`ok / max(target, written)`, from 0 to 1.

    `written` counts the tokens before the end, `ok` those of the first `target` of them
    that are the letter after the token before them.
    """
    ids = np.asarray(response_ids, dtype=np.int64)
    ends = np.flatnonzero(ids == EOS)
    written = int(ends[0]) if len(ends) else len(ids)
    letters = np.concatenate(([FIRST_LETTER + prompt.letter], ids[:written])) - FIRST_LETTER
    before, after = letters[:-1], letters[1:]
    follows = (before >= 0) & (before < len(LETTERS)) & (after == (before + 1) % len(LETTERS))
    return int(follows[: prompt.target].sum()) / max(prompt.target, written)
