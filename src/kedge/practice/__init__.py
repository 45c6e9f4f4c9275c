"""The practice model: built in, deterministic, and usable without a network or a key.

It is a pure function from the effective context of a request to an answer, so that tests and users can see
which context a server has stored. It uses items of the Responses API and no other part of Kedge.
``docs/practice.md`` lists its phrases.
"""

from kedge.practice.context import (
    MessageOutput,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    ReasoningOutput,
    RefusalOutput,
    ToolCallOutput,
)
from kedge.practice.model import answer
from kedge.practice.script import Script

__all__ = [
    "MessageOutput",
    "OutputPart",
    "PracticeOutput",
    "PracticeRequest",
    "ReasoningOutput",
    "RefusalOutput",
    "Script",
    "ToolCallOutput",
    "answer",
]
