"""``refine``: request an answer, judge it, and send the critique, until it passes or the limit is reached.

The prompts are part of stored idempotency keys and must not change.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.conversation import Conversation
from kedge.engines import Engine, OutputSchema
from kedge.engines.output_schema import SchemaMismatch
from kedge.errors import InvalidWorkflow
from kedge.store import Store
from kedge.text.display import first_line
from kedge.workflows.results import (
    AnswerJudged,
    RefineResult,
    Round,
    Verdict,
    WorkflowCallback,
    ignore_event,
)
from kedge.workflows.roles import ModelJudge, Role, WorkflowRun, call_judge, load_schema

VerdictValue = Verdict | bool | float | str
JudgeFunction = Callable[[str], VerdictValue | Awaitable[VerdictValue]]
Judge = JudgeFunction | ModelJudge | Mapping[str, Any] | type[object]

PASSING_SCORE = 1.0
"""The minimum score of an accepted answer, if a judge returns scores."""
AUTHOR_ROLE = "author"
RETRY_PROMPT = """\
That is not right yet.
{critique}

Try again, and give the whole answer."""
TITLE_LENGTH = 80
DEFAULT_CRITIQUE = "It does not meet what was asked for."
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


async def refine(
    task: str,
    *,
    judge: Judge,
    store: Store | None = None,
    engine: Engine | str | None = None,
    conversation: Conversation | None = None,
    rounds: int = 4,
    workflow: str = "",
    again: str = RETRY_PROMPT,
    on_event: WorkflowCallback = ignore_event,
    spec: dict[str, Any] | None = None,
    **settings: Any,
) -> RefineResult:
    """Request an answer until a judge accepts it, at most ``rounds`` times.

    Args:
        task: The first prompt.
        judge: A function of the answer, a JSON schema, a pydantic model, or a ``ModelJudge``.
        conversation: The conversation to use; or pass ``store`` and ``engine`` for a new one.
        store: The store of a new conversation.
        engine: An engine or a model string.
        rounds: Maximum number of rounds.
        again: The prompt of later rounds, with ``{critique}`` in it.
        workflow: The id of an interrupted refinement to resume, or the id of a new one.
        on_event: A function that is called with every event.
        spec: Data to store with the workflow.
        settings: Settings of ``Conversation``.

    Returns:
        All rounds; ``answer`` is the accepted one, or else the last.

    Raises:
        InvalidWorkflow: The arguments are invalid.
        WorkflowFailed: The judge gave no usable verdict.
    """
    if rounds < 1:
        raise InvalidWorkflow("a refinement needs at least one round")
    stored_spec = {"task": task, "rounds": rounds, **(spec or {})}
    async with WorkflowRun("refine", workflow, stored_spec, on_event, settings) as run:
        subject = first_line(task, TITLE_LENGTH)
        author = await run.open_lead(AUTHOR_ROLE, conversation, store, engine, subject)
        judge_role = await run.open_judge(judge, author.conversation.store, subject)
        author.report_start(rounds)
        schema = find_judge_schema(judge)
        return await _Refinement(author, judge_role, judge, schema, task, rounds, again).run()


def find_judge_schema(judge: Any) -> OutputSchema[Any] | None:
    """Return the schema of a judge that is a schema."""
    is_form = isinstance(judge, Mapping | OutputSchema) or (
        isinstance(judge, type) and hasattr(judge, "model_json_schema")
    )
    return load_schema(judge) if is_form else None


@dataclass(frozen=True, slots=True)
class _Refinement:
    """A running refinement."""

    author: Role
    judge_role: Role | None
    judge: Judge
    schema: OutputSchema[Any] | None
    task: str
    rounds: int
    retry_prompt: str

    async def run(self) -> RefineResult:
        """Run the rounds."""
        author = self.author
        done: list[Round] = []
        options = self.schema.request_options() if self.schema else {}
        question, verdict = self.task, Verdict(passed=False)
        for number in range(1, self.rounds + 1):
            reply = await author.ask(number, question, **options)
            judge = partial(self._judge_answer, number, reply.text)
            verdict = await author.resolve_decision("verdicts", number, Verdict, judge)
            author.on_event(AnswerJudged(author.workflow, AUTHOR_ROLE, number, verdict))
            done.append(Round(number, question, reply.text, verdict, reply.node, reply.stored))
            if verdict.passed:
                break
            question = self.retry_prompt.replace("{critique}", verdict.critique or DEFAULT_CRITIQUE)
        status = "passed" if verdict.passed else "failed"
        await author.finish(status, verdict.passed, rounds=len(done))
        return RefineResult(
            workflow=author.workflow,
            conversation=author.conversation.id,
            passed=verdict.passed,
            answer=done[-1].answer,
            rounds=tuple(done),
            usage=author.usage + self.judge_role.usage if self.judge_role else author.usage,
        )

    async def _judge_answer(self, number: int, answer: str) -> Verdict:
        if isinstance(self.judge, ModelJudge) and self.judge_role:
            prompt = FIRST_PROMPT if number == 1 else LATER_PROMPT
            text = prompt.format(rubric=self.judge.rubric, task=self.task, answer=answer)
            schema = load_schema(VERDICT_SCHEMA)
            value = (await self.judge_role.ask_typed(number, text, schema))[0].output
            return Verdict(value["passed"], "" if value["passed"] else value["critique"])
        if self.schema:
            try:
                self.schema.parse(answer)
            except SchemaMismatch as misfit:
                return Verdict(passed=False, critique=f"The answer must fit its schema:\n{misfit}")
            return Verdict(passed=True)
        if not callable(self.judge):
            raise InvalidWorkflow(
                "a judge must be a function, a JSON schema, a pydantic model or a ModelJudge, "
                f"not a {type(self.judge).__name__}"
            )
        return _to_verdict(await call_judge(self.judge, answer))


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
