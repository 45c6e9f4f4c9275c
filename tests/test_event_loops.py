"""One way from sync code into async code, and things that live as long as a loop."""

import asyncio

import pytest

from kedge import KedgeError, run_sync
from kedge.event_loops import PerLoop


class Resource:
    """Something that must be closed in the loop that made it."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_a_coroutine_is_run_to_its_end() -> None:
    """Values come back, and errors are raised."""

    async def work() -> int:
        return 5

    async def fail() -> None:
        raise ValueError("no")

    assert run_sync(work()) == 5
    with pytest.raises(ValueError, match="no"):
        run_sync(fail())


def test_each_loop_has_a_thing_of_its_own_and_closes_it() -> None:
    """What a loop opened is closed before the loop ends."""
    made: list[Resource] = []

    def make() -> Resource:
        made.append(Resource())
        return made[-1]

    things = PerLoop(make, lambda thing: thing.close())

    async def use() -> None:
        assert things.get() is things.get()

    run_sync(use())
    run_sync(use())
    assert [thing.closed for thing in made] == [True, True]


def test_a_loop_closes_what_nobody_closed() -> None:
    """Any way to run a loop will do, also where the owner was dropped on the way or with the loop."""
    made = [Resource(), Resource(), Resource()]
    kept = PerLoop(lambda: made[0], lambda thing: thing.close())

    async def use() -> None:
        kept.get()
        PerLoop(lambda: made[1], lambda thing: thing.close()).get()
        for _ in range(4):
            await asyncio.sleep(0)
        assert made[1].closed
        last = PerLoop(lambda: made[2], lambda thing: thing.close())
        last.get()

    asyncio.run(use())
    assert [thing.closed for thing in made] == [True, True, True]


async def test_what_is_closed_is_made_anew_when_asked_for() -> None:
    """Closing is no end, and closing twice is no error."""
    made: list[Resource] = []

    def make() -> Resource:
        made.append(Resource())
        return made[-1]

    things = PerLoop(make, lambda thing: thing.close())
    first = things.get()
    await things.aclose()
    await things.aclose()
    assert first.closed
    assert things.get() is not first


async def test_inside_a_loop_await_is_the_way() -> None:
    """run_sync says so instead of blocking the loop."""

    async def work() -> None:
        pass

    with pytest.raises(KedgeError, match="use await"):
        run_sync(work())
