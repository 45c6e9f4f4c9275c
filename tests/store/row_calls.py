"""A call of each method of a store that takes the row of a conversation."""

import asyncio
from collections.abc import Awaitable, Callable

from kedge import user
from kedge.store import ConversationRow, Incident, Node, Store, StoredExchange, Telemetry
from kedge.store.nodes import list_nodes
from kedge.store.tree import list_tree_conversations, load_last_blocks, read_tree
from kedge.turns import Turn
from store.sample_conversations import SCOPE

TELEMETRY = Telemetry(
    (Incident("healed", "gone", SCOPE, 5.0),),
    exchanges=(StoredExchange(b"secret request", b"secret reply", 200, 1.0),),
)
BLOCKS = [user("secret")]

ROW_CALLS: dict[str, Callable[[Store, ConversationRow, Node], Awaitable[object]]] = {
    "append": lambda store, row, node: store.append(row, node, BLOCKS),
    "append to the head": lambda store, row, node: store.append(row, node, BLOCKS, head=node.id),
    "append with telemetry": lambda store, row, node: store.append(
        row, node, BLOCKS, telemetry=TELEMETRY, key="k"
    ),
    "children": lambda store, row, node: store.children(row, node.id),
    "find_claim": lambda store, row, _: store.find_claim(row, "k"),
    "claim": lambda store, row, _: store.claim(row, "k", request_hash=b"x", owner="b", lease=9.0),
    "common_ancestor": lambda store, row, node: store.common_ancestor(row, node.id, node.id),
    "conversation": lambda store, row, _: store.conversation(row),
    "delete": lambda store, row, _: store.delete(row),
    "differences": lambda store, row, node: store.differences(row, node.id, node.id),
    "exchanges": lambda store, row, _: store.exchanges(row),
    "export": lambda store, row, _: store.export(row),
    "find_node": lambda store, row, _: store.find_node(row, "resp_A_talk_1"),
    "fork": lambda store, row, node: store.fork(row, node.id),
    "last_blocks": lambda store, row, _: store.last_blocks(row, 1),
    "list_tree_conversations": lambda store, row, _: list_tree_conversations(store, row),
    "load": lambda store, row, _: store.load(row),
    "load a node": lambda store, row, node: store.load(row, node.id),
    "load_last_blocks": lambda store, row, _: load_last_blocks(store, row),
    "load_short": lambda store, row, _: store.load_short(row, 10),
    "load_sync": lambda store, row, node: asyncio.to_thread(store.load_sync, row, node.id),
    "load_turn": lambda store, row, node: store.load_turn(row, node.id, known=node, turn=Turn()),
    "move_head": lambda store, row, node: store.move_head(row, node, head=row.head),
    "newest_below": lambda store, row, node: store.newest_below(row, node.id),
    "newest_response": lambda store, row, _: store.newest_response(row),
    "node": lambda store, row, node: store.node(row, node.id),
    "node_of_response": lambda store, row, _: store.node_of_response(row, "resp_A_talk_0"),
    "note": lambda store, row, node: store.note(row, node.id, TELEMETRY),
    "path": lambda store, row, _: store.path(row),
    "pending": lambda store, row, _: store.pending(row),
    "read_in": lambda store, row, _: store.read_in(row, list_nodes),
    "read_tree": lambda store, row, _: read_tree(store, row),
    "renew": lambda store, row, _: store.renew(row, "k", owner="a", lease=0),
    "require_continuable": lambda store, row, _: store.require_continuable(row),
    "responses": lambda store, row, _: store.responses(row),
    "schedule_delete": lambda store, row, _: store.schedule_delete(row, 1.0),
    "settle": lambda store, row, node: store.settle(row, "k", node.id),
    "tree": lambda store, row, _: store.tree(row),
    "unanswered_after": lambda store, row, node: store.unanswered_after(row, node.id),
    "update": lambda store, row, _: store.update(row, title="stolen"),
    "update_with": lambda store, row, _: store.update_with(row, lambda _: {"title": "stolen"}),
    "write_in": lambda store, row, _: store.write_in(row, list_nodes),
}
"""``test_namespaces.py`` checks that no method is missing."""
