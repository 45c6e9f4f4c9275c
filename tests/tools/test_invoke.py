"""Tests of one attempt of a tool call: timeouts, threads, cancellation, and the limiter of concurrency."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.tools import AnyTool, Edit, Toolbox, ToolRun, run_calls, tool
from kedge.tools.invoke import ConcurrencyExhausted, ConcurrencyLimiter, ThreadRun, get_limiter
from kedge.turns import ToolCallBlock
from tools.runs import make_calls, run_call

SOON = 0.01


async def run_one(function: Any, **options: Any) -> ToolRun:
    toolbox = Toolbox(function)
    return await run_call(toolbox, *make_calls(*toolbox), **options)


@asynccontextmanager
async def run_in_background(
    toolbox: Toolbox, *batches: list[ToolCallBlock], on_run: Callable[[ToolRun], object]
) -> AsyncGenerator[anyio.CancelScope]:
    """Run calls in the background until they end or the yielded scope is cancelled."""
    async with anyio.create_task_group() as group:
        for calls in batches:
            group.start_soon(partial(run_calls, Toolbox(toolbox), calls, on_run=on_run))
        with anyio.fail_after(300):
            yield group.cancel_scope


async def test_an_async_function_is_cancelled_at_its_timeout() -> None:
    """The function is cancelled, its cleanup runs, and the result reports the timeout."""
    cleaned = False

    @tool(timeout=SOON)
    async def slow() -> None:
        nonlocal cleaned
        try:
            await anyio.sleep_forever()
        finally:
            cleaned = True

    run = await run_one(slow)
    assert cleaned
    assert (run.outcome, run.attempts) == ("timeout", 1)
    assert run.result.text == "slow timed out: it took longer than 0.01 s."


async def test_a_timeout_can_be_retried() -> None:
    """A timeout counts as a ``TimeoutError`` for ``retry_on``."""
    starts = 0

    @tool(timeout=SOON, retries=1, retry_wait=0, retry_on=(TimeoutError,))
    async def slow_once() -> str:
        nonlocal starts
        starts += 1
        if starts == 1:
            await anyio.sleep_forever()
        return "there"

    run = await run_one(slow_once)
    assert (run.outcome, run.attempts, run.result.text) == ("ok", 2, "there")


async def test_a_timeout_error_raised_by_the_function_is_a_failure() -> None:
    """A ``TimeoutError`` raised by the function is a failure with its own message, not a timeout."""

    @tool(timeout=30)
    async def slow() -> None:
        raise TimeoutError("the door is closed")

    run = await run_one(slow)
    assert run.outcome == "failed"
    assert run.result.text == "slow failed: TimeoutError: the door is closed"


class ManualTimeout:
    """A timeout that expires when the test says so, independent of the speed of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scopes: list[anyio.CancelScope] = []
        monkeypatch.setattr("kedge.tools.invoke.move_on_after", self._open_scope)

    def expire(self) -> None:
        """Expire the timeouts of all running calls; called in a thread."""
        anyio.from_thread.run_sync(self._cancel)

    def _open_scope(self, delay: float) -> anyio.CancelScope:
        self.scopes.append(anyio.CancelScope())
        return self.scopes[-1]

    def _cancel(self) -> None:
        for scope in self.scopes:
            scope.cancel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualTimeout:
    return ManualTimeout(monkeypatch)


async def test_a_thread_times_out_by_the_real_clock() -> None:
    """A thread times out by the real clock, whether or not it has started."""
    release = threading.Event()

    @tool(timeout=SOON)
    def slow() -> None:
        release.wait(300)

    run = await run_one(slow)
    release.set()
    assert (run.outcome, run.attempts) == ("timeout", 1)


async def test_an_abandoned_thread_holds_its_permit(clock: ManualTimeout) -> None:
    """A tool limited to one call is reported as busy, without a note on its arguments, until the thread ends."""
    release = threading.Event()
    running: list[int] = []

    @tool(timeout=1, concurrency=1)
    def slow() -> None:
        running.append(1)
        assert sum(running) == 1
        clock.expire()
        release.wait(300)
        running.pop()

    runs: list[ToolRun] = []
    with anyio.fail_after(300):
        await run_calls(Toolbox(slow), make_calls("slow", "slow"), on_run=runs.append)
    busy = "slow failed: it is busy: 1 earlier call(s) timed out and are still running."
    assert [(run.outcome, run.attempts) for run in runs] == [("timeout", 1), ("failed", 0)]
    assert runs[1].result.text == busy
    assert (await run_one(slow, approve=lambda _: Edit({}))).result.text == busy
    release.set()
    gate = get_limiter(slow)
    assert gate
    with anyio.fail_after(300):
        while gate.abandoned:  # noqa: ASYNC110 - threads notify no event loop
            await anyio.sleep(0.001)
        async with gate.acquire():
            assert gate.running == 1


