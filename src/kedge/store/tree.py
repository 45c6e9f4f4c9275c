"""The tree of a conversation with its responses: what all views of a tree read."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from kedge.events.request_record import RequestRecord
from kedge.store import conversations
from kedge.store.database.transactions import Tx
from kedge.store.node_paths import describe_edits
from kedge.store.nodes import select_last_bodies, select_question_previews, select_tree
from kedge.store.records import ANSWERED_STATUSES, ConversationRow, Node
from kedge.store.responses import select_responses
from kedge.store.store import Store
from kedge.store.stored_blocks import decode_blocks, preview_body
from kedge.turns import AssistantBlock, Block, UserBlock


class HasParent(Protocol):
    """A node of a tree, which refers to its parent by number."""

    @property
    def parent(self) -> int:
        """The number of the parent; 0 without one."""
        ...


T = TypeVar("T", bound=HasParent)


class StoredTree(msgspec.Struct, frozen=True):
    """A tree: its nodes, its responses by node, the text of each question, and what each edit changed."""

    row: ConversationRow
    nodes: tuple[Node, ...]
    responses: Mapping[int, RequestRecord] = {}
    questions: Mapping[int, str] = {}
    edits: Mapping[int, str] = {}


async def read_tree(store: Store, conversation: ConversationRow) -> StoredTree:
    """Return the complete tree of a conversation, including forks."""
    return await store.read_in(conversation, _select_tree)


def _select_tree(tx: Tx, conversation: ConversationRow) -> StoredTree:
    responses = select_responses(tx, "WHERE n.tree = ?", (conversation.tree,))
    bodies = select_question_previews(tx, conversation.tree)
    previews = {
        node: preview_body(body, UserBlock, AssistantBlock) for node, body in bodies.items()
    }
    nodes = select_tree(tx, conversation.tree)
    return StoredTree(
        conversation,
        tuple(nodes),
        responses={row.node: row for row in responses},
        questions={node: preview or "" for node, preview in previews.items()},
        edits=describe_edits(tx, conversation.tree, {node.id: node for node in nodes}),
    )


def path_to(tree: StoredTree, node: int) -> list[Node]:
    """Return the nodes from the root to this one."""
    return walk_up({each.id: each for each in tree.nodes}, node)


def walk_up(nodes: Mapping[int, T], node: int) -> list[T]:
    """Return the nodes from the root to this one; a cycle ends the path."""
    path: dict[int, T] = {}
    while node in nodes and node not in path:
        path[node] = nodes[node]
        node = nodes[node].parent
    return [*path.values()][::-1]


BlockRange = tuple[Node, int, int]
"""The blocks that a node added: node, start index, end index."""


def iter_block_ranges(path: Sequence[Node]) -> Iterator[BlockRange]:
    """Yield the block range that each node of a path added."""
    stops: list[int] = []
    limit = max((node.length for node in path), default=0)
    for node in reversed(path):
        stops.append(min(node.length, limit))
        limit = min(limit, node.kept)
    for node, stop in zip(path, reversed(stops), strict=True):
        yield node, min(node.kept, stop), stop


def name_models(responses: Mapping[int, RequestRecord]) -> dict[int, str]:
    """Return the name of the model of each response, by node, if several models answered; else an empty dict.

    The name has the provider in front where several providers have a model of this name.
    """
    answered = {
        (row.provider, row.model)
        for row in responses.values()
        if row.model and row.status in ANSWERED_STATUSES
    }
    if len(answered) < 2:
        return {}
    providers = Counter(model for _, model in answered)
    names: dict[int, str] = {}
    for node, row in responses.items():
        if providers[row.model] > 1:
            names[node] = f"{row.provider}:{row.model}"
        elif row.model:
            names[node] = row.model
    return names


def name_answer_models(
    tree: StoredTree, path: Sequence[Node], blocks: Sequence[Block], offset: int = 0
) -> dict[str, str]:
    """Return the name of the model that wrote each answer of a path, by block id; see `name_models`.

    Args:
        tree: The tree.
        path: The nodes from the root.
        blocks: The last blocks of the path.
        offset: The number of blocks before these.
    """
    models = name_models(tree.responses)
    if not models:
        return {}
    nodes = {
        row.provider_response_id: node
        for node, row in tree.responses.items()
        if row.provider_response_id
    }
    names: dict[str, str] = {}
    for node, start, stop in iter_block_ranges(path):
        for block in blocks[max(start - offset, 0) : max(stop - offset, 0)]:
            if not isinstance(block, AssistantBlock):
                continue
            answered_at = node.id
            if node.id not in tree.responses:
                # Where history was rewritten, a node has the blocks of earlier responses.
                answered_at = nodes.get(block.response_id, 0)
            if answered_at in models:
                names[block.id] = models[answered_at]
    return names


async def load_last_blocks(store: Store, conversation: ConversationRow) -> Mapping[int, Block]:
    """Return the last block that each node of a tree added; nodes that added none are omitted."""
    return await store.read_in(conversation, _select_last_blocks)


def _select_last_blocks(tx: Tx, conversation: ConversationRow) -> Mapping[int, Block]:
    bodies = select_last_bodies(tx, conversation.tree)
    return dict(zip(bodies, decode_blocks(list(bodies.values())), strict=True))


async def list_tree_conversations(
    store: Store, conversation: ConversationRow
) -> list[ConversationRow]:
    """Return the conversations on the tree, in the order of their creation: this one, its forks and its origin."""
    return await store.read_in(conversation, conversations.select_tree_conversations)
