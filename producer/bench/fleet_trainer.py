"""The trainer of a played fleet: it submits and takes through the product's own client."""

from __future__ import annotations

from collections.abc import Iterable

from producer.client import RolloutClient
from producer.contract.connection import Queue
from producer.contract.keys import NAMES, sample_id
from producer.contract.sampling import SamplingParams
from producer.pipeline import pieces

#: keys of a queue that are no prefix
_WHOLE = [name for name, key in NAMES.items() if not key.endswith(":")]


class Trainer:
    """Keeps prompts waiting, and takes the groups that have closed, up to 64 at a time."""

    GROUP, _TAKEN = 8, 64

    def __init__(
        self, client: RolloutClient, queue: Queue, params: SamplingParams, prompt: int
    ) -> None:
        """`prompt`: its length in tokens."""
        self._client = client
        self._queue = queue
        self._params = params
        self._prompt = list(range(3, 1 + prompt))
        self.ids: list[str] = []
        self.tokens = 0
        self.samples = 0

    def submit(self, samples: int) -> None:
        first = len(self.ids)
        # Each prompt is another, and small: a simulated engine makes other tokens of each.
        numbers = range(first, first + -(-samples // self.GROUP))
        prompts = [[*self._prompt, 3 + n % 500, 3 + n // 500 % 500] for n in numbers]
        self.ids += self._client.submit(prompts, self._params)

    def turn(self, ahead: int) -> None:
        """What is due now; `ahead`: samples to be kept waiting."""
        redis, keys = self._queue.redis, self._queue.keys
        while closed := redis.xlen(keys["results"]):
            batch = self._client.batch(min(closed, self._TAKEN), timeout=60)
            self.tokens += sum(len(r.response_ids) for group in batch for r in group.rollouts)
            self.samples += self.GROUP * len(batch)
            batch.ack()
        if (waiting := redis.zcard(keys["ready"])) < ahead:
            self.submit(ahead - waiting)

    def forget(self, workers: Iterable[str]) -> None:
        """Leave nothing of this queue behind, but for what ends by itself soon."""
        keys = self._queue.keys
        for piece in pieces(self.ids, 512):
            members = [sample_id(group, i) for group in piece for i in range(self.GROUP)]
            self._queue.redis.unlink(
                *map(keys.group, piece), *map(keys.sample, members), *map(keys.chunks, members)
            )
        self._queue.redis.unlink(*(keys[name] for name in _WHOLE), *map(keys.worker, workers))
