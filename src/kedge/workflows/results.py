"""Inputs, results and events of workflows, as immutable values.

Events are passed to ``on_event``: ``refine(…, on_event=print)``.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kedge._internal.arguments import check_number, check_positive_int, check_type
from kedge.engines import Engine
from kedge.errors import InvalidWorkflow
from kedge.events import Usage
from kedge.providers.model_strings import check_model
from kedge.turns.frozen_json import EMPTY, FrozenMap

WorkflowKind = Literal["refine", "debate", "steps"]


class Verdict(msgspec.Struct, frozen=True):
    """The verdict of a judge; ``critique`` is sent with the next round."""

    passed: bool
    critique: str = ""
    score: float | None = None

    def __post_init__(self) -> None:
        check_type("passed of a verdict", bool, self.passed)
        check_type("the critique of a verdict", str, self.critique)
        if self.score is not None:
            check_number("the score of a judge", self.score)


class Round(msgspec.Struct, frozen=True):
    """One answer of a refinement, and its verdict."""

    number: int
    question: str
    answer: str
    verdict: Verdict
    node: int
    stored: bool = False
    """Whether the answer was already in the store, so that nothing was sent."""


class RefineResult(msgspec.Struct, frozen=True):
    """The result of a refinement; ``answer`` is the accepted one, or else the last."""

    workflow: str
    conversation: str
    passed: bool
    answer: str
    rounds: tuple[Round, ...]
    usage: Usage = Usage()


class Side(msgspec.Struct, frozen=True):
    """A participant of a debate, with a separate model (or engine) and chain."""

    name: str
    engine: Engine | str
    brief: str = ""
    """The position to argue for; by default the model chooses one."""

    def __post_init__(self) -> None:
        check_type("name and brief of a side", str, self.name, self.brief)
        check_model(self.engine)


class DebateArgument(msgspec.Struct, frozen=True):
    """The argument of one side in one round."""

    round: int
    side: str
    text: str
    node: int = 0
    conversation: str = ""
    stored: bool = False


class Ruling(msgspec.Struct, frozen=True):
    """The decision of a judge after a round: whether the debate is over, and the winner (may be empty)."""

    over: bool
    winner: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        check_type("over of a ruling", bool, self.over)
        check_type("winner and reason of a ruling", str, self.winner, self.reason)


class DebateResult(msgspec.Struct, frozen=True):
    """The result of a debate. ``ruling`` is the last one."""

    workflow: str
    question: str
    arguments: tuple[DebateArgument, ...]
    ruling: Ruling
    rounds: int
    conversations: FrozenMap = EMPTY
    """The conversation of each side, and of the judge if it is a model."""
    usage: Usage = Usage()

    @property
    def winner(self) -> str:
        """The name of the winner; empty if there is none."""
        return self.ruling.winner


class Step(msgspec.Struct, frozen=True):
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
        check_type("name and prompt of a step", str, self.name, self.prompt)
        if not self.name.isidentifier():
            raise InvalidWorkflow(f"the name of a step must be an identifier, not {self.name!r}")
        check_positive_int(f"attempts of the step {self.name}", self.attempts)


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step: the answer as text, and as a value."""

    name: str
    question: str
    answer: str
    value: Any
    node: int
    attempts: int = 1
    stored: bool = False


class StepsResult(msgspec.Struct, frozen=True):
    """The results of a pipeline, in order and by name: ``result["plan"]``."""

    workflow: str
    conversation: str
    steps: tuple[StepResult, ...]
    usage: Usage = Usage()

    def __getitem__(self, name: str) -> Any:
        for step in self.steps:
            if step.name == name:
                return step.value
        raise KeyError(name)

    @property
    def value(self) -> Any:
        """The value of the last step."""
        return self.steps[-1].value


class WorkflowStarted(msgspec.Struct, frozen=True):
    """A workflow started or was resumed."""

    workflow: str
    kind: WorkflowKind
    total: int
    """Maximum number of rounds or steps."""
    resumed: bool = False


class RoleEvent(msgspec.Struct, frozen=True):
    """The base class of the events of one question of a role."""

    workflow: str
    role: str
    number: int


class QuestionAsked(RoleEvent, frozen=True):
    """A question is being sent."""


class QuestionAnswered(RoleEvent, frozen=True):
    """An answer is available; ``stored`` if it was already in the store and nothing was sent."""

    text: str
    stored: bool = False


class AnswerJudged(RoleEvent, frozen=True):
    """The judge of a refinement returned a verdict, or an answer of a step did not match its schema."""

    verdict: Verdict


class RoundRuled(msgspec.Struct, frozen=True):
    """The judge of a debate returned a ruling."""

    workflow: str
    number: int
    ruling: Ruling


class WorkflowFinished(msgspec.Struct, frozen=True):
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
