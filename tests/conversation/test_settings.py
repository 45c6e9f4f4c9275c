"""The stored mode and retention of a conversation can be changed, and apply in every process."""

from typing import Any

import pytest
from msgspec.structs import replace

from conversation.conftest import BuildConversation, Connect, assert_sent, list_kinds
from kedge import Conversation, Turn
from kedge.errors import InvalidSetting, UnknownSetting
from kedge.middleware import two_phase
from kedge.planning import get_state, set_state
from kedge.store import Store
from kedge.testing import TestServer


async def open_again(
    conversation: Conversation, connected: Connect, **settings: Any
) -> Conversation:
    """Return the conversation as another process opens it."""
    store, name = conversation.store, conversation.id
    return await Conversation.open(connected(), store=store, id=name, **settings)


def is_chained(server: TestServer) -> bool:
    """Return whether the last request continued a response."""
    return "previous_response_id" in server.requests[-1].body


async def test_changed_mode_is_stored_without_a_node(
    store: Store, conversation_with: BuildConversation
) -> None:
    """The mode is a member of the conversation; its history does not change."""
    conversation = await conversation_with("My name is Ada.")
    await conversation.set_mode("stateless")
    assert (await store.conversation(conversation.id)).mode == conversation.row.mode == "stateless"
    assert list_kinds(await conversation.path()) == ["root", "asked", "answered"]


async def test_next_request_has_the_changed_mode(
    kedge_server: TestServer, conversation_with: BuildConversation
) -> None:
    """A stateless request has all blocks, continues nothing and is not stored at the provider."""
    conversation = await conversation_with("My name is Ada.")
    await conversation.set_mode("stateless")
    assert (await conversation.send("What is my name?")).text == "Your name is Ada."
    assert_sent(kedge_server, blocks=3)
    assert kedge_server.requests[-1].body["store"] is False


async def test_other_objects_follow_a_changed_mode(
    kedge_server: TestServer, conversation_with: BuildConversation, connected: Connect
) -> None:
    """Another object has the new mode after `refresh`, and a fork from the beginning."""
    conversation = await conversation_with("My name is Ada.")
    other = await open_again(conversation, connected)
    await conversation.set_mode("stateless")
    await (await other.refresh()).send("And now?")
    assert not is_chained(kedge_server)
    fork = await other.fork()
    await fork.send("Hello")
    assert not is_chained(kedge_server)


async def test_mode_without_a_value_is_that_of_the_engine(
    kedge_server: TestServer, conversation_with: BuildConversation, connected: Connect
) -> None:
    """`set_mode(None)` removes the mode, in every process."""
    conversation = await conversation_with("My name is Ada.", mode="stateless")
    await conversation.set_mode(None)
    await conversation.send("Once more")
    await conversation.send("And again")
    assert is_chained(kedge_server)
    assert (await open_again(conversation, connected)).row.mode is None


