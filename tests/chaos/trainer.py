"""A trainer of a chaos run: submits, takes, acks, publishes, cancels, and writes down all of it.

Every line of its log is written before what it tells of can have an effect that lasts, except
`acked`, which comes after the ack. So the auditor knows what was shown to the trainer however
it was killed. Token arrays go to a file beside the log, as they came.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import producer.publish
from producer import Batch, RolloutClient, RolloutGroup
from producer.contract.errors import QueueFull, ResultsTimeout
from producer.contract.manifest import MANIFEST
from producer.weights import write_checkpoint
from tests.chaos.work import LIMITS, QUEUE, TRAINERS, Publication, Slice, Work

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """`slices`: in all, of both trainers; 0 for no end. `publish_seconds`: 0 for never."""

    directory: str
    url: str
    rank: int
    seed: int
    poison: float
    slices: int
    publish_seconds: float


class Journal:
    """The log of one rank, over all its processes."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.lines = directory / f"trainer-{rank}.jsonl"
        self.arrays = directory / f"trainer-{rank}.bin"

    def open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(self.lines, flags, 0o600)
        self._arrays = os.open(self.arrays, flags, 0o600)
        if self.lines.stat().st_size:
            os.write(self._lines, b"\n")  # the last process may have died within a line

    def say(self, what: str, **facts: Any) -> None:
        self.say_all([{"what": what, "at": time.time(), **facts}])

    def say_all(self, lines: list[dict[str, Any]]) -> None:
        os.write(self._lines, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def store(self, data: bytes) -> int:
        """Returns where it begins."""
        at = os.lseek(self._arrays, 0, os.SEEK_END)
        os.write(self._arrays, data)
        return at

    def read(self) -> list[dict[str, Any]]:
        lines = []
        for text in self.lines.read_bytes().split(b"\n") if self.lines.exists() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines


class Trainer:
    def __init__(self, settings: Settings) -> None:
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._settings = settings
        self._directory = Path(settings.directory)
        self._work = Work(settings.seed, settings.poison)
        self._journal = Journal(self._directory, settings.rank)
        self._next_slice = settings.rank
        self._begun = False  # whether the next slice was written down, and perhaps in part sent
        self._next_publication = 0
        self._publish_at = time.monotonic()
        self._rng = random.Random(f"{settings.seed} trainer {settings.rank} {os.getpid()}")
        self._recent: list[str] = []

    @property
    def _told_to_finish(self) -> bool:
        return (self._directory / "finish").exists()

    def run(self) -> None:
        s = self._settings
        past = self._journal.read()
        self._journal.open()
        self._journal.say("start", pid=os.getpid())
        with RolloutClient(
            s.url,
            QUEUE,
            consumer=str(s.rank),
            weights_dir=self._directory / "weights",
            limits=LIMITS,
            patience=90.0,
        ) as client:
            self._client = client
            self._offer_again(past)
            while not self._told_to_finish:
                self._publish()
                self._submit()
                self._cancel()
                self._take(self._next(follow=True, timeout=0.4))
            if self._begun:
                self._send(self._work.slice(self._next_slice), block=True)
            while batch := self._next(follow=False, timeout=30.0):
                self._take(batch)
        self._journal.say("end", pid=os.getpid())

    def _offer_again(self, past: list[dict[str, Any]]) -> None:
        """What an earlier process of this rank submitted and did not take itself."""
        acked = {i for line in past if line["what"] == "acked" for i in line["ids"]}
        for line in past:
            if line["what"] == "publish":
                self._next_publication = line["number"] + 1
        for number in [line["slice"] for line in past if line["what"] == "submit"]:
            self._send(self._work.slice(number), block=True, without=acked)
            self._next_slice = number + TRAINERS

    def _submit(self) -> None:
        for _ in range(4):
            number = self._next_slice
            if self._settings.slices and number >= self._settings.slices:
                (self._directory / f"submitted-{self._settings.rank}").touch()
                return
            part = self._work.slice(number)
            if not self._begun:
                self._journal.say("submit", slice=number)
                self._begun = True
            try:
                self._send(part, block=False)
            except QueueFull:
                return
            self._begun = False
            self._next_slice += TRAINERS
            self._recent = [g.id for g in part.groups]

    def _send(self, part: Slice, *, block: bool, without: Container[str] = ()) -> None:
        groups = [g for g in part.groups if g.id not in without]
        self._client.submit(
            [g.prompt for g in groups],
            part.params,
            ids=[g.id for g in groups],
            metadata=[{"slice": part.number, "group": g.id} for g in groups],
            block=block,
        )

    def _cancel(self) -> None:
        """Now and then: a sample, or a whole group."""
        if self._recent and self._rng.random() < 0.1:
            target = self._rng.choice(self._recent)
            if self._rng.random() < 0.7:
                target += "/0"
            self._journal.say("cancel", id=target)
            self._client.cancel([target])

    def _publish(self) -> None:
        every = self._settings.publish_seconds
        if not every or time.monotonic() < self._publish_at:
            return
        self._publish_at = time.monotonic() + every * self._rng.uniform(0.5, 1.5)
        publication = self._work.publication(self._next_publication)
        self._journal.say("publish", number=publication.number, sabotage=publication.sabotage)
        self._next_publication += 1
        files = self._directory / f"files-{publication.number}"
        files.mkdir(exist_ok=True)
        (files / "model.safetensors").write_bytes(b"weights %d " % publication.number * 99)
        vars(producer.publish)["write_checkpoint"] = _sabotaging(publication)
        version = self._client.publish_weights(
            files,
            step=publication.number,
            policy=publication.policy,
            deadline_s=publication.deadline_s,
        )
        self._journal.say("published", number=publication.number, version=version)

    def _next(self, *, follow: bool, timeout: float) -> Batch | None:
        try:
            return self._client.batch(_BATCH, follow=follow, timeout=timeout)
        except ResultsTimeout:
            return self._client.batch(1, follow=follow, timeout=5.0) if not follow else None

    def _take(self, batch: Batch | None) -> None:
        if not batch:
            return
        self._journal.say_all([self._facts(group) for group in batch])
        time.sleep(self._rng.uniform(0.0, 0.06))  # a step of training
        die = self._directory / f"die-{self._settings.rank}"
        if die.exists():
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        count = batch.ack()
        self._journal.say("acked", ids=[g.id for g in batch], count=count)

    def _facts(self, group: RolloutGroup) -> dict[str, Any]:
        parts = [
            np.concatenate([getattr(r, name) for r in group.rollouts]).tobytes()
            for name in ("response_ids", "versions", "response_logprobs")
        ]
        return {
            "what": "shown",
            "at": time.time(),
            "id": group.id,
            "entry": group.entry,
            "prompt": group.prompt_ids.tolist(),
            "metadata": group.metadata,
            "array": self._journal.store(b"".join(parts)),
            "rollouts": [
                {
                    "id": r.id,
                    "state": str(r.state),
                    "reason": r.finish_reason,
                    "error": r.error,
                    "text": r.text,
                    "lengths": [
                        len(r.response_ids),
                        len(r.versions),
                        len(r.response_logprobs),
                        len(r.response_mask),
                        int(r.response_mask.sum()),
                    ],
                    "segments": [[s.version, s.tokens, s.attempt] for s in r.segments],
                    "counts": [r.attempts, r.interruptions, r.crashes, r.recomputed_tokens],
                }
                for r in group.rollouts
            ],
        }


def _sabotaging(publication: Publication) -> Any:
    """`write_checkpoint`, and what happens to its files before Redis hears of them."""

    def write(*arguments: Any) -> tuple[str, str]:
        path, digest = write_checkpoint(*arguments)
        directory = arguments[0] / path
        file = directory / "model.safetensors"
        if publication.sabotage == "corrupt":
            file.write_bytes(b"X" + file.read_bytes()[1:])
        elif publication.sabotage == "truncated":
            file.write_bytes(file.read_bytes()[:-7])
        elif publication.sabotage == "manifest":
            (directory / MANIFEST).unlink()
        return path, digest

    return write
