"""After a response: tag its blocks, append them, and write down what the server now remembers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kedge.planning.anchors import RETENTION, AnchorRecord, Status, proves
from kedge.planning.ledger import covered_count, is_compaction, ledger_of, prefix_digest
from kedge.planning.plan import RequestPlan
from kedge.planning.proof import ENGINE, conversation_scope, derived_from
from kedge.planning.state import ConversationState, get_state, set_state
from kedge.turns import OUTPUT_INDEX, RESPONSE_ID, Block, FrozenMap, Turn

KEPT_STALE = 64
"""How many records that no longer prove are kept, in case that an edit is undone."""


def tag_blocks(blocks: Iterable[Block], response_id: str) -> list[Block]:
    """Mark blocks as made by this response, in this order."""
    tag = {RESPONSE_ID: response_id} if response_id else {}
    return [
        block if _is_tagged(block, response_id) else _tagged(block, {OUTPUT_INDEX: index}, tag)
        for index, block in enumerate(blocks)
    ]


def _is_tagged(block: Block, response_id: str) -> bool:
    tags = block.metadata
    return block.origin == ENGINE and OUTPUT_INDEX in tags and block.response_id == response_id


def _tagged(block: Block, place: dict[str, Any], tag: dict[str, Any]) -> Block:
    return replace(block, origin=ENGINE, metadata=FrozenMap({**place, **block.metadata, **tag}))


def record_response(
    turn: Turn,
    blocks: Iterable[Block],
    *,
    response_id: str,
    plan: RequestPlan,
    created_at: float,
    status: Status = "completed",
    stored: bool = True,
    retention: float | None = RETENTION,
    conversation_id: str = "",
    head: bool = True,
) -> Turn:
    """Append a response's blocks to the Turn that was sent, and record its anchor.

    No anchor is recorded for a response without an id, nor if ``plan`` was made for another Turn:
    what the server remembers is then not known. ``head`` tells whether it is what a server with a
    memory was asked last; an answer of an API without one leaves that as it is.
    """
    was_sent = prefix_digest(turn) == plan.digest
    output = tag_blocks(blocks, response_id)
    turn = turn.append(*output)
    if not response_id or not was_sent:
        return turn
    parent = plan.anchor
    record = AnchorRecord(
        response_id=response_id,
        scope=conversation_scope(plan.scope, conversation_id) if conversation_id else plan.scope,
        digest=prefix_digest(turn),
        block_count=covered_count(turn),
        depth=parent.depth + 1 if parent else 1,
        root_created_at=parent.root_created_at or parent.created_at if parent else created_at,
        status=status,
        stored=stored,
        created_at=created_at,
        expires_at=None if retention is None else created_at + retention,
        barrier=_barrier(turn, output, plan),
        derived=derived_from(output),
    )
    state = pruned(get_state(turn).with_anchor(record), turn)
    if status == "completed" and head:
        state = replace(state, previous_response_id=response_id, conversation_id=conversation_id)
    return set_state(turn, state)


def pruned(state: ConversationState, turn: Turn) -> ConversationState:
    """The state without most of the records that no longer prove, once these are the most of it.

    A conversation that is edited or compacted time and again would carry them along for good.
    """
    covered = covered_count(turn)
    if len(state.anchors) <= 2 * (covered + KEPT_STALE):
        return state
    ledger = ledger_of(turn)
    stale = [record for record in state.anchors if not proves(record, ledger, covered)]
    newest = sorted(stale, key=lambda record: record.created_at)[-KEPT_STALE:]
    dropped = {id(record) for record in stale} - {id(record) for record in newest}
    return state.keeping(record for record in state.anchors if id(record) not in dropped)


def _barrier(turn: Turn, output: list[Block], plan: RequestPlan) -> int | None:
    """Where the server's memory begins: with a compaction in the output, or as it was planned."""
    compactions = [index for index, block in enumerate(output) if is_compaction(block)]
    if not compactions:
        return plan.barrier
    position = len(turn.blocks) - turn.lead - len(output) + compactions[-1]
    return ledger_of(turn).count(position)
