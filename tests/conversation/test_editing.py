"""Undo, redo, edits of blocks, and positions of a conversation."""

from typing import Any

import pytest

from conversation.conftest import BuildConversation, Connect, assert_sent, list_kinds
from kedge import Conversation, assistant, errors, user
from kedge.conversation import lookup
from kedge.store import Store
from kedge.testing import TestServer


async def test_regenerated_answers_are_branches_of_one_question(
    store: Store, kedge_server: TestServer, conversation_with: BuildConversation
) -> None:
    """After an edit, each new answer has the edited context, and both follow the same question."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    await conversation.edit(conversation.turn[0].id, "My name is Bob.")
    first = await conversation.regenerate()
    second = await conversation.regenerate()
    assert first.text == second.text == "Your name is Bob."
    assert "My name is Bob." in str((kedge_server.requests[-1].context or [{}])[0])
    assert [block.kind for block in conversation.turn] == ["user", "assistant"] * 2
    nodes = {node.id: node for node in await store.tree(conversation.row)}
    assert nodes[first.node].parent == nodes[second.node].parent


async def test_edited_blocks_remain_in_the_tree(
    store: Store, conversation_with: BuildConversation
) -> None:
    """The node before an edit has the block as it was."""
    conversation = await conversation_with("My name is Ada.")
    before = conversation.head
    await conversation.edit(conversation.turn[0].id, "My name is Bob.")
    assert "Ada" in str((await store.load(conversation.row, before)).blocks)


async def test_undo_goes_back_step_by_step(conversation_with: BuildConversation) -> None:
    """Each `undo` removes a question with its answer, or an edit, until nothing is left."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    edited = await conversation.edit(conversation.turn[0].id, "My name is Bob.")
    await conversation.regenerate()
    await conversation.undo()
    assert conversation.head == edited.id
    for _ in range(3):
        await conversation.undo()
    with pytest.raises(errors.NotInStore, match="nothing to undo"):
        await conversation.undo()
    assert await conversation.pending() == []


