"""Judges of a refinement: a function, a schema of the answer, or a model with a rubric."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kedge.engines import Engine, OutputSchema
from kedge.engines.output_schema import SchemaMismatch
from kedge.errors import InvalidWorkflow, WorkflowFailed
from kedge.store import Store
from kedge.workflows.results import Verdict
from kedge.workflows.roles import Role, WorkflowRun, load_schema

VerdictValue = Verdict | bool | float | str
JudgeFunction = Callable[[str], VerdictValue | Awaitable[VerdictValue]]

JUDGE_ROLE = "judge"
ATTEMPTS = 3
"""The maximum number of requests to a model judge for an answer of the requested form."""
PASSING_SCORE = 1.0
"""The minimum score of an accepted answer, if a judge returns scores."""


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """A model that judges by a rubric, on a separate chain.

    In a refinement it receives the task and each answer; in a debate the question and the arguments.

    Args:
        engine: An engine or a model string.
        rubric: The criteria.
    """

    engine: Engine | str
    rubric: str


Judge = JudgeFunction | ModelJudge | Mapping[str, Any] | type[object]

VERDICT_SCHEMA: dict[str, Any] = {
    "title": "verdict",
    "type": "object",
    "properties": {
        "passed": {"type": "boolean", "description": "Whether the answer meets the rubric."},
        "critique": {"type": "string", "description": "What to do better; empty if it passed."},
    },
    "required": ["passed", "critique"],
    "additionalProperties": False,
}
FIRST_PROMPT = """\
You judge an answer to a task, by this rubric:
{rubric}

The task:
{task}

The answer:
{answer}

Does it meet the rubric? If not, say in a few words what to do better."""
LATER_PROMPT = """\
The answer was changed:
{answer}

Does it meet the rubric now?"""


async def open_judge_role(
    run: WorkflowRun, judge: object, store: Store, subject: str
) -> Role | None:
    """Open the chain of a judge that is a model, without tools; return None for any other judge."""
    if not isinstance(judge, ModelJudge):
        return None
    settings = {name: run.settings[name] for name in ("lease", "price") if name in run.settings}
    title = f"{JUDGE_ROLE}: {subject}"
    return await replace(run, settings=settings).open_role(JUDGE_ROLE, store, judge.engine, title)


def find_judge_schema(judge: Any) -> OutputSchema[Any] | None:
    """Return the schema of a judge that is a schema."""
    is_form = isinstance(judge, Mapping | OutputSchema) or (
        isinstance(judge, type) and hasattr(judge, "model_json_schema")
    )
    return load_schema(judge) if is_form else None


async def call_judge(judge: Callable[..., Any], subject: object) -> object:
    """Return what the function of a judge returns, sync or async."""
    judgment = judge(subject)
    return await judgment if inspect.isawaitable(judgment) else judgment


async def judge_with_function(judge: Any, answer: str) -> Verdict:
    """Return the verdict of a function; raise ``InvalidWorkflow`` if the judge is none."""
    if not callable(judge):
        raise InvalidWorkflow(
            "a judge must be a function, a JSON schema, a pydantic model or a ModelJudge, "
            f"not a {type(judge).__name__}"
        )
    return _to_verdict(await call_judge(judge, answer))


def _to_verdict(value: object) -> Verdict:
    match value:
        case Verdict():
            return value
        case bool():
            return Verdict(value)
        case int() | float():
            return Verdict(value >= PASSING_SCORE, score=float(value))
        case str():
            return Verdict(not value, value)
        case _:
            raise InvalidWorkflow(
                "a judge returns True or False, a score, a critique (empty to accept) or a Verdict, "
                f"not a {type(value).__name__}"
            )


def judge_with_schema(schema: OutputSchema[Any], answer: str) -> Verdict:
    """Return the verdict of a schema."""
    try:
        schema.parse(answer)
    except SchemaMismatch as misfit:
        return Verdict(passed=False, critique=f"The answer must fit its schema:\n{misfit}")
    return Verdict(passed=True)


async def judge_with_model(role: Role, rubric: str, task: str, number: int, answer: str) -> Verdict:
    """Return the verdict of a model, on the judge's chain."""
    prompt = FIRST_PROMPT if number == 1 else LATER_PROMPT
    value = await ask_structured(
        role,
        number,
        prompt.format(rubric=rubric, task=task, answer=answer),
        load_schema(VERDICT_SCHEMA),
    )
    return Verdict(value["passed"], "" if value["passed"] else value["critique"])


async def ask_structured(role: Role, number: int, text: str, schema: OutputSchema[Any]) -> Any:
    """Request an answer until it matches a schema."""
    found = await role.ask_typed(number, text, schema, attempts=ATTEMPTS)
    if found is None:
        raise WorkflowFailed(
            role.workflow,
            f"the {role.role} did not answer in the requested format, {ATTEMPTS} times",
        )
    return found[0].output
