"""Engines send a Turn to a model and return it with the model's blocks appended.

An engine, with the decoder and the renderer of its API, is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr
from kedge.engines.base import Engine, Events, Middleware, RunStream, Stream, find_filters, unwrap
from kedge.engines.options import RequestOptions, ResendLimit
from kedge.engines.output_schema import OutputSchema, to_output_schema
from kedge.engines.reply import Reply
from kedge.engines.request import Request
from kedge.turns.content_filters import ContentFilter, ContentFilters

if TYPE_CHECKING:
    from kedge.engines.anthropic import AnthropicEngine
    from kedge.engines.chat_completions import ChatCompletionsEngine
    from kedge.engines.responses import ResponsesEngine
    from kedge.engines.stored_items import Audit
    from kedge.wire.chat_renderer import messages_from_blocks
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "AnthropicEngine": "kedge.engines.anthropic",
            "Audit": "kedge.engines.stored_items",
            "ChatCompletionsEngine": "kedge.engines.chat_completions",
            "ResponsesEngine": "kedge.engines.responses",
            "messages_from_blocks": "kedge.wire.chat_renderer",
        },
    )

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
