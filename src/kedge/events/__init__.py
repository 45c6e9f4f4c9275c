"""Decode the streams of providers into events and assemble events into blocks, without I/O."""

from kedge.events.anthropic import AnthropicDecoder
from kedge.events.assembler import DAMAGED_STREAM, Assembler
from kedge.events.chat_completions import ChatDecoder
from kedge.events.decoder import StreamDecoder
from kedge.events.responses import ResponsesDecoder
from kedge.events.run import (
    AnswerFinished,
    AttemptFailed,
    FellBack,
    Healed,
    ModeChanged,
    OutputAccepted,
    OutputRejected,
    RequestPlanned,
    RequestSent,
    ServerForgot,
    ToolFinished,
    ToolStarted,
    TurnEdited,
    TurnFinished,
)
from kedge.events.sse import SSEDecoder, SSEMessage
from kedge.events.tool_calls import CallSummary, ToolCall, ToolCallState, ToolCallUpdate
from kedge.events.types import (
    PARTIAL,
    AnomalyNoted,
    Event,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
    Outcome,
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
    "DAMAGED_STREAM",
    "PARTIAL",
    "AnomalyNoted",
    "AnswerFinished",
    "AnthropicDecoder",
    "Assembler",
    "AttemptFailed",
    "CallSummary",
    "ChatDecoder",
    "Event",
    "FellBack",
    "Healed",
    "ItemCompleted",
    "ItemStarted",
    "ModeChanged",
    "OpaqueEvent",
    "Outcome",
    "OutputAccepted",
    "OutputRejected",
    "PartCompleted",
    "ReasoningDelta",
    "RefusalDelta",
    "RequestPlanned",
    "RequestSent",
    "ResponseCompleted",
    "ResponseFailed",
    "ResponseIncomplete",
    "ResponseStarted",
    "ResponsesDecoder",
    "SSEDecoder",
    "SSEMessage",
    "ServerForgot",
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
    "ToolCallUpdate",
    "ToolFinished",
    "ToolStarted",
    "TurnEdited",
    "TurnFinished",
    "Usage",
]

# Names of version 0.1, for compatibility.
CallSeen = ToolCallUpdate
DAMAGED = DAMAGED_STREAM
