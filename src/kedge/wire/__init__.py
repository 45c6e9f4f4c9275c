"""The APIs of the providers: decode streams into events, assemble events into blocks, and render plans as messages."""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr
from kedge.wire.assembler import Assembler
from kedge.wire.decoder import StreamDecoder
from kedge.wire.items import CallSummary, ItemTable, ToolCall

if TYPE_CHECKING:
    from kedge.wire.anthropic import AnthropicDecoder
    from kedge.wire.chat_completions import ChatDecoder
    from kedge.wire.chat_messages import blocks_from_messages
    from kedge.wire.responses import ResponsesDecoder
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "AnthropicDecoder": "kedge.wire.anthropic",
            "ChatDecoder": "kedge.wire.chat_completions",
            "ResponsesDecoder": "kedge.wire.responses",
            "blocks_from_messages": "kedge.wire.chat_messages",
        },
    )

__all__ = [
    "AnthropicDecoder",
    "Assembler",
    "CallSummary",
    "ChatDecoder",
    "ItemTable",
    "ResponsesDecoder",
    "StreamDecoder",
    "ToolCall",
    "blocks_from_messages",
]
