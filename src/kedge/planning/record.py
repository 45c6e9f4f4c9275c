"""After a response: tag its blocks, append them, and write down what the server now remembers."""

from collections.abc import Iterable
from dataclasses import replace

from kedge.planning.anchors import RETENTION, AnchorRecord, Status
from kedge.planning.ledger import covered_count, prefix_digest
from kedge.planning.plan import RequestPlan
from kedge.planning.render import ENGINE, conversation_scope
from kedge.planning.state import get_state, set_state
from kedge.turns import OUTPUT_INDEX, RESPONSE_ID, Block, Turn


def tag_blocks(blocks: Iterable[Block], response_id: str) -> list[Block]:
    """Mark blocks as made by this response, in this order."""
    return [
        replace(
            block,
            origin=ENGINE,
            metadata={OUTPUT_INDEX: index, **block.metadata, RESPONSE_ID: response_id},
        )
        for index, block in enumerate(blocks)
    ]


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
) -> Turn:
    """Append a response's blocks to the Turn that was sent, and record its anchor."""
    turn = turn.append(*tag_blocks(blocks, response_id))
    parent = plan.anchor
    record = AnchorRecord(
        response_id=response_id,
        scope=conversation_scope(plan.scope, conversation_id) if conversation_id else plan.scope,
        digest=prefix_digest(turn),
        block_count=covered_count(turn),
        depth=parent.depth + 1 if parent else 1,
        root_created_at=parent.root_created_at if parent else created_at,
        status=status,
        stored=stored,
        created_at=created_at,
        expires_at=None if retention is None else created_at + retention,
    )
    state = get_state(turn).with_anchor(record)
    if status == "completed":
        state = replace(state, previous_response_id=response_id, conversation_id=conversation_id)
    return set_state(turn, state)
