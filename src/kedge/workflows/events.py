"""Events of a running workflow, passed to ``on_event``: ``refine(…, on_event=print)``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kedge.workflows.results import Ruling, Verdict

WorkflowKind = Literal["refine", "debate", "steps"]


@dataclass(frozen=True, slots=True)
class WorkflowStarted:
    """A workflow started or was resumed."""

    workflow: str
    kind: WorkflowKind
    total: int
    """Maximum number of rounds or steps."""
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """A question is being sent."""

    workflow: str
    role: str
    number: int


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    """An answer is available; ``stored`` if it was already in the store and nothing was sent."""

    workflow: str
    role: str
    number: int
    text: str
    stored: bool = False


@dataclass(frozen=True, slots=True)
class AnswerJudged:
    """The judge of a refinement returned a verdict, or an answer of a step did not match its schema."""

    workflow: str
    role: str
    number: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RoundRuled:
    """The judge of a debate returned a ruling."""

    workflow: str
    number: int
    ruling: Ruling


@dataclass(frozen=True, slots=True)
class WorkflowFinished:
    """The workflow ended; ``passed`` is ``None`` if it has no judge."""

    workflow: str
    kind: WorkflowKind
    passed: bool | None = None


WorkflowEvent = (
    WorkflowStarted
    | QuestionAsked
    | QuestionAnswered
    | AnswerJudged
    | RoundRuled
    | WorkflowFinished
)
"""The argument of a workflow's ``on_event``."""
WorkflowCallback = Callable[[WorkflowEvent], None]


def ignore_event(_: WorkflowEvent) -> None:
    """Ignore the event."""
