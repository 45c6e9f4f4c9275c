"""Render blocks as the input of a request, without repairing them.

Items that a server derived from the conversation are reasoning and compactions. They are sent again only if they are
provably valid. They are derived from everything before them, and their content is encrypted, so Kedge cannot read it.
If a secret was redacted from the conversation, an earlier reasoning or compaction item may still contain the secret;
sending the item would undo the redaction silently. So an item is sent only while everything it was derived from is
provably unchanged: the record of its response matches the Turn's prefix *and* the response's output, at the same
position, and the derived items have the digests that were received.

The id that the provider gave to an item is sent only for reasoning and for the item directly after it, because a server
looks up the reasoning of an item with an id.

A compaction item replaces all blocks before it. After one, two questions must be distinguished: what the
server remembers (its memory starts at the compaction in its newest matching record), and what the user
wants to send (a compaction that was inserted into the Turn deliberately is also a start). The start is stored in
the records and not found by searching for compaction items, because neither tags nor an equal rebuild of
the Turn may change it: a compaction in a response that was edited since is not part of any memory, although its
item is still in the Turn.

The size of the body that is sent is known. The size of a body with the complete conversation is derived from it, by
adding the sizes of the blocks before the anchor, which are measured once for each block.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from kedge._internal.argument_types import checked
from kedge._internal.json_text import encode, encode_escaped
from kedge.planning.anchors import (
    AnchorRecord,
    ConversationState,
    base_scope,
    get_state,
    matches_prefix,
)
from kedge.planning.digests import (
    DERIVED_TYPES,
    PrefixIndex,
    derived_digests,
    digest_derived,
    get_prefix_index,
    is_compaction,
)
from kedge.turns import Block, OpaqueBlock, ReasoningBlock, Turn, item_from_block
from kedge.turns.blocks import ENGINE
from kedge.turns.responses_items import Item

if TYPE_CHECKING:
    from kedge.planning.plan import RequestPlan

COMPACTOR_ORIGIN = "ServerCompactor"
"""The ``origin`` of a server's compaction that has replaced everything before it in the Turn."""
_get_text = attrgetter("text")


def find_compaction_start(
    turn: Turn, index: PrefixIndex, scope: str, state: ConversationState
) -> int | None:
    """Return the position in the body at which the conversation starts: the newest valid compaction.

    The longest matching record decides whether a compaction item is part of the server's memory. An item that
    it does not cover is valid if it was inserted into the Turn deliberately.
    """
    if not index.barriers:
        return None
    longest_first = reversed(state.anchors)
    record = next((anchor for anchor in longest_first if _is_trusted(anchor, index, scope)), None)
    for position in reversed(index.barriers):
        count = index.count(position)
        if record and count < record.block_count:
            if count == record.barrier:
                return position
        elif _is_inserted(turn[turn.lead + position], state):
            return position
    return None


def find_reusable_ids(
    turn: Turn,
    index: PrefixIndex,
    start: int,
    scope: str,
    state: ConversationState,
    barrier: int | None,
) -> frozenset[str]:
    """Return the ids of the reasoning and compaction blocks from ``start`` on that may be sent."""
    if barrier is None and not index.skipped:
        return frozenset()
    reusable: set[str] = set()
    if barrier is not None and barrier == start:
        reusable.add(turn[turn.lead + start].id)
    reasoning = index.uncovered_positions(start, index.length)
    if not reasoning:
        return frozenset(reusable)

    outputs = list(_iter_outputs(turn, reasoning))
    response_ids = {output[0].response_id for _, output in outputs}
    records = {
        record.response_id: record
        for record in state.anchors
        if record.response_id in response_ids and _is_trusted(record, index, scope)
    }
    for stop, output in outputs:
        record = records.get(output[0].response_id)
        # A copy of an output does not end where its record does.
        if record is None or index.count(stop) != record.block_count:
            continue
        if derived_digests(output) == record.derived:
            reusable.update(block.id for block in output if isinstance(block, ReasoningBlock))
    return frozenset(reusable)


def find_own_responses(turn: Turn, scope: str) -> frozenset[str]:
    """Return the ids of the responses of a provider whose context and output are unchanged."""
    index = get_prefix_index(turn)
    records = get_state(turn).anchors
    return frozenset(record.response_id for record in records if _is_trusted(record, index, scope))


