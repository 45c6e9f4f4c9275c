"""Decide why a request sends the complete conversation, and whether that is a fallback.

A fallback is a request in chained or conversation mode, or one that was forced out of it, that sends blocks which an
earlier answer of the same server covered. Events, metrics, spans, the rows of a store and all views use this decision.
"""

from typing import TYPE_CHECKING

from kedge.planning.anchors import Reason
from kedge.planning.reusable_items import ENGINE_ORIGIN, base_scope
from kedge.planning.state import get_state
from kedge.turns import Turn

if TYPE_CHECKING:
    from kedge.planning.plan import RequestPlan

NOT_FALLBACK_REASONS = ("new", "stateless", "conversation")
"""Reasons for a full request that is no fallback: the server has not answered yet, or chaining is not wanted."""
CHOSEN_MODE_REASONS = ("switched_off", "never")
"""Reasons for another mode than the requested one that are settings: such a request is meant to be stateless."""


def is_fallback_reason(reason: str) -> bool:
    """Return whether a full request with this reason is a fallback."""
    return reason not in ("", *NOT_FALLBACK_REASONS)


def name_send(reason: str) -> str:
    """Return the name that all views use for a request with this reason of a full send.

    Returns:
        ``chained`` without a reason, ``new chain`` for the first request to a server, ``stateless`` where chaining is
        not wanted, and ``sent in full`` for a fallback.
    """
    if is_fallback_reason(reason):
        return "sent in full"
    return {"": "chained", "stateless": "stateless"}.get(reason, "new chain")


def find_full_send_reason(plan: "RequestPlan") -> str:
    """Return why a plan sends everything; empty if it has an anchor."""
    if plan.anchor is not None:
        return ""
    is_forced = plan.mode_reason not in ("", *CHOSEN_MODE_REASONS)
    if plan.mode == "stateless" and not is_forced:
        return "stateless"
    unused = _find_unused_answer(plan)
    if unused is None:
        return "new" if plan.mode == "chained" else plan.mode
    return plan.mode_reason if is_forced else unused


def _find_unused_answer(plan: "RequestPlan") -> Reason | None:
    """Return why the newest answer of the same server is not used; None if there is none."""
    scope = base_scope(plan.scope)
    for each in plan.rejected:
        if base_scope(each.record.scope) == scope:
            return each.reason
    if not isinstance(plan.source, Turn):
        return None
    anchors = get_state(plan.source).anchors
    if any(base_scope(record.scope) == scope for record in reversed(anchors)):
        return "scope"
    known = {record.response_id for record in anchors}
    for block in reversed(plan.delta):
        if block.origin == ENGINE_ORIGIN and block.response_id not in known:
            return "unproven" if block.response_id else "no_id"
    return None
