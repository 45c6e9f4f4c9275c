"""How many run at once: never more than allowed, in the order they came, and nobody waits in vain."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.abc import TaskGroup
from hypothesis import given
from hypothesis import strategies as st

from kedge.tools.concurrency import (
    AllPermitsAbandoned,
    ConcurrencyLimit,
    ConcurrencyLimiter,
    ConcurrencyPermit,
)


class GateRunner:
    """Tasks at a gate that stay inside until they are let go."""

    def __init__(self, gate: ConcurrencyLimiter, group: TaskGroup) -> None:
        self.gate = gate
        self.group = group
        self.log: list[str] = []
        self.inside: dict[str, anyio.Event] = {}
        self.places: dict[str, ConcurrencyPermit] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def start(self, name: str) -> None:
        """Start a task and let it come as far as it can."""
        self.group.start_soon(self._run, name)
        await anyio.wait_all_tasks_blocked()

    async def leave(self, name: str) -> None:
        """Let a task go; those who follow come as far as they can."""
        self.inside.pop(name).set()
        await anyio.wait_all_tasks_blocked()

    async def leave_thread(self, name: str) -> None:
        """Let a task go whose thread stays behind."""
        self.places[name].transfer_to_thread()
        await self.leave(name)

    async def cancel(self, name: str) -> None:
        """Cancel a task, wherever it is."""
        self.inside.pop(name, None)
        self.scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()

    async def _run(self, name: str) -> None:
        with anyio.CancelScope() as scope:
            self.scopes[name] = scope
            try:
                async with self.gate.acquire() as position:
                    self.log.append(name)
                    self.places[name] = position
                    self.inside[name] = anyio.Event()
                    await self.inside[name].wait()
            except AllPermitsAbandoned:
                self.log.append(f"{name} is told")


async def run_at_gate(size: int, scenario: Callable[[GateRunner], Awaitable[None]]) -> None:
    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            await scenario(GateRunner(ConcurrencyLimiter(size), group))
            group.cancel_scope.cancel()


async def test_no_more_than_the_limit_run_and_the_first_come_first() -> None:
    """Those who wait are let in one for one, in order."""

    async def story(at: GateRunner) -> None:
        for name in "abcd":
            await at.start(name)
        assert at.log == ["a", "b"]
        await at.leave("b")
        assert at.log == ["a", "b", "c"]
        await at.leave("a")
        assert at.log == ["a", "b", "c", "d"]

    await run_at_gate(2, story)


async def test_who_gives_up_waiting_leaves_no_hole() -> None:
    """A cancelled task in the queue is passed over; a cancelled one inside frees its place."""

    async def story(at: GateRunner) -> None:
        for name in "abcd":
            await at.start(name)
        await at.cancel("b")
        await at.leave("a")
        assert at.log == ["a", "c"]
        await at.cancel("c")
        assert at.log == ["a", "c", "d"]

    await run_at_gate(1, story)


async def test_a_slot_of_a_cancelled_task_is_given_to_the_next() -> None:
    """Cancelled in the very moment of being let in: the place is not lost."""

    async def story(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        at.inside.pop("a").set()
        at.scopes["b"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert at.log[-1] == "c"
        assert at.gate.running == 1

    await run_at_gate(1, story)


async def test_a_stray_thread_keeps_its_place_until_it_ends() -> None:
    """A tool that may run once does not run beside a thread that was given up."""

    async def story(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        await at.leave_thread("a")
        assert at.log == ["a", "b"]
        at.places["a"].release()
        await at.leave("b")
        await at.start("d")
        assert at.log == ["a", "b", "c", "d"]

    await run_at_gate(2, story)


async def test_abandoned_threads_alone_do_not_block_calls() -> None:
    """Who waits, and who comes, is told when all places are held by stray threads."""

    async def story(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        await at.leave_thread("a")
        assert at.log == ["a", "b is told", "c is told"]
        await at.start("d")
        assert at.log[-1] == "d is told"
        at.places["a"].release()
        await at.start("e")
        assert at.log[-1] == "e"

    await run_at_gate(1, story)


async def test_a_thread_that_ends_during_notification_admits_waiting_calls() -> None:
    """Woken to be told, they find a place free after all."""

    async def story(at: GateRunner) -> None:
        await at.start("a")
        await at.start("b")
        at.places["a"].transfer_to_thread()
        at.inside.pop("a").set()
        at.group.start_soon(_release, at.places["a"])
        await anyio.wait_all_tasks_blocked()
        assert at.log in (["a", "b"], ["a", "b is told"])

    await run_at_gate(1, story)


async def _release(place: ConcurrencyPermit) -> None:
    place.release()


steps = st.lists(st.sampled_from(["start", "leave", "cancel", "stray", "end"]), max_size=25)


@given(st.integers(1, 3), steps)
async def test_any_sequence_of_events_respects_the_limit_and_ends_all_waits(
    size: int, events: list[str]
) -> None:
    """At most ``size`` run or are astray; who waits, waits for someone who runs."""
    waiting: set[str] = set()

    async def story(at: GateRunner) -> None:
        strays: list[ConcurrencyPermit] = []
        for i, event in enumerate(events):
            name = next(iter(at.inside), "")
            match event:
                case "start":
                    waiting.add(f"t{i}")
                    await at.start(f"t{i}")
                case "leave" if name:
                    await at.leave(name)
                case "stray" if name:
                    strays.append(at.places[name])
                    await at.leave_thread(name)
                case "cancel" if at.scopes:
                    gone = next(reversed(at.scopes))
                    await at.cancel(gone)
                    at.scopes.pop(gone)
                    waiting.discard(gone)
                case "end" if strays:
                    strays.pop().release()
                case _:
                    pass
            waiting.difference_update(entry.removesuffix(" is told") for entry in at.log)
            assert len(at.inside) == at.gate.running
            assert at.gate.running + len(strays) <= size
            assert not waiting or at.gate.running

    await run_at_gate(size, story)


def test_each_event_loop_counts_for_itself() -> None:
    """A tool may be used in one event loop after another; a limit left behind holds nobody up."""
    limit = ConcurrencyLimit(1)

    async def hold() -> ConcurrencyLimiter:
        gate = limit.current_limiter()
        await gate.acquire().__aenter__()
        assert limit.current_limiter() is gate
        return gate

    assert anyio.run(hold) is not anyio.run(hold)


@pytest.mark.parametrize("size", [1, 2])
async def test_different_limits_do_not_share(size: int) -> None:
    """Two tools with the same limit each have their own."""
    assert ConcurrencyLimit(size).current_limiter() is not ConcurrencyLimit(size).current_limiter()