def _iter_outputs(turn: Turn, positions: Sequence[int]) -> Iterator[tuple[int, list[Block]]]:
    """Yield where the outputs of responses around these positions end, and their blocks, which are contiguous."""
    lead = turn.lead
    stop = lead
    for position in positions:
        start = lead + position
        response_id = turn[start].response_id
        if start < stop or not response_id:
            continue
        stop = start + 1
        while start > lead and turn[start - 1].response_id == response_id:
            start -= 1
        while stop < len(turn) and turn[stop].response_id == response_id:
            stop += 1
        yield stop - lead, list(turn[start:stop])


def _is_trusted(record: AnchorRecord, index: PrefixIndex, scope: str) -> bool:
    """Return whether a response of this provider is finished and has a context that is a prefix of the Turn."""
    if base_scope(record.scope) != base_scope(scope):
        return False
    # Where nothing is stored, a paused response is continued by sending its items again.
    is_paused = record.status == "incomplete" and not record.stored
    is_finished = record.status in ("completed", "lost") or is_paused
    return is_finished and matches_prefix(record, index)


def _is_inserted(block: Block, state: ConversationState) -> bool:
    """Return whether a compaction was inserted into the Turn, rather than returned in a response."""
    if block.origin == ENGINE or block.response_id:
        return False
    digest = digest_derived(block)
    # A store also loads the records from before a compaction, and one of them may be the record of its response.
    is_detached = block.origin == COMPACTOR_ORIGIN
    return is_detached or not any(digest in record.derived for record in state.anchors)


@checked
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
    state = get_state(turn)
    index = get_prefix_index(turn)
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
    if DERIVED_TYPES.isdisjoint(map(type, blocks)):  # without reasoning, all are sent without ids
        return list(map(item_from_block, blocks))
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
    if DERIVED_TYPES.isdisjoint(map(type, blocks)):
        return ()
    flags = _sendable_flags(blocks, intact, unsealed=unsealed)
    return tuple(block for block, is_sent in zip(blocks, flags, strict=True) if not is_sent)


@checked
def get_instructions(turn: Turn) -> str | None:
    """Return the leading system text, which is sent with every request.

    Args:
        turn: The Turn.

    Returns:
        The text, or None if the Turn has no leading system block.
    """
    if not turn.lead:
        return None
    return "\n\n".join(map(_get_text, turn.leading)) or None


def _sendable_flags(
    blocks: Sequence[Block], intact: Container[str], *, unsealed: bool = False
) -> list[bool]:
    """Return whether each block is sent: all are, except derived blocks that are not proved."""
    flags: list[bool] = []
    following: Block | None = None  # the block after this one, if it is sent
    for block in reversed(blocks):
        match block:
            case ReasoningBlock():
                is_proved = block.id in intact
                is_sent = is_proved and _is_before_own_item(block, following, unsealed)
            case OpaqueBlock() if is_compaction(block):
                is_sent = block.id in intact
            case OpaqueBlock():
                is_sent = block.type != "reasoning"
            case _:
                is_sent = True
        flags.append(is_sent)
        following = block if is_sent else None
    return flags[::-1]


def _is_before_own_item(block: ReasoningBlock, following: Block | None, unsealed: bool) -> bool:
    """Return whether reasoning can be sent: it is directly before the item that the model wrote after it."""
    is_encrypted = bool(block.encrypted_content and block.item_id)
    if following is None or not (is_encrypted or unsealed) or not block.response_id:
        return False
    index = block.output_index
    is_adjacent = index is not None and following.output_index == index + 1
    return is_adjacent and following.response_id == block.response_id


def measure_full_body(plan: "RequestPlan", body_bytes: int) -> int:
    """Return the size of a body that sends everything.

    Args:
        plan: The plan of a request.
        body_bytes: The size of the body of this request.
    """
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
    # In a run, positions and their indices grow alike, so the difference of the two is constant.
    for _, run in groupby(enumerate(positions), key=lambda indexed: indexed[1] - indexed[0]):
        consecutive = [position for _, position in run]
        yield consecutive[0], consecutive[-1] + 1
