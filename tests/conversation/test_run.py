"""Runs of a conversation whose store is busy or unreachable when an answer arrives."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from conversation.conftest import Connect
from kedge import Conversation
from kedge.conversation import run_writer
from kedge.engines import Events, Request
from kedge.engines.reply import answer_text
from kedge.errors import OutputError, ServerFailed, StoreBusy, StoreError, StoreUnreachable
from kedge.events import ResponseStarted, TextDelta
from kedge.events.run import AnswerFinished
from kedge.middleware import BaseMiddleware
from kedge.store import Node, Store
from kedge.testing import TestServer
from kedge.turns import Turn


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between attempts, but not the attempts."""
    monkeypatch.setattr(run_writer, "SAVE_WAITS", replace(run_writer.SAVE_WAITS, longest=0.0))


def fail_appends(
    monkeypatch: pytest.MonkeyPatch,
    store: Store,
    error: StoreError,
    *,
    kind: str = "answered",
    times: int = 1_000,
) -> None:
    """Let the store raise an error for the first nodes of a kind."""
    append, remaining = store.append, times

    async def fail_or_append(*args: Any, **options: Any) -> Node:
        nonlocal remaining
        if options["kind"] == kind and remaining:
            remaining -= 1
            raise error
        return await append(*args, **options)

    monkeypatch.setattr(store, "append", fail_or_append)


@pytest.mark.parametrize("error", [StoreBusy("locked"), StoreUnreachable("no answer")])
async def test_answer_is_stored_when_the_store_is_available_again(
    store: Store,
    connected: Connect,
    kedge_server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
    error: StoreError,
) -> None:
    """Every answer, also that of a tool loop, is stored by a later attempt, without another request."""

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    conversation = await Conversation.create(connected(), store=store, tools=[weather])
    fail_appends(monkeypatch, store, error, times=2)
    reply = await conversation.send('Call weather with {"city": "Oslo"}')
    assert "sunny in Oslo" in reply.text
    assert len(kedge_server.requests) == 2
    kinds = [node.kind for node in await conversation.tree()]
    assert kinds == ["root", "asked", "answered", "results", "answered"]
    assert (await store.conversation(conversation.id)).head == reply.node
    assert [row.status for row in await conversation.responses()] == ["completed"] * 2


