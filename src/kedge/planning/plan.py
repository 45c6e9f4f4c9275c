"""Plan a request: what is sent, on which anchor, and why not on a newer one.

A stored response is a cache of a prefix of the Turn. ``plan_request`` finds the longest prefix that is provably on
the server and can still be used, and sends the blocks after it; without one it sends all blocks. It is pure and
never raises: problems of the Turn are listed in ``plan.problems``, and only sending such a plan is an error.

A fallback is a request in chained or conversation mode, or one that was forced out of it, that sends blocks which an
earlier answer of the same server covered. Events, metrics, spans, the rows of a store and all views use this decision.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kedge._internal.argument_types import checked
from kedge.errors import Unsendable
from kedge.planning.anchors import (
    AnchorRecord,
    ConversationState,
    Mode,
    Reason,
    RejectedAnchor,
    anchor_sort_key,
    base_scope,
    conversation_scope,
    get_state,
    is_unusable_status,
)
from kedge.planning.digests import Problem, ResultMatch, get_prefix_index
from kedge.planning.render import (
    build_input_from_blocks,
    find_compaction_start,
    find_omitted,
    find_own_responses,
    find_reusable_ids,
    get_instructions,
    measure_full_body,
)
from kedge.planning.selection import AnchorCheck, select_anchor
from kedge.turns import Block, ReasoningBlock, Turn
from kedge.turns.blocks import ENGINE
from kedge.turns.responses_items import Item

if TYPE_CHECKING:
    from kedge.planning.cache_plan import CachePlan


NOT_FALLBACK_REASONS = ("new", "stateless", "conversation")
"""Reasons for a full request that is no fallback: the server has not answered yet, or chaining is not wanted."""
CHOSEN_MODE_REASONS = ("switched_off", "never")
"""Reasons for another mode than the requested one that are settings: such a request is meant to be stateless."""


def is_fallback_reason(reason: str) -> bool:
    """Return whether a full request with this reason is a fallback."""
    return reason not in ("", *NOT_FALLBACK_REASONS)


def send_label(reason: str, *, is_refused: bool = False) -> str:
    """Return the label of a request in all views: how it was sent.

    Args:
        reason: The reason of a full send; empty for a request on an anchor.
        is_refused: Whether the server refused the request, which then continued and started nothing.

    Returns:
        ``refused``, ``chained`` without a reason, ``new chain`` for the first request to a server, ``stateless`` where
        chaining is not wanted, and ``sent in full`` for a fallback.
    """
    if is_refused:
        return "refused"
    if is_fallback_reason(reason):
        return "sent in full"
    return {"": "chained", "stateless": "stateless"}.get(reason, "new chain")


class RequestPlan(msgspec.Struct, frozen=True, dict=True):
    """The decision for one request.

    Attributes:
        mode: The mode in which the request is sent.
        scope: The provider, endpoint and account that it is sent to.
        anchor: The record of the response that it is chained on, or None for a full send.
        source: The Turn, or the blocks, that the request is for.
        start: The index in it from which blocks are sent.
        rejected: The candidates that would have saved more, each with the reason why it cannot be used.
        problems: Tool calls and results that prevent sending.
        total_blocks: The number of blocks from the start of the conversation, or from its newest compaction, on.
        full_bytes: The encoded size of all blocks without reasoning, with a comma after each.
        delta_bytes: The encoded size of the blocks of the delta, in the same way.
        instructions: The leading system text, which is sent with every request.
        conversation_id: The server-side conversation object that is used, or an empty string.
        intact: The ids of the reasoning and compaction blocks that may be sent.
        barrier: The position, among the covered blocks, of the compaction item that the conversation
            starts with for this server.
        digest: The digest of the complete Turn.
        block_count: The number of blocks that the digest covers.
        planned_at: The time of planning, in seconds since the epoch.
        unsealed: Whether reasoning that its provider did not encrypt may be sent.
        mode_reason: Why the request is sent in another mode than requested.
        cache: The prediction for the provider's prompt cache; None if the engine does not use one.
        body_bytes: The size of the request body; 0 if it was not built, or cannot be.
        conditional: Whether the plan depends on a probe of the server that the request makes first and that was
            not made.
    """

    mode: Mode
    scope: str
    anchor: AnchorRecord | None
    source: Turn | tuple[Block, ...]
    start: int = 0
    rejected: tuple[RejectedAnchor, ...] = ()
    problems: tuple[Problem, ...] = ()
    total_blocks: int = 0
    full_bytes: int = 0
    delta_bytes: int = 0
    instructions: str | None = None
    conversation_id: str = ""
    intact: frozenset[str] = frozenset()
    barrier: int | None = None
    digest: str = ""
    block_count: int = 0
    planned_at: float = 0.0
    unsealed: bool = False
    mode_reason: str = ""
    cache: "CachePlan | None" = None
    conditional: bool = False
    body_bytes: int = 0

    @cached_property
    def anchor_id(self) -> str:
        """The response that the request continues, itself or in a conversation object; empty for a full send."""
        if self.anchor is None:
            return ""
        return self.anchor.response_id

    @property
    def previous_response_id(self) -> str:
        """The response to chain on; empty for a full send and where a conversation object is used."""
        if self.conversation_id:
            return ""
        return self.anchor_id

    @cached_property
    def delta(self) -> tuple[Block, ...]:
        """The blocks after the anchor, or all of them."""
        return self.source[self.start :]

    @property
    def delta_blocks(self) -> int:
        """The number of blocks that are sent: the delta without the blocks that are left out."""
        return len(self.source) - self.start - len(self.left_out)

    @property
    def full_blocks(self) -> int:
        """The number of blocks of a full send, without the blocks that this request leaves out."""
        return self.total_blocks - len(self.left_out)

    def find_position(self, count: int) -> int:
        """Return the position in the Turn of the block after the first ``count`` that the digests cover."""
        if not isinstance(self.source, Turn):
            return count
        return self.source.lead + get_prefix_index(self.source).end_position(count + 1) - 1

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the request body and of one with everything; of the blocks alone without a body."""
        if not self.body_bytes:
            return self.delta_bytes, self.full_bytes
        return self.body_bytes, measure_full_body(self, self.body_bytes)

    @cached_property
    def is_full(self) -> bool:
        """Whether all blocks are sent."""
        return self.anchor is None

    @cached_property
    def reason(self) -> str:
        """Why all blocks are sent: the reason of a fallback, ``new``, or the mode; empty if there is an anchor."""
        if self.anchor is not None:
            return ""
        is_forced = self.mode_reason not in ("", *CHOSEN_MODE_REASONS)
        if self.mode == "stateless" and not is_forced:
            return "stateless"
        unused_reason = _find_unused_answer(self)
        if unused_reason is None:
            return "new" if self.mode == "chained" else self.mode
        if is_forced:
            return self.mode_reason
        return unused_reason

    @property
    def fallback(self) -> str | None:
        """Why blocks are sent that an earlier answer of the same server covered; None if there are none."""
        if is_fallback_reason(self.reason):
            return self.reason
        return None

    def check(self) -> None:
        """Check that the plan can be sent.

        Raises:
            Unsendable: If tool calls and results do not match.
        """
        if self.problems:
            raise Unsendable(self.problems)

    def input(self) -> list[Item]:
        """Return the input items to send.

        Raises:
            Unsendable: If tool calls and results do not match.
            UnsupportedBlock: If the Responses API has no form for a block.
        """
        self.check()
        return build_input_from_blocks(self.delta, self.intact)

    @cached_property
    def left_out(self) -> tuple[Block, ...]:
        """The blocks of the delta that are not sent: reasoning and compactions that are not proved."""
        return find_omitted(self.delta, self.intact, unsealed=self.unsealed)

    @property
    def body_start(self) -> int:
        """The position from which blocks are sent, among those after the leading system text."""
        if not isinstance(self.source, Turn):
            return self.start
        return self.start - self.source.lead

    def list_omitted(self) -> tuple[int, ...]:
        """Return the positions of the blocks that are left out, among those after the leading system text."""
        if not self.left_out:
            return ()
        omitted = {block.id for block in self.left_out}
        delta = enumerate(self.delta, self.body_start)
        return tuple(position for position, block in delta if block.id in omitted)

    @property
    def sent(self) -> Sequence[Block]:
        """The blocks that are sent: the delta without the blocks that are left out."""
        if not self.left_out:
            return self.delta
        omitted = {block.id for block in self.left_out}
        return [block for block in self.delta if block.id not in omitted]

    def count_results(self) -> Mapping[ResultMatch, int]:
        """Return how the tool results since the newest answer match their calls."""
        turn = self.source
        if not isinstance(turn, Turn):
            return {}
        start = len(turn)
        while start > turn.lead and turn[start - 1].origin != ENGINE:
            start -= 1
        return get_prefix_index(turn).count_matches(start - turn.lead)

    def own_responses(self) -> frozenset[str]:
        """Return the responses of this provider whose context is unchanged.

        Members that only this provider has, such as signatures, are sent back with their blocks and no others.
        """
        if not isinstance(self.source, Turn):
            return frozenset()
        return find_own_responses(self.source, self.scope)

    def without_reasoning(self) -> "RequestPlan":
        """Return the same plan without encrypted reasoning."""
        reasoning = {block.id for block in self.delta if isinstance(block, ReasoningBlock)}
        return replace(self, intact=self.intact - reasoning)

    def explain(self) -> str:
        """Return a few lines of plain English about the plan."""
        from kedge.planning.explain import explain

        return explain(self)


