"""Blocks as the messages of OpenTelemetry's conventions: ``{"role": …, "parts": […]}``.

For spans of those who asked for content. Images and files are named, not copied.
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

Told = dict[str, Any]


def told_messages(blocks: Iterable[Block]) -> list[Told]:
    """One message a block; the parts of the model that follow each other are one message."""
    messages: list[Told] = []
    for block in blocks:
        role, parts = _told(block)
        if messages and role == "assistant" == messages[-1]["role"]:
            messages[-1]["parts"] += parts
        else:
            messages.append({"role": role, "parts": parts})
    return messages


def system_parts(instructions: str | None) -> list[Told]:
    """The leading system text."""
    return [{"type": "text", "content": instructions}] if instructions else []


def _told(block: Block) -> tuple[str, list[Told]]:
    match block:
        case UserBlock():
            return "user", list(_parts(block.parts))
        case AssistantBlock():
            return "assistant", [{"type": "text", "content": block.text}]
        case SystemBlock():
            return block.role, [{"type": "text", "content": block.text}]
        case ReasoningBlock():
            words = "\n\n".join((*block.summary, *block.texts))
            return "assistant", [{"type": "reasoning", "content": words}]
        case ToolCallBlock():
            called = {"id": block.call_id, "name": block.name, "arguments": _json(block.arguments)}
            return "assistant", [{"type": "tool_call", **called}]
        case ToolResultBlock():
            answered = {"id": block.call_id, "response": block.text}
            return "tool", [{"type": "tool_call_response", **answered}]
        case _:
            return "assistant", [{"type": str(getattr(block, "type", block.kind))}]


def _parts(parts: Iterable[Part]) -> Iterator[Told]:
    for part in parts:
        if isinstance(part, TextPart):
            yield {"type": "text", "content": part.text}
        else:
            yield {"type": type(part).__name__.removesuffix("Part").lower()}


def _json(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
