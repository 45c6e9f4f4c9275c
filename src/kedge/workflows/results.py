"""Inputs, results and events of workflows, as immutable values.

Events are passed to ``on_event``: ``refine(…, on_event=print)``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.engines import Engine
from kedge.errors import InvalidWorkflow
from kedge.events import Usage
from kedge.turns.frozen_json import EMPTY, FrozenMap

WorkflowKind = Literal["refine", "debate", "steps"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a judge; ``critique`` is sent with the next round."""

    passed: bool
    critique: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One answer of a refinement, and its verdict."""

    number: int
    question: str
    answer: str
    verdict: Verdict
    node: int
    stored: bool = False
    """Whether the answer was already in the store, so that nothing was sent."""


@dataclass(frozen=True, slots=True)
class RefineResult:
    """The result of a refinement; ``answer`` is the accepted one, or else the last."""

    workflow: str
    conversation: str
    passed: bool
    answer: str
    rounds: tuple[Round, ...]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Side:
    """A participant of a debate, with a separate model (or engine) and chain."""

    name: str
    engine: Engine | str
    brief: str = ""
    """The position to argue for; by default the model chooses one."""


@dataclass(frozen=True, slots=True)
class DebateArgument:
    """The argument of one side in one round."""

    round: int
    side: str
    text: str
    node: int = 0
    conversation: str = ""
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision of a judge after a round: whether the debate is over, and the winner (may be empty)."""

    over: bool
    winner: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DebateResult:
    """The result of a debate. ``ruling`` is the last one."""

    workflow: str
    question: str
    arguments: tuple[DebateArgument, ...]
    ruling: Ruling
    rounds: int
    conversations: FrozenMap = EMPTY
    """The conversation of each side, and of the judge if it is a model."""
    usage: Usage = field(default_factory=Usage)

    @property
    def winner(self) -> str:
        """The name of the winner; empty if there is none."""
        return self.ruling.winner


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt of a pipeline.

    ``{name}`` in a prompt is the result of an earlier step or an input, ``{name.member}`` a part of it.
    ``result`` is a type (see ``output`` of ``Engine.ask``), a JSON schema, or nothing for plain text. An
    answer that does not match is requested again, up to ``attempts`` times in total; in a resumed workflow, all
    attempts are available again.
    """

    name: str
    prompt: str
    result: Any = None
    attempts: int = 3

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InvalidWorkflow(f"the name of a step must be an identifier, not {self.name!r}")
        if self.attempts < 1:
            raise InvalidWorkflow(f"the step {self.name} needs at least one attempt")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the answer as text, and as a value."""

    name: str
    question: str
    answer: str
    value: Any
    node: int
    attempts: int = 1
    stored: bool = False


@dataclass(frozen=True, slots=True)
class StepsResult:
    """The results of a pipeline, in order and by name: ``result["plan"]``."""

    workflow: str
    conversation: str
    steps: tuple[StepResult, ...]
    usage: Usage = field(default_factory=Usage)

    def __getitem__(self, name: str) -> Any:
        for step in self.steps:
            if step.name == name:
                return step.value
        raise KeyError(name)

    @property
    def value(self) -> Any:
        """The value of the last step."""
        return self.steps[-1].value


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
