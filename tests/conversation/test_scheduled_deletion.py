"""A conversation that is about to be deleted is not continued, also by an object that was opened before."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from conversation.conftest import BuildConversation, Connect, list_kinds
from kedge import Conversation, assistant, user
from kedge.errors import NotInStore
from kedge.events import TextDelta
from kedge.events.run import RequestSent
from kedge.store import Store, open_store
from kedge.store.append import COMPLETING_KINDS
from kedge.testing import TestServer
from store.sample_conversations import count_rows, create_conversation

SCHEDULED = "is about to be deleted; undo that to continue it"
LATER = 1e12


@pytest.fixture
async def other(store_url: str) -> AsyncIterator[Store]:
    """Yield another store on the same database, as another process has it."""
    async with open_store(store_url) as opened:
        yield opened


async def continue_stream(conversation: Conversation) -> None:
    """Send a message and read its events."""
    async with conversation.stream("Again") as stream:
        async for _ in stream:
            pass


CONTINUATIONS: dict[str, Callable[[Conversation], Awaitable[object]]] = {
    "send": lambda talk: talk.send("Again"),
    "send with a key": lambda talk: talk.send("Again", key="k"),
    "send elsewhere": lambda talk: talk.send("Again", at=talk.turn.blocks[0]),
    "send in the background": lambda talk: talk.send("Again", background=True),
    "stream": continue_stream,
    "regenerate": lambda talk: talk.regenerate(),
    "resume": lambda talk: talk.resume(),
    "append": lambda talk: talk.append("Again"),
    "insert": lambda talk: talk.insert(0, "Again"),
    "edit": lambda talk: talk.edit(talk.turn.blocks[0], "Changed"),
    "remove": lambda talk: talk.remove(talk.turn.blocks[0]),
    "truncate": lambda talk: talk.truncate(1),
    "goto": lambda talk: talk.goto(talk.turn.blocks[0]),
    "undo": lambda talk: talk.undo(),
    "fork": lambda talk: talk.fork(),
    "merge": lambda talk: talk.merge_summary_of(talk.head),
}


@pytest.mark.parametrize("name", CONTINUATIONS)
async def test_an_open_conversation_is_not_continued(
    store: Store, other: Store, connected: Connect, kedge_server: TestServer, name: str
) -> None:
    """Nothing is sent or stored after another process has scheduled the deletion, until it is undone."""
    talk = await Conversation.create(connected(), store=store)
    await talk.send("My name is Ada.")
    if name == "resume":
        await leave_question(talk)
    await other.schedule_delete(talk.id, LATER)
    requests = len(kedge_server.requests)
    rows = await count_rows(store, "nodes", "links", "blocks", "conversations")
    head = (await store.conversation(talk.id)).head
    with pytest.raises(NotInStore, match=SCHEDULED):
        await CONTINUATIONS[name](talk)
    assert len(kedge_server.requests) == requests
    assert await count_rows(store, "nodes", "links", "blocks", "conversations") == rows
    assert (await store.conversation(talk.id)).head == head
    await other.schedule_delete(talk.id, None)
    await CONTINUATIONS[name](talk)


async def leave_question(talk: Conversation) -> None:
    """Stop a request before its answer, so that its question is pending."""
    async with talk.stream("What is my name?") as stream:
        async for event in stream:
            if isinstance(event, RequestSent):
                break
    assert await talk.pending()


async def test_an_answer_that_was_requested_before_is_stored(
    store: Store, other: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The answer of a question that was sent before is paid for: it is kept for an undo, and nothing follows it."""
    talk = await Conversation.create(connected(), store=store)
    async with talk.stream("My name is Ada.") as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                await other.schedule_delete(talk.id, LATER)
    assert stream.reply.text
    with pytest.raises(NotInStore, match=SCHEDULED):
        await talk.send("What is my name?")
    await other.schedule_delete(talk.id, None)
    assert "Ada" in (await talk.send("What is my name?")).text
    assert len(kedge_server.requests) == 2


@pytest.fixture
async def deleted_by_a_tool(other: Store, conversation_with: BuildConversation) -> Conversation:
    """Return a conversation whose deletion was scheduled while its tool ran."""

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        await other.schedule_delete(talk.id, LATER)
        return a + b

    talk = await conversation_with(tools=[add])
    with pytest.raises(NotInStore, match=SCHEDULED):
        await talk.send("Please call add with a=2 and b=3.")
    return talk


async def test_results_of_a_scheduled_conversation_are_stored_and_not_sent(
    store: Store, deleted_by_a_tool: Conversation, kedge_server: TestServer
) -> None:
    """What tools did before is stored; the request with their results is not sent, also not by `resume`."""
    kinds = [node.kind for node in await store.tree(deleted_by_a_tool.row)]
    assert kinds == ["root", "asked", "answered", "results"]
    with pytest.raises(NotInStore, match=SCHEDULED):
        await deleted_by_a_tool.resume()
    assert len(kedge_server.requests) == 1


async def test_results_are_sent_after_the_deletion_is_undone(
    other: Store, deleted_by_a_tool: Conversation, kedge_server: TestServer
) -> None:
    """The turn continues with the stored results; no tool runs again."""
    await other.schedule_delete(deleted_by_a_tool.id, None)
    assert (await deleted_by_a_tool.resume()).text
    kinds = list_kinds(await deleted_by_a_tool.path())
    assert kinds == ["root", "asked", "answered", "results", "answered"]
    assert len(kedge_server.requests) == 2


async def test_tools_of_an_interrupted_question_are_not_run(
    store: Store, other: Store, connected: Connect
) -> None:
    """Resuming a question runs no tool before it is known whether the conversation may be continued."""
    started = asyncio.Event()
    calls: list[str] = []

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append("started")
        started.set()
        if len(calls) == 1:
            await asyncio.Event().wait()
        return a + b

    talk = await Conversation.create(connected(), store=store, tools=[add])
    sending = asyncio.create_task(talk.send("Please call add with a=2 and b=3."))
    await started.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await other.schedule_delete(talk.id, LATER)
    with pytest.raises(NotInStore, match=SCHEDULED):
        await talk.resume()
    assert calls == ["started"]


async def test_store_keeps_only_what_completes_a_question(store: Store) -> None:
    """Nodes of other kinds are rejected with and without a new branch, and so are a fork and a move of the head."""
    row, nodes = await create_conversation(store, 2)
    await store.schedule_delete(row, LATER)
    last = nodes[-1]
    rejected: list[Awaitable[Any]] = [
        *(store.append(row, last, [user("x")], kind=kind) for kind in ("asked", "added", "merged")),
        store.append(row, last, [user("x")], kind="edited", kept=1, head=last.id),
        store.append(row, last, [user("x")], key="key"),
        store.move_head(row, nodes[1], head=last.id),
        store.fork(row, last.id),
        store.require_continuable(row),
    ]
    before = await count_rows(store, "nodes", "links", "blocks")
    for work in rejected:
        with pytest.raises(NotInStore, match=SCHEDULED):
            await work
    assert await count_rows(store, "nodes", "links", "blocks") == before
    for kind in COMPLETING_KINDS:
        last = await store.append(row, last, [assistant(kind)], kind=kind, head=last.id)
    assert (await store.conversation(row)).head == last.id
    await store.schedule_delete(row, None)
    await store.require_continuable(row)
    assert await store.verify() == []
