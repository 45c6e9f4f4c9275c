"""Test the deletion of conversation objects that Kedge made and that no stored line of history continues."""

from typing import Any

import anyio
import pytest
from openai import OpenAI

from engines.conftest import open_engine
from engines.runs import has_object, read_until
from kedge import Conversation
from kedge.engines import ResponsesEngine
from kedge.engines.responses import delete_unused_objects
from kedge.engines.stored_items import ConversationObjects
from kedge.errors import EngineError
from kedge.evidence.object_claims import ObjectClaims, UnusedObject
from kedge.planning import get_state
from kedge.store import Store, response_index
from kedge.testing import TestServer, serve
from kedge.turns import user

DAY = 24 * 3_600.0


@pytest.fixture
async def conversation(store: Store, engine: ResponsesEngine) -> Conversation:
    """Return a conversation in an object, with one answer."""
    conversation = await Conversation.create(engine, store=store)
    await conversation.send("One")
    return conversation


def get_object(conversation: Conversation) -> str:
    """Return the conversation object that a conversation continues."""
    return get_state(conversation.turn).conversation_id


def add_days(store: Store, days: float) -> None:
    """Advance the clock of a store."""
    now = store.clock() + days * DAY
    store.clock = lambda: now


async def leave_stream(engine: ResponsesEngine, conversation: Conversation) -> str:
    """Leave the stream of a message early, and return the object that ends with it."""
    left = get_object(conversation)
    async with engine.stream(conversation.turn.append(user("Left"))) as stream:
        await read_until(stream)
    return left


async def list_ids(store: Store) -> list[str]:
    """Return the ids of the unused objects of a store."""
    return [each.id for each in await store.list_unused_objects()]


async def test_objects_may_be_in_use_for_a_day(
    store: Store, conversation: Conversation, engine: ResponsesEngine
) -> None:
    """An object whose stream was left is listed after a day, and one that Kedge did not make never is."""
    left = await leave_stream(engine, conversation)
    await conversation.send("Two")
    await store.claim_object(engine.scope, "conv_foreign", "R1", owner="a")
    assert await store.list_unused_objects() == []
    add_days(store, 2)
    (unused,) = await store.list_unused_objects()
    assert (unused.scope, unused.id) == (engine.scope, left)


async def test_objects_are_deleted_by_an_engine_of_their_server(
    store: Store,
    conversation: Conversation,
    engine: ResponsesEngine,
    server: TestServer,
    kedge_server: TestServer,
) -> None:
    """An engine of another server leaves the unused objects of this one."""
    left = await leave_stream(engine, conversation)
    await conversation.send("Two")
    add_days(store, 2)
    (unused,) = await store.list_unused_objects()
    async with open_engine(kedge_server, mode="conversation") as other:
        assert await delete_unused_objects(other, store) == {}
    assert has_object(server, left)
    assert await delete_unused_objects(engine, store) == {unused: ""}
    assert await store.list_unused_objects() == []
    assert not has_object(server, left)


