"""The gate before the engine: who is inside is waited for, nobody new comes in."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import DEADLINE_S
from workers.admission import Admission


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_open_gate_lets_everybody_in() -> None:
    gate = Admission()

    async with gate, gate:
        assert gate.is_open
    await gate.close()
    assert not gate.is_open


async def test_closing_waits_for_who_is_inside() -> None:
    gate = Admission()
    await gate.__aenter__()
    await gate.__aenter__()
    closing = asyncio.create_task(gate.close())

    await let_others_run()
    assert not closing.done()
    await gate.__aexit__(None, None, None)
    await let_others_run()
    assert not closing.done()
    await gate.__aexit__(None, None, None)

    await asyncio.wait_for(closing, DEADLINE_S)


async def test_a_closed_gate_holds_newcomers_until_it_opens() -> None:
    gate = Admission()
    await gate.close()
    entered: list[int] = []

    async def enter(number: int) -> None:
        async with gate:
            entered.append(number)

    tasks = [asyncio.create_task(enter(i)) for i in range(3)]
    await let_others_run()
    assert entered == []
    gate.open()
    await asyncio.gather(*tasks)

    assert entered == [0, 1, 2]


async def test_a_gate_that_closes_again_holds_those_that_were_just_woken() -> None:
    gate = Admission()
    await gate.close()
    entered: list[int] = []

    async def enter() -> None:
        async with gate:
            entered.append(1)

    task = asyncio.create_task(enter())
    await let_others_run()
    gate.open()
    with pytest.raises(StopIteration):
        gate.close().send(None)  # closed again before the task has had its turn
    await let_others_run()
    assert entered == []
    gate.open()
    await task


async def test_a_failed_admission_leaves_the_gate() -> None:
    gate = Admission()

    try:
        async with gate:
            raise ValueError
    except ValueError:
        pass

    await asyncio.wait_for(gate.close(), DEADLINE_S)