@pytest.mark.parametrize("ends_first", [True, False])
async def test_the_last_holder_releases_the_permit(ends_first: bool) -> None:
    """The permit is released if a thread starts or ends at the moment it is abandoned."""
    called: list[int] = []

    @tool(concurrency=1)
    def quick() -> None:
        called.append(1)

    gate = get_limiter(quick)
    assert gate
    async with gate.acquire():
        run = ThreadRun(quick, {}, gate.abandoned)
        if ends_first:
            run.call_function()
        run.abandon()
        if not ends_first:
            run.call_function()
    assert called == ([1] if ends_first else [])
    assert (gate.running, gate.abandoned) == (0, set())


async def test_a_limit_holds_across_runs_and_toolboxes() -> None:
    """At most two of six calls run at once in two concurrent runs with separate toolboxes."""
    gates = [anyio.Event() for _ in range(6)]
    entered: list[int] = []
    active = maximum = 0

    @tool(concurrency=2)
    async def careful() -> None:
        nonlocal active, maximum
        active += 1
        maximum = max(maximum, active)
        entered.append(len(entered))
        await gates[entered[-1]].wait()
        active -= 1

    runs: list[ToolRun] = []
    calls = make_calls("careful", "careful", "careful")
    async with run_in_background(Toolbox(careful), calls, calls, on_run=runs.append):
        for gate in gates:
            await anyio.wait_all_tasks_blocked()
            assert active == min(2, 6 - len(runs))
            gate.set()
    assert [run.outcome for run in runs] == ["ok"] * 6
    assert maximum == 2


async def test_waiting_for_a_slot_does_not_count_towards_the_timeout(clock: ManualTimeout) -> None:
    """The timeout of a call starts when it runs, not when it is queued."""

    @tool(concurrency=1, timeout=1)
    async def queued() -> str:
        return "done"

    gate = get_limiter(queued)
    assert gate
    runs: list[ToolRun] = []
    async with run_in_background(Toolbox(queued), make_calls("queued"), on_run=runs.append):
        async with gate.acquire():
            await anyio.wait_all_tasks_blocked()
            assert clock.scopes == []
        assert runs == []
    assert [(run.outcome, run.attempts) for run in runs] == [("ok", 1)]
    assert len(clock.scopes) == 1
    assert runs[0].waited > 0


async def test_cancellation_answers_every_call() -> None:
    """Completed results are delivered, and running and waiting calls are answered as cancelled."""
    cleaned = threading.Event()
    started = anyio.Event()
    release = threading.Event()

    def quick() -> str:
        return "done"

    @tool(concurrency=1)
    async def slow() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.set()

    def thread() -> None:
        release.wait(300)

    runs: dict[str, ToolRun] = {}
    first = anyio.Event()

    def note(run: ToolRun) -> None:
        assert run.call_id not in runs
        runs[run.call_id] = run
        first.set()

    requested = make_calls("quick", "slow", "slow", "thread")
    async with run_in_background(Toolbox(quick, slow, thread), requested, on_run=note) as scope:
        await started.wait()
        await first.wait()
        scope.cancel()
    release.set()
    assert cleaned.is_set()
    cancelled = "This call was cancelled while it ran; it may have had an effect."
    assert [(runs[c.call_id].outcome, runs[c.call_id].result.text) for c in requested] == [
        ("ok", "done"),
        ("cancelled", cancelled),
        ("cancelled", "This call was cancelled before it ran."),
        ("cancelled", cancelled),
    ]


async def test_a_function_that_is_cancelled_from_within_has_failed() -> None:
    """A call whose awaitable or task was cancelled by the function has failed; the other calls continue."""

    async def waits() -> None:
        inner = asyncio.ensure_future(anyio.sleep_forever())
        inner.cancel()
        await inner

    def thread() -> None:
        raise asyncio.CancelledError

    async def scoped() -> str:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep_forever()
        return "went on"

    async def rash() -> None:
        task = asyncio.current_task()
        assert task
        task.cancel()
        await checkpoint()

    toolbox = Toolbox(waits, thread, scoped, rash)
    with anyio.fail_after(300):
        results = await run_calls(toolbox, make_calls(*toolbox))
    expected = dict.fromkeys(toolbox, "failed: it was cancelled from within.")
    for name, result in zip(toolbox, results, strict=True):
        assert result.text == ("went on" if name == "scoped" else f"{name} {expected[name]}")


def make_raising_tool(exception: type[BaseException], in_thread: bool) -> AnyTool:
    """Return a tool named ``stop`` that raises an exception in a thread or in the event loop."""

    def stop() -> None:
        raise exception

    async def stop_in_loop() -> None:
        raise exception

    return tool(stop if in_thread else stop_in_loop, name="stop")