async def test_objects_of_stored_conversations_are_retained(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """The objects that a conversation or its fork continues are in use, however old they are."""
    fork = await conversation.fork()
    await fork.send("Two")
    await conversation.send("Three")
    add_days(store, 2)
    await delete_unused_objects(engine, store)
    assert has_object(server, get_object(conversation))
    assert has_object(server, get_object(fork))


async def test_the_objects_of_a_deleted_conversation_are_deleted(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """Deletion includes the objects of earlier branches; a fork and another conversation retain theirs."""
    fork = await conversation.fork()
    await fork.send("Two")
    await conversation.send("Three")
    objects = {get_object(conversation)}
    await conversation.regenerate()
    objects.add(get_object(conversation))
    other = await Conversation.create(engine, store=store)
    await other.send("One")
    assert len(objects) == 2
    await conversation.delete()
    assert [has_object(server, each) for each in objects] == [False, False]
    for each in (fork, other):
        before = get_object(each)
        await each.send("Last")
        assert get_object(each) == before


async def test_the_object_of_a_fork_is_not_deleted_with_the_conversation(
    store: Store, conversation: Conversation, server: TestServer
) -> None:
    """A fork that continues the same object keeps it, until it is deleted, too."""
    fork = await conversation.fork()
    await conversation.delete()
    assert has_object(server, get_object(fork))
    await fork.send("Two")
    assert get_object(fork) == get_object(conversation)
    await fork.delete()
    assert not has_object(server, get_object(fork))


@pytest.mark.parametrize("transport", ["http", "websocket"])
@pytest.mark.parametrize("lasting_url", ["sqlite"], indirect=True)
async def test_objects_are_deleted_with_any_client(store: Store, transport: str) -> None:
    """Kedge's own client and that of the openai package delete objects, also after they were closed."""
    with serve() as server:
        async with open_engine(server, mode="conversation", transport=transport) as engine:
            kept, deleted = [await Conversation.create(engine, store=store) for _ in range(2)]
            for each in (kept, deleted):
                await each.send("One")
            await deleted.delete()
            assert not has_object(server, get_object(deleted))
        await kept.delete()
        assert not has_object(server, get_object(kept))


async def test_an_object_with_a_running_request_is_not_deleted(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """The claim of an unfinished answer protects its object, although its conversation is deleted."""
    async with engine.stream(conversation.turn.append(user("Two"))) as stream:
        await read_until(stream)
        await conversation.delete()
        assert has_object(server, get_object(conversation))
        await stream.finish()
    assert await list_ids(store) == []
    add_days(store, 2)
    assert await list_ids(store) == [get_object(conversation)]


class BrokenTransport:
    """A connection whose requests fail with an error, or never end."""

    def __init__(self, error: EngineError | None) -> None:
        self.error = error

    async def request_json(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Raise the error, or wait."""
        if self.error is None:
            await anyio.sleep_forever()
        raise self.error or AssertionError


async def test_a_deletion_that_fails_is_tried_again(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """The object stays in the list with the error, or the limit of time, until the server deletes it."""
    objects, object_id = engine.objects, get_object(conversation)
    await store.delete(conversation.row)
    silent = ConversationObjects(BrokenTransport(None), engine.scope, lambda: store)
    (problem,) = (await silent.delete_unused(store, seconds=0.01)).values()
    assert problem == "the server did not delete it within 0.01 seconds"
    for status in (403, 409, 500):
        broken = BrokenTransport(EngineError("not allowed", status=status))
        engine.objects = ConversationObjects(broken, engine.scope, lambda: store)
        (problem,) = (await delete_unused_objects(engine, store)).values()
        assert "not allowed" in problem
        assert await list_ids(store) == [object_id]
    engine.objects = objects
    assert list((await delete_unused_objects(engine, store)).values()) == [""]
    assert not has_object(server, object_id)
    assert await list_ids(store) == []


async def test_an_object_that_the_server_no_longer_has_is_deleted(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """Another client has deleted the object already, so nothing is left to do."""
    await store.delete(conversation.row)
    with OpenAI(base_url=server.base_url, api_key="any") as client:
        client.conversations.delete(get_object(conversation))
    assert list((await delete_unused_objects(engine, store)).values()) == [""]
    assert await list_ids(store) == []


async def test_a_conversation_is_deleted_without_its_server(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """The conversation is deleted although the server cannot be reached, and its object stays in the list."""
    server.stop()
    await conversation.delete()
    (problem,) = (await delete_unused_objects(engine, store)).values()
    assert "could not reach the server" in problem
    assert await list_ids(store) == [get_object(conversation)]


async def test_an_object_that_is_to_be_deleted_cannot_be_claimed(
    store: Store, conversation: Conversation, engine: ResponsesEngine
) -> None:
    """Once a deletion has begun, a line that returns uses a new object; `delete_object` deletes no later claim."""
    turn = conversation.turn
    await store.delete(conversation.row)
    (taken,) = await store.take_unused_objects(engine.scope, 10)
    answer = await engine.run(turn.append(user("Two")))
    assert get_state(answer).conversation_id != taken.id
    await store.delete_object(taken)
    await store.delete_object(taken)
    await store.claim_object("s", "conv", "", owner="a")
    await store.delete_object(UnusedObject("s conv", "s", "conv"))
    assert await store.claim_object("s", "conv", "", owner="b") == "taken"


async def test_the_object_of_a_killed_process_costs_one_full_send(
    store: Store, conversation: Conversation, engine: ResponsesEngine, server: TestServer
) -> None:
    """The next process uses a new object and streams as usual; the old object is deleted a day later."""
    left, turn = get_object(conversation), conversation.turn
    plan = engine.plan(turn.append(user("Never sent")))
    await engine.objects.claim(plan.conversation_id, plan.anchor_id)
    engine.objects.claims = ObjectClaims()
    server.requests.clear()
    await conversation.send("Two")
    await conversation.send("Three")
    sent = [len(each.body["input"]) for each in server.requests if each.context]
    assert sent == [3, 1]
    add_days(store, 2)
    assert await list_ids(store) == [left]


async def test_claims_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc`` deletes old claims of foreign objects, and the oldest of too many unused ones."""
    monkeypatch.setattr(response_index, "MAX_UNUSED_OBJECTS", 2)
    spaces = [store, store, store.use_namespace("other")]
    now = store.clock()
    for number, space in enumerate(spaces):
        space.clock = lambda number=number: now + number
        await space.claim_object("s", f"made_{number}", "", owner="a")
        await space.claim_object("s", f"foreign_{number}", "R1", owner="a")
    store.clock = lambda: now + 91 * DAY
    await store.claim_object("s", "foreign_new", "R1", owner="a")
    assert await list_ids(store) == ["made_0", "made_1"]
    assert [each.id for each in await store.take_unused_objects("s", 1)] == ["made_0"]
    await store.gc()
    for space, names, claim in (
        (store, ("made_1", "foreign_new"), "taken"),
        (spaces[2], ("made_2",), "taken"),
        (store, ("made_0", "foreign_0", "foreign_1"), "unknown"),
        (spaces[2], ("foreign_2",), "unknown"),
    ):
        for name in names:
            assert await space.claim_object("s", name, "R9", owner="b") == claim
