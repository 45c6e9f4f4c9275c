"""Attribute names and messages of OpenTelemetry's GenAI conventions.

``to_messages`` converts blocks to ``{"role": …, "parts": […]}`` for spans that record content. Images and files are
recorded by type only.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kedge.turns import (
    AssistantBlock,
    Block,
    Part,
    ReasoningBlock,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
)

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
ERROR_TYPE = "error.type"

# Content: recorded only if enabled.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

# Attributes of Kedge, which the conventions do not define.
MODE = "kedge.mode"
ANCHOR = "kedge.anchor.id"
DELTA_BLOCKS = "kedge.delta.blocks"
FULL_BLOCKS = "kedge.full.blocks"
SENT_BYTES = "kedge.sent.bytes"
FULL_BYTES = "kedge.full.bytes"
FALLBACK = "kedge.fallback.reason"
HEALED = "kedge.healed.reason"
OUTCOME = "kedge.tool.outcome"

INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
FETCH_RESPONSE = "fetch_response"
EXECUTE_TOOL = "execute_tool"

CAPTURE_CONTENT_ENV = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that enables content."""
CAPTURE_ENABLED_VALUES = frozenset({"true", "1", "span_only", "span_and_event"})
"""Its values, in lower case, that enable content in spans."""

PROVIDER_NAMES = {"xai": "x_ai", "azure": "azure.ai.openai"}
"""Names of providers in the conventions where they differ from Kedge's."""


MessageDict = dict[str, Any]


def to_messages(blocks: Iterable[Block]) -> list[MessageDict]:
    """Return one message per block; consecutive blocks of the model form one message."""
    messages: list[MessageDict] = []
    for block in blocks:
        role, parts = _to_message(block)
        if messages and role == "assistant" == messages[-1]["role"]:
            messages[-1]["parts"] += parts
        else:
            messages.append({"role": role, "parts": parts})
    return messages


def system_parts(instructions: str | None) -> list[MessageDict]:
    """Return the leading system text as parts."""
    return [{"type": "text", "content": instructions}] if instructions else []


def _to_message(block: Block) -> tuple[str, list[MessageDict]]:
    match block:
        case UserBlock():
            return "user", list(_to_parts(block.parts))
        case AssistantBlock():
            return "assistant", [{"type": "text", "content": block.text}]
        case SystemBlock():
            return block.role, [{"type": "text", "content": block.text}]
        case ReasoningBlock():
            text = "\n\n".join((*block.summary, *block.texts))
            return "assistant", [{"type": "reasoning", "content": text}]
        case ToolCallBlock():
            called = {
                "id": block.call_id,
                "name": block.name,
                "arguments": _parse_arguments(block.arguments),
            }
            return "assistant", [{"type": "tool_call", **called}]
        case ToolResultBlock():
            answered = {"id": block.call_id, "response": block.text}
            return "tool", [{"type": "tool_call_response", **answered}]
        case _:
            return "assistant", [{"type": str(getattr(block, "type", block.kind))}]


def _to_parts(parts: Iterable[Part]) -> Iterator[MessageDict]:
    for part in parts:
        if isinstance(part, TextPart):
            yield {"type": "text", "content": part.text}
        else:
            yield {"type": type(part).__name__.removesuffix("Part").lower()}


def _parse_arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
