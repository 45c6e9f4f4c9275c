"""Tests of the concurrency limiter: its limit, the order of waiting tasks, and abandoned threads."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.abc import TaskGroup
from hypothesis import given
from hypothesis import strategies as st

from kedge.tools import AnyTool, tool
from kedge.tools.invoke import ConcurrencyExhausted, ConcurrencyLimiter, get_limiter


class GateRunner:
    """Tasks that hold a permit of a limiter until the test ends them."""

    def __init__(self, gate: ConcurrencyLimiter, group: TaskGroup) -> None:
        self.gate = gate
        self.group = group
        self.log: list[str] = []
        self.inside: dict[str, anyio.Event] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def start(self, name: str) -> None:
        """Start a task and wait until all tasks are blocked."""
        self.group.start_soon(self._run, name)
        await anyio.wait_all_tasks_blocked()

    async def leave(self, name: str) -> None:
        """End a task and wait until all tasks are blocked."""
        self.inside.pop(name).set()
        await anyio.wait_all_tasks_blocked()

    async def leave_thread(self, name: str) -> None:
        """End a task whose thread is still running."""
        self.gate.abandoned.add(name)
        await self.leave(name)

    def end_thread(self, name: str) -> None:
        """End an abandoned thread."""
        self.gate.abandoned.discard(name)

    async def cancel(self, name: str) -> None:
        """Cancel a task that waits for a permit or holds one."""
        self.inside.pop(name, None)
        self.scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()

    async def _run(self, name: str) -> None:
        with anyio.CancelScope() as scope:
            self.scopes[name] = scope
            try:
                async with self.gate.acquire():
                    self.log.append(name)
                    self.inside[name] = anyio.Event()
                    await self.inside[name].wait()
            except ConcurrencyExhausted:
                self.log.append(f"{name} is told")


async def run_at_gate(size: int, scenario: Callable[[GateRunner], Awaitable[None]]) -> None:
    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            await scenario(GateRunner(ConcurrencyLimiter(size), group))
            group.cancel_scope.cancel()


async def test_waiting_tasks_run_in_order_within_the_limit() -> None:
    """At most ``size`` tasks run, and waiting tasks get permits in the order of their arrival."""

    async def scenario(at: GateRunner) -> None:
        for name in "abcd":
            await at.start(name)
        assert at.log == ["a", "b"]
        await at.leave("b")
        assert at.log == ["a", "b", "c"]
        await at.leave("a")
        assert at.log == ["a", "b", "c", "d"]

    await run_at_gate(2, scenario)


async def test_cancelled_tasks_free_their_permits() -> None:
    """A cancelled task in the queue is skipped, and a cancelled task that runs frees its permit."""

    async def scenario(at: GateRunner) -> None:
        for name in "abcd":
            await at.start(name)
        await at.cancel("b")
        await at.leave("a")
        assert at.log == ["a", "c"]
        await at.cancel("c")
        assert at.log == ["a", "c", "d"]

    await run_at_gate(1, scenario)


async def test_the_permit_of_a_cancelled_task_is_given_to_the_next() -> None:
    """A permit is not lost if its task is cancelled at the moment it gets the permit."""

    async def scenario(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        at.inside.pop("a").set()
        at.scopes["b"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert at.log[-1] == "c"
        assert at.gate.running == 1

    await run_at_gate(1, scenario)


async def test_an_abandoned_thread_holds_its_permit_until_it_ends() -> None:
    """A tool limited to one call does not run while an abandoned thread of it is still running."""

    async def scenario(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        await at.leave_thread("a")
        assert at.log == ["a", "b"]
        at.end_thread("a")
        await at.leave("b")
        await at.start("d")
        assert at.log == ["a", "b", "c", "d"]

    await run_at_gate(2, scenario)


async def test_abandoned_threads_alone_do_not_block_calls() -> None:
    """If abandoned threads hold all permits, waiting and new calls fail instead of blocking."""

    async def scenario(at: GateRunner) -> None:
        for name in "abc":
            await at.start(name)
        await at.leave_thread("a")
        assert at.log == ["a", "b is told", "c is told"]
        await at.start("d")
        assert at.log[-1] == "d is told"
        at.end_thread("a")
        await at.start("e")
        assert at.log[-1] == "e"

    await run_at_gate(1, scenario)


async def test_a_thread_that_ends_during_notification_admits_waiting_calls() -> None:
    """A waiting call does not block if the thread ends while the waiting calls are notified."""

    async def scenario(at: GateRunner) -> None:
        await at.start("a")
        await at.start("b")
        at.gate.abandoned.add("a")
        at.inside.pop("a").set()
        at.group.start_soon(_end_thread, at, "a")
        await anyio.wait_all_tasks_blocked()
        assert at.log in (["a", "b"], ["a", "b is told"])

    await run_at_gate(1, scenario)


async def _end_thread(at: GateRunner, name: str) -> None:
    at.end_thread(name)


steps = st.lists(st.sampled_from(["start", "leave", "cancel", "stray", "end"]), max_size=25)


@given(st.integers(1, 3), steps)
async def test_any_sequence_of_events_respects_the_limit_and_ends_all_waits(
    size: int, events: list[str]
) -> None:
    """At most ``size`` permits are in use, and a task waits only while another task is running."""
    waiting: set[str] = set()

    async def scenario(at: GateRunner) -> None:
        abandoned: list[str] = []
        for i, event in enumerate(events):
            name = next(iter(at.inside), "")
            match event:
                case "start":
                    waiting.add(f"t{i}")
                    await at.start(f"t{i}")
                case "leave" if name:
                    await at.leave(name)
                case "stray" if name:
                    abandoned.append(name)
                    await at.leave_thread(name)
                case "cancel" if at.scopes:
                    cancelled = next(reversed(at.scopes))
                    await at.cancel(cancelled)
                    at.scopes.pop(cancelled)
                    waiting.discard(cancelled)
                case "end" if abandoned:
                    at.end_thread(abandoned.pop())
                case _:
                    pass
            waiting.difference_update(entry.removesuffix(" is told") for entry in at.log)
            assert len(at.inside) == at.gate.running
            assert at.gate.running + len(abandoned) <= size
            assert not waiting or at.gate.running

    await run_at_gate(size, scenario)


def make_limited(size: int) -> AnyTool:
    """Return a tool with a limit."""

    def work() -> None: ...

    return tool(work, concurrency=size)


def test_each_event_loop_has_its_own_limiter() -> None:
    """A permit that is never released in one event loop does not block calls in the next one."""
    limited = make_limited(1)

    async def hold() -> ConcurrencyLimiter:
        gate = get_limiter(limited)
        assert gate
        await gate.acquire().__aenter__()
        assert get_limiter(limited) is gate
        return gate

    assert anyio.run(hold) is not anyio.run(hold)


@pytest.mark.parametrize("size", [1, 2])
async def test_limits_of_the_same_size_are_independent(size: int) -> None:
    """Two tools with limits of the same size have separate limiters."""
    limited, other = make_limited(size), make_limited(size)
    assert get_limiter(limited) is not get_limiter(other)


async def test_a_new_task_waits_behind_others_when_an_abandoned_thread_ends() -> None:
    """The end of a thread frees a permit for the task that waits longest, not for the next one to arrive."""

    async def scenario(at: GateRunner) -> None:
        for name in "ab":
            await at.start(name)
        await at.leave_thread("b")
        await at.start("c")
        at.end_thread("b")
        await at.start("d")
        assert at.log == ["a", "b"]
        await at.leave("a")
        assert at.log == ["a", "b", "c", "d"]

    await run_at_gate(2, scenario)
