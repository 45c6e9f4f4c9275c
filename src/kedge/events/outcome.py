"""How a stream ended. Only one of the four endings is success.

``cut`` means that the stream stopped without a terminal event: the connection broke, the caller
cancelled, or the server simply went away. The blocks made so far are kept in every case; those that
were not whole carry ``metadata["partial"] = True``, so that nobody takes half a call for a call.
"""

from dataclasses import dataclass
from typing import Literal

from kedge.events.types import Usage
from kedge.turns import Block

PARTIAL = "partial"
"""Metadata key: this block was not whole when its stream ended."""

Status = Literal["completed", "incomplete", "failed", "cut"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one response's stream."""

    status: Status
    blocks: tuple[Block, ...] = ()
    response_id: str = ""
    model: str = ""
    usage: Usage | None = None
    created_at: float | None = None
    previous_response_id: str | None = None
    echoed: bool = False
    """Whether the server said anything about ``previous_response_id``."""
    reason: str = ""
    """Why the response is ``incomplete``, in the server's word."""
    code: str = ""
    """Of a failure: the server's code, or ``damaged_stream`` when we found the stream wanting."""
    message: str = ""
    """Of a failure: what the server said, or what we found."""

    @property
    def completed(self) -> bool:
        """Whether the response is whole and may become an anchor."""
        return self.status == "completed"

    @property
    def whole_blocks(self) -> tuple[Block, ...]:
        """The blocks without those that were cut short."""
        return tuple(block for block in self.blocks if not block.metadata.get(PARTIAL))
