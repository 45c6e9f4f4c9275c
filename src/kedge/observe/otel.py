"""Messages of OpenTelemetry's GenAI conventions.

``to_messages`` converts blocks to ``{"role": …, "parts": […]}`` for spans that record content. Images and files are
recorded by type only.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kedge.turns import Block, Part, TextPart

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
    if not instructions:
        return []
    return [{"type": "text", "content": instructions}]


def _to_message(block: Block) -> tuple[str, list[MessageDict]]:
    match block.kind:
        case "user":
            return "user", list(_to_parts(block.parts))
        case "assistant":
            return "assistant", [{"type": "text", "content": block.text}]
        case "system":
            return block.role, [{"type": "text", "content": block.text}]
        case "reasoning":
            text = "\n\n".join((*block.summary, *block.texts))
            return "assistant", [{"type": "reasoning", "content": text}]
        case "tool_call":
            called = {
                "id": block.call_id,
                "name": block.name,
                "arguments": _parse_arguments(block.arguments),
            }
            return "assistant", [{"type": "tool_call", **called}]
        case "tool_result":
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