async def test_answer_that_cannot_be_stored_is_in_the_error(
    store: Store,
    conversation: Conversation,
    kedge_server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the last attempt the error has the Turn with the answer, which can be appended later."""
    with monkeypatch.context() as patch:
        fail_appends(patch, store, StoreBusy("locked"))
        with pytest.raises(StoreBusy) as exc_info:
            await conversation.send("What is 2+3?")
    received = exc_info.value.turn
    assert received is not None
    assert (len(received), answer_text(received, conversation.turn)) == (2, "2+3 = 5.")
    assert "append" in exc_info.value.__notes__[0]
    await conversation.append(*received[len(conversation.turn) :])
    reply = await conversation.send("What is 1+1?")
    assert len(reply.turn) == 4
    assert len(kedge_server.requests) == 2


async def test_error_that_a_retry_cannot_resolve_is_raised_at_once(
    store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is not retryable, such as a commit whose result is unknown, is not tried again."""
    unknown = StoreUnreachable("check whether it was written")
    unknown.retryable = False
    fail_appends(monkeypatch, store, unknown, times=1)
    with pytest.raises(StoreUnreachable) as exc_info:
        await conversation.send("What is 2+3?")
    assert exc_info.value.turn is not None
    assert [node.kind for node in await conversation.tree()] == ["root", "asked"]


async def test_moved_head_is_retried(
    store: Store, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head moves to an answer that is stored already, also if the store is busy at first."""

    class Repeat(BaseMiddleware):
        async def events(self, turn: Turn, request: Request) -> Events:
            async for event in self.inner.events(turn, request):
                yield event
                if isinstance(event, AnswerFinished):
                    yield TextDelta("")  # an event after the answer lets the run store it

    move_head, failures = store.move_head, [StoreBusy("locked")]

    async def fail_once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await move_head(*args, **options)

    monkeypatch.setattr(store, "move_head", fail_once)
    conversation = await Conversation.create(connected(), store=store, middleware=[Repeat])
    reply = await conversation.send("What is 2+3?")
    assert not failures
    assert (await store.conversation(conversation.id)).head == reply.node


async def list_stored(
    conversation: Conversation, kind: type[AnswerFinished | ResponseStarted], **options: Any
) -> list[str]:
    """Return the status of the newest stored response at each event of a kind, which must be about that response."""
    statuses: list[str] = []
    async with conversation.stream('Call weather with {"city": "Oslo"}', **options) as stream:
        async for event in stream:
            if not isinstance(event, kind):
                continue
            subject = event.outcome if isinstance(event, AnswerFinished) else event
            row = (await conversation.store.responses())[-1]
            assert row.provider_response_id == subject.response_id
            statuses.append(row.status)
    return statuses


async def test_an_answer_is_stored_before_its_event(store: Store, connected: Connect) -> None:
    """Whoever sees that an answer has ended finds it in the store: with calls, after them, in the background."""

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    conversation = await Conversation.create(connected(), store=store, tools=[weather])
    assert await list_stored(conversation, AnswerFinished) == ["completed", "completed"]
    statuses = await list_stored(conversation, AnswerFinished, background=True, streaming=False)
    assert statuses == ["running"]
    assert await store.verify() == []


async def test_a_response_in_the_background_is_stored_before_its_start_is_shown(
    store: Store, connected: Connect
) -> None:
    """A process that ends after it has seen the start of the response leaves its id in the store."""
    conversation = await Conversation.create(connected(), store=store)
    statuses = await list_stored(conversation, ResponseStarted, background=True)
    assert statuses == ["running"]
    assert await store.verify() == []


async def test_the_event_of_a_rejected_typed_answer_is_passed_on_when_it_is_stored(
    store: Store, connected: Connect
) -> None:
    """An answer without the requested type is stored, and its event comes before the error."""
    conversation = await Conversation.create(connected(), store=store)
    question = "First invalid: What is 2 + 3?"
    stored: list[bool] = []

    async def read() -> None:
        async with conversation.stream(question, output=int, output_retries=0) as stream:
            async for event in stream:
                if isinstance(event, AnswerFinished):
                    rows = await store.responses()
                    stored.append(rows[-1].provider_response_id == event.outcome.response_id)

    with pytest.raises(OutputError):
        await read()
    assert stored == [True]


async def test_key_of_a_stored_answer_gets_it_later(
    store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process ends between storing an answer and recording it for its key, the next one records it."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "settle", AsyncMock(side_effect=StoreError("killed")))
        with pytest.raises(StoreError, match="killed"):
            await conversation.send("What is 2+3?", key="k")
    reply = await conversation.send("What is 2+3?", key="k")
    assert reply.stored
    claim = await store.find_claim(conversation.row, "k")
    assert claim
    assert claim.answer == reply.node


async def test_answer_is_stored_if_a_middleware_fails_after_it(
    store: Store, connected: Connect
) -> None:
    """An error that is not one of the engine does not lose an answer that was received."""

    class Fail(BaseMiddleware):
        async def events(self, turn: Turn, request: Request) -> Events:
            async for event in self.inner.events(turn, request):
                yield event
                if isinstance(event, AnswerFinished):
                    raise ZeroDivisionError

    conversation = await Conversation.create(connected(), store=store, middleware=[Fail])
    with pytest.raises(ZeroDivisionError):
        await conversation.send("What is 2+3?")
    assert [node.kind for node in await conversation.tree()] == ["root", "asked", "answered"]


async def test_failed_request_raises_its_own_error_if_it_cannot_be_stored(
    store: Store,
    conversation: Conversation,
    kedge_server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller gets the error of the request, with a note about the store."""
    kedge_server.faults.set("status=500")
    fail_appends(monkeypatch, store, StoreBusy("locked"), kind="failed")
    with pytest.raises(ServerFailed) as exc_info:
        await conversation.send("What is 2+3?")
    assert "not stored" in exc_info.value.__notes__[0]


async def test_answer_is_stored_if_the_caller_is_cancelled_meanwhile(
    store: Store,
    conversation: Conversation,
    kedge_server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that is being stored when the caller is cancelled is stored, and the handle follows."""
    append, started, released = store.append, asyncio.Event(), asyncio.Event()

    async def wait_and_append(*args: Any, **options: Any) -> Node:
        if options["kind"] == "answered":
            started.set()
            await released.wait()
        return await append(*args, **options)

    monkeypatch.setattr(store, "append", wait_and_append)
    task = asyncio.create_task(conversation.send("My name is Ada."))
    await started.wait()
    task.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [node.kind for node in await conversation.path()] == ["root", "asked", "answered"]
    assert len(conversation.turn) == 2
    assert (await conversation.send("What is my name?")).text == "Your name is Ada."
    assert len(kedge_server.requests) == 2


class SendAgain(BaseMiddleware):
    """Sends a Turn again after an error, and reports nothing about it."""

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the first attempt up to its error, and then those of the second one."""
        with suppress(ServerFailed):
            async for event in self.inner.events(turn, request):
                yield event
            return
        async for event in self.inner.events(turn, request):
            yield event


async def test_a_request_that_a_middleware_replaces_has_a_record(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A failed request is recorded and stored, also if a middleware catches its error."""
    chat = await Conversation.create(connected(), store=store, middleware=[SendAgain])
    await chat.send("My name is Ada.")
    kedge_server.faults.set("status=500", times=1)
    reply = await chat.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert [each.status for each in reply.requests] == ["failed", "completed"]
    assert reply.requests[0].sent_bytes == reply.requests[1].sent_bytes
    stored = [each.status for each in await store.responses()]
    assert stored == ["completed", "failed", "completed"]
