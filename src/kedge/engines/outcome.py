"""Record a finished response in the Turn as blocks and an anchor, or raise an error with the partial content."""

from kedge.engines.http_errors import is_permanent_failure
from kedge.errors import AnswerIncomplete, EngineError, ServerFailed, StreamCut
from kedge.events import Outcome
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan, Status, TokenCounts, record_response, tag_blocks
from kedge.turns import Turn

log = get_logger("kedge.engines.outcome")


def record_outcome(
    turn: Turn,
    outcome: Outcome,
    plan: RequestPlan,
    *,
    now: float,
    stored: bool,
    retention: float | None,
    conversation_id: str = "",
    lost: bool = False,
    reused: bool = False,
    stateful: bool = True,
    counted: TokenCounts | None = None,
) -> Turn:
    """Return the Turn with the blocks of the response, and with its anchor if the response can be one.

    Of a response that the server generates in the background only the id is recorded. ``lost`` means that the
    server's context differs from the Turn, ``stateful`` that the API stores responses at all.
    """
    if outcome.status not in ("completed", "incomplete", "running"):
        return turn
    is_running = outcome.status == "running"
    blocks = outcome.blocks if outcome.completed else outcome.whole_blocks
    problem = "" if is_running else _find_anchor_problem(outcome, reused=reused)
    if stateful and not is_running:
        problem = problem or outcome.anchor_problem
    if problem:
        if stateful:
            log.warning("no anchor: %s", problem, response_id=outcome.response_id, turn_id=turn.id)
            count("responses_without_id_total")
        return turn.append(*tag_blocks(blocks, outcome.response_id)) if blocks else turn
    status: Status = "running" if is_running else "incomplete"
    if outcome.completed:
        status = "lost" if lost else "completed"
    log.debug("the response is %s", status, response_id=outcome.response_id)
    return record_response(
        turn,
        () if is_running else blocks,
        response_id=outcome.response_id,
        plan=plan,
        created_at=now,
        status=status,
        stored=stored,
        retention=retention,
        conversation_id=conversation_id,
        head=stateful,
        counted=counted,
    )


def raise_for_outcome(
    outcome: Outcome, provider: str, turn: Turn, cut: StreamCut | None = None
) -> None:
    """Raise unless the response is complete, or continues in the background.

    ``cut`` is the error that ended its connection, if any.
    """
    error: EngineError
    match outcome.status:
        case "completed" | "running":
            return
        case "incomplete":
            message = f"the response stopped before its end ({outcome.reason or 'no reason given'})"
            error = AnswerIncomplete(message, provider=provider, code=outcome.reason)
        case "failed":
            message = outcome.message or "the server reported a failure"
            retryable = not is_permanent_failure(outcome.code, message)
            error = ServerFailed(message, provider=provider, code=outcome.code, retryable=retryable)
        case "cut":
            message = "the stream ended before the response was complete; the Turn is unchanged"
            error = cut or StreamCut(message, provider=provider, retryable=True)
    error.turn = turn
    error.partial = outcome.blocks
    error.response_id, error.usage = outcome.response_id, outcome.usage
    raise error


def _find_anchor_problem(outcome: Outcome, *, reused: bool) -> str:
    if not outcome.response_id:
        return "the response came without an id"
    if reused:
        return "the response came with the id of an earlier one"
    return "" if outcome.blocks else "the answer is empty"
