"""Events of a run: what engines and middleware did around the streams of a provider."""

from dataclasses import dataclass, field
from typing import Literal

from kedge.events.types import (
    Event,
    Outcome,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallStarted,
)
from kedge.planning import Mode, Reason, RequestPlan
from kedge.turns import ToolCallBlock, ToolResultBlock, Turn, TurnDiff

VISIBLE_EVENTS = (TextDelta, RefusalDelta, ReasoningDelta, ToolCallStarted)
"""The events by which a person has seen something of an answer: from then on it cannot be taken back."""

HealReason = Literal[
    "gone", "unsupported", "forgot", "reasoning", "include", "empty_input", "conversation", "audit"
]


@dataclass(frozen=True, slots=True)
class RequestPlanned(Event):
    """A request is about to be sent, by this plan."""

    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class ModeChanged(Event):
    """The request goes out in another mode than was asked for."""

    mode: Mode
    wanted: Mode
    reason: str


@dataclass(frozen=True, slots=True)
class FellBack(Event):
    """Everything is sent, although there were candidates; ``reason`` is that of the newest."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Healed(Event):
    """The server refused or forgot, and the request is sent again in another way."""

    reason: HealReason
    lost: tuple[str, ...] = ()
    """The responses that the server no longer has."""


@dataclass(frozen=True, slots=True)
class ServerForgot(Event):
    """The answer was given without the memory that was asked for; it was shown already."""

    response_id: str


@dataclass(frozen=True, slots=True)
class AnswerFinished(Event):
    """One response of the server is over, and its blocks are in ``turn``."""

    outcome: Outcome = field(repr=False)
    turn: Turn
    plan: RequestPlan = field(repr=False)


@dataclass(frozen=True, slots=True)
class TurnEdited(Event):
    """A middleware changed the Turn, on the way in or on the way out."""

    by: str
    diff: TurnDiff
    phase: Literal["in", "out"]


@dataclass(frozen=True, slots=True)
class ToolStarted(Event):
    """A tool is about to run."""

    call: ToolCallBlock


@dataclass(frozen=True, slots=True)
class ToolFinished(Event):
    """A tool has answered."""

    call: ToolCallBlock
    result: ToolResultBlock
    seconds: float = 0.0
    outcome: str = "ok"


@dataclass(frozen=True, slots=True)
class TurnFinished(Event):
    """The run is over: this is the Turn with everything appended. Always the last event."""

    turn: Turn
