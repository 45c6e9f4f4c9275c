"""Explain a plan in plain English: what is sent, on which anchor, and why not on a newer one."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kedge._internal.display import format_size, pluralize
from kedge.planning.anchors import REASONS, RejectedAnchor
from kedge.planning.cache_plan import CACHE_HINTS, CachePlan

if TYPE_CHECKING:
    from kedge.planning.plan import RequestPlan

MAX_LISTED = 5
"""The maximum number of rejected candidates and problems that are listed."""

_ADVICE = {
    "expired": "Nothing to do: the full conversation is stored locally and is sent again.",
    "unstored": "Send with store=true, or in stateless mode, if you want the server to remember.",
    "lost": "Nothing to do: the full conversation is stored locally and is sent again.",
    "too_deep": "Nothing to do: the full send starts a new chain.",
    "taken": "Nothing to do: the full send starts a new conversation object.",
    "untrusted": (
        "The server is tried once its token count can show whether it remembers. If you know that it "
        "does, connect with trust='always'."
    ),
}

_CONDITION = (
    "This may change: the request first checks what the server says about itself and what it stores. "
    "`probe_and_plan` does so without sending the request."
)

DOUBT_REASONS = {
    "forgot": "the server answered without the context it was asked to continue",
    "never_stores": "the server does not store responses",
    "reused_ids": "the server issued the same response id twice",
    "no_verdict": "the server's token counts do not show whether it remembers",
    "fails": "the server answered the last chained requests with server errors",
    "unsupported": "the server rejected chaining as unsupported",
}
"""Why a server is not chained on for a while; see ``kedge.evidence.server_evidence``."""
MODE_REASONS = {
    **DOUBT_REASONS,
    "switched_off": "chaining is turned off by ENABLE_RESPONSE_BOUNDARY_TRACKING",
    "never": "this server was connected with trust='never'",
    "stateless_api": "this API stores no responses",
    "prompt": "the request uses a stored prompt, whose messages only the server has",
}

_CACHE_MISSES = {
    "expired": "the last request is too long ago for this provider",
    "settings": "the instructions, the tools or the model changed",
    "edited": "the history changed near its start",
}


def explain(plan: "RequestPlan") -> str:
    """Return a few lines that a user can act on."""
    lines = [format_headline(plan)]
    listed = plan.rejected[:MAX_LISTED]
    lines += [f"Not used: {describe_rejection(candidate, plan)}" for candidate in listed]
    if len(plan.rejected) > MAX_LISTED:
        lines.append(f"Not used: {len(plan.rejected) - MAX_LISTED} more.")
    if plan.conditional:
        lines.append(_CONDITION)
    elif plan.fallback in _ADVICE:
        lines.append(_ADVICE[plan.fallback])
    lines += _describe_omitted(plan)
    if plan.cache:
        lines += _describe_cache(plan, plan.cache)
    lines += [f"Cannot be sent: {problem}." for problem in plan.problems[:MAX_LISTED]]
    if len(plan.problems) > MAX_LISTED:
        lines.append(f"Cannot be sent: {len(plan.problems) - MAX_LISTED} more of these.")
    return "\n".join(lines)


def format_headline(plan: "RequestPlan", *, sizes: bool = True) -> str:
    """Return one sentence with the anchor of the request, its blocks and, before it is sent, about their size."""
    sent = pluralize(plan.delta_blocks, "block")
    full = pluralize(plan.full_blocks, "block")
    if sizes:
        sent_bytes, full_bytes = plan.sizes
        about = "" if plan.body_bytes else "about "
        sent += f", {about}{format_size(sent_bytes)}"
        full += f", {about}{format_size(full_bytes)}"

    if plan.anchor is None:
        reason = plan.mode_reason or plan.reason
        words = describe_full_send(plan.mode, reason, has_candidates=bool(plan.rejected))
        return f"Sending everything ({full}): {words}."

    owner = "the server"
    if plan.conversation_id:
        owner = f"conversation {plan.conversation_id}"
    return f"Chained on {plan.anchor.response_id}: sending {sent}; {owner} has the rest of {full}."


def describe_full_send(mode: str, reason: str, *, has_candidates: bool) -> str:
    """Return why a request without an anchor sends the complete conversation.

    Args:
        mode: The mode of the request.
        reason: The reason of its plan or of its record.
        has_candidates: Whether candidates were rejected.
    """
    if mode == "stateless":
        if reason in MODE_REASONS:
            return f"stateless mode, because {MODE_REASONS[reason]}"
        return "stateless mode"
    if has_candidates:
        return "no stored response matches this history"
    if reason in REASONS:
        return f"the last answer cannot be continued, because {REASONS[reason]}"
    return "the server has no response of this conversation yet"


def describe_rejection(rejected: RejectedAnchor, plan: "RequestPlan") -> str:
    """Return one sentence with the response that is not used, and the reason."""
    record = rejected.record
    sentence = f"{rejected.name}, because {REASONS[rejected.reason]}"
    if rejected.reason != "changed":
        return f"{sentence}."
    if plan.barrier is not None and record.block_count <= plan.barrier:
        return f"{rejected.name}, because a compaction has replaced it."
    if record.block_count > plan.block_count:
        end = ""
        if plan.block_count:
            end = f" (with block {plan.find_position(plan.block_count - 1)})"
        return f"{rejected.name}, because the conversation now ends before it{end}."
    # The anchor matches, so the change is after it.
    start = plan.anchor.block_count if plan.anchor else 0
    first = plan.find_position(start)
    last = plan.find_position(record.block_count - 1)
    return f"{sentence} (somewhere in blocks {first} to {last})."


def _describe_omitted(plan: "RequestPlan") -> Iterator[str]:
    """Describe the blocks of the delta that are not sent."""
    kinds = Counter(
        "reasoning" if block.kind == "reasoning" else "compaction" for block in plan.left_out
    )
    for kind, count in kinds.items():
        yield (
            f"Left out: {pluralize(count, 'block')} of {kind}. It is sent only to the provider that generated "
            "it, and only while the conversation it was generated from is unchanged."
        )


def _describe_cache(plan: "RequestPlan", cache: CachePlan) -> Iterator[str]:
    """Describe the expected use of the prompt cache, and the cost of an edit or a changed setting."""
    if cache.cached_tokens:
        yield (
            f"Prompt cache: about {cache.cached_tokens:,} of {cache.input_tokens:,} input tokens "
            f"({cache.share:.0%}) are expected from the provider's cache."
        )
    elif cache.reason in _CACHE_MISSES:
        yield f"Prompt cache: nothing is expected, because {_CACHE_MISSES[cache.reason]}."
    if cache.reason == "edited":
        first = plan.find_position(cache.intact_blocks)
        yield (
            f"The history changed from block {first} on: about {cache.lost_tokens:,} tokens that "
            "were cached are billed in full again."
        )
    yield from (f"Prevents prompt caching: {CACHE_HINTS[hint]}." for hint in cache.hints)
