"""The request and the answer of the practice model, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Item = Mapping[str, Any]


def _read_nothing(_: Item) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class PracticeRequest:
    """One request to the practice model.

    Args:
        items: The effective context as items of the Responses API, oldest first.
        instructions: The instructions of the request.
        tools: The offered tools.
        tool_choice: ``auto``, ``none``, ``required``, or an object that names tools.
        parallel_tool_calls: Whether several calls may be made at once.
        text_format: The ``text.format`` of the request.
        reasoning: The ``reasoning`` of the request.
        read_reasoning: Returns the text of an earlier reasoning item whose text its client does not see.
    """

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, Any] | None = None
    read_reasoning: Callable[[Item], str] = field(default=_read_nothing, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    """A reasoning item."""

    text: str


@dataclass(frozen=True, slots=True)
class MessageOutput:
    """A message with one text part."""

    text: str


@dataclass(frozen=True, slots=True)
class RefusalOutput:
    """A message with one refusal part."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallOutput:
    """A call of an offered tool; for a custom tool ``arguments`` is free text."""

    name: str
    arguments: str
    custom: bool = False


OutputPart = ReasoningOutput | MessageOutput | RefusalOutput | ToolCallOutput
"""One item of an answer of the practice model."""


@dataclass(frozen=True, slots=True)
class PracticeOutput:
    """An answer.

    Args:
        parts: Its parts, in order.
        pace: Seconds between two streamed chunks.
    """

    parts: tuple[OutputPart, ...]
    pace: float = 0.0
