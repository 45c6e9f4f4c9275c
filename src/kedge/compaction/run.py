"""Run a compactor so that neither a failure nor a wrong result affects the conversation.

A compactor is the caller's code and may send requests. If it raises, or leaves a call without its result,
its result is not used: the conversation continues uncompacted, with a note.
"""

from dataclasses import replace
from operator import is_

from kedge.compaction.base import (
    CompactionRequest,
    CompactionResult,
    Compactor,
    Occasion,
    component_name,
    unchanged_result,
)
from kedge.engines import Engine
from kedge.engines.content_filter import ContentFilters, Phase
from kedge.errors import Blocked
from kedge.events import Usage
from kedge.observe import count, get_logger
from kedge.planning import find_problems, get_state
from kedge.planning.record import drop_changed_anchors
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import SystemBlock, Turn, diff

log = get_logger("kedge.compaction.run")

_PHASES: dict[Occasion, tuple[Phase, ...]] = {
    "answered": ("output", "input"),  # it is from a model, and may be sent to another
    "pending": ("input",),
    "resend": ("input",),
}


async def run_compactor(compactor: Compactor, request: CompactionRequest) -> CompactionResult:
    """Run a compactor. If it fails or its result is invalid, nothing is changed.

    Args:
        compactor: The compactor.
        request: The conversation to compact.

    Returns:
        The result, or an unchanged one with a note.
    """
    by = component_name(compactor)
    try:
        result = await compactor.compact(request)
        defect = _find_defect(request, result)
    except Exception as error:  # the caller's code; the answer must not be lost
        log.debug("compaction failed", exc_info=error)
        defect = type(error).__name__
        result = None
    if result is not None and not defect:
        return result
    log.warning("compaction failed, the conversation is unchanged: %s by %s", defect, by)
    count("compactions_total", by=by, outcome="failed")
    return unchanged_result(request, by, f"{by} failed ({defect}); nothing was changed")


async def compact_turn(
    turn: Turn,
    compactor: Compactor,
    *,
    engine: Engine | None = None,
    usage: Usage | None = None,
    counter: TokenCounter = DEFAULT_COUNTER,
    occasion: Occasion = "answered",
    filters: ContentFilters | None = None,
) -> tuple[Turn, CompactionResult]:
    """Run a compactor on a Turn. If the compactor fails, the Turn is unchanged.

    Args:
        turn: The Turn to compact.
        compactor: The compactor, which decides whether and how.
        engine: The engine that a compactor may send requests to.
        usage: The usage that the server reported with the last answer.
        counter: The token counter to use if the server did not report usage.
        occasion: When compaction runs.
        filters: The content filters of the stack: a compactor may send content to a model or have a
            provider count it, so it receives the filtered Turn, and its result is filtered again.

    Returns:
        The Turn to continue with, and the result.

    Raises:
        Blocked: A content filter rejects the Turn.
    """
    filters = filters or ContentFilters()
    original, turn = turn, filters.apply_to_turn(turn, _PHASES[occasion])
    request = CompactionRequest(
        turn.body,
        turn.leading,
        usage=usage,
        engine=engine,
        counter=counter,
        occasion=occasion,
        state=get_state(turn),
    )
    result = _filter_result(request, await run_compactor(compactor, request), filters)
    record_result(result, occasion, turn.id)
    if not result.changed:
        return original, result
    blocks = (*turn.leading, *result.blocks)
    short = Turn(blocks, id=turn.id, data=turn.data, extra=turn.extra)
    return drop_changed_anchors(short), result  # a cut cannot be undone


def _filter_result(
    request: CompactionRequest, result: CompactionResult, filters: ContentFilters
) -> CompactionResult:
    """Return the result with what the compactor added filtered; unchanged if that is rejected.

    The other blocks were filtered before, as the occasion requires. The answer that comes before a compaction
    is complete and paid for: a summary that a guard rejects must not make it an error.
    """
    known = {id(block) for block in request.blocks}
    try:
        blocks = tuple(
            block if id(block) in known else filters.apply(block) for block in result.blocks
        )
    except Blocked as error:
        note = f"a guard rejected its result ({error.rule}); nothing was changed"
        return replace(unchanged_result(request, result.by, note), usage=result.usage)
    if all(map(is_, blocks, result.blocks)):
        return result
    return replace(result, blocks=blocks, changes=diff(Turn(request.blocks), Turn(blocks)))


def record_result(result: CompactionResult, occasion: Occasion, turn_id: str) -> None:
    """Log and count the result of a compaction."""
    if result.changed:
        count("compactions_total", by=result.by, outcome="compacted")
        count("compaction_blocks_removed_total", len(result.removed))
        saved = max(0, (result.tokens_before or 0) - (result.tokens_after or 0))
        count("compaction_tokens_saved_total", saved)
        log.info("%s (%s)", str(result), occasion, turn_id=turn_id)
    elif result.notes:
        count("compactions_total", by=result.by, outcome="refused")
        log.warning("%s (%s)", str(result), occasion, turn_id=turn_id)


def _find_defect(request: CompactionRequest, result: CompactionResult) -> str:
    """Return the problem of a result: calls or results that lost their counterpart."""
    if not result.changed:
        return ""
    if not result.blocks or isinstance(result.blocks[0], SystemBlock):
        return "it left nothing, or a leading system block"
    before, after = (
        {(problem.kind, problem.call_id) for problem in find_problems(Turn(blocks))}
        for blocks in (request.blocks, result.blocks)
    )
    new = after - before
    return f"it left {len(new)} calls or results unpaired" if new else ""
