"""Engines send a Turn to a model and return it with the model's blocks appended."""

from kedge.engines.anthropic import AnthropicEngine
from kedge.engines.audit import Audit
from kedge.engines.base import (
    Engine,
    Events,
    Middleware,
    Request,
    find_filters,
    unwrap,
)
from kedge.engines.chat_completions import ChatCompletionsEngine, messages_from_blocks
from kedge.engines.content_filter import ContentFilter, ContentFilters
from kedge.engines.output_schema import OutputSchema, to_output_schema
from kedge.engines.reply import Reply
from kedge.engines.request_options import RequestOptions, ResendLimit
from kedge.engines.responses import ResponsesEngine
from kedge.engines.stream import RunStream, Stream

__all__ = [
    "AnthropicEngine",
    "Audit",
    "ChatCompletionsEngine",
    "ContentFilter",
    "ContentFilters",
    "Engine",
    "Events",
    "Middleware",
    "OutputSchema",
    "Reply",
    "Request",
    "RequestOptions",
    "ResendLimit",
    "ResponsesEngine",
    "RunStream",
    "Stream",
    "find_filters",
    "messages_from_blocks",
    "to_output_schema",
    "unwrap",
]
