"""Durable conversations: sending, streaming, editing, forking, idempotency keys and healing."""

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.responses import Response

from conversation.conftest import (
    BuildConversation,
    Connect,
    add,
    assert_sent,
    export_nodes,
    list_kinds,
)
from engines.fake_server import json_response, serve_handler
from kedge import Conversation, assistant, connect, errors, system, tool_result, user
from kedge.engines import Engine
from kedge.events import TextDelta
from kedge.events.run import TurnFinished
from kedge.middleware import find_open_calls, guard, redact
from kedge.planning import get_state
from kedge.presentation.response_tree import build_response_tree
from kedge.store import Store
from kedge.store.tree import read_tree
from kedge.testing import TestServer


async def test_reopened_conversation_continues(
    kedge_server: TestServer, conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """A reopened conversation sends only the new blocks, chained on the stored response."""
    conversation = await conversation_with("My name is Ada.")
    reopened = await reopen(conversation)
    (first,) = await reopened.responses()
    reply = await reopened.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert_sent(kedge_server, blocks=1, anchor=first.provider_response_id)
    assert reply.plan
    assert reply.plan.delta_blocks == 1


async def test_responses_are_stored_with_their_nodes(conversation_with: BuildConversation) -> None:
    """Each response has its node, the node of its question, and the response that it continues."""
    conversation = await conversation_with("My name is Ada.")
    reply = await conversation.send("What is my name?")
    first, second = await conversation.responses()
    assert second.provider_response_id == reply.response_id
    assert second.anchor == first.provider_response_id
    assert (second.node, second.parent) == (reply.node, reply.node - 1)
    assert f'"provider_response_id":"{reply.response_id}"' in await conversation.export()


async def test_appended_blocks_belong_to_no_response(conversation_with: BuildConversation) -> None:
    """A block that was added without a request has a node, and no response."""
    conversation = await conversation_with("My name is Ada.")
    reply = await conversation.send("What is my name?")
    await conversation.append("Thank you.")
    assert replace(reply, turn=conversation.turn).response_id == ""
    kinds = ["root", *["asked", "answered"] * 2, "added"]
    assert list_kinds(await conversation.tree()) == kinds


async def test_stream_ends_with_a_stored_reply(store: Store, conversation: Conversation) -> None:
    """Deltas arrive while the answer is generated, and the reply is available at the end."""
    async with conversation.stream("Count to 5") as stream:
        with pytest.raises(errors.KedgeError, match="not ended"):
            _ = stream.reply
        events = [event async for event in stream]
    text = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert text == stream.reply.text == "1 2 3 4 5"
    assert isinstance(events[-1], TurnFinished)
    assert (await store.conversation(conversation.id)).head == stream.reply.node
    (row,) = await conversation.responses()
    assert row.first_token_seconds is not None
    assert 0 <= row.first_token_seconds <= row.seconds


async def test_conflicting_answers_are_both_stored(
    conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """The second of two answers raises `HeadConflict`, and is stored at a node that can be forked."""
    conversation = await conversation_with("My name is Ada.")
    other = await reopen(conversation)
    await conversation.send("What is 1+1?")
    with pytest.raises(errors.HeadConflict) as conflict:
        await other.send("What is 2+2?")
    assert conflict.value.turn is None  # the answer is stored
    fork = await other.fork(at=conflict.value.node)
    assert [block.kind for block in fork.turn] == ["user", "assistant"] * 2
    assert (await fork.send("What is my name?")).text == "Your name is Ada."


async def test_refresh_continues_from_the_head_of_another_process(
    conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """After `refresh`, messages follow what another process has sent."""
    conversation = await conversation_with("My name is Ada.")
    other = await reopen(conversation)
    await conversation.send("What is 1+1?")
    assert len((await other.refresh()).turn) == 4
    assert (await other.send("What did I say first?")).text.endswith('"My name is Ada."')


async def test_settings_are_stored_with_the_response(store: Store, connected: Connect) -> None:
    """Settings are stored after guards have changed them, without transport options."""
    secret = guard(redact("hunter2"))
    conversation = await Conversation.create(
        connected(), store=store, middleware=[secret], ttl=60.0
    )
    assert conversation.row.ttl == 60.0
    await conversation.send("Hello", temperature=0.5, metadata={"note": "hunter2"})
    await conversation.send("Hello")
    first, second = await conversation.responses()
    settings = json.loads(first.settings)
    assert settings["temperature"] == 0.5
    assert settings.keys() == {"temperature", "metadata"}
    assert "hunter2" not in first.settings
    assert second.settings == ""


async def test_turns_of_one_object_queue_or_conflict(store: Store, connected: Connect) -> None:
    """Concurrent sends are queued or conflict, by the setting; a failed or stopped turn frees the queue."""
    queued = await Conversation.create(connected(), store=store, concurrent="queue")
    replies: list[str] = []

    async def send(conversation: Conversation, text: str) -> None:
        replies.append((await conversation.send(text)).text)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(send, queued, f"What is {number}+1?")
    assert replies == ["0+1 = 1.", "1+1 = 2.", "2+1 = 3."]
    assert list_kinds(await queued.path()) == ["root", *["asked", "answered"] * 3]
    async with queued.stream("Count to 5") as stream:
        await anext(stream)
    assert (await queued.regenerate()).text == "2+1 = 3."
    fork = await queued.fork()
    async with queued.stream("Count to 5") as stream:
        await anext(stream)
        assert (await fork.send("What is 2+2?")).text == "2+2 = 4."
    plain = await Conversation.create(connected(), store=store)
    both = (plain.send("What is 1+1?"), plain.send("What is 2+2?"))
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [isinstance(result, errors.HeadConflict) for result in results].count(True) == 1


async def check_same_as_opened(conversation: Conversation, engine: Engine) -> None:
    """Check that a conversation has the same Turn and plan as a newly opened one."""
    opened = await Conversation.open(engine, store=conversation.store, id=conversation.id)
    assert conversation.turn.blocks == opened.turn.blocks
    assert (conversation.head, conversation.turn.id) == (opened.head, opened.turn.id)
    mine, reopened = conversation.plan("What is 2+3?"), opened.plan("What is 2+3?")
    assert mine.anchor == reopened.anchor
    assert [block.id for block in mine.delta[:-1]] == [block.id for block in reopened.delta[:-1]]
    assert (mine.digest, mine.block_count) == (reopened.digest, reopened.block_count)
    state, loaded = get_state(conversation.turn), get_state(opened.turn)
    assert set(loaded.anchors) <= set(state.anchors)


@pytest.mark.parametrize(("seed", "is_long"), [(1, False), (3, True)])
async def test_every_method_leads_to_the_stored_conversation(
    store: Store, connected: Connect, monkeypatch: pytest.MonkeyPatch, seed: int, is_long: bool
) -> None:
    """After every method, the Turn in memory equals the stored one.

    A long conversation is reopened before each step, and loads its blocks only when they are needed.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(
        "kedge.conversation.lazy_conversation.MAX_LOADED_BLOCKS", 0 if is_long else 2_000
    )
    engine = connected()
    conversation = await Conversation.create(
        engine, store=store, blocks=[system("Be brief."), "Hello"]
    )
    other = await Conversation.open(engine, store=store, id=conversation.id)
    verbs = ["send", "append", "undo", "redo", "edit", "fork", "goto", "refresh", "truncate"]
    for step in range(24):
        verb = rng.choice(verbs) if step > 3 else "send"
        blocks = conversation.turn.blocks
        if is_long:
            conversation = await Conversation.open(engine, store=store, id=conversation.id)
        with suppress(errors.NotInStore):
            match verb:
                case "send":
                    await conversation.send(f"What is {step}+3?")
                case "append":
                    await conversation.append(f"note {step}", assistant("noted"))
                case "undo" | "redo":
                    await getattr(conversation, verb)()
                    assert (conversation._turn is None) == is_long  # pyright: ignore[reportPrivateUsage]
                case "edit":
                    users = [block for block in blocks if block.kind == "user"]
                    await conversation.edit(rng.choice(users).id, f"What is {step}+4?")
                case "fork":
                    conversation = await conversation.fork(rng.choice([None, blocks[-1].id]))
                    other = await Conversation.open(engine, store=store, id=conversation.id)
                case "goto":
                    node = rng.choice(await conversation.tree())
                    await conversation.goto(node.id)
                case "refresh":
                    await other.refresh()
                    await check_same_as_opened(other, engine)
                case _:
                    await conversation.truncate(max(len(blocks) - 2, 2))
        await check_same_as_opened(conversation, engine)
    tree = await conversation.tree()
    for node in tree:
        children = await store.children(conversation.row, node.id)
        assert children == [each for each in tree if each.parent == node.id]


async def test_long_conversation_loads_blocks_lazily(
    store: Store, conversation: Conversation, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods that need no blocks load none, and a head moved while loading is respected."""
    monkeypatch.setattr("kedge.conversation.lazy_conversation.MAX_LOADED_BLOCKS", 1)
    await conversation.send("My name is Ada.")
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    fork = await reopened.fork()
    await reopened.undo()
    assert repr(reopened).endswith("0 blocks>")
    await reopened.redo()
    load, moved = store.load, False

    async def load_slowly(row: Any, node: int | None = None) -> Any:
        nonlocal moved
        if not moved:
            moved = True
            await reopened.undo()
        return await load(row, node)

    monkeypatch.setattr(store, "load", load_slowly)
    await reopened.append("Hello.")
    assert [block.kind for block in reopened.turn] == ["user"]
    assert len(fork.turn) == 2
    assert (await fork.send("What is my name?")).text == "Your name is Ada."


async def test_calls_of_a_definition_are_left_to_the_caller(store: Store) -> None:
    """A definition among the tools of a conversation is offered; its result is sent as a message."""
    look_up = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    conversation = await Conversation.create("practice", store=store, tools=[look_up])
    reply = await conversation.send("Call look_up")
    (call,) = find_open_calls(reply.turn)
    again = await Conversation.open("practice", store=store, id=conversation.id, tools=[look_up])
    answer = await again.send(tool_result(call.call_id, "a cat"))
    assert answer.text == "look_up says: a cat."


async def test_conversation_is_created_with_blocks(conversation_with: BuildConversation) -> None:
    """One block, or a text as a user block, is what a new conversation begins with."""
    for blocks in (user("Hello"), "Hello"):
        conversation = await conversation_with(blocks=blocks)
        assert list(conversation.turn) == [user("Hello")]


async def test_first_question_is_answered_by_send_and_regenerate(
    conversation_with: BuildConversation,
) -> None:
    """`send` without a message answers the question that a conversation begins with, and `regenerate` again."""
    conversation = await conversation_with(blocks="What is 2+3?")
    assert (await conversation.send()).text == "2+3 = 5."
    assert (await conversation.regenerate()).text == "2+3 = 5."
    assert len(conversation.turn) == 2


async def test_conversation_without_a_question_is_not_regenerated(
    conversation: Conversation,
) -> None:
    """`regenerate` needs a question."""
    with pytest.raises(errors.NotInStore, match="has no question"):
        await conversation.regenerate()


async def test_question_of_a_new_conversation_is_regenerated_first(
    store: Store, connected: Connect
) -> None:
    """`regenerate` creates a conversation that begins with a question; without one, it creates nothing."""
    empty = Conversation(connected(), store=store)
    with pytest.raises(errors.NotInStore, match="has no question"):
        await empty.regenerate()
    assert await store.conversations() == []
    conversation = Conversation(connected(), store=store, blocks="What is 2+3?")
    assert (await conversation.regenerate()).text == "2+3 = 5."
    assert conversation.row.number


async def test_messages_of_an_api_are_no_blocks(store: Store, connected: Connect) -> None:
    """The error names the function that converts messages, and nothing is created."""
    message: Any = {"role": "user", "content": "Hello"}
    with pytest.raises(errors.InvalidTurn, match="blocks_from_messages"):
        Conversation.create(connected(), store=store, blocks=[message])
    with pytest.raises(errors.InvalidTurn, match="blocks_from_messages"):
        await store.create(blocks=[message])
    assert await store.conversations() == []


async def test_tool_calls_and_results_are_nodes(store: Store, connected: Connect) -> None:
    """The tool call is stored before the tool runs, and its result and duration afterwards."""
    snapshots: list[list[str]] = []

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        snapshots.append(list_kinds(await store.tree(conversation.row)))
        return a + b

    conversation = await Conversation.create(connected(), store=store, tools=[add])
    reply = await conversation.send("Please call add with a=2 and b=3")
    assert "5" in reply.text
    assert snapshots == [["root", "asked", "answered"]]
    tree = await store.tree(conversation.row)
    assert list_kinds(tree) == ["root", "asked", "answered", "results", "answered"]
    ran_tools = [
        (node["kind"], run["name"])
        for node in await export_nodes(conversation)
        for run in node.get("tool_runs", ())
    ]
    assert ran_tools == [("results", "add")]
    reopened = await Conversation.open(connected(), store=store, id=conversation.id, tools=[add])
    assert reopened.plan("Thanks").delta_blocks == 1


async def test_rejected_request_is_stored(conversation: Conversation) -> None:
    """A rejected request is stored as a response with its status and the server's message."""
    with pytest.raises(errors.RequestRefused):
        await conversation.send("Hello", temperature=99)
    (row,) = await conversation.responses()
    assert (row.status, row.provider_response_id) == ("refused", "")
    assert "temperature" in row.error
    assert (await conversation.send("What is 2+3?")).text == "2+3 = 5."


async def test_title_tags_and_archive(store: Store, conversation: Conversation) -> None:
    """The list shows renamed, tagged and archived conversations; a handle does not undo what another one tagged."""
    other = await Conversation.open(conversation.engine, store=store, id=conversation.id)
    await conversation.tag("one", "two")
    await other.tag("three")
    assert other.tags == ("one", "three", "two")
    await conversation.untag("two")
    assert conversation.tags == ("one", "three")
    await conversation.rename("Weather")
    await conversation.archive()
    assert await Conversation.list(store) == []
    (row,) = await Conversation.list(store, archived=True, tag="three")
    assert (row.title, row.tags, row.archived) == ("Weather", ("one", "three"), True)


async def test_handle_of_a_deleted_conversation(store: Store, conversation: Conversation) -> None:
    """Another conversation that has its id now is not changed, deleted or continued."""
    await conversation.send("Hello")
    await store.delete(conversation.id)
    await store.create("Other", id=conversation.id, tags=["other"], blocks=[user("Ahoy")])
    other = await store.conversation(conversation.id)
    calls: list[Any] = [
        *(lambda: conversation.rename("Mine"), lambda: conversation.tag("mine")),
        *(lambda: conversation.untag("other"), lambda: conversation.send("Hello", key="k")),
        *(conversation.archive, conversation.refresh, conversation.delete),
    ]
    for call in calls:
        with pytest.raises(errors.NotInStore, match="was deleted"):
            await call()
        assert await store.conversation(other.id) == other


@pytest.mark.parametrize("is_callers", [False, True])
async def test_results_after_the_last_round_of_tools_are_no_edit(
    store: Store, *, is_callers: bool
) -> None:
    """A model that never stops calling, or a call that is left to the caller, ends a run with results, not an edit."""
    own = {"type": "function", "name": "own", "parameters": {"type": "object", "properties": {}}}

    async def answer(request: Any) -> Response:
        number = len(json.loads(await request.body())["input"])
        names = ["add", "own"] if is_callers else ["add"]
        calls = [
            {
                "type": "function_call",
                "call_id": f"{name}_{number}",
                "name": name,
                "arguments": "{}",
            }
            for name in names
        ]
        return json_response({"id": f"resp_{number}", "status": "completed", "output": calls})

    with serve_handler(answer) as url:
        engine = connect(f"responses:{url}#m", mode="stateless")
        async with await Conversation.create(engine, store=store, tools=[add]) as conversation:
            before = conversation.head
            await conversation.send("Go", tools=[own] if is_callers else [])
            kinds = list_kinds(await conversation.path())
            rounds = 1 if is_callers else 18
            assert kinds == ["root", "asked", *["answered", "results"] * rounds]
            tree = await read_tree(store, conversation.row)
            labels = {node.label for node in build_response_tree(tree, 0.0).nodes}
            assert labels == ({"Go"} if is_callers else {"Go", "After the tools answered"})
            await conversation.undo()
            assert conversation.head == before


async def test_instructions_are_sent_with_every_request(store: Store) -> None:
    """``system=`` sets the instructions of a new and of an opened conversation; they may be a function."""
    question = "What are your instructions?"
    first = await Conversation.create("practice", store=store, id="c", system="Be brief.")
    assert (await first.send(question)).text == 'My instructions are: "Be brief."'
    again = await Conversation.open(
        "practice", store=store, id="c", system=lambda turn: f"{len(turn)}."
    )
    assert (await again.send(question)).text == 'My instructions are: "4."'
