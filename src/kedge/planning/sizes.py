"""The encoded size of a block in the input of a request, and of the request that sends everything.

The size of the body that is sent is known. That of the body with the complete conversation is the sum of the sizes of
the blocks before the anchor, which are measured once for each block.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kedge.errors import UnsupportedBlock
from kedge.text.json_text import encode, encode_escaped
from kedge.turns import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    UserBlock,
    item_from_block,
)

if TYPE_CHECKING:
    from kedge.planning.plan import RequestPlan

_SINGLE_TEXT = frozenset({UserBlock, AssistantBlock, ToolResultBlock})


def measure_item(block: Block, form: bytes) -> int:
    """Return the bytes of a block in the input of a request, with a comma; 0 if it has no form there.

    Args:
        block: The block.
        form: Its canonical form: the item of a usual block is longer by a constant.
    """
    shape = _find_shape(block)
    if shape is None:
        return _measure_slowly(block)
    if shape not in _overheads:
        _overheads[shape] = _measure_slowly(block) - len(form)
    return len(form) + _overheads[shape]


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


_overheads: dict[tuple[type[Block], bool], int] = {}


def _find_shape(block: Block) -> tuple[type[Block], bool] | None:
    """Return the type of a block whose item differs from its canonical form by constant text; None for others."""
    kind = type(block)
    if block.extra:
        return None
    if kind in _SINGLE_TEXT:
        parts: Sequence[object] = getattr(block, "parts", ())
        is_plain = len(parts) == 1 and type(part := parts[0]) is TextPart and not part.extra
        return (kind, getattr(block, "custom", False)) if is_plain else None
    return (kind, block.custom) if isinstance(block, ToolCallBlock) else None


def _measure_slowly(block: Block) -> int:
    if isinstance(block, OpaqueBlock) and block.type == "reasoning":  # never sent
        return 0
    try:
        return len(encode_escaped(item_from_block(block))) + 1
    except (UnsupportedBlock, ValueError, TypeError):
        return 0


def _measure_reasoning(plan: "RequestPlan", turn: Turn) -> int:
    """Return the bytes of the reasoning before the anchor that a full send has."""
    from kedge.planning.digests import get_prefix_index  # imports this module
    from kedge.planning.render import build_input_from_blocks
    from kedge.planning.reusable_items import find_compaction_start, find_reusable_ids
    from kedge.planning.state import get_state

    index = get_prefix_index(turn)
    stop = plan.start - turn.lead
    if not index.uncovered_positions(0, stop):
        return 0
    state = get_state(turn)
    barrier = find_compaction_start(turn, index, plan.scope, state)
    first = barrier or 0
    intact = find_reusable_ids(turn, index, first, plan.scope, state, barrier)
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
