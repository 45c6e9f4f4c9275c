"""What a workflow tells while it runs, for whoever watches: ``refine(…, watch=print)``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kedge.workflows.results import Ruling, Verdict

WorkflowKind = Literal["refine", "debate", "steps"]


@dataclass(frozen=True, slots=True)
class WorkflowStarted:
    """A workflow began, or goes on after an interruption."""

    workflow: str
    kind: WorkflowKind
    total: int
    """How many rounds or steps there will be at most."""
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """A question is on its way."""

    workflow: str
    role: str
    number: int


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    """An answer came; ``stored`` if it was there already and nothing was sent."""

    workflow: str
    role: str
    number: int
    text: str
    stored: bool = False


@dataclass(frozen=True, slots=True)
class AnswerJudged:
    """The judge of a refinement has spoken; or an answer of a step did not fit."""

    workflow: str
    role: str
    number: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RoundRuled:
    """The judge of a debate has spoken."""

    workflow: str
    number: int
    ruling: Ruling


@dataclass(frozen=True, slots=True)
class WorkflowFinished:
    """The workflow is over; ``passed`` is ``None`` where there is nothing to pass."""

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
WorkflowCallback = Callable[[WorkflowEvent], None]


def ignore_event(_: WorkflowEvent) -> None:
    """Nobody looks."""
