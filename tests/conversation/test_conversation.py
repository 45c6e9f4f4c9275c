"""Durable conversations: sending, streaming, editing, forking, idempotency keys and healing."""

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from starlette.responses import Response

from conversation.conftest import Connect, add
from engines.fake_server import json_response, serve_handler
from kedge import Conversation, assistant, connect, errors, system, tool_result, user
from kedge.conversation import lookup
from kedge.engines import Engine, Events, Request
from kedge.events import TextDelta
from kedge.events.run import TurnFinished
from kedge.middleware import BaseMiddleware, block, find_open_calls, guard, redact, retry
from kedge.planning import get_state
from kedge.presentation.response_tree import build_response_tree
from kedge.store import Node, Store
from kedge.store.tree import read_tree
from kedge.testing import TestServer
from kedge.turns import Turn


def node_kinds(nodes: Any) -> list[str]:
    """Return the kinds of the nodes."""
    return [node.kind for node in nodes]


async def test_reopened_conversation_continues(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """A reopened conversation sends only the new blocks, chained on the stored response."""
    await conversation.send("My name is Ada.")
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    reply = await reopened.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert reply.plan
    assert reply.plan.delta_blocks == 1
    sent = kedge_server.requests[-1].body
    (first, second) = await reopened.responses()
    assert reply.response_id == second.provider_response_id
    await reopened.append("Thank you.")
    assert replace(reply, turn=reopened.turn).response_id == ""
    assert f'"provider_response_id":"{reply.response_id}"' in await reopened.export()
    assert sent["previous_response_id"] == first.provider_response_id == second.anchor
    assert (second.node, second.parent) == (reply.node, reply.node - 1)
    kinds = ["root", *["asked", "answered"] * 2, "added"]
    assert node_kinds(await store.tree(reopened.row)) == kinds


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


async def test_question_is_stored_before_it_is_sent(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """After a failed request the question is stored without an answer, and can be resumed, or sent with its key."""
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is 2+3?")
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    assert len(reopened.turn) == 0
    (question,) = await reopened.pending()
    assert (await store.load(reopened.row, question.id)).blocks == (user("What is 2+3?"),)
    (failed,) = await reopened.responses()
    assert failed.status == "failed"
    reply = await (await reopened.goto(question.id)).resume()
    assert (reply.text, len(reopened.turn)) == ("2+3 = 5.", 2)
    assert await reopened.pending() == []
    with pytest.raises(errors.NotInStore):
        await reopened.resume()
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await reopened.send("What is 2+4?", key="k")
    leases = await store.database.read(lambda tx: tx.rows("SELECT lease_until FROM claims"))
    assert leases == [(0,)]  # another caller need not wait
    assert (await reopened.send("What is 2+4?", key="k")).text == "2+4 = 6."
    assert await reopened.pending() == []
    kedge_server.faults.set("status=500", times=2)
    for text in ("What is 1+1?", "What is 1+2?"):
        with pytest.raises(errors.KedgeError):
            await reopened.send(text)
    assert (await reopened.resume()).text == "1+2 = 3."  # the newest of several


async def test_conflicting_answers_are_both_stored(
    store: Store, conversation: Conversation, connected: Connect
) -> None:
    """The second of two answers raises `HeadConflict`, and its node can be forked; an undo stores none."""
    await conversation.send("My name is Ada.")
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    await conversation.send("What is 1+1?")
    with pytest.raises(errors.HeadConflict) as conflict:
        await other.send("What is 2+2?")
    assert conflict.value.turn is None  # the answer is stored
    with pytest.raises(errors.HeadConflict, match="not moved to node") as undone:
        await other.undo()
    assert undone.value.head == conversation.head
    assert "message" not in str(undone.value)
    fork = await other.fork(at=conflict.value.node)
    assert [block.kind for block in fork.turn] == ["user", "assistant"] * 2
    assert (await fork.send("What is my name?")).text == "Your name is Ada."
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
    assert node_kinds(await queued.path()) == ["root", *["asked", "answered"] * 3]
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


async def test_undo_and_edit_leave_history(
    store: Store, conversation: Conversation, kedge_server: TestServer
) -> None:
    """Undo, edit and regenerate create other branches without the replaced blocks; all earlier nodes remain."""
    await conversation.send("My name is Ada.")
    await conversation.send("What is my name?")
    first = conversation.head
    edited = await conversation.edit(conversation.turn[0].id, "My name is Bob.")
    second = await conversation.regenerate()
    third = await conversation.regenerate()
    assert second.text == third.text == "Your name is Bob."
    assert "My name is Bob." in str((kedge_server.requests[-1].context or [{}])[0])
    assert [block.kind for block in conversation.turn] == ["user", "assistant"] * 2
    tree = {node.id: node for node in await store.tree(conversation.row)}
    assert tree[second.node].parent == tree[third.node].parent
    assert "Ada" in str((await store.load(conversation.row, first)).blocks)
    await conversation.undo()
    assert conversation.head == edited.id
    for _ in range(3):
        await conversation.undo()
    with pytest.raises(errors.NotInStore, match="nothing to undo"):
        await conversation.undo()
    assert await conversation.pending() == []


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


async def test_undo_covers_all_steps(
    store: Store, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undo removes a question and all its steps, even if the question is far before the head."""
    monkeypatch.setattr(lookup, "UNDO_STEP", 3)
    await conversation.append("First.")
    before = step = await store.node(conversation.row, conversation.head)
    for number in range(40):
        kind, block = "results" if number else "asked", assistant(f"Step {number}.")
        step = await store.append(conversation.row, step, [block], kind=kind, head=step.id)
    await conversation.refresh()
    assert len(conversation.turn) == 41
    await conversation.undo()
    assert (conversation.head, len(conversation.turn)) == (before.id, 1)


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


async def test_redo_reverts_undo(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """`redo` repeats the undone steps; a reopened conversation follows the newest branch."""
    await conversation.send("My name is Ada.")
    first = conversation.head
    await conversation.send("What is my name?")
    older = conversation.head
    await conversation.regenerate()
    newer = conversation.head
    await conversation.goto(older)
    await conversation.undo()
    await conversation.undo()
    assert (await conversation.redo()).head == first
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    assert (await conversation.redo()).head == older
    await conversation.goto(first)
    assert (await reopened.redo()).head == newer
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await reopened.redo()
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await reopened.send("What is 2+3?")
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await reopened.redo()
    await reopened.goto(first)
    last = await reopened.send("What is 1+1?")
    await (await reopened.fork()).send("Only in the fork")
    await reopened.undo()
    again = await Conversation.open(connected(), store=store, id=conversation.id)
    assert (await again.redo()).head == last.node
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await again.redo()


async def test_blocks_are_inserted_removed_replaced_and_truncated(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """Each edit is a separate node, and the next request chains on the unchanged part."""
    await conversation.send("My name is Ada.")
    await conversation.send("My ship is the Erebus.")
    one, two, three, four = conversation.turn.blocks
    await conversation.insert(2, "My dog is Rex.", user("My cat is Tom."))
    assert [b.text for b in conversation.turn[2:4]] == ["My dog is Rex.", "My cat is Tom."]  # pyright: ignore[reportAttributeAccessIssue]
    await conversation.remove(conversation.turn[2].id, three.id, four.id)
    assert conversation.turn.blocks == (one, two, user("My cat is Tom."))
    await conversation.edit(conversation.turn[2].id, "My cat is Kit.")
    reply = await conversation.send("What is my cat?")
    assert reply.text == "Your cat is Kit."
    assert kedge_server.requests[-1].body["previous_response_id"] == two.response_id
    await conversation.truncate(two.id)
    assert conversation.turn.blocks == (one, two)
    await conversation.truncate(-1)
    assert conversation.turn.blocks == (one,)
    assert node_kinds(await conversation.path())[-2:] == ["edited", "edited"]
    assert len(await conversation.tree()) == len(await conversation.path()) == 12


async def test_goto_moves_head_to_any_position(conversation: Conversation) -> None:
    """`goto` accepts a node, a response id or a block id; `diff` compares without moving the head."""
    first = await conversation.send("My name is Ada.")
    second = await conversation.send("What is my name?")
    assert (await conversation.diff(first.node)).removed == conversation.turn.blocks[2:]
    await conversation.goto(first.response_id)
    assert conversation.head == first.node
    assert (await conversation.diff(second.response_id)).added == second.turn.blocks[2:]
    fork = await conversation.fork()
    await fork.edit(fork.turn[0].id, "My name is Bob.")
    assert (await conversation.diff(fork)).added == (fork.turn[0],)
    edited = fork.turn.blocks
    await fork.goto(edited[1].id)  # a block that is also on the path without the edit
    assert fork.turn.blocks == edited
    await conversation.goto(second.node)
    await conversation.goto(conversation.turn[2].id)
    assert conversation.turn.blocks == second.turn.blocks[:3]
    for position in (1 << 70, 0, "resp_nothing", str(first.node), ""):
        with pytest.raises(errors.NotInStore):
            await conversation.goto(position)


async def test_nodes_and_blocks_are_positions(conversation: Conversation) -> None:
    """Every method with a position or a block accepts the objects, besides their numbers and ids."""
    await conversation.send("My name is Ada.")
    second = await conversation.send("What is my name?")
    asked, answered = [node for node in await conversation.path() if node.depth in (1, 2)]
    name, greeting, question, answer = second.turn.blocks
    assert (await conversation.diff(answered)).removed == (question, answer)
    assert (await conversation.diff(question)).removed == (answer,)
    assert (await conversation.fork(at=answered)).turn.blocks == (name, greeting)
    fork = await conversation.fork(question)
    assert fork.turn.blocks == (name, greeting, question)
    await fork.merge_summary_of(answered)
    await conversation.send("And now?", at=answered)
    assert conversation.turn.blocks[:2] == (name, greeting)
    await conversation.send("What else?", at=greeting)
    assert [block.text for block in conversation.turn[1:3]] == [greeting.text, "What else?"]  # pyright: ignore[reportAttributeAccessIssue]
    assert (await conversation.goto(asked)).head == asked.id
    await conversation.edit(name, "My name is Bob.")
    assert (await conversation.send("What is my name?", at=conversation.turn[0])).text.endswith(
        "Bob."
    )
    await conversation.remove(conversation.turn[0])
    await conversation.truncate(conversation.turn[0])
    assert len(conversation.turn) == 1
    assert (await conversation.goto(conversation.turn[0])).turn == conversation.turn


async def test_unanswered_question_is_resumed_by_its_node(conversation: Conversation) -> None:
    """`resume` accepts a node that `pending` returned."""
    async with conversation.stream("Count to 50") as stream:
        await anext(stream)
    (question,) = await conversation.pending()
    assert isinstance(question, Node)
    assert (await conversation.resume(question)).node > question.id


async def test_positions_of_another_conversation_are_rejected(
    store: Store, connected: Connect, conversation: Conversation
) -> None:
    """A node of another tree is no position here, even if its number is one, and neither is a removed block."""
    await conversation.send("My name is Ada.")
    other = await Conversation.create(connected(), store=store)
    await other.send("My name is Bob.")
    (node,) = [node for node in await other.path() if node.kind == "answered"]
    moves: list[Any] = [conversation.goto, conversation.fork, conversation.diff]
    moves += [conversation.resume, conversation.merge_summary_of]
    for move in moves:
        with pytest.raises(errors.NotInStore, match="belongs to another conversation"):
            await move(node)
    with pytest.raises(errors.NotInStore, match="belongs to another conversation"):
        await conversation.send("Hello", at=node)
    for act in (conversation.goto, conversation.fork):
        with pytest.raises(errors.NotInStore, match="at the head of this"):
            await act(other.turn[0])
    with pytest.raises(errors.InvalidTurn, match="no block with the id"):
        await conversation.edit(other.turn[0], "My name is Carl.")


async def test_calls_of_a_definition_are_left_to_the_caller(store: Store) -> None:
    """A definition among the tools of a conversation is offered; its result is sent as a message."""
    look_up = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    conversation = await Conversation.create("practice", store=store, tools=[look_up])
    reply = await conversation.send("Call look_up")
    (call,) = find_open_calls(reply.turn)
    again = await Conversation.open("practice", store=store, id=conversation.id, tools=[look_up])
    answer = await again.send(tool_result(call.call_id, "a cat"))
    assert answer.text == "look_up says: a cat."


async def test_conversation_is_created_with_blocks(store: Store, connected: Connect) -> None:
    """A text is one message, which `send` and `regenerate` answer; messages of an API are refused."""
    engine = connected()
    block = await Conversation.create(engine, store=store, blocks=user("Hello"))
    assert list(block.turn) == [user("Hello")]
    conversation = await Conversation.create(engine, store=store, blocks="What is 2+3?")
    with pytest.raises(errors.NotInStore, match="has no question"):
        await (await Conversation.create(engine, store=store)).regenerate()
    assert (await conversation.send()).text == "2+3 = 5."
    assert (await conversation.regenerate()).text == "2+3 = 5."
    assert len(conversation.turn) == 2
    message: Any = {"role": "user", "content": "Hello"}
    with pytest.raises(errors.InvalidTurn, match="blocks_from_messages"):
        Conversation.create(engine, store=store, blocks=[message])
    with pytest.raises(errors.InvalidTurn, match="blocks_from_messages"):
        await store.create(blocks=[message])
    assert len(await store.conversations()) == 3


async def test_tool_calls_and_results_are_nodes(store: Store, connected: Connect) -> None:
    """The tool call is stored before the tool runs, and its result and duration afterwards."""
    snapshots: list[list[str]] = []

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        snapshots.append(node_kinds(await store.tree(conversation.row)))
        return a + b

    conversation = await Conversation.create(connected(), store=store, tools=[add])
    reply = await conversation.send("Please call add with a=2 and b=3")
    assert "5" in reply.text
    assert snapshots == [["root", "asked", "answered"]]
    tree = await store.tree(conversation.row)
    assert node_kinds(tree) == ["root", "asked", "answered", "results", "answered"]
    ((name, node),) = await store.database.read(
        lambda tx: tx.rows("SELECT name, node FROM tool_runs")
    )
    assert (name, node) == ("add", tree[3].id)
    reopened = await Conversation.open(connected(), store=store, id=conversation.id, tools=[add])
    assert reopened.plan("Thanks").delta_blocks == 1


async def test_key_runs_once(
    conversation: Conversation, kedge_server: TestServer, store: Store
) -> None:
    """A repeated key returns or streams the stored answer without a request, and rejects another message."""
    first = await conversation.send("What is 2+3?", key="k1")
    sent = len(kedge_server.requests)
    second = await conversation.send("What is 2+3?", key="k1")
    assert (second.text, second.node, second.stored) == (first.text, first.node, True)
    assert second.usage == first.usage
    assert (len(kedge_server.requests), len(conversation.turn)) == (sent, 2)
    with pytest.raises(errors.KeyReused):
        await conversation.send("What is 2+4?", key="k1")
    async with conversation.stream("What is 2+3?", key="k1") as stream:
        assert [delta async for delta in stream.text_deltas()] == [first.text]
    assert stream.reply.stored

    def read_in_sync_code() -> list[str]:
        with conversation.sync.stream("What is 2+3?", key="k1") as stream:
            return list(stream.text_deltas())

    assert await asyncio.to_thread(read_in_sync_code) == [first.text]


async def test_send_at_another_node_moves_the_head_after_its_answer(
    store: Store, conversation: Conversation, kedge_server: TestServer
) -> None:
    """If a request at another node, response or block fails, the head does not move."""
    first = await conversation.send("My name is Ada.")
    second = await conversation.send("My name is Bo.")
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is my name?", at=first.node)
    assert (await store.conversation(conversation.id)).head == conversation.head == second.node
    for at in (first.node, first.response_id, first.turn[-1].id):
        reply = await conversation.send("What is my name?", at=at)
        assert reply.text == "Your name is Ada."
        assert (await store.conversation(conversation.id)).head == conversation.head == reply.node


async def test_concurrent_sends_with_one_key_run_once(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """Concurrent sends with the same key send one request and return the same answer."""
    replies: list[Any] = []
    others = [
        await Conversation.open(connected(), store=store, id=conversation.id) for _ in range(4)
    ]

    async def ask(each: Conversation) -> None:
        replies.append(await each.send("What is 2+3?", key="k1"))

    async with anyio.create_task_group() as group:
        for each in others:
            group.start_soon(ask, each)
    assert {(reply.text, reply.node) for reply in replies} == {(replies[0].text, replies[0].node)}
    assert sum(not reply.stored for reply in replies) == 1
    assert len(kedge_server.requests) == 1


async def test_key_after_a_head_conflict_runs_again_from_the_new_head(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """After a head conflict, the answer on the other branch is not returned for the key."""
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    await other.send("My name is Ada.")
    with pytest.raises(errors.HeadConflict):
        await conversation.send("What is my name?", key="k")
    sent = len(kedge_server.requests)
    with pytest.raises(errors.HeadConflict):  # it would conflict again, so no request is sent
        await conversation.send("What is my name?", key="k")
    assert len(kedge_server.requests) == sent
    await conversation.refresh()
    reply = await conversation.send("What is my name?", key="k")
    assert (reply.text, reply.stored) == ("Your name is Ada.", False)
    assert reply.node == conversation.head == (await store.conversation(conversation.id)).head
    assert (await conversation.send("What is my name?", key="k")).stored


async def test_stored_reply_updates_the_head(
    store: Store, conversation: Conversation, connected: Connect
) -> None:
    """After a stored reply, the next message is sent with the context of the current head."""
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    first = await other.send("My name is Ada.", key="k")
    await other.send("My ship is the Erebus.")
    reply = await conversation.send("My name is Ada.", key="k")
    assert (reply.stored, reply.node) == (True, first.node)
    assert (conversation.head, len(conversation.turn)) == (other.head, 4)
    assert (await conversation.send("What is my name?")).text == "Your name is Ada."


async def test_key_belongs_to_one_request(conversation: Conversation) -> None:
    """Another model, setting, schema or mode is a different request; streaming is not."""
    await conversation.send("What is 2+3?", key="k", temperature=0.1)
    assert (await conversation.send("What is 2+3?", key="k", temperature=0.1)).stored
    async with conversation.stream("What is 2+3?", key="k", temperature=0.1) as stream:
        assert (await stream.finish()).stored
    json_format = {"text": {"format": {"type": "json_object"}}}
    others = ({"temperature": 0.5}, {"model": "practice-2"}, json_format, {"mode": "stateless"})
    for changed in others:
        options: dict[str, Any] = {"temperature": 0.1, **changed}
        with pytest.raises(errors.KeyReused):
            await conversation.send("What is 2+3?", key="k", **options)


async def test_key_of_a_message_that_was_not_stored_is_free(
    store: Store, connected: Connect
) -> None:
    """A message that a guard rejects is not stored, so its key may be used for another message."""
    blocked = guard(block("Terror"))
    conversation = await Conversation.create(connected(), store=store, middleware=[blocked])
    with pytest.raises(errors.Blocked):
        await conversation.send("My ship is the Terror.", key="k")
    assert await conversation.pending() == []
    reply = await conversation.send("My ship is the Erebus.", key="k")
    assert (await conversation.send("My ship is the Erebus.", key="k")).node == reply.node


async def test_question_with_invalid_options_is_not_stored(conversation: Conversation) -> None:
    """A question whose request can never be encoded does not stay in the conversation as pending."""
    for options in ({"metadata": {"a": object()}}, {"extra_body": {"a": {1}}}):
        with pytest.raises(errors.InvalidSetting, match="cannot be sent as JSON"):
            await conversation.send("Hello", **cast("dict[str, Any]", options))
        assert await conversation.pending() == []
    assert (await conversation.send("Hello")).text.startswith("You said")


async def test_retention_applies_immediately(
    store: Store, kedge_server: TestServer, connected: Connect
) -> None:
    """After the retention everything is sent, by the object that created the conversation and by another one."""
    conversation = await Conversation.create(connected(), store=store, retention=0.001)
    await conversation.send("My name is Ada.")
    reply = await conversation.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert get_state(reply.turn) == get_state(conversation.turn)
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    await reopened.send("What is my name?")
    assert [row.reason for row in await reopened.responses()] == ["new", "expired", "expired"]
    for request in kedge_server.requests:
        assert "previous_response_id" not in request.body


async def test_question_is_stored_without_events(store: Store, connected: Connect) -> None:
    """The question is stored before it is sent, even if a middleware drops events."""

    class Quiet(BaseMiddleware):
        name = "recall"

        async def events(self, turn: Turn, request: Request) -> Events:
            async for event in self.inner.events(turn, request):
                if isinstance(event, TurnFinished):
                    yield event

    conversation = await Conversation.create(connected(), store=store, middleware=[Quiet])
    await conversation.send("My name is Ada.")
    assert "asked" in node_kinds(await store.tree(conversation.row))


async def test_turn_that_is_cancelled_while_it_claims_its_key_releases_it(
    store: Store, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that was stored just before the cancellation does not delay the next caller by its lease."""
    conversation = await Conversation.create(connected(), store=store, lease=1e6)
    claim = store.claim

    async def cancel_after_claim(*args: Any, **options: Any) -> Any:
        result = await claim(*args, **options)
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        return result

    monkeypatch.setattr(store, "claim", cancel_after_claim)
    with anyio.CancelScope() as scope:
        await conversation.send("What is 2+3?", key="k")
    assert scope.cancelled_caught
    monkeypatch.undo()
    with anyio.fail_after(300):
        assert (await conversation.send("What is 2+3?", key="k")).text == "2+3 = 5."


@pytest.mark.parametrize("reopened", [False, True])
async def test_lost_responses_are_marked_and_resent(
    store: Store, connected: Connect, kedge_server: TestServer, reopened: bool
) -> None:
    """All lost responses are marked once, the reply and its row say why everything was sent, and later ones chain."""
    conversation = await Conversation.create(connected(), store=store)
    for text in ("My name is Ada.", "What is my name?"):
        await conversation.send(text)
    kedge_server.forget()
    if reopened:
        conversation = await Conversation.open(connected(), store=store, id=conversation.id)
    reply = await conversation.send("What is my name?", key="name")
    assert (reply.text, reply.healed) == ("Your name is Ada.", ("gone",))
    assert (await conversation.send("What is my name?", key="name")).healed == ("gone",)
    *lost, rejected, second = await conversation.responses()
    assert [(each.status, each.lost_reason) for each in lost] == [("lost", "gone")] * 2
    assert (rejected.status, rejected.anchor) == ("refused", lost[1].provider_response_id)
    assert (second.healed, second.reason, second.anchor) == ("gone", "lost", "")
    assert reply.plan
    assert reply.plan.fallback == "lost"
    assert f"Not used: {lost[1].provider_response_id}" in reply.plan.explain()
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    assert get_state(other.turn) == get_state(conversation.turn)
    plan = (await other.send("What is 1+1?")).plan
    assert plan
    assert plan.previous_response_id == second.provider_response_id
    rows = await store.database.read(lambda tx: tx.rows("SELECT kind, reason FROM incidents"))
    assert rows == [("healed", "gone")]


async def test_rebuilt_turn_chains_again(store: Store, connected: Connect) -> None:
    """Plain messages without ids find the stored response of their content, unless it expired, or for another key."""
    first = await Conversation.create(connected(api_key="one"), store=store)
    await first.send("My name is Ada.")
    plain = [type(block)(block.parts) for block in first.turn]  # type: ignore[attr-defined,call-arg]
    (record,) = get_state(first.turn).anchors
    for key, retention, response_id in (
        ("one", None, record.response_id),
        ("one", 0.001, ""),
        ("two", None, ""),
    ):
        engine = connected(api_key=key)
        rebuilt = await Conversation.create(engine, store=store, blocks=plain, retention=retention)
        assert rebuilt.plan("What is my name?").conditional
        plan = await rebuilt.probe_and_plan("What is my name?")
        reply = await rebuilt.send("What is my name?")
        assert reply.plan
        assert not plan.conditional
        assert plan.previous_response_id == reply.plan.previous_response_id == response_id
    assert not first.plan("What is my name?").conditional
    await store.mark_lost(record, "gone")
    again = await Conversation.open(connected(api_key="one"), store=store, id=first.id)
    assert again.plan("What is my name?").conditional  # another response may have this content


async def test_rejected_request_is_stored(conversation: Conversation) -> None:
    """A rejected request is stored as a response with its status and the server's message."""
    with pytest.raises(errors.RequestRefused):
        await conversation.send("Hello", temperature=99)
    (row,) = await conversation.responses()
    assert (row.status, row.provider_response_id) == ("refused", "")
    assert "temperature" in row.error
    assert (await conversation.send("What is 2+3?")).text == "2+3 = 5."


async def test_summary_of_another_branch_is_merged(conversation: Conversation) -> None:
    """A merged summary is a block whose metadata has the number of summarized blocks."""
    await conversation.send("My name is Ada.")
    fork = await conversation.fork()
    await fork.send("My ship is the Erebus.")
    await conversation.merge_summary_of(fork)
    assert conversation.turn[-1].metadata["kedge.summary"] == 4
    await conversation.merge_summary_of(fork.head)
    assert conversation.turn[-1].metadata["kedge.summary"] == 2


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


async def read_first_text(conversation: Conversation) -> str:
    """Stop a turn at its first text, and return that text."""
    async with conversation.stream("Count to 500") as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                return event.delta
    raise AssertionError("the stream ended without a text")


async def test_question_is_pending_until_its_tool_calls_are_answered(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A turn that is stopped while a tool runs, or fails after it, is resumed from its last step."""
    found: list[Node] = []

    async def work() -> str:
        """Fail, or look at the conversation as another process would after a crash."""
        found[:] = await (
            await Conversation.open(engine, store=store, id=conversation.id)
        ).pending()
        if scope:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        kedge_server.faults.set("status=400", times=1)
        return "done"

    engine = connected()
    conversation = await Conversation.create(engine, store=store, tools=[work])
    for scope, result in ((None, "done"), (anyio.CancelScope(), "This call was interrupted")):
        with scope or pytest.raises(errors.RequestRefused):
            await conversation.send("Please call work")
        (question,) = await conversation.pending()
        assert (question.kind, found) == ("asked", [question])
        assert (await conversation.resume()).text.startswith(f"work says: {result}")
        assert await conversation.pending() == []
    await conversation.undo()
    assert await conversation.pending() == []


async def test_stopped_stream_is_pending(store: Store, conversation: Conversation) -> None:
    """The head stays, and the partial answer is a cancelled node that is not an anchor; continued, it is sent."""
    received = await read_first_text(conversation)
    assert (await store.conversation(conversation.id)).head == conversation.head
    (question,) = await conversation.pending()
    assert question.kind == "asked"
    (stopped,) = await conversation.responses()
    assert (stopped.status, stopped.anchor_record, stopped.error) == ("cancelled", None, "")
    loaded = await store.load(conversation.row, stopped.node)
    assert loaded.blocks == (user("Count to 500"), assistant(received))
    assert loaded.state.anchors == ()
    assert (await conversation.resume()).text.startswith("1 2 3")
    assert [each.status for each in await conversation.responses()] == ["cancelled", "completed"]
    reply = await conversation.send("How many messages?", at=stopped.node)
    assert [block.kind for block in reply.turn.blocks] == ["user", "assistant"] * 2
    assert reply.plan
    assert (reply.plan.anchor, reply.plan.delta_blocks) == (None, 3)


async def test_stored_question_can_be_streamed_again(conversation: Conversation) -> None:
    """`stream_resume` returns the stored answer, or a new one with ``restart``, as `stream_regenerate` does."""
    first = await conversation.send("What is 2+3?")
    (question,) = [
        node.id for node in await conversation.store.tree(conversation.row) if node.kind == "asked"
    ]
    async with conversation.stream_resume(question) as stream:
        assert [type(event) async for event in stream] == [TurnFinished]
    assert (stream.reply.node, stream.reply.stored) == (first.node, True)
    async with conversation.stream_resume(question, restart=True) as stream:
        await stream.finish()
    assert stream.reply.text == first.text
    assert stream.reply.node != first.node
    async with conversation.stream_regenerate() as stream:
        text = "".join([delta async for delta in stream.text_deltas()])
    assert text == stream.reply.text == "2+3 = 5."
    assert first.node != stream.reply.node == conversation.head


async def test_cost_of_an_incomplete_answer_is_stored(store: Store) -> None:
    """The cost has the current prices, also if the answer reached its limit."""
    async with await Conversation.create(
        "practice", store=store, price=lambda row: 1.5
    ) as conversation:
        with pytest.raises(errors.AnswerIncomplete):
            await conversation.send("Write 500 words.", max_output_tokens=20)
        (row,) = await conversation.responses()
    assert (row.provider, row.status, row.cost) == ("practice", "incomplete", 1.5)


async def test_cost_of_an_attempt_that_is_retried_is_stored(store: Store) -> None:
    """Tokens of an attempt that ``retry`` repeats are stored beside the path, and counted in the reply."""
    statuses = ["failed", "failed", "completed"]

    async def answer(_: object) -> Response:
        content = [{"type": "output_text", "text": "Hi"}]
        message = {"type": "message", "id": "m", "role": "assistant", "content": content}
        members = {"usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}}
        error = {"code": "server_error", "message": "overloaded"}
        status = statuses.pop(0)
        result = {"error": error} if status == "failed" else {"output": [message]}
        return json_response({"id": f"resp_{len(statuses)}", "status": status, **members, **result})

    with serve_handler(answer) as url:
        engine = connect(f"responses:{url}#m")
        async with await Conversation.create(
            engine, store=store, middleware=[retry(first=0)], price=lambda row: 1.5
        ) as conversation:
            reply = await conversation.send("Hello")
            rows = await conversation.responses()
            path = await conversation.path()
    assert reply.text == "Hi"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (21, 9)
    found = sorted((row.status, row.cost, row.input_tokens) for row in rows)
    assert found == [("completed", 1.5, 7), *[("failed", 1.5, 7)] * 2]
    errors = sorted((row.is_resent, row.error_code, "overloaded" in row.error) for row in rows)
    assert errors == [(False, "", False), *[(True, "server_error", True)] * 2]
    assert node_kinds(path) == ["root", "asked", "answered"]


async def test_cost_of_an_answer_that_healing_discards_is_stored(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """Tokens of an answer without the context are stored beside the path, and counted in the reply."""
    async with await Conversation.create(
        connected(), store=store, price=lambda row: 1.5
    ) as conversation:
        await conversation.send("One")
        kedge_server.faults.set("forget_silently,echo=no", times=1)
        reply = await conversation.send("Two")
        _, *rows = await conversation.responses()
        path = await conversation.path()
    discarded, answered = sorted(rows, key=lambda row: row.status, reverse=True)
    assert (discarded.status, discarded.cost, discarded.healed) == ("failed", 1.5, "")
    assert (answered.status, answered.cost, answered.healed) == ("completed", 1.5, "forgot")
    assert discarded.anchor
    assert "without the context" in discarded.error
    assert discarded.is_resent
    assert discarded.input_tokens
    assert answered.input_tokens
    assert reply.usage.input_tokens == discarded.input_tokens + answered.input_tokens
    assert node_kinds(path) == ["root", "asked", "answered", "asked", "answered"]


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
            kinds = node_kinds(await conversation.path())
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
