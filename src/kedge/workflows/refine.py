"""``refine``: request an answer, judge it, and send the critique, until it passes or the limit is reached.

The prompts are part of stored idempotency keys and must not change.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kedge.conversation import Conversation
from kedge.engines import Engine, OutputSchema
from kedge.errors import InvalidWorkflow
from kedge.store import Store
from kedge.text.display import first_line
from kedge.workflows.judges import (
    Judge,
    ModelJudge,
    find_judge_schema,
    judge_with_function,
    judge_with_model,
    judge_with_schema,
    open_judge_role,
)
from kedge.workflows.results import (
    AnswerJudged,
    RefineResult,
    Round,
    Verdict,
    WorkflowCallback,
    WorkflowFinished,
    WorkflowStarted,
    ignore_event,
)
from kedge.workflows.roles import Role, WorkflowRun, new_workflow_id

AUTHOR_ROLE = "author"
RETRY_PROMPT = """\
That is not right yet.
{critique}

Try again, and give the whole answer."""
TITLE_LENGTH = 80
DEFAULT_CRITIQUE = "It does not meet what was asked for."


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
    async with AsyncExitStack() as stack:
        name = workflow or new_workflow_id()
        run = WorkflowRun(name, "refine", stored_spec, on_event, settings, stack)
        subject = first_line(task, TITLE_LENGTH)
        author = await run.open_lead(AUTHOR_ROLE, conversation, store, engine, subject)
        judge_role = await open_judge_role(run, judge, author.conversation.store, subject)
        on_event(WorkflowStarted(name, "refine", rounds, author.is_resumed))
        schema = find_judge_schema(judge)
        return await _Refinement(author, judge_role, judge, schema, task, rounds, again).run()


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
        done: list[Round] = []
        options = self.schema.request_options() if self.schema else {}
        question = self.task
        for number in range(1, self.rounds + 1):
            reply = await self.author.ask(number, question, **options)
            verdict = await self._resolve_verdict(number, reply.text)
            done.append(Round(number, question, reply.text, verdict, reply.node, reply.stored))
            if verdict.passed:
                break
            question = self.retry_prompt.replace("{critique}", verdict.critique or DEFAULT_CRITIQUE)
        return await self._build_result(tuple(done))

    async def _resolve_verdict(self, number: int, answer: str) -> Verdict:
        """Return the stored verdict, on which the next question is based, or request one."""
        known: list[dict[str, Any]] = self.author.notes.get("verdicts", [])
        if number > len(known):
            verdict = await self._judge_answer(number, answer)
            known = await self.author.add_decision("verdicts", number, verdict)
        verdict = Verdict(**known[number - 1])
        self.author.on_event(AnswerJudged(self.author.workflow, AUTHOR_ROLE, number, verdict))
        return verdict

    async def _judge_answer(self, number: int, answer: str) -> Verdict:
        if isinstance(self.judge, ModelJudge) and self.judge_role:
            return await judge_with_model(
                self.judge_role, self.judge.rubric, self.task, number, answer
            )
        if self.schema:
            return judge_with_schema(self.schema, answer)
        return await judge_with_function(self.judge, answer)

    async def _build_result(self, rounds: tuple[Round, ...]) -> RefineResult:
        last = rounds[-1]
        status = "passed" if last.verdict.passed else "failed"
        if self.author.notes.get("status") != status:
            await self.author.update_notes(status=status, rounds=len(rounds))
        usage = self.author.usage + self.judge_role.usage if self.judge_role else self.author.usage
        self.author.on_event(WorkflowFinished(self.author.workflow, "refine", last.verdict.passed))
        return RefineResult(
            workflow=self.author.workflow,
            conversation=self.author.conversation.id,
            passed=last.verdict.passed,
            answer=last.answer,
            rounds=rounds,
            usage=usage,
        )
