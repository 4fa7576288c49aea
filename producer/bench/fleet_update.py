"""A weight update of a played fleet, in real time: part of `rollq bench fleet`.

Every worker waits on the streams, looks at the level when told, asks for its turn, hands back what
it holds, loads for so long, says so, claims again and gives its turn back, as `workers/updates.py`
does it. Those in the line ask again when it is their turn, and now and then.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

from producer.bench.fleet_load import UPDATED, Fleet
from producer.contract.scripts import Argument

_ASK_AGAIN = 2.0
_HOLD_MS = 3_600_000
_GIVE_UP_SECONDS = 600.0
_LEVEL = ("current", "last_good")
_PUBLICATION = ("path", "digest", "state", "policy", "deadline_ms")


def update(fleet: Fleet, load_seconds: float) -> dict[str, float]:
    """Publish, and go on until the last worker serves it.

    Raises:
        AssertionError: not all did within ten minutes.
    """
    ears = _Ears(fleet)
    started = time.monotonic()
    version = _publish(fleet)
    stopped: dict[int, float] = {}  # worker -> when its load ends
    line: dict[int, float] = {}  # worker -> when it asks again
    served: set[int] = set()
    asks = 0
    last_stopped = 0.0
    while len(served) < fleet.workers:
        now = time.monotonic()
        if now - started > _GIVE_UP_SECONDS:
            raise AssertionError(f"{len(served)} of {fleet.workers} workers were updated")
        told, called = ears.hear()
        news = [w for w in told if w not in served and w not in line and w not in stopped]
        _read(fleet, told, news, version)
        again = {w for w, due in line.items() if due <= now} | (called & line.keys())
        asking = [*news, *sorted(again)]
        granted = _turn(fleet, asking, _HOLD_MS)
        asks += len(asking)
        line.update((w, now + _ASK_AGAIN) for w in asking)
        for w in granted:
            del line[w]
        fleet.release(granted)
        if granted:
            last_stopped = time.monotonic() - started
        stopped |= {w: time.monotonic() + load_seconds for w in granted}
        loaded = [w for w, end in stopped.items() if end <= now]
        for w in loaded:
            del stopped[w]
        _confirm(fleet, loaded, version)
        fleet.claim(loaded)
        _turn(fleet, loaded, 0)
        served.update(loaded)
    ears.close()
    return {
        "update_last_stopped_ms": 1e3 * last_stopped,
        "update_asks_per_worker": asks / fleet.workers,
    }


class _Ears:
    """Each worker's wait for entries of its two streams."""

    def __init__(self, fleet: Fleet) -> None:
        keys = fleet.queue.keys
        self._fleet = fleet
        self._updates = keys["updates"]
        self._turns = [keys.turn(name) for name in fleet.names]
        self._last = [{self._updates: "$", turn: "0"} for turn in self._turns]
        self._listen(range(fleet.workers))

    def hear(self) -> tuple[list[int], set[int]]:
        """Those told of a publication, and those of their turn; all go on waiting."""
        answered, told, called = [], [], set()
        for w, connection in enumerate(self._fleet.listens):
            if not connection.can_read(0):
                continue
            answered.append(w)
            reply = connection.read_response() or ()
            for stream, entries in reply.items() if isinstance(reply, dict) else reply:
                self._last[w][stream.decode()] = entries[-1][0].decode()
                if stream.decode() == self._updates:
                    told.append(w)
                else:
                    called.add(w)
        self._listen(answered)
        return told, called

    def close(self) -> None:
        """Take what is still waited for."""
        for connection in self._fleet.listens:
            connection.read_response()

    def _listen(self, workers: Iterable[int]) -> None:
        for w in workers:
            last = self._last[w]
            self._fleet.listens[w].send_command(
                "XREAD", "BLOCK", 2000, "STREAMS", *last, *last.values()
            )


def _publish(fleet: Fleet) -> int:
    version, _ = fleet.queue.call(
        "publish",
        request=secrets.token_hex(8),
        digest=secrets.token_hex(8),
        path="/weights/1",
        step=1,
        policy="requeue",
        deadline_ms=0,
        max_updating="50%",
        force=0,
        floor=0,
    )
    return int(version)


def _read(fleet: Fleet, told: Sequence[int], news: Sequence[int], version: int) -> None:
    """The level, and where it is new what is published, and that it is on its way."""
    weights = fleet.queue.keys["weights"]
    fleet.ask((w, [["HMGET", weights, *_LEVEL]]) for w in told)
    fields = [f"{version}:{name}" for name in _PUBLICATION]
    fleet.ask((w, [["HMGET", weights, *fields]]) for w in news)
    _say(fleet, news, ("loading", version))


def _say(fleet: Fleet, workers: Sequence[int], *fields: tuple[str, Argument]) -> None:
    fleet.ask((w, [fleet.script("heartbeat", fields, worker=fleet.names[w])]) for w in workers)


def _turn(fleet: Fleet, workers: Sequence[int], hold_ms: int) -> list[int]:
    """Those that have their turn to load."""
    scalars: dict[str, Argument] = {"hold_ms": hold_ms, "waits": 1}
    replies = fleet.ask(
        (w, [fleet.script("turn", (), worker=fleet.names[w], serves=fleet.versions[w], **scalars)])
        for w in workers
    )
    return [w for w, [(_, _, granted)] in zip(workers, replies, strict=True) if granted]


def _confirm(fleet: Fleet, workers: Sequence[int], version: int) -> None:
    for w in workers:
        fleet.versions[w] = version
    _say(fleet, workers, ("version", version), ("loading", ""), *UPDATED)
    fleet.ask(
        (w, [fleet.script("confirm", worker=fleet.names[w], version=version, error="")])
        for w in workers
    )
