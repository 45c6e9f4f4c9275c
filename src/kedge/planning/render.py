"""Rendering: from blocks to the input of a request. It never repairs, and it never leaks.

What a server derived from the conversation (reasoning, compaction items) goes out again only where it
is proved to stand: see ``kedge.planning.reusable_items``. The provider's ids follow the same rule, and go out
only for reasoning and the one item directly behind it: an item with an id makes a server look for the
reasoning that belongs to it.
"""

from collections.abc import Container, Sequence

from kedge.planning.digests import is_compaction
from kedge.planning.reusable_items import find_compaction_start, find_reusable_ids
from kedge.planning.state import get_state
from kedge.turns import (
    OUTPUT_INDEX,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    SystemBlock,
    Turn,
    item_from_block,
)
from kedge.turns.responses_items import Item


def render(turn: Turn, *, scope: str = "") -> list[Item]:
    """The whole Turn as input items (its leading system text apart: see ``instructions_of``)."""
    state = get_state(turn)
    barrier = find_compaction_start(turn, scope, state)
    start = barrier or 0
    intact = find_reusable_ids(turn, start, scope, state, barrier)
    return build_input_from_blocks(turn.blocks[turn.lead + start :], intact)


def build_input_from_blocks(
    blocks: Sequence[Block], intact: Container[str] = frozenset()
) -> list[Item]:
    """Input items for these blocks.

    ``intact`` holds the ids of the reasoning and compaction blocks that may go out; a plan knows them.
    """
    items: list[Item] = []
    sealed: Block | None = None  # the reasoning before, if it belongs to this block and goes out
    for block, goes_out in zip(blocks, _sendable_flags(blocks, intact), strict=True):
        if goes_out:
            item = item_from_block(block)
            if block.item_id and (sealed or isinstance(block, ReasoningBlock)):
                item["id"] = block.item_id
            items.append(item)
        sealed = block if goes_out and isinstance(block, ReasoningBlock) else None
    return items


def find_omitted(
    blocks: Sequence[Block], intact: Container[str], *, unsealed: bool = False
) -> tuple[Block, ...]:
    """The blocks for which nothing is sent; ``unsealed`` as in ``plan_request``."""
    going = _sendable_flags(blocks, intact, unsealed=unsealed)
    return tuple(block for block, goes in zip(blocks, going, strict=True) if not goes)


def get_instructions(turn: Turn) -> str | None:
    """The leading system text, which is sent afresh with every request."""
    texts = [block.text for block in turn.leading if isinstance(block, SystemBlock)]
    return "\n\n".join(texts) or None


def _sendable_flags(
    blocks: Sequence[Block], intact: Container[str], *, unsealed: bool = False
) -> list[bool]:
    """Whether each block goes out: all do, but for what is derived and does not stand.

    Reasoning must also be directly before the item it belongs to, and that one must go out.
    """
    going: list[bool] = []
    following: Block | None = None
    for block in reversed(blocks):
        match block:
            case ReasoningBlock():
                leads = (
                    following is not None and going[-1] and _is_bound_to(block, following, unsealed)
                )
                goes = leads and block.id in intact
            case OpaqueBlock():
                goes = block.id in intact if is_compaction(block) else block.type != "reasoning"
            case _:
                goes = True
        going.append(goes)
        following = block
    return going[::-1]


def _is_bound_to(block: ReasoningBlock, following: Block, unsealed: bool) -> bool:
    sealed = bool(block.encrypted_content and block.item_id)
    if not (sealed or unsealed) or not block.response_id:
        return False
    here, there = block.metadata.get(OUTPUT_INDEX), following.metadata.get(OUTPUT_INDEX)
    adjacent = isinstance(here, int) and there == here + 1
    return adjacent and following.response_id == block.response_id
