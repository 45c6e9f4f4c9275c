"""Middleware: wraps an Engine and is an Engine. The first one given is the outermost."""

from kedge.middleware.compact import compact
from kedge.middleware.compose import with_middleware
from kedge.middleware.guard import Rule, block, guard, redact
from kedge.middleware.log import log
from kedge.middleware.notice import notice
from kedge.middleware.repair import repair, repaired
from kedge.middleware.retry import retry
from kedge.middleware.system_prompt import system_prompt
from kedge.middleware.tools import open_calls, tools
from kedge.middleware.trace import trace
from kedge.middleware.two_phase import two_phase
from kedge.middleware.wrapping import Wrapped

__all__ = [
    "Rule",
    "Wrapped",
    "block",
    "compact",
    "guard",
    "log",
    "notice",
    "open_calls",
    "redact",
    "repair",
    "repaired",
    "retry",
    "system_prompt",
    "tools",
    "trace",
    "two_phase",
    "with_middleware",
]
