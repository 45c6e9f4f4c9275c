"""Test the methods of engines, Chat and Conversation for sync code."""

import asyncio
import gc
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from queue import Queue
from typing import assert_type

import pytest

from for_each import for_each
from kedge import Chat, Conversation, Turn, connect, user
from kedge._internal.event_loops import SyncCall, run_sync
from kedge.conversation import ChatReply
from kedge.conversation.chat import SyncChat
from kedge.conversation.sync import SyncConversation
from kedge.engines import Engine, RunStream
from kedge.engines.sync import SyncEngine, SyncStream
from kedge.errors import KedgeError
from kedge.events import Event, TextDelta
from kedge.testing import TestServer


@pytest.fixture
def engine(kedge_server: TestServer) -> Engine:
    """Return an engine for the test's server."""
    return connect(f"responses:{kedge_server.base_url}#practice", max_retries=0)


def test_an_engine_runs_and_streams(engine: Engine) -> None:
    """The sync methods of an engine have the signatures and results of the async methods."""
    turn = engine.sync.run(Turn([user("My name is Ada.")]))
    assert_type(turn, Turn)
    assert engine.sync.ask(turn.append(user("What is my name?"))).text == "Your name is Ada."
    with engine.sync.stream(turn.append(user("What is my name?"))) as stream:
        text = "".join(event.delta for event in stream if isinstance(event, TextDelta))
    assert text == "Your name is Ada."
    engine.sync.close()


def test_a_chat_continues_with_its_state(engine: Engine) -> None:
    """A sync stream of a chat returns its answer from `finish`."""
    chat = Chat(engine)
    first = chat.sync.chat_with_state(None, "My name is Ada.")
    assert_type(first, ChatReply)
    with chat.sync.stream_with_state(first.state, "What is my name?") as stream:
        assert_type(stream, SyncStream[ChatReply])
        assert stream.finish().text == "Your name is Ada."
    assert chat.sync.compact_pending(first.state) == first.state
    chat.sync.close()


def test_stream_can_be_closed_after_an_error(engine: Engine, kedge_server: TestServer) -> None:
    """After an error, a stream can be closed more than once."""
    kedge_server.faults.set("status=500")
    with engine.sync.stream(Turn([user("Hello")])) as stream:
        with pytest.raises(KedgeError):
            list(stream)
        stream.close()


def test_deleted_stream_closes_its_run(engine: Engine) -> None:
    """The task of a deleted stream ends on the background loop."""
    stream = engine.sync.stream(Turn([user("Count to 5")]))
    next(stream)
    call = stream._call  # pyright: ignore[reportPrivateUsage]
    assert call is not None
    del stream
    call.wait()


def test_stream_that_failed_and_was_not_closed_ends_on_its_loop() -> None:
    """The garbage collector, which frees the stream with its error, does not destroy its task."""
    closed_by: Queue[str] = Queue()

    class Failing(RunStream[None]):
        async def aclose(self) -> None:
            closed_by.put(threading.current_thread().name)

    def open_source() -> AsyncGenerator[Event]:
        raise OSError

    with suppress(OSError):
        next(SyncStream(Failing(open_source)))
    run_sync(asyncio.sleep(0))  # the loop has dealt with the error
    gc.collect()
    assert closed_by.get(timeout=60) == "kedge-sync"


@for_each(
    ("source", "facade"), [(Conversation, SyncConversation), (Chat, SyncChat), (Engine, SyncEngine)]
)
def test_every_async_method_has_a_sync_version(source: type, facade: type) -> None:
    """Only constructors and listings have no sync version; they are called with `run_sync`."""
    methods = {
        name
        for name, value in vars(source).items()
        if inspect.iscoroutinefunction(value) and not name.startswith("_")
    }
    assert methods - {"aclose"} <= vars(facade).keys()


def test_methods_without_io_are_available_too() -> None:
    """Plans and states are read and written by the sync form, as by the object itself."""
    with connect("practice").sync as engine:
        assert engine.plan(Turn([user("Hello")])).full_blocks == 1
        assert engine.name == "practice"
    with Chat("practice").sync as chat:
        state = chat.write_state(None, Turn([user("My name is Ada.")]))
        assert chat.read_state(state)[0].text == "My name is Ada."
        assert chat.inspect_state(state).pending == 1
        assert chat.plan(state, "What is my name?").full_blocks == 2


def test_interrupt_before_waiting_for_an_event_closes_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt while the run works on the next event still closes the stream."""

    async def events() -> AsyncGenerator[Event]:
        yield TextDelta("first")
        await asyncio.Event().wait()

    class Endless(RunStream[None]):
        def _result(self) -> None:
            return None

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    stream = SyncStream(Endless(events))
    next(stream)
    monkeypatch.setattr(SyncCall, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt), stream:
        next(stream)
    assert list(stream) == []


def test_an_interrupt_closes_a_stream() -> None:
    """Ctrl-C between two events ends the run before KeyboardInterrupt is raised."""
    code = """
    import os, signal
    from kedge.engines import RunStream
    from kedge.engines.sync import SyncStream

    async def events():
        try:
            yield "first"
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            print("closed")

    class Numbers(RunStream):
        def _result(self):
            return None

    try:
        with SyncStream(Numbers(events)) as stream:
            for event in stream:
                print(event)
    except KeyboardInterrupt:
        print("interrupted")
    print(list(stream))
    """
    command = [sys.executable, "-c", "import asyncio\n" + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("first\nclosed\ninterrupted\n[]\n", "")
