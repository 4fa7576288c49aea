"""Samples in the making: shown as they grow, and cancelled by what they look like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from producer import Rollout, partials
from producer.contract.errors import InvalidSample
from producer.contract.states import State
from tests.integration.pool import Pool, proved
from tests.integration.stepper import StepEngine, sample_of
from tests.waiting import DEADLINE_S


def three_tokens_each() -> StepEngine:
    return StepEngine(lambda r: 3)


async def after(growing: Iterator[Rollout]) -> tuple[str, int, State]:
    """The next one: its id, tokens and state."""
    rollout = await asyncio.wait_for(asyncio.to_thread(next, growing), DEADLINE_S)
    proved(rollout)
    return rollout.id, len(rollout.response_ids), rollout.state


async def test_each_sample_is_shown_when_it_has_changed_and_once_when_it_ended(pool: Pool) -> None:
    engine = three_tokens_each()
    await pool.start(engine, checkpoint_tokens=1)
    pool.submit(2)
    await pool.made(3, "g0/0", "g1/0")
    growing = pool.client.partials(every=0.01)

    assert await after(growing) == ("g0/0", 3, State.LEASED)
    assert await after(growing) == ("g1/0", 3, State.LEASED)
    engine.allow(2, "g1/0")
    assert await after(growing) == ("g1/0", 5, State.LEASED)
    engine.allow(5, "g0/0")
    assert await after(growing) == ("g0/0", 8, State.FINISHED)
    engine.allow(3, "g1/0")
    assert await after(growing) == ("g1/0", 8, State.FINISHED)
    assert list(growing) == []

    assert len(await pool.groups(2)) == 2, "nothing was taken"


async def test_only_the_clients_own_and_only_those_named_are_shown(pool: Pool) -> None:
    engine = three_tokens_each()
    await pool.start(engine)
    pool.submit(3, n=2)
    other = pool.new_client()
    other.submit([[1, 2, 3]], ids=["others"])
    await pool.made(3, "others/0", *[f"g{g}/{i}" for g in range(3) for i in range(2)])
    growing = pool.client.partials(["g0/1", "g2"], every=0.01)

    shown = [(await after(growing))[0] for _ in range(3)]
    assert shown == ["g0/1", "g2/0", "g2/1"]
    other.cancel(["g0", "g2"])
    rest = await asyncio.to_thread(list, growing)

    assert [(r.id, r.state) for r in rest] == [(sid, State.CANCELLED) for sid in shown]
    with pytest.raises(InvalidSample, match="is a list"):
        next(pool.client.partials("g0"))


async def test_many_samples_are_read_in_bounded_pieces(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials, "_MARKS_A_READ", 7)
    monkeypatch.setattr(partials, "_SAMPLES_A_READ", 3)
    pieces: list[int] = []
    read_all = partials.read_all
    monkeypatch.setattr(
        partials,
        "read_all",
        lambda q, commands: pieces.append(len(commands)) or read_all(q, commands),
    )
    await pool.start(StepEngine())
    pool.submit(10, n=2)
    await pool.made(8, *[f"g{g}/{i}" for g in range(10) for i in range(2)])

    shown = [r.id for r in pool.client.partials(every=0.01)]

    assert shown == [f"g{g}/{i}" for g in range(10) for i in range(2)]
    assert max(pieces) <= 3 * 3


# cancel


async def test_samples_are_cancelled_by_what_they_look_like(pool: Pool) -> None:
    engine = StepEngine(lambda r: {"g0/0": 5, "g2/0": 6}.get(sample_of(r.request_id), 2))
    await pool.start(engine)
    pool.submit(3)
    await pool.made(5, "g0/0")
    await pool.made(2, "g1/0")
    await pool.made(6, "g2/0")

    def long(rollout: Rollout) -> bool:
        return len(proved(rollout).response_ids) > 3

    assert pool.client.cancel(["g1", "g2"], where=long, reason="too long") == 1
    assert pool.client.cancel(where=long) == 1
    assert pool.client.cancel(where=long) == 0, "they have ended"
    engine.allow(6, "g1/0")

    rollouts = {g.id: g.rollouts[0] for g in await pool.groups(3)}
    assert {name: (str(r.state), len(r.response_ids)) for name, r in rollouts.items()} == {
        "g0": ("cancelled", 5),
        "g1": ("finished", 8),
        "g2": ("cancelled", 6),
    }
    assert rollouts["g2"].error == "too long"


async def test_samples_are_cancelled_by_age(pool: Pool) -> None:
    pool.submit(2)
    other = pool.new_client()
    other.submit([[1, 2, 3]], ids=["others"])

    assert pool.client.cancel(older_than=3600) == 0
    assert pool.client.cancel(older_than=0, where=lambda r: r.group_id == "g1") == 1
    assert pool.client.cancel(older_than=0) == 1
    assert pool.client.status().ready == 1, "another client's is not touched"
    with pytest.raises(InvalidSample, match="cancel needs ids, where= or older_than="):
        pool.client.cancel()
    with pytest.raises(InvalidSample, match="list of ids"):
        pool.client.cancel("g0", older_than=0)
