"""Render blocks as the input of a request, without repairing them.

Items that a server derived from the conversation (reasoning, compaction items) are sent again only if they are
provably valid: see ``kedge.planning.reusable_items``. Provider ids follow the same rule, and are sent only for
reasoning and the item directly after it, because a server looks up the reasoning of an item with an id.

The size of the body that is sent is known. That of the body with the complete conversation adds the sizes of the blocks
before the anchor, which are measured once for each block.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kedge.planning.digests import get_prefix_index, is_compaction
from kedge.planning.reusable_items import find_compaction_start, find_reusable_ids
from kedge.planning.state import get_state
from kedge.text.json_text import encode, encode_escaped
from kedge.turns import Block, OpaqueBlock, ReasoningBlock, SystemBlock, Turn, item_from_block
from kedge.turns.responses_items import Item

if TYPE_CHECKING:
    from kedge.planning.plan import RequestPlan

_DERIVED_TYPES = frozenset({ReasoningBlock, OpaqueBlock})
"""The types of blocks that may be omitted."""


def render(turn: Turn, *, scope: str = "") -> list[Item]:
    """Render a complete Turn as input items.

    Args:
        turn: The Turn; its leading system text is not included, see ``get_instructions``.
        scope: The provider, endpoint and account; decides which reasoning may be sent.

    Returns:
        The items.

    Raises:
        UnsupportedBlock: If the Responses API has no form for a block.
    """
    start, intact = _find_full_send(turn, scope)
    return build_input_from_blocks(turn[turn.lead + start :], intact)


def _find_full_send(turn: Turn, scope: str) -> tuple[int, frozenset[str]]:
    """Return where a full send of a Turn starts in its body, and the reasoning and compactions that it may have."""
    state, index = get_state(turn), get_prefix_index(turn)
    barrier = find_compaction_start(turn, index, scope, state)
    start = barrier or 0
    return start, find_reusable_ids(turn, index, start, scope, state, barrier)


def build_input_from_blocks(
    blocks: Sequence[Block], intact: Container[str] = frozenset()
) -> list[Item]:
    """Render blocks as input items.

    Args:
        blocks: The blocks.
        intact: The ids of the reasoning and compaction blocks that may be sent, as ``RequestPlan.intact``.

    Returns:
        The items.

    Raises:
        UnsupportedBlock: If the Responses API has no form for a block.
    """
    if _DERIVED_TYPES.isdisjoint(map(type, blocks)):  # without reasoning, all are sent without ids
        return [item_from_block(block) for block in blocks]
    items: list[Item] = []
    after_reasoning = False  # whether the item before is reasoning that is sent with this one
    for block, is_sent in zip(blocks, _sendable_flags(blocks, intact), strict=True):
        if is_sent:
            item = item_from_block(block)
            if block.item_id and (after_reasoning or isinstance(block, ReasoningBlock)):
                item["id"] = block.item_id
            items.append(item)
        after_reasoning = is_sent and isinstance(block, ReasoningBlock)
    return items


def find_omitted(
    blocks: Sequence[Block], intact: Container[str], *, unsealed: bool = False
) -> tuple[Block, ...]:
    """Return the blocks that are not sent; ``unsealed`` as in ``plan_request``."""
    if _DERIVED_TYPES.isdisjoint(map(type, blocks)):
        return ()
    flags = _sendable_flags(blocks, intact, unsealed=unsealed)
    return tuple(block for block, is_sent in zip(blocks, flags, strict=True) if not is_sent)


def get_instructions(turn: Turn) -> str | None:
    """Return the leading system text, which is sent with every request.

    Args:
        turn: The Turn.

    Returns:
        The text, or None if the Turn has no leading system block.
    """
    if not turn.lead:
        return None
    texts = [block.text for block in turn.leading if isinstance(block, SystemBlock)]
    return "\n\n".join(texts) or None


def _sendable_flags(
    blocks: Sequence[Block], intact: Container[str], *, unsealed: bool = False
) -> list[bool]:
    """Return whether each block is sent: all are, except derived ones that are not proved.

    Reasoning must also be directly before the item it belongs to, and that item must be sent.
    """
    flags: list[bool] = []
    following: Block | None = None
    for block in reversed(blocks):
        match block:
            case ReasoningBlock():
                is_bound = (
                    following is not None and flags[-1] and _is_bound_to(block, following, unsealed)
                )
                is_sent = is_bound and block.id in intact
            case OpaqueBlock():
                is_sent = block.id in intact if is_compaction(block) else block.type != "reasoning"
            case _:
                is_sent = True
        flags.append(is_sent)
        following = block
    return flags[::-1]


def _is_bound_to(block: ReasoningBlock, following: Block, unsealed: bool) -> bool:
    encrypted = bool(block.encrypted_content and block.item_id)
    if not (encrypted or unsealed) or not block.response_id:
        return False
    index = block.output_index
    adjacent = index is not None and following.output_index == index + 1
    return adjacent and following.response_id == block.response_id


def measure_full_body(plan: "RequestPlan", body_bytes: int) -> int:
    """Return the size of the body that sends everything, instead of the body of a plan, which has this size."""
    if plan.anchor is None or not isinstance(plan.source, Turn):
        return body_bytes
    saved = plan.full_bytes - plan.delta_bytes + _measure_reasoning(plan, plan.source)
    if not plan.delta:  # no comma after the last item
        saved -= 1
    if not plan.conversation_id:
        saved -= len(b',"previous_response_id":') + len(encode(plan.previous_response_id))
    return body_bytes + saved


def _measure_reasoning(plan: "RequestPlan", turn: Turn) -> int:
    """Return the bytes of the reasoning before the anchor that a full send has."""
    index = get_prefix_index(turn)
    stop = plan.start - turn.lead
    if not index.uncovered_positions(0, stop):
        return 0
    first, intact = _find_full_send(turn, plan.scope)
    total = 0
    for start, end in _iter_runs(index.uncovered_positions(first, stop)):
        blocks = turn[turn.lead + start : turn.lead + end + 1]
        items = build_input_from_blocks(blocks, intact)
        if len(items) > 1:
            plain = build_input_from_blocks(blocks[-1:], intact)
            total += len(encode_escaped(items)) - len(encode_escaped(plain))
    return total


def _iter_runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of consecutive positions."""
    for _, run in groupby(enumerate(positions), key=lambda each: each[1] - each[0]):
        numbers = [position for _, position in run]
        yield numbers[0], numbers[-1] + 1
