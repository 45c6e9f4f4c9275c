"""The plan: what one request sends, on which anchor, and why not on a newer one.

A stored response is a cache of a prefix of the Turn. ``plan_request`` finds the longest prefix that is
proved to be on the server and may still be asked for, and sends what comes after it; with none it
sends everything. It is pure and never raises: what stands in the way of sending is listed in
``plan.problems``, and only sending such a plan is an error.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kedge.errors import Unsendable
from kedge.planning.anchors import (
    AnchorRecord,
    Reason,
    RejectedAnchor,
    matches_prefix,
    unavailable_reason,
)
from kedge.planning.digests import PrefixIndex, get_prefix_index
from kedge.planning.render import build_input_from_blocks, find_omitted, get_instructions
from kedge.planning.reusable_items import (
    conversation_scope,
    find_compaction_start,
    find_reusable_ids,
)
from kedge.planning.state import ConversationState, Mode, anchor_sort_key, get_state
from kedge.planning.tool_pairing import Problem
from kedge.turns import Block, ReasoningBlock, Turn
from kedge.turns.responses_items import Item


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The decision for one request."""

    mode: Mode
    scope: str
    anchor: AnchorRecord | None
    delta: tuple[Block, ...]
    """The blocks that are sent: those after the anchor, or all of them."""
    rejected: tuple[RejectedAnchor, ...]
    """The candidates that would have saved more, with the reason why each was refused."""
    problems: tuple[Problem, ...]
    full_blocks: int
    full_bytes: int
    delta_bytes: int
    instructions: str | None
    conversation_id: str = ""
    intact: frozenset[str] = frozenset()
    """The ids of the reasoning and compaction blocks that may go out."""
    barrier: int | None = None
    """The place, among the covered blocks, of the compaction with which the conversation begins."""
    digest: str = ""
    """The digest of the whole Turn that was planned."""
    block_count: int = 0
    """How many blocks that digest covers."""
    planned_at: float = 0.0
    unsealed: bool = False
    """Whether reasoning may go out that its provider did not seal."""
    mode_reason: str = ""
    """Why the request goes out in another mode than the one asked for."""

    @property
    def previous_response_id(self) -> str:
        """The id to chain on, or an empty string (also where a conversation object is used)."""
        return self.anchor.response_id if self.anchor and not self.conversation_id else ""

    @property
    def delta_blocks(self) -> int:
        """How many blocks are sent."""
        return len(self.delta)

    @property
    def is_full(self) -> bool:
        """Whether everything is sent."""
        return self.anchor is None

    @property
    def fallback(self) -> Reason | None:
        """Why everything is sent although there were candidates; ``None`` otherwise."""
        return self.rejected[0].reason if self.is_full and self.rejected else None

    def check(self) -> None:
        """Raise ``Unsendable`` if calls or results stand in the way."""
        if self.problems:
            raise Unsendable(self.problems)

    def input(self) -> list[Item]:
        """The items to send."""
        self.check()
        return build_input_from_blocks(self.delta, self.intact)

    @property
    def left_out(self) -> tuple[Block, ...]:
        """The blocks of the delta that are not sent: reasoning and compactions without proof."""
        return find_omitted(self.delta, self.intact, unsealed=self.unsealed)

    def without_reasoning(self) -> "RequestPlan":
        """The same plan, with no encrypted reasoning in it."""
        thoughts = {block.id for block in self.delta if isinstance(block, ReasoningBlock)}
        return replace(self, intact=self.intact - thoughts)

    def explain(self) -> str:
        """A few lines of plain English."""
        from kedge.planning.explain import explain  # words are kept apart from decisions

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
    """Decide what to send for this Turn to this scope. Pure; never raises.

    Records made before ``not_before`` count as lost. Where the best record is deeper than
    ``max_depth``, everything is sent, which starts a new chain.

    ``extra`` are candidates from elsewhere, such as a store's index or a live socket. ``max_depth`` is
    how many responses of a chain the server is known to remember. ``unsealed`` tells of a server that
    wants its reasoning back although it does not seal it.
    """
    ledger, state = get_prefix_index(turn), get_state(turn)
    length = len(turn.blocks) - turn.lead
    barrier = find_compaction_start(turn, scope, state)
    first = barrier or 0
    question = _CandidateCheck(
        ledger,
        covered=ledger.count(length),
        barrier=None if barrier is None else ledger.count(barrier),
        scope=conversation_scope(scope, state.conversation_id) if mode == "conversation" else scope,
        now=now,
        max_depth=None if mode == "conversation" else max_depth,
        not_before=not_before,
    )
    anchor, rejected = _choose_anchor(_iter_candidates(mode, state, extra), question)
    start = ledger.end_position(anchor.block_count) if anchor else first
    return RequestPlan(
        mode=mode,
        scope=scope,
        anchor=anchor,
        delta=turn.blocks[turn.lead + start :],
        rejected=rejected,
        problems=find_problems(turn, first),
        full_blocks=length - first,
        full_bytes=ledger.byte_size(first, length),
        delta_bytes=ledger.byte_size(start, length),
        instructions=get_instructions(turn),
        conversation_id=state.conversation_id if mode == "conversation" and anchor else "",
        intact=find_reusable_ids(turn, start, scope, state, barrier),
        unsealed=unsealed,
        barrier=question.barrier,
        digest=ledger.digest(question.covered),
        block_count=question.covered,
        planned_at=now,
    )


