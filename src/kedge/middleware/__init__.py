"""Middleware wraps an Engine and is an Engine. The first middleware of a stack is the outermost."""

from kedge.engines.stack import BaseMiddleware, with_middleware
from kedge.engines.tool_loop import find_open_calls, tools
from kedge.middleware.compact import compact
from kedge.middleware.guard import CARD_NUMBER, GuardRule, block, guard, redact
from kedge.middleware.log import log, on_response_started
from kedge.middleware.retry import retry
from kedge.middleware.trace import trace
from kedge.middleware.turn_edits import repair, repair_turn, system_prompt, two_phase

__all__ = [
    "CARD_NUMBER",
    "BaseMiddleware",
    "GuardRule",
    "block",
    "compact",
    "find_open_calls",
    "guard",
    "log",
    "on_response_started",
    "redact",
    "repair",
    "repair_turn",
    "retry",
    "system_prompt",
    "tools",
    "trace",
    "two_phase",
    "with_middleware",
]
