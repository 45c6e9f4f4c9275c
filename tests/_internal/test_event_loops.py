"""Tests of sync calls of async code, and of resources that belong to an event loop."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from kedge import KedgeError, run_sync
from kedge._internal import event_loops
from kedge._internal.event_loops import AsyncResource, PerLoop, SharedLock, SharedResource, SyncCall

name: ContextVar[str] = ContextVar("name")


class Resource:
    """A resource that must be closed in the event loop that created it."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def make_resources() -> tuple[PerLoop[Resource], list[Resource]]:
    """Return an owner of resources, and the list of those that it has created."""
    created: list[Resource] = []

    def make() -> Resource:
        created.append(Resource())
        return created[-1]

    return PerLoop(make, Resource.close), created


def test_a_coroutine_is_run_to_its_end() -> None:
    """The call returns the value of the coroutine or raises its error."""

    async def work() -> int:
        return 5

    async def fail() -> None:
        raise TimeoutError("late")

    assert run_sync(work()) == 5
    with pytest.raises(TimeoutError, match="late"):
        run_sync(fail())


def test_a_long_wait_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives just before a blocking wait would otherwise be handled only after it."""
    monkeypatch.setattr(event_loops, "MAX_BLOCK_SECONDS", 0.01)
    assert run_sync(asyncio.sleep(0.05, "done")) == "done"


def test_sync_calls_share_one_loop_and_its_resources() -> None:
    """A resource opened by one sync call is reused by the next one, also from another thread."""
    resources, created = make_resources()

    async def use() -> None:
        resources.get()

    run_sync(use())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_sync, use()).result()
    run_sync(resources.aclose())
    assert [resource.closed for resource in created] == [True]


async def test_a_shared_resource_is_closed_by_its_last_user() -> None:
    """After that it has no further users, who would get a closed resource."""

    class Shared(AsyncResource):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1

    shared = SharedResource(Shared())
    assert shared.add_user()
    for closed in (0, 1):
        await shared.aclose()
        assert shared.resource.closed == closed
    assert not shared.add_user()


def test_a_loop_closes_open_resources() -> None:
    """A resource is closed at the end of its event loop, also if its owner was deleted before."""
    instances = [Resource(), Resource(), Resource()]
    resources = PerLoop(lambda: instances[0], lambda resource: resource.close())

    async def use() -> None:
        resources.get()
        PerLoop(lambda: instances[1], lambda resource: resource.close()).get()
        for _ in range(4):
            await asyncio.sleep(0)
        assert instances[1].closed
        last = PerLoop(lambda: instances[2], lambda resource: resource.close())
        last.get()

    asyncio.run(use())
    assert [resource.closed for resource in instances] == [True, True, True]


def test_a_dropped_resource_is_closed_once(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop and the deleted owner do not both close it, which asyncio would log."""
    owner, created = make_resources()
    owners = [owner]
    del owner

    async def use() -> None:
        owners[0].get()

    with asyncio.Runner() as runner:
        runner.run(use())
        owners.clear()
    assert created[0].closed
    assert caplog.messages == []


async def test_a_closed_resource_is_created_again_on_use() -> None:
    """Closing twice is not an error, and a new resource is created on the next use."""
    resources, _ = make_resources()
    first = resources.get()
    await resources.aclose()
    await resources.aclose()
    assert first.closed
    assert resources.get() is not first


async def test_a_sync_call_works_inside_a_running_loop() -> None:
    """The call blocks the running loop and uses the context variables of the caller."""
    name.set("Ada")

    async def work() -> tuple[str, bool]:
        return name.get(), asyncio.get_running_loop() is outer

    outer = asyncio.get_running_loop()
    assert run_sync(work()) == ("Ada", False)


def test_a_nested_sync_call_is_an_error_unless_made_by_a_thread() -> None:
    """A sync call on the background loop would wait for itself."""

    async def work() -> int:
        return 5

    async def nest() -> int:
        return run_sync(work())

    async def nest_in_thread() -> int:
        return await asyncio.to_thread(run_sync, work())

    with pytest.raises(KedgeError, match="use await"):
        run_sync(nest())
    assert run_sync(nest_in_thread()) == 5


