"""Witnesses of silent forgetting: a server that answers as if it remembered, and does not.

The first witness is the echo of ``previous_response_id`` when the response starts. The second is the
number of input tokens: about those of the delta, where the Turn holds far more. Many honest things
change that number, so there is no verdict where one of them is at play.
"""

from collections.abc import Mapping
from typing import Any

from kedge.events import ResponseStarted, Usage
from kedge.planning import RequestPlan
from kedge.turns import TextPart, ToolResultBlock, UserBlock

_HONEST = ("truncation", "context_management", "prompt", "reasoning")
"""Parameters that make a server count other tokens than it was sent."""
_MARGIN = 64
"""Tokens that a server may add to a request for its own use."""
_FRAME = 128
"""Bytes of a block's canonical form and frame that are not its text."""
_FAR_MORE = 4_000
"""Bytes of text that the anchor must hold before their absence can be told."""
_LONG_TOKEN = 10
"""Bytes of an unusually long token."""


def forgot_by_echo(started: ResponseStarted, plan: RequestPlan) -> bool:
    """Whether the server says itself that it started from something else."""
    wanted = plan.previous_response_id
    return bool(wanted) and started.echoed and started.previous_response_id != wanted


def forgot_by_usage(usage: Usage | None, plan: RequestPlan, body: Mapping[str, Any]) -> bool:
    """Whether the server counted no more than the delta, where the Turn holds far more."""
    if usage is None or not usage.input_tokens or not plan.anchor:
        return False
    if any(_changes_count(body.get(name)) for name in _HONEST):
        return False
    # A cheap look before the exact one: could all that the anchor holds have gone into so few tokens?
    held = plan.full_blocks - plan.delta_blocks
    held_text = plan.full_bytes - plan.delta_bytes - held * _FRAME
    if held_text < _FAR_MORE or usage.input_tokens * _LONG_TOKEN > held_text:
        return False
    return usage.input_tokens <= _count_delta(plan, body)


def _changes_count(value: object) -> bool:
    return value not in (None, "disabled") and (
        not isinstance(value, Mapping) or "context" in value
    )


def _count_delta(plan: RequestPlan, body: Mapping[str, Any]) -> float:
    """The tokens of what was sent, generously; none where pictures make counting a guess."""
    from kedge.tokens import count_items, count_json, count_text

    spoken = (block for block in plan.delta if isinstance(block, UserBlock | ToolResultBlock))
    if not all(isinstance(part, TextPart) for block in spoken for part in block.parts):
        return 0
    sent = count_items(body["input"]) + count_text(plan.instructions or "")
    tools = body.get("tools")
    return (sent + (count_json(tools) if tools else 0)) * 1.25 + _MARGIN
