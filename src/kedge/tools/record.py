"""The record of a call: what became of it, for metrics, traces and whoever must answer every call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kedge.turns import ToolCallBlock, ToolResultBlock

Outcome = Literal["ok", "unknown", "invalid", "refused", "failed", "timeout", "cancelled"]

OUTCOME = "outcome"
"""Metadata key of a result block: what became of the call."""


@dataclass(frozen=True, slots=True, repr=False)
class ToolRun:
    """The record of one call. Its ``repr`` shows neither arguments nor output."""

    call: ToolCallBlock
    result: ToolResultBlock
    outcome: Outcome
    attempts: int
    """How often the function was started."""
    seconds: float
    """How long it ran, over all attempts."""
    waited: float
    """How long the call was not running: approval, waiting for a place, pauses between attempts."""
    error: BaseException | None = None
    edited: ToolCallBlock | None = None
    """The call as the approver changed it, if it was changed."""

    @property
    def call_id(self) -> str:
        """The id of the call, and of its result."""
        return self.call.call_id

    @property
    def name(self) -> str:
        """The name of the tool, as the model wrote it."""
        return self.call.name

    def __repr__(self) -> str:
        times = f"{self.attempts} attempt(s), {self.seconds:.3f} s"
        return f"<ToolRun {self.call_id} {self.name}: {self.outcome}, {times}>"


OnRun = Callable[[ToolRun], object]
