"""Property tests that compare a store with a model of dictionaries and lists."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kedge import run_sync, user
from kedge.errors import HeadConflict
from kedge.store import ConversationRow, Node, Store, open_store
from strategies import scale_examples

numbers = st.integers(0, 50)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), numbers, st.integers(0, 3), numbers, st.booleans()),
        st.tuples(st.just("fork"), numbers, numbers),
        st.tuples(st.just("delete"), numbers),
        st.tuples(st.just("move"), numbers, numbers),
        st.tuples(st.just("again"), numbers, numbers, numbers),
    ),
    max_size=25,
)


@dataclass
class StoreModel:
    """The expected content of a store: the texts of each node and the head of each conversation."""

    paths: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    nodes: dict[int, Node] = field(default_factory=dict[int, Node])
    rows: dict[str, ConversationRow] = field(default_factory=dict[str, ConversationRow])
    heads: dict[str, int] = field(default_factory=dict[str, int])
    created_nodes: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    text_count: int = 0


async def run_moves(moves: list[Any]) -> None:
    """Apply the moves to the store and the model, and compare them."""
    async with open_store("sqlite://:memory:") as store:
        model = StoreModel()
        await add_conversation(store, model)
        for name, *values in moves:
            if not model.rows:
                await add_conversation(store, model)
            await MOVES[name](store, model, *values)
        await compare(store, model)


async def add_conversation(store: Store, model: StoreModel) -> None:
    row = await store.create()
    root = (await store.load(row)).node
    model.rows[row.id], model.heads[row.id] = row, root.id
    model.nodes[root.id], model.paths[root.id] = root, []
    model.created_nodes[row.id] = {root.id}


def pick_row(model: StoreModel, number: int) -> ConversationRow:
    return list(model.rows.values())[number % len(model.rows)]


def pick_node(model: StoreModel, row: ConversationRow, number: int) -> Node:
    nodes = [node for node in model.nodes.values() if node.tree == row.tree]
    return nodes[number % len(nodes)]


async def append(
    store: Store, model: StoreModel, row_index: int, count: int, at: int, moves: bool
) -> None:
    """Append blocks to a node after a prefix of its path, and optionally move the head."""
    row = pick_row(model, row_index)
    parent = pick_node(model, row, at)
    retained = max(0, parent.length - at % 3)
    model.text_count += count
    texts = [f"said {model.text_count - index}" for index in range(count)]
    blocks = [user(text, id=f"blk {text}") for text in texts]
    head = parent.id if moves else None
    try:
        node = await store.append(row, parent, blocks, kept=retained, head=head)
        moved = moves
    except HeadConflict as conflict:
        node, moved = await store.node(row, conflict.node), False
    assert moved == (moves and model.heads[row.id] == parent.id)
    if moved:
        model.heads[row.id] = node.id
    record_node(model, row, node, model.paths[parent.id][:retained] + texts)


async def append_copy(store: Store, model: StoreModel, row_index: int, at: int, other: int) -> None:
    """Append the blocks of another conversation, which are stored once."""
    row = pick_row(model, row_index)
    parent = pick_node(model, row, at)
    source = pick_row(model, other)
    texts = model.paths[model.heads[source.id]]
    blocks = [user(text, id=f"blk {text}") for text in texts]
    node = await store.append(row, parent, blocks, kept=0)
    record_node(model, row, node, list(texts))


def record_node(model: StoreModel, row: ConversationRow, node: Node, texts: list[str]) -> None:
    model.nodes[node.id], model.paths[node.id] = node, texts
    model.created_nodes[row.id].add(node.id)


async def fork(store: Store, model: StoreModel, row_index: int, at: int) -> None:
    row = pick_row(model, row_index)
    node = pick_node(model, row, at)
    forked = await store.fork(row, node.id)
    model.rows[forked.id], model.heads[forked.id] = forked, node.id
    model.created_nodes[forked.id] = set()


async def move(store: Store, model: StoreModel, row_index: int, at: int) -> None:
    row = pick_row(model, row_index)
    node = pick_node(model, row, at)
    await store.move_head(row, node, head=model.heads[row.id])
    model.heads[row.id] = node.id


async def delete(store: Store, model: StoreModel, row_index: int) -> None:
    """Delete a conversation, and check that nodes used by others remain."""
    row = pick_row(model, row_index)
    await store.delete(row.id)
    del model.rows[row.id], model.heads[row.id]
    deleted = model.created_nodes.pop(row.id)
    left = {node.id: node for node in await _nodes(store)}
    created = {name for names in model.created_nodes.values() for name in names}
    heads = set(model.heads.values())
    assert (created | heads) <= left.keys()
    for name in deleted:
        if name in left:  # another conversation owns it now, possibly shortened
            model.nodes[name] = left[name]
            model.paths[name] = model.paths[name][: left[name].length]
            owner = next(
                each for each in model.rows.values() if each.number == left[name].conversation
            )
            model.created_nodes[owner.id].add(name)
        else:
            del model.nodes[name], model.paths[name]


async def _nodes(store: Store) -> list[Node]:
    trees = {row.tree: row for row in await store.conversations(archived=None)}
    return [node for row in trees.values() for node in await store.tree(row)]


MOVES: dict[str, Any] = {
    "append": append,
    "again": append_copy,
    "fork": fork,
    "move": move,
    "delete": delete,
}


async def compare(store: Store, model: StoreModel) -> None:
    """Check that heads, paths and blocks of the store equal those of the model."""
    rows = {row.id: row for row in await store.conversations(archived=None)}
    assert {name: row.head for name, row in rows.items()} == model.heads
    assert {node.id for node in await _nodes(store)} == model.nodes.keys()
    for node in model.nodes.values():
        row = next(row for row in rows.values() if row.tree == node.tree)
        blocks = (await store.load(row, node.id)).blocks
        assert [block.text for block in blocks] == model.paths[node.id]  # type: ignore[attr-defined]
    texts = {text for path in model.paths.values() for text in path}
    ((count,),) = await store.database.read(lambda tx: tx.rows("SELECT COUNT(*) FROM blocks"))
    assert count == len(texts)
    assert await store.verify() == []


SHORTENED = [
    *(("append", 0, 0, 0, False), ("fork", 0, 0), ("append", 0, 3, 0, False)),
    *(
        ("append", 0, 0, 0, False),
        ("append", 0, 0, 2, False),
        ("append", 1, 0, 34, True),
        ("delete", 0),
    ),
]
"""Moves that lead to a node of which fewer blocks are used than it has in common with its parent."""


@given(steps)
@example(SHORTENED)
@settings(max_examples=scale_examples(20))
def test_store_matches_model(moves: list[Any]) -> None:
    """Appends, edits, forks, moved heads, shared blocks and deletions in any order match the model."""
    run_sync(run_moves(moves))