def plan_request(
    turn: Turn,
    *,
    scope: str,
    mode: Mode = "chained",
    now: float,
    extra: Iterable[AnchorRecord] = (),
    max_depth: int | None = None,
    not_before: float = 0.0,
    unsealed: bool = False,
) -> RequestPlan:
    """Decide what to send for a Turn. Pure; never raises.

    Args:
        turn: The Turn.
        scope: The provider, endpoint and account that the request is for.
        mode: ``chained``, ``stateless`` or ``conversation``.
        now: The current time, in seconds since the epoch.
        extra: Candidates from elsewhere, such as a store's index or a live WebSocket.
        max_depth: The number of responses of a chain that the server is known to remember; None for no limit.
        not_before: Records created before this time count as lost.
        unsealed: Whether the server accepts reasoning that it did not encrypt.

    Returns:
        The plan. If the best record is deeper than ``max_depth`` all blocks are sent, which starts a new
        chain.
    """
    index = get_prefix_index(turn)
    state = get_state(turn)
    compaction = find_compaction_start(turn, index, scope, state)
    first = compaction or 0
    barrier = None
    if compaction is not None:
        barrier = index.count(compaction)

    check = AnchorCheck(index, scope, now, max_depth, not_before, barrier)
    if mode == "conversation":
        check.scope = conversation_scope(scope, state.conversation_id)
        check.max_depth = None
    anchor, rejected = select_anchor(_iter_candidates(mode, state, extra), check)

    start = first
    covered_start = barrier or 0
    conversation_id = ""
    if anchor:
        start = index.end_position(anchor.block_count)
        covered_start = anchor.block_count
        if mode == "conversation":
            conversation_id = state.conversation_id
    return RequestPlan(
        mode=mode,
        scope=scope,
        anchor=anchor,
        source=turn,
        start=turn.lead + start,
        rejected=rejected,
        problems=index.problems(turn.blocks, turn.lead, first),
        total_blocks=turn.body_length - first,
        full_bytes=index.byte_size(barrier or 0, index.covered),
        delta_bytes=index.byte_size(covered_start, index.covered),
        instructions=get_instructions(turn),
        conversation_id=conversation_id,
        intact=find_reusable_ids(turn, index, start, scope, state, compaction),
        unsealed=unsealed,
        barrier=barrier,
        digest=index.digest(index.covered),
        block_count=index.covered,
        planned_at=now,
    )


