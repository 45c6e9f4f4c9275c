"""Decide which reasoning and compaction items may be sent again.

Both are derived from everything before them, and their content is encrypted, so Kedge cannot read it. If a
secret was redacted from the conversation, an earlier reasoning or compaction item may still contain it; sending
it would undo the redaction silently. So an item is sent only while everything it was derived from is
provably unchanged: the record of its response matches the Turn's prefix *and* the response's output, at the
same position, and the digests of the derived items are those that were received.

A compaction item replaces all blocks before it. After one, two questions must be distinguished: what the
server remembers (its memory starts at the compaction in its newest matching record), and what the user
wants to send (a compaction that was inserted into the Turn deliberately is also a start). The start is stored in
the records and not found by searching for compaction items, because neither tags nor an equal rebuild of
the Turn may change it: a compaction in a response that was edited since is not part of any memory, although its
item is still in the Turn.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

from kedge.planning.anchors import AnchorRecord, matches_prefix
from kedge.planning.canonical import canonical_json, get_members
from kedge.planning.digests import PrefixIndex, get_prefix_index, is_compaction
from kedge.planning.state import ConversationState, get_state
from kedge.turns import Block, ReasoningBlock, Turn
from kedge.turns.frozen_json import thaw

ENGINE_ORIGIN = "engine"
_CONVERSATION_SUFFIX = " conversation:"


def conversation_scope(scope: str, conversation_id: str) -> str:
    """Return the scope of responses inside a server-side conversation object."""
    return f"{scope}{_CONVERSATION_SUFFIX}{conversation_id}"


def get_conversation_id(scope: str) -> str:
    """Return the server-side conversation object of a scope; empty if it has none."""
    return scope.partition(_CONVERSATION_SUFFIX)[2]


def base_scope(scope: str) -> str:
    """Return the provider's scope, without the conversation object."""
    return scope.partition(_CONVERSATION_SUFFIX)[0]


def derived_digests(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Return the digests of the reasoning and compaction items among a response's blocks."""
    return tuple(
        _digest_block(block)
        for block in blocks
        if isinstance(block, ReasoningBlock) or is_compaction(block)
    )


def find_compaction_start(
    turn: Turn, index: PrefixIndex, scope: str, state: ConversationState
) -> int | None:
    """Return the position in the body at which the conversation starts: the newest valid compaction.

    The longest matching record decides whether a compaction item is part of the server's memory. An item that
    it does not cover is valid if it was inserted into the Turn deliberately.
    """
    if not index.barriers:
        return None
    length = len(turn) - turn.lead
    record = _find_longest_record(state, index, index.count(length), scope)
    for position in reversed(index.barriers):
        if position >= length:
            continue  # it belongs to a longer Turn that shares the index
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
    found: set[str] = set()
    if barrier is not None and barrier == start:
        found.add(turn[turn.lead + start].id)
    length = len(turn) - turn.lead
    reasoning = index.uncovered_positions(start, length)
    if not reasoning:
        return frozenset(found)
    covered = index.count(length)
    runs = list(_iter_response_runs(turn, reasoning))
    response_ids = {run[0].response_id for _, run in runs}
    records = {
        record.response_id: record
        for record in state.anchors
        if record.response_id in response_ids and _is_trusted(record, index, covered, scope)
    }
    for stop, run in runs:
        record = records.get(run[0].response_id)
        # A copy of an output does not end where its record does.
        ends_there = record and index.count(stop) == record.block_count
        if record and ends_there and derived_digests(run) == record.derived:
            found.update(block.id for block in run if isinstance(block, ReasoningBlock))
    return frozenset(found)


def find_own_responses(turn: Turn, scope: str) -> frozenset[str]:
    """Return the ids of the responses of a provider whose context and output are unchanged."""
    index = get_prefix_index(turn)
    covered = index.count(len(turn) - turn.lead)
    records = get_state(turn).anchors
    return frozenset(
        record.response_id for record in records if _is_trusted(record, index, covered, scope)
    )


def _iter_response_runs(turn: Turn, positions: Sequence[int]) -> Iterator[tuple[int, list[Block]]]:
    """Yield the contiguous outputs of responses around these positions, and where each ends."""
    lead = stop = turn.lead
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


def _find_longest_record(
    state: ConversationState, index: PrefixIndex, covered: int, scope: str
) -> AnchorRecord | None:
    """Return the record of this provider that matches the longest prefix."""
    for record in reversed(state.anchors):
        if _is_trusted(record, index, covered, scope):
            return record
    return None


def _is_trusted(record: AnchorRecord, index: PrefixIndex, covered: int, scope: str) -> bool:
    same_provider = base_scope(record.scope) == base_scope(scope)
    # Where nothing is stored, a paused response is continued by sending its items again.
    paused = record.status == "incomplete" and not record.stored
    finished = record.status in ("completed", "lost") or paused
    return same_provider and finished and matches_prefix(record, index, covered)


def _is_inserted(block: Block, state: ConversationState) -> bool:
    """Return whether a compaction was inserted into the Turn, rather than returned in a response."""
    if block.origin == ENGINE_ORIGIN or block.response_id:
        return False
    digest = _digest_block(block)
    return not any(digest in record.derived for record in state.anchors)


def _digest_block(block: Block) -> str:
    form = canonical_json(block)
    if form is None and isinstance(block, ReasoningBlock):
        content = [block.summary, block.texts, block.encrypted_content]
        members = thaw(get_members(block))
        form = json.dumps([*content, members] if members else content, sort_keys=True).encode()
    return hashlib.sha256(form or b"").hexdigest()[:32]
