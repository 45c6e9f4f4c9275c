"""Engines: they take a Turn to a model and return it with the model's blocks appended."""

from kedge.engines.anthropic import AnthropicEngine
from kedge.engines.audit import Audit
from kedge.engines.base import (
    Engine,
    Events,
    Middleware,
    Request,
    RunStream,
    Stream,
    find_filters,
    unwrap,
)
from kedge.engines.chat_completions import ChatCompletionsEngine
from kedge.engines.content_filter import ContentFilter, ContentFilters
from kedge.engines.responses import ResponsesEngine

__all__ = [
    "AnthropicEngine",
    "Audit",
    "ChatCompletionsEngine",
    "ContentFilter",
    "ContentFilters",
    "Engine",
    "Events",
    "Middleware",
    "Request",
    "ResponsesEngine",
    "RunStream",
    "Stream",
    "find_filters",
    "unwrap",
]

# Names of version 0.1, which keep working.
innermost = unwrap
