"""Decode the streams of providers into events and assemble events into blocks, without I/O."""

from typing import TYPE_CHECKING

from kedge.events.assembler import Assembler
from kedge.events.decoder import StreamDecoder
from kedge.events.items import CallSummary, ItemTable, ToolCall
from kedge.events.request_record import RequestRecord
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
from kedge.events.types import (
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
from kedge.text.lazy_names import make_getattr

if TYPE_CHECKING:
    from kedge.events.anthropic import AnthropicDecoder
    from kedge.events.chat_completions import ChatDecoder
    from kedge.events.responses import ResponsesDecoder
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "AnthropicDecoder": "kedge.events.anthropic",
            "ChatDecoder": "kedge.events.chat_completions",
            "ResponsesDecoder": "kedge.events.responses",
        },
    )

__all__ = [
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
    "ItemTable",
    "ModeChanged",
    "OpaqueEvent",
    "Outcome",
    "OutputAccepted",
    "OutputRejected",
    "PartCompleted",
    "ReasoningDelta",
    "RefusalDelta",
    "RequestPlanned",
    "RequestRecord",
    "RequestSent",
    "ResponseCompleted",
    "ResponseFailed",
    "ResponseIncomplete",
    "ResponseStarted",
    "ResponsesDecoder",
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
    "ToolFinished",
    "ToolStarted",
    "TurnEdited",
    "TurnFinished",
    "Usage",
]
