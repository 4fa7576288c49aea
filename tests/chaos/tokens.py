"""Makes every token of a run again from its labelled version and the tokens before it."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.chaos.work import SIM
from workers import resume
from workers.engines import sim_model


@lru_cache(maxsize=1 << 18)
def _seed_number(seed: int | None, index: int, done: int) -> int:
    return sim_model.seed_number(None if seed is None else resume._seed(seed, index, done), 1.0)


class Flat:
    """All rollouts end to end, so that numpy checks them in one go."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._parts: list[NDArray[np.int32]] = []
        self._prompts: list[int] = []
        self._prompt_lengths: list[int] = []
        self._seeds: list[int] = []
        self._seed_counts: list[int] = []
        self._ended: list[bool] = []
        self._texts: list[str] = []
        self._mixed: list[str] = []
        self._done = False

    @property
    def size(self) -> int:
        self._join()
        return len(self.ids)

    def add_group(
        self, rollouts: list[dict[str, Any]], data: bytes, seed: int | None, prompt: list[int]
    ) -> None:
        """`data`: ids, versions and logprobs of all members, one array after the other."""
        self._parts.append(np.frombuffer(data, np.int32).reshape(3, -1))
        number = sim_model.prefix_number(np.array(prompt, np.int32))
        for index, r in enumerate(rollouts):
            self._names.append(r["id"])
            self._lengths.append(r["lengths"][0])
            self._prompts.append(number)
            self._prompt_lengths.append(len(prompt))
            self._ended.append(r["reason"] == "stop")
            self._texts.append(r["text"] if r["state"] == "finished" else "")
            done, attempt = 0, -1
            for _, tokens, of_attempt in r["segments"]:
                if of_attempt < attempt:
                    self._mixed.append(f"{r['id']} {r['segments']}")
                if of_attempt != attempt:
                    attempt = of_attempt
                    number_of_seed = _seed_number(seed, index, done)
                self._seeds.append(number_of_seed)
                self._seed_counts.append(tokens)
                done += tokens

    def _join(self) -> None:
        if self._done:
            return
        self._done = True
        joined = np.concatenate(self._parts, axis=1) if self._parts else np.empty((3, 0), np.int32)
        self.ids, self.versions = joined[0], joined[1]
        self.logprobs = joined[2].view(np.float32)
        lengths = np.array(self._lengths, np.int64)
        self.owner = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.cumsum(lengths) - lengths
        self.place = np.arange(len(self.ids)) - np.repeat(starts, lengths)
        self.starts, self.lengths = starts, lengths

    def wrong(self) -> list[str]:
        """Rollouts with a token or logprob that the model does not make there, or an end of
        sequence in the wrong place."""
        self._join()
        place = self.place + np.array(self._prompt_lengths, np.int64)[self.owner]
        terms = sim_model.prefix_terms(self.ids, place)
        before = np.cumsum(terms, dtype=np.uint64) - terms
        prefix = np.array(self._prompts, np.uint64)[self.owner] + before
        first = before[np.minimum(self.starts, max(0, len(before) - 1))] if len(before) else before
        prefix = prefix - first[self.owner]
        seeds = np.repeat(np.array(self._seeds, np.uint64), self._seed_counts)
        bad = np.zeros(len(self.ids), np.bool_)
        model = SIM.model()
        order = np.argsort(self.versions, kind="stable")
        versions, at = np.unique(self.versions[order], return_index=True)
        for version, rows in zip(versions.tolist(), np.split(order, at[1:]), strict=True):
            tokens, logprobs, stops = model.next(prefix[rows], seeds[rows], version)
            tokens[stops] = sim_model.EOS
            bad[rows] = (tokens != self.ids[rows]) | (logprobs != self.logprobs[rows])
        last = self.place == self.lengths[self.owner] - 1
        ended = np.array(self._ended, np.bool_)[self.owner]
        bad |= (self.ids == sim_model.EOS) != (last & ended)
        return self._named(bad)

    def other_texts(self) -> list[str]:
        """Rollouts whose text is not what their ids say: whoever finished held other tokens."""
        self._join()
        parts = zip(self._names, self._texts, np.split(self.ids, self.starts[1:]), strict=True)
        return [
            name
            for name, text, ids in parts
            if text and text != sim_model.decode(ids, skip_special_tokens=True)
        ]

    def mixed(self) -> list[str]:
        """Rollouts in which an attempt wrote after a later one had begun to."""
        return self._mixed

    def backwards(self) -> list[str]:
        self._join()
        back = np.zeros(len(self.ids), np.bool_)
        back[1:] = (np.diff(self.versions) < 0) & (self.place[1:] > 0)
        return self._named(back)

    def _named(self, rows: NDArray[np.bool_]) -> list[str]:
        places = defaultdict(list)
        for row in np.flatnonzero(rows).tolist():
            places[int(self.owner[row])].append(int(self.place[row]))
        return [f"{self._names[o]} at {at[:5]} of {self._lengths[o]}" for o, at in places.items()]
