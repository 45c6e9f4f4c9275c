"""Judges of a refinement: a function, a form that the answer must have, or a model with a rubric."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.engines import Engine
from kedge.errors import InvalidWorkflow, WorkflowFailed
from kedge.workflows.chains import Role
from kedge.workflows.forms import Form, Misfit, form_of
from kedge.workflows.values import Verdict

Opinion = Verdict | bool | float | str
JudgeFunction = Callable[[str], Opinion | Awaitable[Opinion]]

GOOD_ENOUGH = 1.0
"""The score from which on an answer passes, if a judge gives scores."""


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """A model that judges by a rubric, on a chain of its own.

    ``engine`` is an engine or a model string. In a refinement it sees the task and each answer; in a
    debate the question and what every side said.
    """

    engine: Engine | str
    rubric: str


Judge = JudgeFunction | ModelJudge | Mapping[str, Any] | type[Any]

VERDICT: dict[str, Any] = {
    "title": "verdict",
    "type": "object",
    "properties": {
        "passed": {"type": "boolean", "description": "Whether the answer meets the rubric."},
        "critique": {"type": "string", "description": "What to do better; empty if it passed."},
    },
    "required": ["passed", "critique"],
    "additionalProperties": False,
}
FIRST = """\
You judge an answer to a task, by this rubric:
{rubric}

The task:
{task}

The answer:
{answer}

Does it meet the rubric? If not, say in a few words what to do better."""
LATER = """\
The answer was changed:
{answer}

Does it meet the rubric now?"""
AGAIN = """\
That was not readable:
{problems}

Write only the JSON object."""


def bench_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a judge's conversation shares with those that are judged: not their tools."""
    return {name: settings[name] for name in ("lease", "price") if name in settings}


def form_judge(given: Any) -> Form | None:
    """The form that a judge asks for, if it is one."""
    is_form = isinstance(given, Mapping | Form) or (
        isinstance(given, type) and hasattr(given, "model_json_schema")
    )
    return form_of(given) if is_form else None


async def judged_by_function(judge: JudgeFunction, answer: str) -> Verdict:
    """What a function thinks of an answer."""
    said = judge(answer)
    if inspect.isawaitable(said):
        said = await said
    return _as_verdict(said)


def _as_verdict(said: object) -> Verdict:
    match said:
        case Verdict():
            return said
        case bool():
            return Verdict(said)
        case int() | float():
            return Verdict(said >= GOOD_ENOUGH, score=float(said))
        case str():
            return Verdict(not said, said)
        case _:
            raise InvalidWorkflow(
                "a judge says True or False, a score, a critique (empty if all is well) or a Verdict, "
                f"not a {type(said).__name__}"
            )


def judged_by_form(form: Form, answer: str) -> Verdict:
    """Whether an answer has a form."""
    try:
        form.read(answer)
    except Misfit as misfit:
        return Verdict(passed=False, critique=f"The answer must fit its schema:\n{misfit}")
    return Verdict(passed=True)


async def judged_by_model(role: Role, rubric: str, task: str, number: int, answer: str) -> Verdict:
    """What a model thinks of an answer, on the judge's chain."""
    words = FIRST if number == 1 else LATER
    value = await ask_form(
        role, number, words.format(rubric=rubric, task=task, answer=answer), form_of(VERDICT)
    )
    return Verdict(value["passed"], "" if value["passed"] else value["critique"])


async def ask_form(role: Role, number: int, text: str, form: Form, tries: int = 3) -> Any:
    """Ask for an answer of a form; one that does not fit is asked for again.

    Answers that are in the store already are no tries: who resumes what failed so, tries again.
    """
    said, attempt, left = text, 1, tries
    while left:
        part = f".{attempt}" if attempt > 1 else ""
        reply = await role.ask(number, said, part=part, **form.options())
        try:
            return form.read(reply.text)
        except Misfit as misfit:
            said = AGAIN.format(problems=misfit)
        attempt, left = attempt + 1, left - (not reply.stored)
    raise WorkflowFailed(
        role.workflow, f"the {role.role} did not answer in the form asked for, {tries} times"
    )


def as_function(judge: Any) -> JudgeFunction:
    """The judge as a function, or a refusal."""
    if not callable(judge):
        raise InvalidWorkflow(
            "a judge is a function, a JSON schema, a pydantic model or a ModelJudge, "
            f"not a {type(judge).__name__}"
        )
    return cast("JudgeFunction", judge)