@checked
def find_problems(turn: Turn, first: int = 0) -> tuple[Problem, ...]:
    """Return the tool calls and results that prevent sending a Turn.

    Args:
        turn: The Turn.
        first: The position in the body from which blocks are sent.

    Returns:
        The problems in the order of the blocks.
    """
    return get_prefix_index(turn).problems(turn.blocks, turn.lead, first)


def _iter_candidates(
    mode: Mode, state: ConversationState, extra: Iterable[AnchorRecord]
) -> Iterable[AnchorRecord]:
    """Return the records to try, longest prefix first, then the newest."""
    if mode == "chained":
        anchors = reversed(state.anchors)
        added = [record for record in extra if _is_new_candidate(record, state)]
        if not added:
            return anchors
        added.sort(key=anchor_sort_key, reverse=True)
        return heapq.merge(added, anchors, key=anchor_sort_key, reverse=True)
    if mode == "conversation" and state.conversation_id:
        record = state.anchor(state.previous_response_id)
        if record:
            # A conversation object stores its items without expiry.
            return (replace(record, expires_at=None),)
    return ()


def _is_new_candidate(record: AnchorRecord, state: ConversationState) -> bool:
    """Return whether a record from elsewhere is new to the state; a lost or unusable record remains so."""
    own_record = state.anchor(record.response_id, record.scope)
    if own_record is None:
        return True
    is_lost = own_record.status == "lost" or is_unusable_status(own_record.status)
    return own_record != record and not is_lost


def _find_unused_answer(plan: RequestPlan) -> Reason | None:
    """Return why the newest answer of the same server is not used; None if there is none."""
    scope = base_scope(plan.scope)
    for candidate in plan.rejected:
        if base_scope(candidate.record.scope) == scope:
            return candidate.reason
    if not isinstance(plan.source, Turn):
        return None

    anchors = get_state(plan.source).anchors
    for record in reversed(anchors):
        if base_scope(record.scope) != scope:
            continue
        if is_unusable_status(record.status):
            return record.status
        return "scope"

    recorded_ids = {record.response_id for record in anchors}
    for block in reversed(plan.delta):
        if block.origin == ENGINE and block.response_id not in recorded_ids:
            return "unproven" if block.response_id else "no_id"
    return None
