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
from kedge.planning.anchors import AnchorRecord, Reason, Rejected, proves, unusable
from kedge.planning.calls import Problem
from kedge.planning.ledger import Ledger, ledger_of
from kedge.planning.proof import barrier_of, conversation_scope, proved
from kedge.planning.render import build_input_from_blocks, instructions_of, left_out
from kedge.planning.state import ConversationState, Mode, by_reach, get_state
from kedge.turns import Block, ReasoningBlock, Turn
from kedge.turns.wire import Item


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The decision for one request."""

    mode: Mode
    scope: str
    anchor: AnchorRecord | None
    delta: tuple[Block, ...]
    """The blocks that are sent: those after the anchor, or all of them."""
    rejected: tuple[Rejected, ...]
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
        return left_out(self.delta, self.intact, unsealed=self.unsealed)

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
    unsealed: bool = False,
) -> RequestPlan:
    """Decide what to send for this Turn to this scope. Pure; never raises.

    ``extra`` are candidates from elsewhere, such as a store's index or a live socket. ``max_depth`` is
    how many responses of a chain the server is known to remember. ``unsealed`` tells of a server that
    wants its reasoning back although it does not seal it.
    """
    ledger, state = ledger_of(turn), get_state(turn)
    length = len(turn.blocks) - turn.lead
    barrier = barrier_of(turn, scope, state)
    first = barrier or 0
    question = _Question(
        ledger,
        covered=ledger.count(length),
        barrier=None if barrier is None else ledger.count(barrier),
        scope=conversation_scope(scope, state.conversation_id) if mode == "conversation" else scope,
        now=now,
        max_depth=None if mode == "conversation" else max_depth,
    )
    anchor, rejected = _choose(_candidates(mode, state, extra), question)
    start = ledger.end(anchor.block_count) if anchor else first
    return RequestPlan(
        mode=mode,
        scope=scope,
        anchor=anchor,
        delta=turn.blocks[turn.lead + start :],
        rejected=rejected,
        problems=find_problems(turn, first),
        full_blocks=length - first,
        full_bytes=ledger.weight(first, length),
        delta_bytes=ledger.weight(start, length),
        instructions=instructions_of(turn),
        conversation_id=state.conversation_id if mode == "conversation" and anchor else "",
        intact=proved(turn, start, scope, state, barrier),
        unsealed=unsealed,
        barrier=question.barrier,
        digest=ledger.digest(question.covered),
        block_count=question.covered,
        planned_at=now,
    )


def find_problems(turn: Turn, first: int = 0) -> tuple[Problem, ...]:
    """What stands in the way of sending the Turn's body, from position ``first`` on."""
    return ledger_of(turn).problems(turn.blocks, turn.lead, first)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of a candidate: to prove, and to be there for the asking."""

    ledger: Ledger
    covered: int
    barrier: int | None
    scope: str
    now: float
    max_depth: int | None

    def refusal(self, record: AnchorRecord) -> Reason | None:
        """Why this record is no anchor; ``None`` if it is one."""
        reason = unusable(record, scope=self.scope, now=self.now, max_depth=self.max_depth)
        if reason or record.block_count <= 0:
            return reason or "unproven"
        # What a server remembers from before the newest compaction is not what we would send.
        stands = record.barrier == self.barrier and proves(record, self.ledger, self.covered)
        return None if stands else "changed"


def _candidates(
    mode: Mode, state: ConversationState, extra: Iterable[AnchorRecord]
) -> Iterator[AnchorRecord]:
    """The records that may be tried, longest prefix first, then the newest."""
    if mode == "chained":
        news = sorted((each for each in extra if _is_news(each, state)), key=by_reach)
        anchors = reversed(state.anchors)
        merged = heapq.merge(reversed(news), anchors, key=by_reach, reverse=True)
        yield from merged if news else anchors
    elif mode == "conversation" and state.conversation_id:
        record = state.anchor(state.previous_response_id)
        if record:
            # The object keeps its items for good: what it holds does not expire.
            yield replace(record, expires_at=None)


def _is_news(record: AnchorRecord, state: ConversationState) -> bool:
    """Whether a record from elsewhere says more than the state; what the state calls lost is lost."""
    twin = state.twin(record)
    return twin is None or (twin != record and twin.status != "lost")


def _choose(
    candidates: Iterable[AnchorRecord], question: _Question
) -> tuple[AnchorRecord | None, tuple[Rejected, ...]]:
    """The first candidate that holds, and those before it that do not."""
    rejected: list[Rejected] = []
    for record in candidates:
        reason = question.refusal(record)
        if reason is None:
            return record, tuple(rejected)
        rejected.append(Rejected(record.response_id, reason, record))
    return None, tuple(rejected)