async def test_changed_mode_replaces_the_one_of_the_object(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """An object that was opened with a mode has the new one after its own change; another object keeps its own."""
    conversation = await Conversation.create(connected(), store=store, mode="stateless")
    other = await open_again(conversation, connected, mode="stateless")
    await conversation.send("My name is Ada.")
    await conversation.set_mode("chained")
    await conversation.send("What is my name?")
    await conversation.send("And now?")
    assert is_chained(kedge_server)
    await (await other.refresh()).send("Hello")
    assert not is_chained(kedge_server)


async def test_changed_mode_replaces_that_of_a_middleware(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A mode that a middleware has set is dropped by a node after the head, which keeps the data."""

    def be_private(turn: Turn) -> Turn:
        turn = turn.with_data(topic="ships")
        return set_state(turn, replace(get_state(turn), mode="stateless"))

    private = two_phase(after=be_private, name="private")
    conversation = await Conversation.create(connected(), store=store, middleware=[private])
    await conversation.send("My name is Ada.")
    plain = await open_again(conversation, connected)
    await plain.set_mode("chained")
    assert [node.kind for node in await plain.path()][-1] == "edited"
    assert (get_state(plain.turn).mode, plain.turn.data["topic"]) == ("chained", "ships")
    assert await store.verify() == []
    for opened in (plain, await open_again(conversation, connected)):
        await (await opened.refresh()).send("What is my name?")
        await opened.send("And now?")
        assert is_chained(kedge_server)
    count = len(await (await plain.refresh()).tree())
    await plain.set_mode("stateless")
    assert len(await plain.tree()) == count  # no node: the head has no mode of its own any more
    await plain.send("Hello")
    assert not is_chained(kedge_server)


async def test_change_during_a_turn_applies_after_it(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A turn ends in the mode in which it began, and the next one has the new mode."""
    conversation = await Conversation.create(connected(), store=store)
    async with conversation.stream("My name is Ada.") as stream:
        await anext(stream)
        await (await open_again(conversation, connected)).set_mode("stateless")
        await conversation.set_mode("stateless")
        await stream.finish()
    await conversation.send("What is my name?")
    assert not is_chained(kedge_server)
    reopened = await open_again(conversation, connected)
    assert get_state(reopened.turn).mode == get_state(conversation.turn).mode == "stateless"
    (memory,) = {node.memory for node in await reopened.path()}
    assert memory is None


async def test_retention_is_changed_for_every_process(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A shorter retention limits the anchors of this object, and a longer one restores them."""
    conversation = await Conversation.create(connected(), store=store, retention=600.0)
    await conversation.send("My name is Ada.")
    other = await open_again(conversation, connected)

    def list_lifetimes(turn: Turn) -> list[float | None]:
        anchors = get_state(turn).anchors
        return [each.expires_at and round(each.expires_at - each.created_at) for each in anchors]

    await conversation.set_retention(60.0)
    assert list_lifetimes(conversation.turn) == [60]
    assert list_lifetimes((await other.refresh()).turn) == [60]
    await conversation.set_retention(None)
    (unlimited,) = list_lifetimes(conversation.turn)
    assert unlimited is None or unlimited > 600
    assert list_lifetimes((await other.refresh()).turn) == [unlimited]
    await conversation.send("What is my name?")
    assert is_chained(kedge_server)


async def test_members_of_a_change_are_checked(store: Store, connected: Connect) -> None:
    """A wrong member is an error that lists the valid ones, and a wrong value names its member."""
    conversation = await Conversation.create(connected(), store=store, title="Ships")
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"mod": "stateless"}, UnknownSetting, "did you mean 'mode'"),
        ({"head": 1}, UnknownSetting, "archived, data, mode, retention, tags, title, ttl"),
        ({"mode": "private"}, InvalidSetting, "mode must be"),
        ({"retention": -1}, InvalidSetting, "retention must be"),
        ([("title", "x")], InvalidSetting, "a mapping of names to values, not list"),
        (None, InvalidSetting, "a mapping of names to values, not NoneType"),
    ]
    for members, kind, message in wrong:
        for update_with in (
            conversation.update_with,
            lambda compute: store.update_with(conversation.row, compute),
        ):
            with pytest.raises(kind, match=message):
                await update_with(lambda _, members=members: members)
    assert (await store.conversation(conversation.id)).title == "Ships"
    with pytest.raises(InvalidSetting, match="mode must be"):
        await store.update(conversation.id, mode="private")  # pyright: ignore[reportArgumentType]


async def test_members_with_a_default_are_reset(store: Store) -> None:
    """None is the default of mode, retention and ttl, and leaves other members as they are."""
    row = await store.create("Ships", tags=["a"], mode="stateless", retention=60.0, ttl=3600.0)
    row = await store.update(row, mode=None)
    assert (row.mode, row.retention, row.ttl) == (None, 60.0, 3600.0)
    members = {"title": None, "tags": None, "retention": None, "ttl": None}
    row = await store.update_with(row, lambda _: members)
    assert (row.title, row.tags, row.retention, row.ttl) == ("Ships", ("a",), None, None)


def test_sync_code_changes_mode_and_retention(store_url: str) -> None:
    """The methods are there for sync code, too, also for a conversation that is not stored yet."""
    with Conversation("practice", store=store_url, id="ada").sync as conversation:
        conversation.set_mode("stateless")
        conversation.set_retention(60.0)
        assert (conversation.row.mode, conversation.row.retention) == ("stateless", 60.0)
        assert conversation.send("My name is Ada.").plan
