"""A request as it was sent: what decides how its answer is judged and recorded.

A ``SentRequest`` is made once, before the request is sent. The answer may arrive much later and elsewhere: a response
in the background is fetched by another call, with other tools and another mode, or by another process. So the request
is kept with the id of the response, in the Turn and in a store, and whoever receives the answer judges and records it
by what was sent, never by what the receiving call would send.
"""

import msgspec

from kedge.planning.anchors import (
    AnchorRecord,
    Mode,
    base_scope,
    conversation_scope,
    get_conversation_id,
    get_state,
    place_in_chain,
    prune_anchors,
    set_state,
)
from kedge.planning.digests import prefix_digest
from kedge.planning.plan import RequestPlan
from kedge.planning.render import get_instructions
from kedge.turns import Turn


class SentRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request was sent with, besides its texts, which the Turn has.

    Attributes:
        scope: The provider, endpoint and account that it was sent to.
        model: The model.
        transport: ``http`` or ``websocket``.
        streaming: Whether the answer was requested as a stream.
        requested_mode: The mode that was requested.
        mode: The mode in which the request was sent.
        anchor: The record of the response that it continues, with its token counts; None if everything was sent.
        start: The position, after the leading system text, from which blocks were sent.
        omitted: The positions of the blocks after it that were not sent.
        total_blocks: The number of blocks that a full send has.
        digest: The digest of the complete Turn.
        block_count: The number of blocks that the digest covers.
        barrier: The position, among the covered blocks, of the compaction item that the context starts with.
        object_id: The conversation object that the request was sent to; empty for none.
        settings: Identifies the members of its body that change a token count; None if its counts are no evidence.
        visible: A minimum count of the context that it could have continued and sent instead.
        store: Whether the server was asked to store the response.
        has_hidden_context: Whether the context has messages that only the server knows, those of a stored prompt.
        include: Whether encrypted reasoning was requested.
        is_include_rejected: Whether the server rejected an earlier attempt because that was requested.
        created_at: When the request was sent, in seconds since the epoch.
        expires_at: When the server drops the response, or None.
    """

    scope: str
    model: str
    transport: str
    streaming: bool
    requested_mode: Mode
    mode: Mode
    anchor: AnchorRecord | None
    start: int
    omitted: tuple[int, ...]
    total_blocks: int
    digest: str
    block_count: int
    barrier: int | None
    object_id: str
    settings: int | None
    visible: int
    store: bool
    has_hidden_context: bool
    include: bool
    is_include_rejected: bool
    created_at: float
    expires_at: float | None

    @property
    def is_continuable(self) -> bool:
        """Whether a later request may continue the response, if the server stores it: its context is known."""
        return self.store and not self.has_hidden_context

    def restore_plan(self, turn: Turn) -> RequestPlan:
        """Return the plan of this request: the members that decide what its answer means.

        Args:
            turn: The Turn that was sent.
        """
        start = turn.lead + self.start
        omitted = {turn.lead + position for position in self.omitted}
        sent = (block.id for at, block in enumerate(turn[start:], start) if at not in omitted)
        conversation_id = ""
        if self.anchor is not None:
            conversation_id = self.object_id
        return RequestPlan(
            mode=self.mode,
            scope=self.scope,
            anchor=self.anchor,
            source=turn,
            start=start,
            total_blocks=self.total_blocks,
            instructions=get_instructions(turn),
            conversation_id=conversation_id,
            intact=frozenset(sent),
            barrier=self.barrier,
            digest=self.digest,
            block_count=self.block_count,
            planned_at=self.created_at,
        )


_decode_sent_request = msgspec.json.Decoder(SentRequest).decode


def decode_sent_request(text: str | None) -> SentRequest | None:
    """Return the request in a JSON text; a malformed one counts as missing, so that its answer is no evidence."""
    if not text:
        return None
    try:
        return _decode_sent_request(text)
    except ValueError:
        return None


def restore_foreign_plan(turn: Turn, running: AnchorRecord) -> RequestPlan:
    """Return a plan for the answer to a request that is not known, except for the Turn that it was sent for.

    Args:
        turn: The Turn.
        running: The record of the response, whose id another program has provided.
    """
    mode: Mode = "chained"
    if get_conversation_id(running.scope):
        mode = "conversation"
    return RequestPlan(
        mode=mode,
        scope=base_scope(running.scope),
        anchor=None,
        source=turn,
        start=turn.lead,
        total_blocks=turn.body_length,
        instructions=get_instructions(turn),
        barrier=running.barrier,
        digest=running.digest,
        block_count=running.block_count,
        planned_at=running.created_at,
    )


def record_running(
    turn: Turn, request: SentRequest, response_id: str, *, is_stored: bool = True
) -> Turn:
    """Return the Turn with the record of a response that the server generates in the background.

    Args:
        turn: The Turn that was sent. Without its digest nothing is recorded, because the context is then unknown.
        request: The request as it was sent.
        response_id: The id of the response. Without one it cannot be fetched, and nothing is recorded.
        is_stored: Whether the server stores the response, as far as its start shows.

    Returns:
        The Turn, which can be stored, and sent again by any process to receive the answer.
    """
    if not response_id or prefix_digest(turn) != request.digest:
        return turn
    scope = request.scope
    if request.object_id:
        scope = conversation_scope(request.scope, request.object_id)
    record = AnchorRecord(
        response_id=response_id,
        scope=scope,
        digest=request.digest,
        block_count=request.block_count,
        root_created_at=request.created_at,
        status="running",
        stored=request.is_continuable and is_stored,
        created_at=request.created_at,
        expires_at=request.expires_at,
        barrier=request.barrier,
    )
    record = place_in_chain(record, request.anchor)
    return set_state(turn, prune_anchors(get_state(turn).with_anchor(record), turn))
