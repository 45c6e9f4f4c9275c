"""Build plan cards: the blocks that a past request sent, its anchor, and why newer candidates were rejected.

A plan is a pure function of the Turn, so it can be recomputed from the Turn as it was before the request
and the responses at that time. The response's row records the request as it was sent; where the two differ
(because the request was healed) the row is correct.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kedge.events.request_record import MAX_REJECTED, RejectedCandidate
from kedge.planning import (
    AnchorRecord,
    RequestPlan,
    get_state,
    plan_request,
    set_state,
)
from kedge.planning.explain import describe_full_send
from kedge.planning.reusable_items import base_scope, get_conversation_id
from kedge.store import RequestRecord, StoredExchange
from kedge.text.display import (
    HEALING_TEXTS,
    LOST_TEXTS,
    capitalize,
    format_cost,
    format_duration,
    format_number,
    format_percent,
    format_size,
    pluralize,
)
from kedge.turns import Block, Turn
from kedge.turns.text_format import describe
from kedge.web.schemas import RejectedShape
from kedge.web.transcript import indent_json
from kedge.web.views import BlockMark, PlanCard, RawExchange

FOLD_ENDS = 4
"""The number of unsent blocks shown at either end of a long run of them."""
MAX_BODY_CHARS = 200_000
"""The maximum number of characters shown of a raw body."""


def rebuild_plan(turn: Turn, row: RequestRecord, records: Iterable[AnchorRecord]) -> RequestPlan:
    """Recompute the plan of a past request from the Turn as it was before it."""
    earlier = [record for record in records if record.created_at < row.created_at]
    mode = row.mode if row.mode in ("chained", "stateless", "conversation") else "chained"
    state = replace(
        get_state(turn), anchors=tuple(_restore_record(r, row) for r in get_state(turn).anchors)
    )
    return plan_request(
        set_state(turn, state),
        scope=base_scope(row.scope),
        mode=mode,
        now=row.created_at,
        extra=[_restore_record(record, row) for record in earlier],
    )


def _restore_record(record: AnchorRecord, row: RequestRecord) -> AnchorRecord:
    """Return a record as it was at the time of the request, when its anchor was not lost yet."""
    if record.status == "lost" and record.response_id == row.anchor:
        return replace(record, status="completed")
    return record


def build_plan_card(
    plan: RequestPlan,
    row: RequestRecord,
    turn: Turn,
    exchanges: Sequence[StoredExchange],
    changed: str = "",
) -> PlanCard:
    """Build the card of a past request; ``changed`` names the block that broke the chain."""
    agrees = plan.anchor_id == row.anchor
    sent = {block.id for block in plan.delta} if agrees else set[str]()
    return PlanCard(
        row,
        describe_request_size(row),
        _format_headline(row, describe_full_send(plan) if agrees else ""),
        changed,
        _build_strip(turn.body, sent, {block.id for block in plan.left_out}) if agrees else (),
        tuple(map(_to_rejected, row.rejected)),
        tuple(_iter_notes(plan, row)),
        tuple(iter_facts(row)),
        tuple(
            RawExchange(format_body(each.request), format_body(each.reply), each.status)
            for each in exchanges
        ),
    )


def describe_request_size(row: RequestRecord) -> str:
    """Return one sentence about the messages that were sent and those that the server already had."""
    if not row.anchor:
        total = row.sent_blocks + row.saved_blocks
        return f"Sent {'all ' if total > 1 else ''}{pluralize(total, 'message')}."
    sent = pluralize(row.sent_blocks, "new message") if row.sent_blocks else "no new message"
    if not row.saved_blocks:
        return f"Sent {sent}."
    rest = f"the other {row.saved_blocks:,}" if row.sent_blocks else f"all {row.saved_blocks:,}"
    return f"Sent {sent}; the server already had {rest}."


def _format_headline(row: RequestRecord, reason: str) -> str:
    sent = f"{pluralize(row.sent_blocks, 'block')}, {format_size(row.request_size)}"
    if row.anchor:
        return f"Chained on {row.anchor}: sent {sent}."
    return f"Sent in full ({sent}){f': {reason}' if reason else ''}."


def _to_rejected(rejected: RejectedCandidate) -> RejectedShape:
    text = rejected.words.removeprefix(f"{rejected.response_id}, because ")
    return RejectedShape(response_id=rejected.response_id, reason=rejected.reason, words=text)


def _iter_notes(plan: RequestPlan, row: RequestRecord) -> Iterable[str]:
    if len(plan.rejected) > MAX_REJECTED:
        yield f"{len(plan.rejected) - MAX_REJECTED} more candidates were rejected."
    if row.healed:
        yield f"{capitalize(HEALING_TEXTS.get(row.healed, f'resent: {row.healed}'))}."
    if row.lost_reason:
        yield f"Later requests cannot use it: {LOST_TEXTS.get(row.lost_reason, row.lost_reason)}."
    if plan.left_out:
        yield f"Left out: {pluralize(len(plan.left_out), 'block')} of reasoning or compaction."
    for problem in plan.problems[:MAX_REJECTED]:
        yield f"{problem}."


def iter_facts(row: RequestRecord) -> Iterable[tuple[str, str]]:
    """Yield the figures of a response as labels and values."""
    yield "Model", f"{row.provider}:{row.model}" if row.model else row.provider
    yield "Mode", row.mode
    if object_id := get_conversation_id(row.scope):
        yield "Conversation object", object_id
    full = format_size(row.full_size)
    suffix = "" if row.request_bytes is not None else ", without tools and settings"
    yield "Request size", f"{format_size(row.request_size)} instead of {full}{suffix}"
    if row.input_tokens is not None:
        cached = format_percent(row.cached_tokens or 0, row.input_tokens)
        predicted = row.predicted_cached_tokens
        note = f" ({format_number(predicted)} tokens predicted)" if predicted else ""
        yield "Input", f"{format_number(row.input_tokens)} tokens, {cached} cached{note}"
    if row.output_tokens is not None:
        reasoning = (
            f", {format_number(row.reasoning_tokens)} for reasoning" if row.reasoning_tokens else ""
        )
        yield "Output", f"{format_number(row.output_tokens)} tokens{reasoning}"
    yield "First token", format_duration(row.first_token_seconds)
    yield "Total time", format_duration(row.seconds)
    if row.cost is not None:
        yield "Cost", format_cost(row.cost)
    if row.depth:
        yield "Chain depth", format_number(row.depth)


def _build_strip(
    blocks: Sequence[Block], delta: set[str], omitted: set[str]
) -> tuple[BlockMark, ...]:
    """Return a mark for each block; long runs of blocks that the server had are folded."""
    marks: list[BlockMark] = []
    run: list[BlockMark] = []
    for block in blocks:
        is_omitted = block.id in omitted
        is_sent = block.id in delta and not is_omitted
        mark = BlockMark(block.kind, describe(block), is_sent, omitted=is_omitted)
        run.append(mark)
        if block.id in delta:
            marks += [*_fold_run(run[:-1]), mark]
            run = []
    return (*marks, *_fold_run(run))


def _fold_run(run: list[BlockMark]) -> list[BlockMark]:
    if len(run) <= 2 * FOLD_ENDS + 1:
        return run
    return [*run[:FOLD_ENDS], BlockMark(folded=len(run) - 2 * FOLD_ENDS), *run[-FOLD_ENDS:]]


def format_body(body: bytes) -> str:
    """Return a raw body as text, with its JSON indented."""
    text = indent_json(body.decode("utf-8", "replace"))
    return text if len(text) <= MAX_BODY_CHARS else f"{text[:MAX_BODY_CHARS]}\n…"