def test_an_exit_in_a_coroutine_is_raised_by_the_call() -> None:
    """SystemExit in a coroutine is raised by the call and does not end the event loop."""

    async def leave() -> None:
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(SystemExit):
            run_sync(leave())


def test_a_call_cancelled_before_it_starts_ends() -> None:
    """The coroutine of a call that is cancelled before it starts is closed."""

    async def work() -> None:
        raise AssertionError

    first = SyncCall(asyncio.sleep(0))
    first.run()
    blocked, release = threading.Event(), threading.Event()
    first.loop.call_soon_threadsafe(lambda: (blocked.set(), release.wait()))
    blocked.wait()
    call = SyncCall(work()).start()
    call.loop.call_soon_threadsafe(call.cancel)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        call.wait()


def run_script(code: str) -> str:
    """Run a script in a new process and return its output."""
    source = f"import asyncio, os, signal\nfrom kedge import run_sync\n{textwrap.dedent(code)}"
    # Python 3.12 and newer warn about a fork while there are threads, which is what one of the scripts tests.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return done.stdout


def test_a_forked_process_has_its_own_loop() -> None:
    """A forked process creates its own event loop, and the parent's loop continues."""
    printed = run_script(
        """
        async def work():
            return os.getpid()
        assert run_sync(work()) == os.getpid()
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            assert run_sync(work()) == os.getpid()
            print("done")
        else:
            os._exit(0 if run_sync(work()) == os.getpid() else 1)
        """
    )
    assert printed == "done\n"


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_end() -> None:
    """Its cleanup is complete before KeyboardInterrupt is raised; the loop can be used again."""
    printed = run_script(
        """
        async def work():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                print("cleaned up")
        try:
            run_sync(work())
        except KeyboardInterrupt:
            print("interrupted")
        run_sync(asyncio.sleep(0))
        """
    )
    assert printed == "cleaned up\ninterrupted\n"


@pytest.mark.parametrize("started", [True, False])
def test_an_interrupt_before_the_wait(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal can arrive while the coroutine is being scheduled: before it has started or after."""
    steps: list[str] = []
    running = threading.Event()

    async def work() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    call = SyncCall(work())
    schedule = call.loop.call_soon_threadsafe

    def interrupt(callback: Callable[..., None]) -> asyncio.Handle:
        monkeypatch.undo()
        if started:
            schedule(callback)
            running.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(call.loop, "call_soon_threadsafe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call.run()
    assert call.done
    assert steps == ["cleaned up"] * started


def test_resources_of_sync_calls_are_closed_at_exit() -> None:
    """At the end of the program the resources are closed, not left to the garbage collector."""
    printed = run_script(
        """
        from kedge._internal.event_loops import PerLoop
        async def close(resource):
            print("closed", resource)
        async def use():
            resources.get()
        resources = PerLoop(lambda: "it", close)
        run_sync(use())
        """
    )
    assert printed == "closed it\n"


def test_a_loop_that_used_threads_ends_with_the_program() -> None:
    """The end of a program that used threads, and that has a running task, writes no error."""
    printed = run_script(
        """
        async def use():
            global task
            task = asyncio.create_task(wait())
            print(await asyncio.to_thread(lambda: "worked"))
        async def wait():
            try:
                await asyncio.sleep(3600)
            finally:
                print("cancelled")
        run_sync(use())
        """
    )
    assert printed == "worked\ncancelled\n"


def test_tasks_of_several_loops_share_a_lock() -> None:
    """Tasks acquire the lock in order of arrival, on any loop; one that stops waiting does not delay the others."""
    lock, order = SharedLock(), list[str]()

    async def hold(name: str) -> None:
        async with lock.acquire():
            order.append(name)

    async def main() -> None:
        async with lock.acquire():
            other = SyncCall(hold("other loop")).start()
            await asyncio.to_thread(run_sync, asyncio.sleep(0))  # the other loop has started it
            stopped, waiting = (asyncio.ensure_future(hold(name)) for name in ("stopped", "last"))
            await asyncio.sleep(0)
            stopped.cancel()
            await asyncio.wait([stopped])
            assert order == []
        await waiting
        await asyncio.to_thread(other.wait)

    asyncio.run(main())
    assert order == ["other loop", "last"]
    run_sync(hold("again"))