@for_each("in_thread", [True, False])
async def test_generator_exit_is_a_failed_call(in_thread: bool) -> None:
    """GeneratorExit, which would close the stream of the run, is answered as a failure."""
    run = await run_one(make_raising_tool(GeneratorExit, in_thread))
    assert run.result.text == "stop failed: RuntimeError: the function raised GeneratorExit"


class Stop(BaseException):
    """An exception that is not reported as a tool result."""


@for_each("exception", [KeyboardInterrupt, SystemExit, Stop])
@for_each("in_thread", [True, False])
async def test_base_exceptions_are_raised_unchanged(
    exception: type[BaseException], in_thread: bool
) -> None:
    """The exception is not wrapped in a group, and all calls are delivered as cancelled."""

    async def waits() -> None:
        await anyio.sleep_forever()

    runs: list[ToolRun] = []
    toolbox = Toolbox(make_raising_tool(exception, in_thread), waits)
    with anyio.fail_after(300), pytest.raises(exception):
        await run_calls(toolbox, make_calls("stop", "waits"), on_run=runs.append)
    assert [(run.name, run.outcome) for run in runs] == [
        ("stop", "cancelled"),
        ("waits", "cancelled"),
    ]


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

    async def abandon(self, name: str) -> None:
        """End a task whose thread is still running."""
        self.gate.abandoned.add(name)
        await self.leave(name)

    async def end(self, name: str) -> None:
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
                self.log.append(name.upper())


@asynccontextmanager
async def open_gate(size: int, *names: str) -> AsyncGenerator[GateRunner]:
    """Start these tasks at a limiter, and cancel at the end those that remain."""
    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            at = GateRunner(ConcurrencyLimiter(size), group)
            for name in names:
                await at.start(name)
            yield at
            group.cancel_scope.cancel()


@for_each(
    ("size", "names", "steps"),
    [
        # At most `size` tasks run, and waiting tasks get permits in the order of their arrival.
        (2, "abcd", "leave b: abc, leave a: abcd"),
        # A cancelled task in the queue is skipped, and a cancelled task that runs frees its permit.
        (1, "abcd", "cancel b: a, leave a: ac, cancel c: acd"),
        # A tool does not run while an abandoned thread of it is still running and holds its permit.
        (2, "abc", "abandon a: ab, end a: ab, leave b: abc, start d: abcd"),
        # If abandoned threads hold all permits, waiting and new calls fail instead of blocking.
        (1, "abc", "abandon a: aBC, start d: aBCD, end a: aBCD, start e: aBCDe"),
        # The end of a thread frees a permit for the task that waits longest, not for the next one.
        (2, "ab", "abandon b: ab, start c: ab, end b: ab, start d: ab, leave a: abcd"),
    ],
)
async def test_permits_are_given_in_order(size: int, names: str, steps: str) -> None:
    """After each step these tasks have had a permit; those in upper case were told that there is none."""
    async with open_gate(size, *names) as at:
        assert "".join(at.log) == names[:size]
        for step in steps.split(", "):
            method, name, log = step.replace(":", "").split()
            await getattr(at, method)(name)
            assert "".join(at.log) == log, step


async def test_the_permit_of_a_cancelled_task_is_given_to_the_next() -> None:
    """A permit is not lost if its task is cancelled at the moment it gets the permit."""
    async with open_gate(1, *"abc") as at:
        at.inside.pop("a").set()
        at.scopes["b"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert at.log[-1] == "c"
        assert at.gate.running == 1


async def test_a_thread_that_ends_during_notification_admits_waiting_calls() -> None:
    """A waiting call does not block if the thread ends while the waiting calls are notified."""
    async with open_gate(1, *"ab") as at:
        at.gate.abandoned.add("a")
        at.inside.pop("a").set()
        at.group.start_soon(at.end, "a")
        await anyio.wait_all_tasks_blocked()
        assert at.log in (["a", "b"], ["a", "B"])


steps = st.lists(st.sampled_from(["start", "leave", "cancel", "stray", "end"]), max_size=25)


@given(st.integers(1, 3), steps)
async def test_any_sequence_of_events_respects_the_limit_and_ends_all_waits(
    size: int, events: list[str]
) -> None:
    """At most ``size`` permits are in use, and a task waits only while another task is running."""
    waiting: set[str] = set()
    abandoned: list[str] = []
    async with open_gate(size) as at:
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
                    await at.abandon(name)
                case "cancel" if at.scopes:
                    cancelled = next(reversed(at.scopes))
                    await at.cancel(cancelled)
                    at.scopes.pop(cancelled)
                    waiting.discard(cancelled)
                case "end" if abandoned:
                    await at.end(abandoned.pop())
                case _:
                    pass
            waiting.difference_update(entry.lower() for entry in at.log)
            assert len(at.inside) == at.gate.running
            assert at.gate.running + len(abandoned) <= size
            assert not waiting or at.gate.running


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
