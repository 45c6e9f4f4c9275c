"""The events of engines and middleware before, between and after response streams."""

from typing import Any, Literal

from kedge.errors import EngineError
from kedge.events import types
from kedge.events.types import Event, Outcome, Usage
from kedge.planning import Mode, RequestPlan, SentRequest
from kedge.turns import ToolCallBlock, ToolResultBlock, Turn, TurnDiff

VISIBLE_EVENTS = (types.TextDelta, types.RefusalDelta, types.ReasoningDelta, types.ToolCallStarted)
"""Events that show output to the user. After one of them a request must not be sent again silently."""

ResendReason = Literal[
    "gone",
    "unsupported",
    "forgot",
    "unproven",
    "reasoning",
    "include",
    "empty_input",
    "conversation",
    "audit",
]
"""The reason why an engine sends a request again in another form."""
HealReason = ResendReason | Literal["format"]
"""The reason why a request is sent again; ``format`` means without the format of a typed answer."""


class RequestPlanned(Event, frozen=True):
    """A request is about to be sent, or its answer is fetched.

    Attributes:
        plan: The plan that the request is built from.
        running: The response in the background that answers the request already, so that nothing is sent.
    """

    plan: RequestPlan
    running: str = ""


class RequestSent(Event, frozen=True):
    """The body of the planned request is complete and is being sent.

    Attributes:
        body_bytes: The size of the body, with tool definitions and settings.
        full_bytes: The size of the body that would send everything; equal if this one does.
        request: What decides how the answer is judged and recorded; None for an API that stores nothing.
    """

    hidden = ("request",)

    body_bytes: int
    full_bytes: int
    request: SentRequest | None = None


class ModeChanged(Event, frozen=True):
    """The request is sent in another mode than requested.

    Attributes:
        mode: The mode that is used.
        wanted: The mode that was requested.
        reason: Why they differ.
    """

    mode: Mode
    wanted: Mode
    reason: str


class FellBack(Event, frozen=True):
    """Blocks are sent that an earlier answer of the same server covered.

    Attributes:
        reason: Why that answer is not used, or why the request is sent in another mode than requested.
    """

    reason: str


class Healed(Event, frozen=True):
    """The server rejected the request or lost its context, and the request is sent again differently.

    Attributes:
        reason: Why it is sent again.
        lost: The responses that the server no longer has.
        response_id: The id of the response that is discarded, if the server sent one. Events that differ only in
            this or the next members are equal.
        usage: Token counts of that response, if the server sent any.
        status: The HTTP status of the rejection; None if the server answered the request.
        code: The server's error code, or the HTTP status; empty if the server answered the request.
        message: The error that is raised if the request cannot be sent again, as text.
    """

    reason: HealReason
    lost: tuple[str, ...] = ()
    response_id: str = ""
    usage: Usage | None = None
    status: int | None = None
    code: str = ""
    message: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Healed) and (self.reason, self.lost) == (other.reason, other.lost)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.reason, self.lost))


class ServerForgot(Event, frozen=True):
    """The server answered without the stored context, and the answer was already shown.

    Attributes:
        response_id: The response that was generated without the context.
    """

    response_id: str


class AttemptFailed(Event, frozen=True):
    """An attempt failed before it showed any output, and the middleware ``retry`` sends the Turn again.

    Attributes:
        error: The type of the error.
        wait: Seconds until the next attempt.
        plan: The plan of the failed request, if there is one.
        response_id: The id of its response, if the server sent one.
        usage: Token counts of its response, if the server sent any.
        code: The server's error code, or the HTTP status; empty if there was no response.
        message: The error as text.
    """

    hidden = ("plan",)

    error: type[EngineError]
    wait: float
    plan: RequestPlan | None = None
    response_id: str = ""
    usage: Usage | None = None
    code: str = ""
    message: str = ""


class AnswerFinished(Event, frozen=True):
    """One response is complete.

    Attributes:
        outcome: The result of its stream.
        turn: The Turn with the blocks of the response.
        plan: The plan that the request was built from.
    """

    hidden = ("outcome", "plan")

    outcome: Outcome
    turn: Turn
    plan: RequestPlan


class TurnEdited(Event, frozen=True):
    """A middleware changed the Turn.

    Attributes:
        by: The middleware's name.
        diff: The changes.
        phase: ``in`` before the request, ``out`` after the response.
    """

    by: str
    diff: TurnDiff
    phase: Literal["in", "out"]


class ToolStarted(Event, frozen=True):
    """A tool is about to run.

    Attributes:
        call: The model's call.
    """

    call: ToolCallBlock


class ToolFinished(Event, frozen=True):
    """A tool returned its result.

    Attributes:
        call: The model's call.
        result: The result as it is sent to the model.
        seconds: The duration of the call.
        outcome: ``ok``, or the kind of failure.
    """

    call: ToolCallBlock
    result: ToolResultBlock
    seconds: float = 0.0
    outcome: str = "ok"


class OutputRejected(Event, frozen=True):
    """An answer does not have the requested type, and is requested again.

    Attributes:
        attempt: The number of the answer, from 1.
        problems: Its problems, one line each.
        text: The text of the answer.
    """

    hidden = ("text",)

    attempt: int
    problems: tuple[str, ...]
    text: str = ""


class OutputAccepted(Event, frozen=True):
    """The answer has the requested type.

    Attributes:
        value: The typed value of the answer.
    """

    hidden = ("value",)

    value: Any


class TurnFinished(Event, frozen=True):
    """The run is complete; always its last event.

    Attributes:
        turn: The Turn with everything appended.
    """

    turn: Turn
