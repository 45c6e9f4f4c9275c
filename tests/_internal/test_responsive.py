"""Tests of tasks that never wait and share one event loop."""

import asyncio

import pytest

from kedge._internal import responsive
from kedge._internal.responsive import TimeSlice


class TurnCounter:
    """Counts the turns of the running loop, and in which of them each task ran."""

    def __init__(self) -> None:
        self.turn = 0
        self.ran_at: list[int] = []
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.turn += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._handle.cancel()

    async def work(self, steps: int) -> None:
        """Run without ever waiting."""
        time_slice = TimeSlice()
        for _ in range(steps):
            await time_slice.share()
            self.ran_at.append(self.turn)


async def test_one_task_continues_in_each_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tasks never wait, the loop looks at its sockets after the slice of one of them."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 0.0)
    turns = TurnCounter()
    await asyncio.gather(*(turns.work(4) for _ in range(20)))
    turns.stop()
    assert len(turns.ran_at) == 20 * 4
    assert len(set(turns.ran_at)) == len(turns.ran_at)


async def test_a_task_with_time_left_continues_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is interrupted before its slice is over."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 3600.0)
    turns = TurnCounter()
    await turns.work(100)
    turns.stop()
    assert set(turns.ran_at) == {0}


async def test_a_cancelled_task_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that are cancelled while they wait for their turn are skipped."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 0.0)
    turns = TurnCounter()
    tasks = [asyncio.create_task(turns.work(3)) for _ in range(4)]
    await asyncio.sleep(0)  # all of them wait for their first turn
    tasks[0].cancel()
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    turns.stop()
    assert [type(result) for result in results[::2]] == [asyncio.CancelledError] * 2
    assert results[1::2] == [None, None]
    assert len(turns.ran_at) == 6


async def test_many_tasks_do_not_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While some tasks take turns, others begin one after the other; without any, a task begins at once."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 0.0)
    turns = TurnCounter()
    began: list[int] = []

    async def begin() -> None:
        await TimeSlice.begin()
        began.append(turns.turn)

    await begin()
    assert began == [0]
    await asyncio.gather(turns.work(20), *(begin() for _ in range(5)))
    turns.stop()
    assert len(set(began)) == len(began)