async def test_undo_after_another_process_moved_the_head(
    conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """The head is not moved back from where another process has moved it, and the error names it."""
    conversation = await conversation_with("My name is Ada.")
    other = await reopen(conversation)
    await conversation.send("What is 1+1?")
    with pytest.raises(errors.HeadConflict, match="not moved to node") as conflict:
        await other.undo()
    assert conflict.value.head == conversation.head
    assert "message" not in str(conflict.value)  # nothing was sent


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


async def test_redo_repeats_the_undone_steps(conversation_with: BuildConversation) -> None:
    """`redo` goes back to the nodes that `undo` left, the last one first, also if there is a newer branch."""
    conversation = await conversation_with("My name is Ada.")
    first = conversation.head
    older = (await conversation.send("What is my name?")).node
    await conversation.regenerate()
    await conversation.goto(older)
    await conversation.undo()
    await conversation.undo()
    assert (await conversation.redo()).head == first
    assert (await conversation.redo()).head == older


async def test_redo_of_a_reopened_conversation_follows_the_newest_branch(
    conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """An object that has undone nothing itself continues to the newest answer below the head."""
    conversation = await conversation_with("My name is Ada.")
    first = conversation.head
    await conversation.send("What is my name?")
    newest = await conversation.regenerate()
    await conversation.goto(first)
    reopened = await reopen(conversation)
    assert (await reopened.redo()).head == newest.node
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await reopened.redo()


async def test_redo_ignores_questions_without_an_answer(
    kedge_server: TestServer, conversation_with: BuildConversation
) -> None:
    """A question whose request failed is continued by `resume`, not by `redo`."""
    conversation = await conversation_with("My name is Ada.")
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is 2+3?")
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await conversation.redo()


async def test_redo_ignores_the_steps_of_forks(
    conversation_with: BuildConversation, reopen: BuildConversation
) -> None:
    """What a fork has added after the head is not part of this conversation."""
    conversation = await conversation_with("My name is Ada.")
    last = await conversation.send("What is 1+1?")
    await (await conversation.fork()).send("Only in the fork")
    await conversation.undo()
    reopened = await reopen(conversation)
    assert (await reopened.redo()).head == last.node
    with pytest.raises(errors.NotInStore, match="nothing to redo"):
        await reopened.redo()


async def test_blocks_are_inserted_before_an_index(conversation_with: BuildConversation) -> None:
    """Texts and blocks are inserted in their order."""
    conversation = await conversation_with("My name is Ada.", "My ship is the Erebus.")
    one, two, three, four = conversation.turn.blocks
    await conversation.insert(2, "My dog is Rex.", user("My cat is Tom."))
    inserted = (user("My dog is Rex."), user("My cat is Tom."))
    assert conversation.turn.blocks == (one, two, *inserted, three, four)


async def test_blocks_are_removed(conversation_with: BuildConversation) -> None:
    """The other blocks remain."""
    conversation = await conversation_with("My name is Ada.", "My ship is the Erebus.")
    one, two, three, four = conversation.turn.blocks
    await conversation.remove(two.id, three.id)
    assert conversation.turn.blocks == (one, four)


async def test_request_after_an_edit_chains_on_the_unchanged_part(
    kedge_server: TestServer, conversation_with: BuildConversation
) -> None:
    """The response before the first change is continued, and the blocks after it are sent."""
    conversation = await conversation_with("My name is Ada.")
    answer = conversation.turn.blocks[1]
    await conversation.append("My cat is Tom.")
    await conversation.send("What is my cat?")
    await conversation.edit(conversation.turn[2].id, "My cat is Kit.")
    await conversation.truncate(3)
    reply = await conversation.send("What is my cat?")
    assert reply.text == "Your cat is Kit."
    assert_sent(kedge_server, blocks=2, anchor=answer.response_id)


async def test_conversation_is_truncated_to_a_block_or_a_length(
    conversation_with: BuildConversation,
) -> None:
    """`truncate` accepts the last block that remains, and a number of blocks, from the end if it is negative."""
    conversation = await conversation_with("My name is Ada.", "My ship is the Erebus.")
    one, two, three, _ = conversation.turn.blocks
    await conversation.truncate(3)
    assert conversation.turn.blocks == (one, two, three)
    await conversation.truncate(two.id)
    assert conversation.turn.blocks == (one, two)
    await conversation.truncate(-1)
    assert conversation.turn.blocks == (one,)


async def test_each_edit_is_a_node(conversation_with: BuildConversation) -> None:
    """Changes follow each other in the tree, and none replaces a node."""
    conversation = await conversation_with("My name is Ada.")
    await conversation.insert(1, "My dog is Rex.")
    await conversation.remove(conversation.turn[1])
    await conversation.edit(conversation.turn[0], "My name is Bob.")
    await conversation.truncate(1)
    kinds = ["root", "asked", "answered", *["edited"] * 4]
    assert list_kinds(await conversation.path()) == kinds
    assert list_kinds(await conversation.tree()) == kinds


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


async def test_diff_accepts_a_node_or_a_block(conversation_with: BuildConversation) -> None:
    """`diff` compares with the conversation up to a node, or up to a block."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    question, answer = conversation.turn.blocks[2:]
    answered = (await conversation.path())[2]
    assert (await conversation.diff(answered)).removed == (question, answer)
    assert (await conversation.diff(question)).removed == (answer,)


async def test_fork_accepts_a_node_or_a_block(conversation_with: BuildConversation) -> None:
    """A fork has the blocks up to a node, or up to a block."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    blocks = conversation.turn.blocks
    answered = (await conversation.path())[2]
    assert (await conversation.fork(at=answered)).turn.blocks == blocks[:2]
    assert (await conversation.fork(blocks[2])).turn.blocks == blocks[:3]


async def test_summary_of_a_node_is_merged(conversation_with: BuildConversation) -> None:
    """`merge_summary_of` accepts a node of the same tree."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    answered = (await conversation.path())[2]
    merged = await conversation.merge_summary_of(answered)
    assert merged.kind == "merged"


async def test_message_continues_from_a_node_or_a_block(
    conversation_with: BuildConversation,
) -> None:
    """A message that is sent at a position follows the blocks up to there."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    name, greeting = conversation.turn.blocks[:2]
    answered = (await conversation.path())[2]
    for position in (answered, greeting):
        reply = await conversation.send("And now?", at=position)
        assert reply.turn.blocks[:3] == (name, greeting, user("And now?"))


async def test_head_moves_to_a_node_or_a_block(conversation_with: BuildConversation) -> None:
    """`goto` moves the head to a node; at the last block of the head it stays."""
    conversation = await conversation_with("My name is Ada.")
    asked = (await conversation.path())[1]
    assert (await conversation.goto(asked)).head == asked.id
    turn = conversation.turn
    assert (await conversation.goto(turn[0])).turn == turn


async def test_blocks_are_edited_removed_and_truncated_as_objects(
    conversation_with: BuildConversation,
) -> None:
    """Methods that change blocks accept the blocks, besides their ids."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    await conversation.edit(conversation.turn[0], "My name is Bob.")
    assert conversation.turn[0] == user("My name is Bob.")
    reply = await conversation.send("What is my name?", at=conversation.turn[0])
    assert reply.text.endswith("Bob.")
    await conversation.remove(conversation.turn[0])
    await conversation.truncate(conversation.turn[0])
    assert conversation.turn.blocks == (user("What is my name?"),)


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


async def test_summary_of_another_branch_is_merged(conversation: Conversation) -> None:
    """A merged summary is a block whose metadata has the number of summarized blocks."""
    await conversation.send("My name is Ada.")
    fork = await conversation.fork()
    await fork.send("My ship is the Erebus.")
    await conversation.merge_summary_of(fork)
    assert conversation.turn[-1].metadata["kedge.summary"] == 4
    await conversation.merge_summary_of(fork.head)
    assert conversation.turn[-1].metadata["kedge.summary"] == 2


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
