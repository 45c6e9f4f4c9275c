"""Plan cards: what a past request sent, on which anchor, and why not on a newer one.

A plan is a pure function of the Turn, so it can be made again: from the Turn as it was before the
request, and from the responses that there were. What was really done stands in the response's own row,
and where the two differ (because a server refused and the request was healed) the row is right.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from kedge.planning import AnchorRecord, Rejected, RequestPlan, get_state, plan_request, set_state
from kedge.planning.explain import headline, refusal
from kedge.store import Exchange, ResponseRow
from kedge.turns import Block, Turn
from kedge.turns.show import describe
from kedge.web.views import BlockMark, PlanCard, RawExchange, Refused
from kedge.web.words import duration, money, number, plural, share

REFUSED = 8
"""How many refused candidates are told one by one."""
ENDS = 4
"""How many remembered blocks are shown at either end of a long run of them."""
RAW = 200_000
"""Characters of a raw body that are shown."""

HEALED = {
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


def plan_again(turn: Turn, row: ResponseRow, others: Iterable[AnchorRecord]) -> RequestPlan:
    """The plan of a past request, made again from the Turn as it was before it."""
    known = [record for record in others if record.created_at < row.created_at]
    mode = row.mode if row.mode in ("chained", "stateless", "conversation") else "chained"
    then = replace(get_state(turn), anchors=tuple(_as_of(r, row) for r in get_state(turn).anchors))
    return plan_request(
        set_state(turn, then),
        scope=row.scope,
        mode=mode,
        now=row.created_at,
        extra=[_as_of(record, row) for record in known],
    )


def _as_of(record: AnchorRecord, row: ResponseRow) -> AnchorRecord:
    """A record as it was known then: what this very request was chained on was not lost yet."""
    if record.status == "lost" and record.response_id == row.anchor:
        return replace(record, status="completed")
    return record


def card_of(plan: RequestPlan, row: ResponseRow, turn: Turn, raw: Sequence[Exchange]) -> PlanCard:
    """The card of a past request."""
    agrees = plan.previous_response_id == row.anchor
    sent = {block.id for block in plan.delta} if agrees else set[str]()
    return PlanCard(
        row,
        headline(plan) if agrees else _told(row),
        _strip(turn.body, sent) if agrees else (),
        tuple(_refused(each, plan) for each in plan.rejected[:REFUSED]),
        tuple(_notes(plan, row)),
        tuple(facts_of(row)),
        tuple(RawExchange(_raw(each.request), _raw(each.reply), each.status) for each in raw),
    )


def _told(row: ResponseRow) -> str:
    if row.anchor:
        return f"Chained on {row.anchor}: sending {row.sent_blocks} blocks."
    return f"Sending everything: {row.sent_blocks} blocks."


def _refused(rejected: Rejected, plan: RequestPlan) -> Refused:
    words = refusal(rejected, plan).removeprefix(f"{rejected.response_id}, because ")
    return Refused(rejected.response_id, rejected.reason, words)


def _notes(plan: RequestPlan, row: ResponseRow) -> Iterable[str]:
    if len(plan.rejected) > REFUSED:
        yield f"{len(plan.rejected) - REFUSED} more were not used."
    if row.healed:
        yield HEALED.get(row.healed, f"It was sent again: {row.healed}.")
    if row.lost_reason:
        yield f"The server has since lost this response ({row.lost_reason})."
    if plan.left_out:
        yield f"Left out: {plural(len(plan.left_out), 'block')} of reasoning or compaction."
    for problem in plan.problems[:REFUSED]:
        yield f"{problem}."


def facts_of(row: ResponseRow) -> Iterable[tuple[str, str]]:
    """The figures of a response, by name."""
    yield "Model", f"{row.provider}:{row.model}" if row.model else row.provider
    yield "Mode", row.mode
    if row.input_tokens is not None:
        cached = share(row.cached_tokens or 0, row.input_tokens)
        yield "Input", f"{number(row.input_tokens)} tokens, {cached} cached"
    if row.output_tokens is not None:
        thought = f", {number(row.reasoning_tokens)} to think" if row.reasoning_tokens else ""
        yield "Output", f"{number(row.output_tokens)} tokens{thought}"
    yield "First token", duration(row.first_token_seconds)
    yield "In all", duration(row.seconds)
    if row.cost is not None:
        yield "Cost", money(row.cost)
    if row.depth:
        yield "Depth of the chain", number(row.depth)


def _strip(blocks: Sequence[Block], sent: set[str]) -> tuple[BlockMark, ...]:
    """A mark for each block; of a long run that the server remembered only the ends."""
    marks: list[BlockMark] = []
    run: list[BlockMark] = []
    for block in blocks:
        mark = BlockMark(block.kind, describe(block), block.id in sent)
        run.append(mark)
        if mark.sent:
            marks += [*_folded(run[:-1]), mark]
            run = []
    return (*marks, *_folded(run))


def _folded(run: list[BlockMark]) -> list[BlockMark]:
    if len(run) <= 2 * ENDS + 1:
        return run
    return [*run[:ENDS], BlockMark(folded=len(run) - 2 * ENDS), *run[-ENDS:]]


def _raw(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):  # a stream of events, or cut at the store's bound
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return text if len(text) <= RAW else f"{text[:RAW]}\n…"
