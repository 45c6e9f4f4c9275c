"""Streams without I/O: what a provider sends becomes Events, and Events become Blocks."""

from kedge.events.anthropic import AnthropicDecoder
from kedge.events.assembler import DAMAGED, Assembler
from kedge.events.call import CallSeen, CallSummary, ToolCall
from kedge.events.calls import ToolCallState
from kedge.events.chat import ChatDecoder
from kedge.events.decoder import StreamDecoder
from kedge.events.outcome import PARTIAL, Outcome
from kedge.events.responses import ResponsesDecoder
from kedge.events.sse import SSEDecoder, SSEMessage
from kedge.events.types import (
    AnomalyNoted,
    Event,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
    PartCompleted,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
    Usage,
)

__all__ = [
    "DAMAGED",
    "PARTIAL",
    "AnomalyNoted",
    "AnthropicDecoder",
    "Assembler",
    "CallSeen",
    "CallSummary",
    "ChatDecoder",
    "Event",
    "ItemCompleted",
    "ItemStarted",
    "OpaqueEvent",
    "Outcome",
    "PartCompleted",
    "ReasoningDelta",
    "RefusalDelta",
    "ResponseCompleted",
    "ResponseFailed",
    "ResponseIncomplete",
    "ResponseStarted",
    "ResponsesDecoder",
    "SSEDecoder",
    "SSEMessage",
    "StreamDecoder",
    "StreamEvent",
    "StreamFailed",
    "TextDelta",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallCompleted",
    "ToolCallRenamed",
    "ToolCallStarted",
    "ToolCallState",
    "Usage",
]
