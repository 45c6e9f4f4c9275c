"""Create, fork and change conversations, together with the nodes that this adds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kedge.errors import HeadConflict
from kedge.store.append import insert_node, insert_root
from kedge.store.conversations import (
    insert_conversation,
    lock_names,
    lock_tree_shared,
    require_continuable,
    resolve,
    select_conversation,
    select_head,
    select_titled,
    set_tags,
    swap_head,
    validate_members,
    write_members,
)
from kedge.store.database.transactions import Tx
from kedge.store.node_state import encode_first_state, encode_without_mode
from kedge.store.nodes import get_node
from kedge.store.records import ConversationRow, Node, Telemetry, new_row, validate_title
from kedge.store.responses import insert_telemetry
from kedge.store.stored_blocks import to_stored_block
from kedge.turns import Block, Turn, new_id
from kedge.turns.frozen_json import EMPTY


def create_conversation(
    tx: Tx, new: ConversationRow, now: float, root_created_at: float | None = None
) -> ConversationRow:
    """Create the conversation of a new row on a new tree, which begins with an empty root node."""
    number = insert_conversation(tx, new, now)
    root = insert_root(tx, number, now if root_created_at is None else root_created_at)
    tx.run("UPDATE conversations SET tree = ?, head = ? WHERE number = ?", (root, root, number))
    set_tags(tx, number, new.tags)
    return select_conversation(tx, new.id)


def insert_row(
    tx: Tx, new: ConversationRow, blocks: Turn | Sequence[Block] = ()
) -> ConversationRow:
    """Create the conversation of a new row, with its first node and the blocks that it begins with."""
    turn = blocks if isinstance(blocks, Turn) else Turn(blocks)  # which checks them
    stored_blocks = [to_stored_block(block) for block in turn]
    state = encode_first_state(turn, new.mode)
    now = tx.clock()
    row = create_conversation(tx, new, now)
    if not (stored_blocks or state):
        return row
    root = get_node(tx, row)
    insert_node(
        tx,
        root,
        stored_blocks,
        conversation=row,
        kind="added",
        now=now,
        memory=state,
        head=root.id,
    )
    return select_conversation(tx, row.id)


def create_titled(
    tx: Tx, title: str, *, data: Mapping[str, Any] = EMPTY
) -> tuple[ConversationRow, bool]:
    """Create a conversation with a title, unless there is one: several callers all get the same."""
    new = new_row(title, data=data)
    lock_names(tx)
    row = select_titled(tx, title)
    if row:
        return row, False
    return create_conversation(tx, new, tx.clock()), True


def create_all(tx: Tx, chats: Sequence[Sequence[Block]]) -> list[ConversationRow]:
    """Create a conversation for each list of blocks, all or none of them."""
    return [insert_row(tx, new_row(), blocks) for blocks in chats]


def update_with(
    tx: Tx,
    name: str | ConversationRow,
    compute: Callable[[ConversationRow], Mapping[str, Any]],
) -> ConversationRow:
    """Change members of a conversation that depend on their present values, in one transaction."""
    unlocked = resolve(tx, name)
    lock_tree_shared(tx, unlocked.tree)
    row = resolve(tx, unlocked, tx.dialect.for_update)
    changes = validate_members(compute(row))
    write_members(tx, row.number, changes)
    if "mode" in changes:
        _drop_own_mode(tx, row)
    return select_conversation(tx, row.id)


def _drop_own_mode(tx: Tx, row: ConversationRow) -> None:
    """Add a node without a mode of its own if the head has one, which would precede the mode of the conversation."""
    head = get_node(tx, row)
    state = encode_without_mode(head.memory)
    if state != head.memory:
        insert_node(
            tx,
            head,
            (),
            conversation=row,
            kind="edited",
            now=tx.clock(),
            memory=state,
            head=head.id,
        )


def fork_conversation(
    tx: Tx, conversation: ConversationRow, at: int, title: str = ""
) -> ConversationRow:
    """Create a conversation that continues from a node of another, and shares the blocks up to it."""
    require_continuable(tx, conversation)
    get_node(tx, conversation, at)
    new = replace(conversation, id=new_id("conv"), title=validate_title(title))
    number = insert_conversation(tx, new, tx.clock())
    tx.run(
        "UPDATE conversations SET tree = ?, head = ?, forked_from = ?, forked_at = ? WHERE number = ?",
        (conversation.tree, at, conversation.id, at, number),
    )
    set_tags(tx, number, conversation.tags)
    return select_conversation(tx, new.id)


def move_head(tx: Tx, conversation: ConversationRow, node: Node, *, head: int) -> None:
    """Move the head to a node."""
    require_continuable(tx, conversation)
    get_node(tx, conversation, node.id)
    if not swap_head(tx, conversation.number, head, node.id, tx.clock()):
        raise HeadConflict(conversation.id, node.id, select_head(tx, conversation.number))


def note_telemetry(tx: Tx, conversation: ConversationRow, node: int, telemetry: Telemetry) -> None:
    """Record incidents, tool runs and exchanges of a node."""
    get_node(tx, conversation, node)
    insert_telemetry(tx, telemetry, conversation.number, node)