def find_problems(turn: Turn, first: int = 0) -> tuple[Problem, ...]:
    """What stands in the way of sending the Turn's body, from position ``first`` on."""
    return get_prefix_index(turn).problems(turn.blocks, turn.lead, first)


@dataclass(frozen=True, slots=True)
class _CandidateCheck:
    """What is asked of a candidate: to prove, and to be there for the asking."""

    index: PrefixIndex
    covered: int
    barrier: int | None
    scope: str
    now: float
    max_depth: int | None
    not_before: float = 0.0

    def rejection_reason(self, record: AnchorRecord) -> Reason | None:
        """Why this record is no anchor; ``None`` if it is one."""
        reason = unavailable_reason(
            record,
            scope=self.scope,
            now=self.now,
            max_depth=self.max_depth,
            not_before=self.not_before,
        )
        if reason or record.block_count <= 0:
            return reason or "unproven"
        return None if self.matches(record) else "changed"

    def matches(self, record: AnchorRecord) -> bool:
        """Whether the record proves a prefix of what would be sent."""
        # What a server remembers from before the newest compaction is not what we would send.
        return record.barrier == self.barrier and matches_prefix(record, self.index, self.covered)


def _iter_candidates(
    mode: Mode, state: ConversationState, extra: Iterable[AnchorRecord]
) -> Iterator[AnchorRecord]:
    """The records that may be tried, longest prefix first, then the newest."""
    if mode == "chained":
        news = sorted(
            (each for each in extra if _is_new_candidate(each, state)), key=anchor_sort_key
        )
        anchors = reversed(state.anchors)
        merged = heapq.merge(reversed(news), anchors, key=anchor_sort_key, reverse=True)
        yield from merged if news else anchors
    elif mode == "conversation" and state.conversation_id:
        record = state.anchor(state.previous_response_id)
        if record:
            # The object keeps its items for good: what it holds does not expire.
            yield replace(record, expires_at=None)


def _is_new_candidate(record: AnchorRecord, state: ConversationState) -> bool:
    """Whether a record from elsewhere says more than the state; what the state calls lost is lost."""
    twin = state.find_matching(record)
    return twin is None or (twin != record and twin.status != "lost")


def _choose_anchor(
    candidates: Iterable[AnchorRecord], check: _CandidateCheck
) -> tuple[AnchorRecord | None, tuple[RejectedAnchor, ...]]:
    """The first candidate that holds, and those before it that do not."""
    rejected: list[RejectedAnchor] = []
    for record in candidates:
        reason = check.rejection_reason(record)
        if reason is None:
            return record, tuple(rejected)
        rejected.append(RejectedAnchor(record.response_id, reason, record))
        if reason == "too_deep" and check.matches(record):
            # A shallower ancestor would stay the anchor for good, with an ever longer delta.
            break
    return None, tuple(rejected)
