"""What the practice model is asked, and what it answers: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PracticeRequest:
    """One request: the effective context, oldest item first, and the settings that shape it."""

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, Any] | None = None


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
    """A call of an offered tool; a custom tool takes ``arguments`` as free text."""

    name: str
    arguments: str
    custom: bool = False


OutputPart = ReasoningOutput | MessageOutput | RefusalOutput | ToolCallOutput


@dataclass(frozen=True, slots=True)
class PracticeOutput:
    """An answer in parts; ``pace`` is the seconds between two streamed chunks."""

    parts: tuple[OutputPart, ...]
    pace: float = 0.0
