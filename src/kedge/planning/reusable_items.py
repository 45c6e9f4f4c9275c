"""What may go out again: reasoning and compaction items, while what they were made from still stands.

Both are derived from everything before them, so they can hold what was edited away or redacted since.
Reasoning goes out only while the record of its response proves the response's prefix and its own
output, and its own reasoning is the one that was received. A compaction item stands for all before
it; whether the server's memory begins with it is written down in the records, so neither tags nor an
equal rebuild can change the answer.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

from kedge.planning.anchors import AnchorRecord, matches_prefix
from kedge.planning.canonical import canonical_json
from kedge.planning.digests import PrefixIndex, get_prefix_index, is_compaction
from kedge.planning.state import ConversationState
from kedge.turns import Block, ReasoningBlock, Turn

ENGINE_ORIGIN = "engine"
_CONVERSATION_SUFFIX = " conversation:"


def conversation_scope(scope: str, conversation_id: str) -> str:
    """The scope of what happens inside one server-side conversation object."""
    return f"{scope}{_CONVERSATION_SUFFIX}{conversation_id}"


def base_scope(scope: str) -> str:
    """The provider's scope, without the conversation object."""
    return scope.partition(_CONVERSATION_SUFFIX)[0]


def derived_digests(blocks: Iterable[Block]) -> tuple[str, ...]:
    """The digests of the reasoning and compaction items among a response's blocks."""
    return tuple(_digest_block(block) for block in blocks if _is_derived(block))


def find_compaction_start(turn: Turn, scope: str, state: ConversationState) -> int | None:
    """Where in the Turn's body the conversation begins for this server: at its newest compaction.

    The longest record that proves tells whether a compaction item is part of the server's memory.
    One that it does not cover counts if somebody put it there on purpose.
    """
    ledger = get_prefix_index(turn)
    if not ledger.barriers:
        return None
    length = len(turn.blocks) - turn.lead
    record = _find_longest_record(state, ledger, ledger.count(length), scope)
    for position in reversed(ledger.barriers):
        if position >= length:
            continue  # of a longer Turn that shares the ledger
        index = ledger.count(position)
        if record and index < record.block_count:
            if index == record.barrier:
                return position
        elif _is_inserted(turn.blocks[turn.lead + position], state):
            return position
    return None


def find_reusable_ids(
    turn: Turn, start: int, scope: str, state: ConversationState, barrier: int | None
) -> frozenset[str]:
    """The ids of the reasoning and compaction blocks from position ``start`` on that may go out."""
    found: set[str] = set()
    if barrier is not None and barrier == start:
        found.add(turn.blocks[turn.lead + start].id)
    ledger, length = get_prefix_index(turn), len(turn.blocks) - turn.lead
    covered = ledger.count(length)
    runs = list(_iter_response_runs(turn, ledger.uncovered_positions(start, length)))
    wanted = {run[0].response_id for _, run in runs}
    records: dict[str, AnchorRecord] = {}
    if wanted:
        records = {
            record.response_id: record
            for record in state.anchors
            if record.response_id in wanted and _is_trusted(record, ledger, covered, scope)
        }
    for stop, run in runs:
        record = records.get(run[0].response_id)
        # A copy of an output stands elsewhere than its record says.
        stands = record and ledger.count(stop) == record.block_count
        if record and stands and derived_digests(run) == record.derived:
            found.update(block.id for block in run if isinstance(block, ReasoningBlock))
    return frozenset(found)


def _iter_response_runs(turn: Turn, positions: Sequence[int]) -> Iterator[tuple[int, list[Block]]]:
    """The unbroken outputs of responses around these places, and where each ends."""
    blocks, lead = turn.blocks, turn.lead
    stop = lead
    for place in positions:
        start = lead + place
        response_id = blocks[start].response_id
        if start < stop or not response_id:
            continue
        stop = start + 1
        while start > lead and blocks[start - 1].response_id == response_id:
            start -= 1
        while stop < len(blocks) and blocks[stop].response_id == response_id:
            stop += 1
        yield stop - lead, list(blocks[start:stop])


def _find_longest_record(
    state: ConversationState, index: PrefixIndex, covered: int, scope: str
) -> AnchorRecord | None:
    """The record of this provider that proves the longest prefix."""
    for record in reversed(state.anchors):
        if _is_trusted(record, index, covered, scope):
            return record
    return None


def _is_trusted(record: AnchorRecord, index: PrefixIndex, covered: int, scope: str) -> bool:
    same_provider = base_scope(record.scope) == base_scope(scope)
    finished = record.status in ("completed", "lost")
    return same_provider and finished and matches_prefix(record, index, covered)


def _is_inserted(block: Block, state: ConversationState) -> bool:
    """Whether somebody put this compaction into the Turn, rather than a response."""
    if block.origin == ENGINE_ORIGIN or block.response_id:
        return False
    made = _digest_block(block)
    return not any(made in record.derived for record in state.anchors)


def _is_derived(block: Block) -> bool:
    return isinstance(block, ReasoningBlock) or is_compaction(block)


def _digest_block(block: Block) -> str:
    form = canonical_json(block)
    if form is None and isinstance(block, ReasoningBlock):
        form = json.dumps([block.summary, block.texts, block.encrypted_content]).encode()
    return hashlib.sha256(form or b"").hexdigest()[:32]
