"""Rendering: from blocks to the input of a request. It never repairs, and it never leaks.

Two things a server made are derived from everything before them: reasoning, and compaction items. They
go out again only while the context they were made from is proved unchanged, so nothing that
was edited away or redacted can return through them. The provider's ids follow the same rule, and go
out only for reasoning and the one item directly behind it: an item with an id makes a server look for
the reasoning that belongs to it.
"""

from collections.abc import Container, Sequence

from kedge.planning.anchors import AnchorRecord, proves
from kedge.planning.ledger import Ledger, is_compaction, ledger_of
from kedge.planning.state import ConversationState, get_state
from kedge.turns import (
    OUTPUT_INDEX,
    Block,
    ReasoningBlock,
    SystemBlock,
    Turn,
    item_from_block,
)
from kedge.turns.wire import Item

ENGINE = "engine"


def render(turn: Turn, *, scope: str = "") -> list[Item]:
    """The whole Turn as input items (its leading system text apart: see ``instructions_of``)."""
    blocks = turn.body[barrier_of(turn, scope) or 0 :]
    return build_input_from_blocks(blocks, proved(turn, blocks, scope))


def build_input_from_blocks(
    blocks: Sequence[Block], intact: Container[str] = frozenset()
) -> list[Item]:
    """Input items for these blocks.

    ``intact`` names what is proved unchanged: the responses whose reasoning may go out, and the
    ids of the compaction blocks that may (see ``proved``).
    """
    items: list[Item] = []
    sealed = False  # whether the item before is reasoning that belongs to the next one
    for index, block in enumerate(blocks):
        if isinstance(block, ReasoningBlock):
            sealed = _may_go_out(blocks, index, intact)
            if sealed:
                items.append({**item_from_block(block), "id": block.item_id})
            continue
        if is_compaction(block) and block.id not in intact and not _is_deliberate(block):
            continue  # what it stood for was edited since, and is sent itself
        item = item_from_block(block)
        if sealed and block.item_id:
            item["id"] = block.item_id
        items.append(item)
        sealed = False
    return items


def instructions_of(turn: Turn) -> str | None:
    """The leading system text, which is sent afresh with every request."""
    texts = [block.text for block in turn.leading if isinstance(block, SystemBlock)]
    return "\n\n".join(texts) or None


def barrier_of(turn: Turn, scope: str) -> int | None:
    """Where in the Turn's body rendering starts: at the newest compaction that still holds."""
    ledger = ledger_of(turn)
    if not ledger.barriers:
        return None
    length, state = len(turn.blocks) - turn.lead, get_state(turn)
    for position in reversed(ledger.barriers):
        if position < length and _holds(turn, position, ledger, state, scope):
            return position
    return None


def proved(turn: Turn, blocks: Sequence[Block], scope: str) -> frozenset[str]:
    """What of ``blocks`` was made from a context that is proved unchanged.

    These are the responses whose reasoning is among the blocks, and the compaction block with which
    they begin.
    """
    found: set[str] = set()
    if blocks and is_compaction(blocks[0]) and barrier_of(turn, scope) is not None:
        found.add(blocks[0].id)
    wanted = {block.response_id for block in blocks if isinstance(block, ReasoningBlock)}
    if wanted:
        ledger = ledger_of(turn)
        covered = ledger.count(len(turn.blocks) - turn.lead)
        found.update(
            record.response_id
            for record in get_state(turn).anchors
            if record.response_id in wanted and _speaks_for(record, ledger, covered, scope)
        )
    return frozenset(found)


def _holds(turn: Turn, position: int, ledger: Ledger, state: ConversationState, scope: str) -> bool:
    """Whether a compaction item still stands for what is before it.

    One that somebody put there on purpose does. One that an engine received does while a record
    proves a prefix that reaches to it.
    """
    block = turn.blocks[turn.lead + position]
    if _is_deliberate(block):
        return True
    covered = ledger.count(len(turn.blocks) - turn.lead)
    reach = ledger.count(position + 1)
    return any(
        record.block_count >= reach and _speaks_for(record, ledger, covered, scope)
        for record in reversed(state.anchors)
    )


def _is_deliberate(block: Block) -> bool:
    """Whether somebody other than an engine put this block into the Turn."""
    return block.origin != ENGINE and not block.response_id


def _speaks_for(record: AnchorRecord, ledger: Ledger, covered: int, scope: str) -> bool:
    same_provider = base_scope(record.scope) == base_scope(scope)
    return (
        same_provider and record.status in ("completed", "lost") and proves(record, ledger, covered)
    )


def conversation_scope(scope: str, conversation_id: str) -> str:
    """The scope of what happens inside one server-side conversation object."""
    return f"{scope} {conversation_id}"


def base_scope(scope: str) -> str:
    """The provider's scope, without the conversation object."""
    return scope.partition(" ")[0]


def _may_go_out(blocks: Sequence[Block], index: int, intact: Container[str]) -> bool:
    """Whether this reasoning is intact, sealed, and directly before the item it belongs to."""
    block = blocks[index]
    if not isinstance(block, ReasoningBlock) or index + 1 == len(blocks):
        return False
    if block.response_id not in intact or not block.encrypted_content or not block.item_id:
        return False
    following = blocks[index + 1]
    if following.response_id != block.response_id or not _follows(block, following):
        return False
    return not isinstance(following, ReasoningBlock) or _may_go_out(blocks, index + 1, intact)


def _follows(block: Block, following: Block) -> bool:
    here, there = block.metadata.get(OUTPUT_INDEX), following.metadata.get(OUTPUT_INDEX)
    return isinstance(here, int) and there == here + 1
