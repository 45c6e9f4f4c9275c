"""Convert conversations, nodes, requests and replies to their JSON form, for the API and for ``--json``."""

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from kedge.planning.explain import describe_full_send, describe_rejection
from kedge.store import ConversationRow, Node, RequestRecord
from kedge.store.summaries import ConversationSummary
from kedge.text.display import HEALING_TEXTS, LOST_TEXTS, capitalize, format_size, pluralize
from kedge.web.schemas import (
    ConversationShape,
    NodeShape,
    OverviewShape,
    PlanShape,
    RejectedShape,
    ResponseShape,
    TurnShape,
)

if TYPE_CHECKING:
    from kedge.conversation import Reply
    from kedge.planning import RequestPlan

EXPIRING_SECONDS = 86_400.0
"""Seconds before its expiry from which a conversation is shown as expiring."""


def shape_conversation(row: ConversationRow) -> ConversationShape:
    """Return the form of a conversation."""
    return ConversationShape.model_validate(row)


def shape_overview(summary: ConversationSummary, status: str) -> OverviewShape:
    """Return the form of a conversation with its totals."""
    totals = {each.name: getattr(summary, each.name) for each in fields(summary)}
    own = {name: getattr(summary.row, name) for name in ConversationShape.model_fields}
    return OverviewShape.model_validate({**totals, **own, "status": status})


def shape_node(
    node: Node, response: RequestRecord | None, *, parent: int, label: str, marks: list[str]
) -> NodeShape:
    """Return the form of a node; ``parent`` is the node before it among those that are shown."""
    return NodeShape(
        node=node.id,
        parent=parent,
        kind=node.kind,
        label=label,
        marks=sorted(marks),
        created_at=node.created_at,
        response=ResponseShape.model_validate(response) if response else None,
    )


def shape_plan(plan: "RequestPlan") -> PlanShape:
    """Return the form of a plan."""
    sent_bytes, full_bytes = plan.sizes
    return PlanShape(
        mode=plan.mode,
        anchor=plan.anchor_id,
        reason=plan.reason,
        sent_blocks=plan.delta_blocks,
        full_blocks=plan.full_blocks,
        sent_bytes=sent_bytes,
        full_bytes=full_bytes,
        conditional=plan.conditional,
        rejected=[
            RejectedShape(
                response_id=each.response_id,
                reason=each.reason,
                words=describe_rejection(each, plan),
            )
            for each in plan.rejected
        ],
        problems=[str(problem) for problem in plan.problems],
        explanation=plan.explain(),
    )


def shape_request(row: RequestRecord) -> PlanShape:
    """Return the form of the plan of a request that was sent."""
    return PlanShape(
        mode=row.mode,
        anchor=row.anchor,
        reason=row.reason,
        sent_blocks=row.sent_blocks,
        full_blocks=row.full_blocks,
        sent_bytes=row.sent_bytes,
        full_bytes=row.full_bytes,
        rejected=[RejectedShape.model_validate(each) for each in row.rejected],
        problems=[],
        explanation="\n".join((format_headline(row), *iter_notes(row))),
    )


def format_headline(row: RequestRecord) -> str:
    """Return one sentence with the anchor and the size of a request, and why everything was sent."""
    sent = f"{pluralize(row.sent_blocks, 'block')}, {format_size(row.sent_bytes)}"
    if row.anchor:
        return f"Chained on {row.anchor}: sent {sent}."
    reason = describe_full_send(row.mode, row.reason, has_candidates=bool(row.rejected))
    return f"Sent in full ({sent}){f': {reason}' if reason else ''}."


def iter_notes(row: RequestRecord) -> Iterable[str]:
    """Yield further sentences about a request."""
    if row.more_rejected:
        yield f"Also rejected: {pluralize(row.more_rejected, 'more candidate')}."
    if row.healed:
        yield f"{capitalize(HEALING_TEXTS.get(row.healed, f'resent: {row.healed}'))}."
    if row.lost_reason:
        yield f"Later requests cannot use it: {LOST_TEXTS.get(row.lost_reason, row.lost_reason)}."
    if row.omitted:
        yield f"Left out: {pluralize(len(row.omitted), 'block')} of reasoning or compaction."


def shape_reply(reply: "Reply") -> TurnShape:
    """Return the form of a reply."""
    members = {name: getattr(reply, name) for name in TurnShape.model_fields}
    plan = shape_plan(reply.plan) if reply.plan else None
    return TurnShape.model_validate({**members, "plan": plan})


def overview_status(summary: ConversationSummary, now: float) -> str:
    """Return the status of a conversation: the first that applies.

    Returns:
        ``archived``, ``pending``, ``cancelled``, ``failed``, ``lost``, ``expired``, ``expiring`` or ``active``.
    """
    until = summary.relied_until
    if summary.row.archived:
        return "archived"
    if summary.unanswered:
        return summary.unanswered
    if summary.lost and summary.expires_at is None:
        return "lost"
    if until is None or now < until - EXPIRING_SECONDS:
        return "active"
    return "expired" if now >= until else "expiring"
