"""Plan cards: what a past request sent, on which anchor, and why not on a newer one.

A plan is a pure function of the Turn, so it can be made again: from the Turn as it was before the
request, and from the responses that there were. What was really done stands in the response's own row,
and where the two differ (because a server refused and the request was healed) the row is right.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from kedge.formatting import format_cost, format_duration, format_number, format_percent, pluralize
from kedge.planning import (
    AnchorRecord,
    RejectedAnchor,
    RequestPlan,
    get_state,
    plan_request,
    set_state,
)
from kedge.planning.explain import describe_rejection, format_headline
from kedge.store import ResponseRow, StoredExchange
from kedge.turns import Block, Turn
from kedge.turns.formatting import describe
from kedge.web.views import BlockMark, PlanCard, RawExchange, RejectedCandidate

MAX_REJECTED = 8
"""How many refused candidates are told one by one."""
FOLD_ENDS = 4
"""How many remembered blocks are shown at either end of a long run of them."""
MAX_BODY_CHARS = 200_000
"""Characters of a raw body that are shown."""

HEALING_TEXTS = {
    "gone": "The server no longer knew the response that it was chained on, so everything was sent.",
    "unsupported": "The server does not chain, so everything was sent.",
    "forgot": "The server answered without the memory asked for, so everything was sent.",
    "reasoning": "The server could not read the encrypted reasoning; it was sent again without it.",
    "include": "The model has no encrypted reasoning; it was not asked for again.",
    "empty_input": "The server wants some input, so everything was sent.",
    "conversation": "The conversation object was gone; a new one was begun.",
    "audit": "An audit found that the server remembers something else, so everything was sent.",
}
"""What each healing did, in plain words."""


def rebuild_plan(turn: Turn, row: ResponseRow, records: Iterable[AnchorRecord]) -> RequestPlan:
    """The plan of a past request, made again from the Turn as it was before it."""
    known = [record for record in records if record.created_at < row.created_at]
    mode = row.mode if row.mode in ("chained", "stateless", "conversation") else "chained"
    then = replace(
        get_state(turn), anchors=tuple(_restore_record(r, row) for r in get_state(turn).anchors)
    )
    return plan_request(
        set_state(turn, then),
        scope=row.scope,
        mode=mode,
        now=row.created_at,
        extra=[_restore_record(record, row) for record in known],
    )


def _restore_record(record: AnchorRecord, row: ResponseRow) -> AnchorRecord:
    """A record as it was known then: what this very request was chained on was not lost yet."""
    if record.status == "lost" and record.response_id == row.anchor:
        return replace(record, status="completed")
    return record


def build_plan_card(
    plan: RequestPlan, row: ResponseRow, turn: Turn, exchanges: Sequence[StoredExchange]
) -> PlanCard:
    """The card of a past request."""
    agrees = plan.previous_response_id == row.anchor
    sent = {block.id for block in plan.delta} if agrees else set[str]()
    return PlanCard(
        row,
        format_headline(plan) if agrees else _format_headline(row),
        _build_strip(turn.body, sent) if agrees else (),
        tuple(_to_rejected(each, plan) for each in plan.rejected[:MAX_REJECTED]),
        tuple(_iter_notes(plan, row)),
        tuple(iter_facts(row)),
        tuple(
            RawExchange(_format_body(each.request), _format_body(each.reply), each.status)
            for each in exchanges
        ),
    )


def _format_headline(row: ResponseRow) -> str:
    if row.anchor:
        return f"Chained on {row.anchor}: sending {row.sent_blocks} blocks."
    return f"Sending everything: {row.sent_blocks} blocks."


def _to_rejected(rejected: RejectedAnchor, plan: RequestPlan) -> RejectedCandidate:
    words = describe_rejection(rejected, plan).removeprefix(f"{rejected.response_id}, because ")
    return RejectedCandidate(rejected.response_id, rejected.reason, words)


def _iter_notes(plan: RequestPlan, row: ResponseRow) -> Iterable[str]:
    if len(plan.rejected) > MAX_REJECTED:
        yield f"{len(plan.rejected) - MAX_REJECTED} more were not used."
    if row.healed:
        yield HEALING_TEXTS.get(row.healed, f"It was sent again: {row.healed}.")
    if row.lost_reason:
        yield f"The server has since lost this response ({row.lost_reason})."
    if plan.left_out:
        yield f"Left out: {pluralize(len(plan.left_out), 'block')} of reasoning or compaction."
    for problem in plan.problems[:MAX_REJECTED]:
        yield f"{problem}."


def iter_facts(row: ResponseRow) -> Iterable[tuple[str, str]]:
    """The figures of a response, by name."""
    yield "Model", f"{row.provider}:{row.model}" if row.model else row.provider
    yield "Mode", row.mode
    if row.input_tokens is not None:
        cached = format_percent(row.cached_tokens or 0, row.input_tokens)
        yield "Input", f"{format_number(row.input_tokens)} tokens, {cached} cached"
    if row.output_tokens is not None:
        thought = (
            f", {format_number(row.reasoning_tokens)} to think" if row.reasoning_tokens else ""
        )
        yield "Output", f"{format_number(row.output_tokens)} tokens{thought}"
    yield "First token", format_duration(row.first_token_seconds)
    yield "In all", format_duration(row.seconds)
    if row.cost is not None:
        yield "Cost", format_cost(row.cost)
    if row.depth:
        yield "Depth of the chain", format_number(row.depth)


def _build_strip(blocks: Sequence[Block], sent: set[str]) -> tuple[BlockMark, ...]:
    """A mark for each block; of a long run that the server remembered only the ends."""
    marks: list[BlockMark] = []
    run: list[BlockMark] = []
    for block in blocks:
        mark = BlockMark(block.kind, describe(block), block.id in sent)
        run.append(mark)
        if mark.sent:
            marks += [*_fold_run(run[:-1]), mark]
            run = []
    return (*marks, *_fold_run(run))


def _fold_run(run: list[BlockMark]) -> list[BlockMark]:
    if len(run) <= 2 * FOLD_ENDS + 1:
        return run
    return [*run[:FOLD_ENDS], BlockMark(folded=len(run) - 2 * FOLD_ENDS), *run[-FOLD_ENDS:]]


def _format_body(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):  # a stream of events, or cut at the store's bound
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return text if len(text) <= MAX_BODY_CHARS else f"{text[:MAX_BODY_CHARS]}\n…"
