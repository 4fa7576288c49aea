"""The load of a pool on Redis, without the pool: what `rollq bench fleet` drives.

`Fleet` sends every call that workers send, with their batching, sizes and rates, each worker over
connections of its own; it counts time in steps of an engine, so a fleet that a machine cannot
serve in real time is driven slower, with the same calls. That they cost Redis what real workers
do is measured, see `fleet.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.contract.connection import Queue, split
from producer.contract.messages import Chunk
from producer.contract.scripts import SCRIPTS, Argument
from producer.pipeline import pieces

Command = list[Argument]
Key = tuple[str, str]
#: so many lengths of responses, in tokens
Lengths = Callable[[int], NDArray[np.int64]]

#: what `rollq worker` does unless told otherwise
CHECKPOINT_TOKENS, CHECKPOINT_SECONDS = 64, 5.0
LEASE_SECONDS = 30.0
_BEAT_SECONDS, _LISTEN_SECONDS, _RENEW_SECONDS = 1.0, 2.0, LEASE_SECONDS / 4
#: workers whose calls are on their way at once: their replies wait in Redis's memory
_AT_ONCE = 64
_BYTES_A_TOKEN = 4  # of text


def _endless(samples: int) -> NDArray[np.int64]:
    return np.full(samples, 1 << 40, np.int64)


class Fleet:
    """Workers with so many samples each; `version` are the weights that they serve."""

    def __init__(
        self,
        queue: Queue,
        workers: int,
        samples: int,
        rate: float,
        checkpoint_tokens: int = CHECKPOINT_TOKENS,
        lengths: Lengths = _endless,
    ) -> None:
        """`rate`: tokens a second of each sample; `lengths`: of the samples that it claims."""
        self.workers, self.samples, self.rate = workers, samples, rate
        self.queue = queue
        self.lengths = lengths
        self.every = max(1, min(checkpoint_tokens, int(rate * CHECKPOINT_SECONDS)))
        self.names = [f"gpu{w:04}-123456-{w:04x}" for w in range(workers)]
        self.versions = [0] * workers
        self._calls = [_connect(queue) for _ in range(workers)]
        self.listens = [_connect(queue) for _ in range(workers)]
        # Id and lease token of the sample in each slot.
        self._held: list[list[Key | None]] = [[None] * samples for _ in range(workers)]
        self._left: dict[str, int] = {}  # sample that waits with tokens -> how many
        # Tokens of the sample in each slot; one without a length is free.
        self._length = np.zeros((workers, samples), np.int64)
        self._made = np.zeros((workers, samples), np.int64)
        self._stored = np.zeros((workers, samples), np.int64)
        self._due = np.zeros((workers, samples), np.int64)
        self._chunks: dict[int, bytes] = {}
        self._random = np.random.default_rng(7)
        self._phase = self._random.random(workers)
        self._steps = 0
        for script in SCRIPTS.values():
            queue.redis.script_load(script.source)

    def close(self) -> None:
        for connection in (*self._calls, *self.listens):
            connection.disconnect()

    # the time between updates

    def step(self) -> int:
        """One token of every sample, with all calls that fall due; returns how many ended."""
        self._steps += 1
        active = self._length > 0
        self._made += active
        ends = active & (self._made >= self._length)
        due = ends | (active & (self._made >= self._due))
        self._report(due)
        free = np.flatnonzero(ends.any(axis=1)).tolist()
        self.claim(free)
        self._beat(self._each(_BEAT_SECONDS))
        return int(ends.sum())

    def stagger(self) -> None:
        """As in an engine whose samples began at different times: each has made tokens that are
        not stored yet."""
        made = self._random.integers(0, self.every, self._made.shape)
        self._made += np.where(self._length > 0, made, 0)

    def store(self, tokens: int) -> None:
        """So many more tokens of every sample, as one checkpoint."""
        self._made += np.where(self._length > 0, tokens, 0)
        self._report(self._length > 0)

    def end(self, slot: int) -> None:
        """The sample in this slot of every worker ends with some tokens more; another follows."""
        self._made[:, slot] += self.every
        self._length[:, slot] = self._made[:, slot]
        due = np.zeros_like(self._length, np.bool_)
        due[:, slot] = True
        self._report(due)
        self.claim(range(self.workers))

    def _each(self, seconds: float) -> list[int]:
        """Workers whose turn it is at this step, with a phase of their own."""
        at = self._steps / self.rate / seconds + self._phase
        before = (self._steps - 1) / self.rate / seconds + self._phase
        due: list[int] = np.flatnonzero(np.floor(at) > np.floor(before)).tolist()
        return due

    def _beat(self, workers: Sequence[int]) -> None:
        """What the lease thread and the loop of a worker do, a round trip each."""
        if renewing := self._each(_RENEW_SECONDS):
            for start in range(0, self.samples, 256):
                held = {w: self._keys(w)[start : start + 256] for w in renewing}
                self.ask(
                    (w, [self.script("renew", keys, worker=self.names[w])])
                    for w, keys in held.items()
                    if keys
                )
        self.ask((w, [self._heartbeat(w, "serving")]) for w in workers)
        self.ask((w, [self.script("reap", limit=256)]) for w in workers)
        self.ask((w, [self.script("due", limit=256)]) for w in workers)
        listening = self._each(_LISTEN_SECONDS)
        stream = self.queue.keys["updates"]
        own = self.queue.keys.turn
        self.ask(
            (
                (w, [["XREAD", "BLOCK", 1, "STREAMS", stream, own(self.names[w]), "$", "0"]])
                for w in listening
            ),
            self.listens,
        )

    def _report(self, due: NDArray[np.bool_]) -> None:
        """A flush of each worker that has something due: checkpoints, then ends."""
        workers, slots = np.nonzero(due)
        at = (workers, slots)
        facts = (workers, slots, self._made[at], self._stored[at], self._length[at])
        asks: dict[int, tuple[list[Any], list[Any]]] = {}
        for w, slot, made, stored, length in zip(*(f.tolist() for f in facts), strict=True):
            key = self._held[w][slot]
            assert key is not None
            n = made - stored
            piece = (stored, n, self.versions[w], self._chunk(n)) if n else (made, 0, 0, b"")
            points, ends = asks.setdefault(w, ([], []))
            if made >= length:
                text = "x" * (_BYTES_A_TOKEN * made)
                ends.append((*key, made, "length", "", text, *piece))
                self._held[w][slot] = None
            else:
                points.append((*key, *piece))
        replies = self.ask(
            (
                w,
                [
                    self.script(name, items[start : start + 256], worker=self.names[w])
                    for name, items in (("checkpoint", points), ("finish", ends))
                    for start in range(0, len(items), 256)
                ],
            )
            for w, (points, ends) in asks.items()
        )
        for (points, ends), of_worker in zip(asks.values(), replies, strict=True):
            answers = [answer for reply in of_worker for answer in reply[2]]
            if answers != [*(p[2] + p[3] for p in points), *(e[2] for e in ends)]:
                raise AssertionError(f"tokens are stored that nobody sent, or lost: {answers}")
        self._stored[at] = self._made[at]
        self._due[at] = self._made[at] + self.every
        self._length[due & (self._made >= self._length)] = 0

    # what an update is made of

    def claim(self, workers: Iterable[int]) -> None:
        """Fill the free slots of each, and read what was made of the samples before."""
        wanted = {w: [s for s, held in enumerate(self._held[w]) if held is None] for w in workers}
        while wanted := {w: slots for w, slots in wanted.items() if slots}:
            replies = self.ask((w, [self._claim(w, len(slots))]) for w, slots in wanted.items())
            partial: dict[int, list[Command]] = {}
            for (w, slots), [reply] in zip(wanted.items(), replies, strict=True):
                keys = [(header[0].decode(), header[1].decode()) for header in reply[2]]
                made = [self._left.pop(sample, 0) for sample, _ in keys]
                if any(made):
                    asked = [sample for (sample, _), n in zip(keys, made, strict=True) if n]
                    partial[w] = [["LRANGE", self.queue.keys.chunks(s), 0, -1] for s in asked]
                self._take(w, slots[: len(keys)], keys, np.array(made, np.int64))
                wanted[w] = slots[len(keys) :] if keys else []
            for piece in pieces(list(partial.items()), _AT_ONCE):
                self.ask(piece)  # of all workers they would fill the memory

    def _take(
        self, w: int, slots: Sequence[int], keys: Sequence[Key], made: NDArray[np.int64]
    ) -> None:
        self._made[w, slots] = self._stored[w, slots] = made
        self._due[w, slots] = made + self.every
        self._length[w, slots] = made + self.lengths(len(keys))
        for slot, key in zip(slots, keys, strict=True):
            self._held[w][slot] = key

    def release(self, workers: Sequence[int]) -> None:
        """Hand back everything that these hold."""
        calls: dict[int, list[Command]] = {}
        for w in workers:
            made = self._stored[w].tolist()
            items = [(*key, made[s]) for s, key in enumerate(self._held[w]) if key is not None]
            self._left |= {sample: tokens for sample, _, tokens in items if tokens}
            calls[w] = [
                self.script("release", piece, worker=self.names[w], reason="update")
                for piece in split(items)
            ]
            self._held[w] = [None] * self.samples
            self._length[w] = 0
        self.ask(calls.items())

    # calls

    def ask(
        self,
        asks: Iterable[tuple[int, Sequence[Command]]],
        connections: Sequence[Any] | None = None,
    ) -> list[list[Any]]:
        """Send what each worker has to say, and return the replies; many at once."""
        by = connections or self._calls
        waiting = [(by[w], commands) for w, commands in asks]
        replies = []
        for start in range(0, len(waiting), _AT_ONCE):
            wave = waiting[start : start + _AT_ONCE]
            for connection, commands in wave:
                connection.send_packed_command(connection.pack_commands(commands))
            replies += [[c.read_response() for _ in commands] for c, commands in wave]
        return replies

    def script(self, name: str, items: Iterable[Any] = (), **scalars: Argument) -> Command:
        script = SCRIPTS[name]
        return ["EVALSHA", script.sha, *script.arguments(self.queue.keys, scalars, items)]

    def _claim(self, w: int, limit: int) -> Command:
        held = self.samples - limit
        return self.script("claim", (), **claiming(self.names[w], self.versions[w], limit, held))

    def _heartbeat(self, w: int, state: str) -> Command:
        fields = (
            ("version", self.versions[w]),
            ("loading", ""),
            ("state", state),
            ("in_flight", self.samples),
            ("tokens", 10**9 + self._steps),
            ("tokens_per_second", "12800.0"),
            ("last_error", ""),
            ("host", "gpu0000"),
            ("pid", 123456),
            ("nonce", f"{w:016x}"),
            *UPDATED,
        )
        return self.script("heartbeat", fields, worker=self.names[w])

    def _keys(self, w: int) -> list[Key]:
        return [key for key in self._held[w] if key is not None]

    def _chunk(self, tokens: int) -> bytes:
        if tokens not in self._chunks:
            ids, logprobs = np.ones(tokens, np.int32), np.zeros(tokens, np.float32)
            self._chunks[tokens] = Chunk(0, self.names[0], 1, ids, logprobs).to_wire()
        return self._chunks[tokens]


#: what a worker says of its updates
UPDATED = (
    ("updates", 1),
    ("updates_failed", 0),
    *((f"update_{n}_ms", 100) for n in ("idle", "close", "pause", "load", "reset", "resume")),
)


def claiming(worker: str, version: int, limit: int, held: int) -> dict[str, Argument]:
    """Scalars of `claim`, of a worker that holds so many samples and has room for any."""
    return {
        "worker": worker,
        "request": secrets.token_hex(8),
        "version": version,
        "limit": limit,
        "held": held,
        "share": 0,
        "suspects": 1,
        "alone": 1,
        "room": 1 << 40,
        "reserve": 256,
    }


def _connect(queue: Queue) -> Any:
    pool = queue.redis.connection_pool
    # More than may be served in real time is played, so a reply may be long in coming.
    connection = pool.connection_class(**{**pool.connection_kwargs, "socket_timeout": 120})
    connection.connect()
    return connection
