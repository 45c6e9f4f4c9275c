"""Summaries of conversations, trees and exchanges, on every database."""

import itertools
import time
from typing import Any

from kedge.planning.anchors import is_expired
from kedge.presentation.response_tree import build_response_tree
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.store.summaries import (
    LIST_FILTERS,
    LIST_ORDERS,
    find_by_title,
    list_summaries,
    load_attached,
)
from kedge.store.tree import (
    list_tree_conversations,
    load_last_blocks,
    read_tree,
)
from kedge.turns import Block, assistant, system, user


async def append_exchange(
    store: Store, row: ConversationRow, parent: Node, text: str, **members: Any
) -> Node:
    """Append one exchange without moving the head."""
    question = await store.append(row, parent, [user(text)], kind="asked")
    fields: dict[str, Any] = {
        "provider": "p", "scope": "s", "model": "m", "created_at": time.time(), **members
    }  # fmt: skip
    return await store.append(
        row,
        question,
        [assistant(f"{text}!")],
        kind="answered",
        response=RequestRecord(**fields),
    )


async def create_conversation(
    store: Store, title: str, *questions: str, **members: Any
) -> ConversationRow:
    """Create a conversation with one exchange per question, and no forks."""
    row = await store.create(title)
    node = await store.node(row, row.head)
    for question in questions:
        node = await append_exchange(store, row, node, question, **members)
    await store.move_head(row, node, head=row.head)
    return await store.conversation(row.id)


async def test_request_that_was_sent_again_is_no_failure(store: Store) -> None:
    """A refused request that was sent again is no failure of the question; if nothing followed, it is pending."""
    row = await store.create("Healed")
    root = await store.node(row, row.head)
    question = await store.append(row, root, [user("Hello")], kind="asked")
    facts: dict[str, Any] = {
        "provider": "p",
        "scope": "s",
        "status": "refused",
        "error_code": "gone",
    }
    resent = RequestRecord(**facts, is_resent=True)
    await store.append(row, question, [], kind="failed", response=resent)
    (summary,), _ = await list_summaries(store)
    assert (summary.failed, summary.unanswered) == (0, "pending")
    assert await list_summaries(store, show="failed") == ([], 0)
    await store.append(row, question, [], kind="failed", response=RequestRecord(**facts))
    (summary,), total = await list_summaries(store, show="failed")
    assert (summary.failed, summary.unanswered, total) == (1, "failed", 1)


async def test_edits_of_a_tree_are_described(store: Store) -> None:
    """Each edit names the first block that it changed, inserted or removed, with the old and the new words."""
    row = await store.create("Edits")
    root = await store.node(row, row.head)
    long = "The harbour is full of ships today. " * 4
    first = [
        user("My name is Ada."),
        assistant("Hello Ada."),
        user(f"{long}Count them."),
        assistant("12"),
    ]
    named = user(f"{long}Name them.")
    node = await store.append(row, root, first)

    async def edit(kept: int, *blocks: Block) -> int:
        nonlocal node
        node = await store.append(row, node, blocks, kind="edited", kept=kept)
        return node.id

    expected = {
        await edit(0, user("My name is Bea."), *first[1:]): "user message “…Ada.” → “…Bea.”",
        await edit(
            2, user(f"{long}Name them."), first[3]
        ): "user message “…Count them.” → “…Name them.”",
        await edit(1, named, first[3]): "removed answer “Hello Ada.”",
        await edit(1, system("Hurry."), named, first[3]): "new system prompt “Hurry.”",
        await edit(2): f"removed user message “{long[:59]}…” and 1 later block",
        await edit(1, assistant("Hello.")): "system prompt “Hurry.” → answer “Hello.”",
        await edit(1, assistant("x" * 70_000)): "",
    }
    side = await store.append(row, root, [user("Bye")])
    node = side
    expected[await edit(0, user("Bye-bye"))] = "user message “Bye” → “Bye-bye”"
    tree = await read_tree(store, row)
    assert tree.edits == expected
    labels = {each.id: each.label for each in build_response_tree(tree, 0.0).nodes}
    assert labels[node.id] == "User message “Bye” → “Bye-bye”"
    assert "History was edited" in labels.values()


TOKENS: dict[str, Any] = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 3}


async def test_summary_contains_sums_of_its_conversation(store: Store) -> None:
    """A summary has the first question, the last answer, and sums over all responses."""
    await create_conversation(
        store, "Boats", "One", "Two", "Three", cost=0.5, seconds=2.0, expires_at=9.0, **TOKENS
    )
    ((row,), total) = await list_summaries(store)
    assert total == 1
    assert (row.first_words, row.last_answer) == ("One", "Three!")
    assert (row.responses, row.failed, row.forks) == (3, 0, 0)
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (30, 12, 9)
    assert (row.cost, row.median_seconds, row.expires_at, row.model) == (1.5, 2.0, 9.0, "m")
    assert all(type(count) is int for count in (row.responses, row.input_tokens, row.forks))


