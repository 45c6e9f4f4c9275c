"""What goes into workflows and comes out of them: plain frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.engines import Engine
from kedge.errors import InvalidWorkflow
from kedge.events import Usage


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge thinks of an answer; ``critique`` is for whoever answers next."""

    passed: bool
    critique: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One answer of a refinement, and what was thought of it."""

    number: int
    question: str
    answer: str
    verdict: Verdict
    node: int
    stored: bool = False
    """Whether the answer was in the store already: nothing was sent for it this time."""


@dataclass(frozen=True, slots=True)
class RefineResult:
    """How a refinement went; ``answer`` is the one that passed, or else the last."""

    workflow: str
    conversation: str
    passed: bool
    answer: str
    rounds: tuple[Round, ...]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Side:
    """One who takes part in a debate, with a model (or engine) and a chain of its own."""

    name: str
    engine: Engine | str
    brief: str = ""
    """What it stands for, if that is not for itself to find out."""


@dataclass(frozen=True, slots=True)
class DebateArgument:
    """What one side said in one round."""

    round: int
    side: str
    text: str
    node: int = 0
    conversation: str = ""
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the judge of a debate says after a round: whether it is over, and who won (or nobody)."""

    over: bool
    winner: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DebateResult:
    """How a debate went. ``ruling`` is the last one."""

    workflow: str
    question: str
    arguments: tuple[DebateArgument, ...]
    ruling: Ruling
    rounds: int
    conversations: Mapping[str, str] = field(default_factory=dict[str, str])
    """The conversation of each side, and of the judge if it is a model."""
    usage: Usage = field(default_factory=Usage)

    @property
    def winner(self) -> str:
        """Who won; empty if nobody did."""
        return self.ruling.winner


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt of a pipeline.

    ``{name}`` in a prompt is the result of an earlier step or an input, ``{name.member}`` a part of it.
    ``result`` is a pydantic model, a JSON schema, or nothing for plain text. An answer that does not fit
    is asked for again, ``attempts`` times in all; who resumes a workflow that failed so, tries as often.
    """

    name: str
    prompt: str
    result: Any = None
    attempts: int = 3

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InvalidWorkflow(f"the name of a step is a word, not {self.name!r}")
        if self.attempts < 1:
            raise InvalidWorkflow(f"the step {self.name} needs at least one attempt")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step: the answer as it was written, and as a value."""

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
