"""What becomes of an answer: blocks and an anchor in the Turn, or an error that loses nothing."""

import re

from kedge.errors import AnswerIncomplete, EngineError, ServerFailed, StreamCut
from kedge.events import Outcome
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan, Status, get_state, record_response, tag_blocks
from kedge.turns import Turn

log = get_logger(__name__)

_FINAL = re.compile(
    r"^(invalid|unsupported|empty|image)_|policy|content_filter|moderation|_not_found|quota|billing"
    r"|context_length|_too_(large|small|long)|max_tokens"
)
"""Codes of failures that lie in the request or the account: sent again, it would fail again."""


def taken_down(
    turn: Turn,
    outcome: Outcome,
    plan: RequestPlan,
    *,
    now: float,
    stored: bool,
    retention: float | None,
    conversation_id: str = "",
    lost: bool = False,
    remembered: bool = True,
) -> Turn:
    """The Turn with the answer's blocks; its response becomes an anchor only if it can be one.

    ``lost`` tells that what the server remembers is not what the Turn says, ``remembered`` whether the
    API has a memory at all.
    """
    blocks = outcome.blocks if outcome.completed else outcome.whole_blocks
    if outcome.status not in ("completed", "incomplete"):
        return turn
    flaw = _flaw(turn, outcome)
    if flaw:
        if remembered:
            log.warning("no anchor: %s", flaw, response_id=outcome.response_id, turn_id=turn.id)
            count("responses_without_id_total")
        return turn.append(*tag_blocks(blocks, outcome.response_id)) if blocks else turn
    status: Status = "incomplete"
    if outcome.completed:
        status = "lost" if lost else "completed"
    log.trace("tagging %d blocks", len(blocks), response_id=outcome.response_id)
    return record_response(
        turn,
        blocks,
        response_id=outcome.response_id,
        plan=plan,
        created_at=now,
        status=status,
        stored=stored,
        retention=retention,
        conversation_id=conversation_id,
        head=remembered,
    )


def raise_for(outcome: Outcome, provider: str, turn: Turn, broken: StreamCut | None = None) -> None:
    """Raise unless the answer is whole; ``broken`` tells how its connection ended, if badly."""
    error: EngineError
    match outcome.status:
        case "completed":
            return
        case "incomplete":
            words = f"the answer stopped before its end ({outcome.reason or 'no reason given'})"
            error = AnswerIncomplete(words, provider=provider, code=outcome.reason)
        case "failed":
            words = outcome.message or "the server gave up on the response"
            retryable = not _FINAL.search(outcome.code)
            error = ServerFailed(words, provider=provider, code=outcome.code, retryable=retryable)
        case "cut":
            words = "the stream ended before the answer did; nothing of the Turn is lost"
            error = broken or StreamCut(words, provider=provider, retryable=True)
    error.turn = turn
    error.partial = outcome.blocks
    raise error


def carrying(error: EngineError, turn: Turn, plan: RequestPlan) -> EngineError:
    """The error with the Turn to go on from and the plan, unless it has them."""
    error.plan = error.plan or plan
    error.turn = error.turn or turn
    return error


def _flaw(turn: Turn, outcome: Outcome) -> str:
    if not outcome.response_id:
        return "the response came without an id"
    if get_state(turn).anchor(outcome.response_id):
        return "the response came with the id of an earlier one"
    return "" if outcome.blocks else "the answer is empty"