async def test_expiry_of_a_summary_is_that_of_stored_responses(store: Store) -> None:
    """A response that the provider does not store is counted, and does not expire."""
    row = await create_conversation(store, "Boats", "One", expires_at=9.0)
    head = await store.node(row, row.head)
    await append_exchange(store, row, head, "Two", stored=False, expires_at=99.0)
    ((summary,), _) = await list_summaries(store)
    assert (summary.responses, summary.expires_at) == (2, 9.0)


async def test_summary_of_an_empty_conversation_has_no_sums(store: Store) -> None:
    """Without responses there is no cost and no duration."""
    await store.create("Empty")
    ((summary,), _) = await list_summaries(store)
    assert (summary.first_words, summary.responses) == ("", 0)
    assert (summary.cost, summary.median_seconds) == (None, None)


async def test_forks_are_the_conversations_forked_from_one(store: Store) -> None:
    """A fork counts for its origin, also without a message; another branch of a conversation is no fork."""
    row = await create_conversation(store, "Boats", "One", "Two")
    start = await store.node(row, (await store.path(row))[1].id)
    other = await append_exchange(store, row, start, "Three")
    await store.move_head(row, other, head=row.head)
    forked = await store.fork(row, other.id, title="Fork")
    await store.fork(forked, forked.head, title="Fork of the fork")
    await store.fork(row, other.id, title="Second")
    rows, _ = await list_summaries(store)
    forks = {each.row.title: each.forks for each in rows}
    assert forks == {"Boats": 2, "Fork": 1, "Fork of the fork": 0, "Second": 0}


async def test_expiry_matches_the_planner(store: Store) -> None:
    """Summaries and responses expire by the planner's definition, with its margin and the retention."""
    day = 86_400.0
    times = {"created_at": 1_000.0, "root_created_at": 1_000.0, "expires_at": 1_000.0 + 2 * day}
    await create_conversation(store, "Boats", "One", **times)
    ((summary,), _) = await list_summaries(store)
    (row,) = await store.responses(summary.row)
    for now, expected in ((1_000.0 + 2 * day - 1800, True), (1_000.0 + day, False)):
        assert is_expired(row, now) is expected
        assert summary.relied_until is not None
        assert (now >= summary.relied_until) is expected
    short = await store.create(retention=100.0)
    node = await append_exchange(store, short, await store.node(short, short.head), "x", **times)
    await store.move_head(short, node, head=short.head)
    (row,) = await store.responses(short)
    assert (row.expires_at, is_expired(row, 1_096.0)) == (1_100.0, True)
    ((summary, _), _) = await list_summaries(store)
    assert summary.relied_until == 1_095.0


async def test_every_filter_and_order_works(store: Store) -> None:
    """Every combination of filter and order returns the expected conversations."""
    plain = await create_conversation(store, "Plain", "a", cost=0.1, input_tokens=1)
    branched = await create_conversation(store, "Branched", "b", "c", cost=0.2, input_tokens=5)
    root = await store.node(branched, branched.tree)
    await append_exchange(store, branched, root, "another")
    failed = await create_conversation(store, "Failed", "d", status="refused")
    archived = await create_conversation(store, "Archived", "e")
    await store.update(archived.id, archived=True)
    expected = {
        "active": {plain.id, branched.id, failed.id},
        "branched": {branched.id},
        "failed": {failed.id},
        "archived": {archived.id},
        "all": {plain.id, branched.id, failed.id, archived.id},
    }
    first = {"oldest": "Plain", "newest": "Failed"}
    for selection, order in itertools.product(LIST_FILTERS, LIST_ORDERS):
        rows, total = await list_summaries(store, show=selection, order=order)
        assert {each.row.id for each in rows} == expected[selection], order
        assert total == len(rows)
        if selection == "active":
            assert rows[0].row.title == first.get(order, "Branched")


async def test_tree_is_read_completely(store: Store) -> None:
    """A tree has the nodes, responses, questions, last blocks and conversations of a fork, too."""
    row = await create_conversation(store, "Tree", "One", "Two")
    fork = await store.fork(row, row.head)
    end = await append_exchange(store, fork, await store.node(row, row.head), "Three")
    tree = await read_tree(store, row)
    assert sorted(tree.questions.values()) == ["One", "Three", "Two"]
    assert len(tree.responses) == 3
    assert [node.kind for node in tree.nodes] == ["root", *["asked", "answered"] * 3]
    assert (await load_last_blocks(store, row))[end.id] == assistant("Three!")
    assert [each.id for each in await list_tree_conversations(store, fork)] == [row.id, fork.id]


async def test_blocks_are_found_by_their_own_id(store: Store) -> None:
    """The id of another object in a block is not that of the block."""
    block = user("One", id="blk_1")
    row = await store.create(blocks=[block, user("Two", metadata={"id": "blk_1"})])
    assert await load_attached(store, row, "blk_1") == [block]


async def test_conversations_are_found_by_part_of_title(store: Store) -> None:
    """The title search ignores case and treats wildcards of the database as plain characters."""
    row = await create_conversation(store, "100% of Boats")
    await create_conversation(store, "1000 of them")
    assert await find_by_title(store, "boats", 9) == [row.id]
    assert await find_by_title(store, "100%", 9) == [row.id]
    assert await find_by_title(store, "_", 9) == []
