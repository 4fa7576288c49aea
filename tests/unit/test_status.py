"""A pool's status out of what Redis answers."""

from __future__ import annotations

from producer.contract.keys import QueueKeys
from producer.status import Status, WorkerStatus, build_status, worker_commands

SAID = {
    "version": b"3",
    "loading": b"4",
    "state": b"updating",
    "in_flight": b"17",
    "tokens_per_second": b"12.5",
    "last_error": b"no such file \xff",
    "pid": b"1",
}


def status(*said: dict[str, bytes]) -> Status:
    """Of workers w0, w1 and so on, by whatever fields are asked for."""
    names = [f"w{i}".encode() for i in range(len(said))]
    commands = worker_commands(QueueKeys("q"), names)
    answers = [[said[i].get(f) for f in command[2:]] for i, command in enumerate(commands)]
    assert [c[1] for c in commands] == [f"rollq:{{q}}:worker:{n.decode()}" for n in names]
    return build_status([0, 0, 0, 0, 0, {}, {}, {}, names], answers)


def test_each_field_of_a_worker_is_its_own() -> None:
    (worker,) = status(SAID).workers

    assert worker == WorkerStatus("w0", 3, 4, "updating", 17, 12.5, "no such file \ufffd")


def test_a_worker_that_said_little_is_shown_and_one_that_is_gone_is_not() -> None:
    shown = status({"loading": b""}, {"version": b"0", "state": b"starting"}, {}).workers

    assert [w.name for w in shown] == ["w0", "w1"]
    assert shown[0] == WorkerStatus("w0", -1, -1, "?", 0, 0.0, "")
    assert (shown[1].version, shown[1].state) == (0, "starting")
