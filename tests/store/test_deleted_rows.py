"""The row of a deleted conversation is rejected, even when a new conversation has the same id."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kedge import user
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import ConversationRow, Incident, Node, Store, Telemetry
from kedge.store.tree import list_tree_conversations, load_last_blocks, read_tree
from kedge.turns import Turn
from store.sample_conversations import SCOPE, count_rows, create_conversation

Call = Callable[[Store, ConversationRow, Node], Awaitable[object]]
TELEMETRY = Telemetry((Incident("healed", "gone", SCOPE, 5.0),))

CALLS: dict[str, Call] = {
    "append": lambda store, row, node: store.append(row, node, [user("secret")]),
    "append to the head": lambda store, row, node: store.append(
        row, node, [user("secret")], head=node.id
    ),
    "append with telemetry": lambda store, row, node: store.append(
        row, node, [user("secret")], accounts=TELEMETRY, asked_for="k"
    ),
    "children": lambda store, row, node: store.children(row, node.id),
    "claim": lambda store, row, _: store.claim(row, "k", request_hash=b"x", owner="a", lease=9.0),
    "conversation": lambda store, row, _: store.conversation(row),
    "common_ancestor": lambda store, row, node: store.common_ancestor(row, node.id, node.id),
    "delete": lambda store, row, _: store.delete(row),
    "differences": lambda store, row, node: store.differences(row, node.id, node.id),
    "exchanges": lambda store, row, _: store.exchanges(row),
    "export": lambda store, row, _: store.export(row),
    "find_node": lambda store, row, _: store.find_node(row),
    "fork": lambda store, row, node: store.fork(row, node.id),
    "list_tree_conversations": lambda store, row, _: list_tree_conversations(store, row),
    "last_blocks": lambda store, row, _: store.last_blocks(row, 1),
    "newest_response": lambda store, row, _: store.newest_response(row),
    "load": lambda store, row, _: store.load(row),
    "load a node": lambda store, row, node: store.load(row, node.id),
    "load_short": lambda store, row, _: store.load_short(row, 10),
    "load_sync": lambda store, row, node: asyncio.to_thread(store.load_sync, row, node.id),
    "load_turn": lambda store, row, node: store.load_turn(row, node.id, known=node, turn=Turn()),
    "load_last_blocks": lambda store, row, _: load_last_blocks(store, row),
    "move_head": lambda store, row, node: store.move_head(row, node, head=row.head),
    "unanswered_after": lambda store, row, node: store.unanswered_after(row, node.id),
    "newest_below": lambda store, row, node: store.newest_below(row, node.id),
    "node": lambda store, row, node: store.node(row, node.id),
    "node_of_response": lambda store, row, _: store.node_of_response(row, "resp_A_talk_0"),
    "note": lambda store, row, node: store.note(row, node.id, TELEMETRY),
    "path": lambda store, row, _: store.path(row),
    "pending": lambda store, row, _: store.pending(row),
    "read_tree": lambda store, row, _: read_tree(store, row),
    "renew": lambda store, row, _: store.renew(row, "k", owner="a", lease=9.0),
    "responses": lambda store, row, _: store.responses(row),
    "settle": lambda store, row, node: store.settle(row, "k", node.id),
    "tree": lambda store, row, _: store.tree(row),
    "update": lambda store, row, _: store.update(row, title="mine"),
    "update_with": lambda store, row, _: store.update_with(row, lambda _: {"title": "mine"}),
}


async def test_no_method_accepts_row_of_deleted_conversation(store: Store) -> None:
    """Each method raises `NotInStore`, and a new conversation with the same id is unchanged."""
    row, nodes = await create_conversation(store, 2, id="mine")
    await store.claim(row, "k", request_hash=b"x", owner="a", lease=9.0)
    await store.delete(row.id)
    other, others = await create_conversation(store, 2, id="mine", title="Another")
    assert other.number != row.number
    assert not {node.id for node in nodes} & {node.id for node in others}
    before = await store.export(other)
    accepted: list[str] = []
    for name, call in CALLS.items():
        try:
            await call(store, row, nodes[-1])
        except NotInStore:
            continue
        accepted.append(name)
    assert accepted == []
    assert await store.export(other) == before
    assert await store.verify() == []


def test_every_method_with_a_row_is_covered() -> None:
    """Every public method of `Store` that takes a conversation row has an entry in `CALLS`."""
    methods = {
        name
        for name, method in vars(Store).items()
        if "ConversationRow" in str(getattr(method, "__annotations__", {}).get("conversation"))
    }
    assert not {name for name in methods if not name.startswith("_")} - CALLS.keys()


async def test_claim_is_not_inherited(store: Store) -> None:
    """A key claimed in a deleted conversation can be claimed in the next one."""
    row, _ = await create_conversation(store, 1)
    await store.claim(row, "k", request_hash=b"x", owner="a", lease=1000.0)
    await store.delete(row.id)
    other, _ = await create_conversation(store, 1)
    assert (await store.claim(other, "k", request_hash=b"y", owner="b", lease=1000.0)).is_owner


async def test_deleted_node_of_original_is_rejected(store: Store) -> None:
    """A fork cannot continue from nodes or blocks that were deleted with the original conversation."""
    row, nodes = await create_conversation(store, 4)
    fork = await store.fork(row, nodes[1].id)
    await store.append(fork, nodes[2], [user("elsewhere")], kept=3, head=nodes[1].id)
    await store.note(fork, nodes[4].id, TELEMETRY)
    await store.claim(fork, "k", request_hash=b"x", owner="a", lease=9.0)
    await store.settle(fork, "k", nodes[4].id)
    await store.delete(row)
    for node in (nodes[2], nodes[4]):
        with pytest.raises(NotInStore):
            await store.append(fork, node, [user("too late")])
    with pytest.raises(NotInStore):
        await store.fork(fork, nodes[4].id)
    assert await count_rows(store, "incidents", "claims") == [0, 0]
    assert await store.verify() == []


async def test_duplicate_conversation_id_is_rejected(store: Store) -> None:
    """A second conversation with the same id raises `InvalidSetting`, not a database error."""
    await store.create(id="mine")
    with pytest.raises(InvalidSetting, match="already a conversation 'mine'"):
        await store.create(id="mine")
    assert len(await store.conversations()) == 1
