"""The request to the practice model, and its answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Item = Mapping[str, Any]
"""An item of the Responses API."""
ItemKind = Literal["text", "refusal", "reasoning", "function_call", "custom_tool_call"]


class PracticeRequest(Struct, frozen=True):
    """One request to the practice model.

    Args:
        items: The effective context as items of the Responses API, oldest first.
        instructions: The instructions of the request.
        tools: The offered tools.
        tool_choice: ``auto``, ``none``, ``required``, or an object that names tools.
        parallel_tool_calls: Whether several calls may be made at once.
        text_format: The ``text.format`` of the request.
        reasoning: The ``reasoning`` of the request.
        read_reasoning: Returns the text of an earlier reasoning item whose text is hidden from the client.
    """

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, Any] | None = None
    read_reasoning: Callable[[Item], str] = lambda _: ""


class OutputPart(Struct, frozen=True):
    """One item of an answer.

    Args:
        kind: The kind of the item.
        text: Its text; of a call, the arguments or, for a custom tool, the input.
        name: The name of the tool, for a call.
    """

    kind: ItemKind
    text: str
    name: str = ""


class PracticeOutput(Struct, frozen=True):
    """An answer.

    Args:
        parts: Its parts, in order.
        pace: Seconds between two streamed chunks.
    """

    parts: tuple[OutputPart, ...]
    pace: float = 0.0
