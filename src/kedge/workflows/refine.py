"""``refine``: ask, judge, ask again with the critique, until it is good or the rounds are over."""

from typing import Any

from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.errors import InvalidWorkflow
from kedge.store import Store
from kedge.workflows.chains import Role, new_workflow_id
from kedge.workflows.events import Judged, Watch, WorkflowFinished, WorkflowStarted, unwatched
from kedge.workflows.judges import (
    Judge,
    ModelJudge,
    as_function,
    bench_settings,
    form_judge,
    judged_by_form,
    judged_by_function,
    judged_by_model,
)
from kedge.workflows.values import RefineResult, Round, Verdict

AUTHOR = "author"
JUDGE = "judge"
AGAIN = """\
That is not right yet.
{critique}

Try again, and give the whole answer."""
NO_CRITIQUE = "It does not meet what was asked for."


async def refine(
    task: str,
    *,
    judge: Judge,
    store: Store | None = None,
    engine: Engine | str | None = None,
    conversation: Conversation | None = None,
    rounds: int = 4,
    workflow: str = "",
    again: str = AGAIN,
    watch: Watch = unwatched,
    spec: dict[str, Any] | None = None,
    **settings: Any,
) -> RefineResult:
    """Ask a model for an answer until a judge is content with it, or ``rounds`` times.

    Give a ``conversation``, or a ``store`` and an ``engine`` (or model string) for a new one. With the id
    of a ``workflow`` that was interrupted, it goes on where that stood. ``again`` asks for the next
    answer, with ``{critique}`` in it. ``settings`` are those of ``Conversation``. ``spec`` is kept with
    the workflow.
    """
    if rounds < 1:
        raise InvalidWorkflow("a refinement needs at least one round")
    workflow = workflow or new_workflow_id()
    kept = {"task": task, "rounds": rounds, **(spec or {})}
    author = await _author(workflow, task, store, engine, conversation, kept, watch, settings)
    bench: Role | None = None
    try:
        bench = await _bench(author, judge, watch, settings)
        watch(WorkflowStarted(workflow, "refine", rounds, author.resumed))
        return await _Refinement(author, bench, judge, task, rounds, again).run()
    finally:
        for role in (author, bench):
            if role:
                await role.aclose()


async def _author(
    workflow: str,
    task: str,
    store: Store | None,
    engine: Engine | str | None,
    conversation: Conversation | None,
    spec: dict[str, Any],
    watch: Watch,
    settings: dict[str, Any],
) -> Role:
    if conversation is not None:
        return await Role.adopt(workflow, "refine", AUTHOR, conversation, spec=spec, watch=watch)
    if store is None or engine is None:
        raise InvalidWorkflow("a workflow needs a conversation, or a store and an engine")
    return await Role.open(
        workflow,
        "refine",
        AUTHOR,
        store=store,
        engine=engine,
        lead=True,
        spec=spec,
        watch=watch,
        title=title_of(task),
        settings=settings,
    )


async def _bench(author: Role, judge: Judge, watch: Watch, settings: dict[str, Any]) -> Role | None:
    """The judge's own chain, if it is a model."""
    if not isinstance(judge, ModelJudge):
        return None
    return await Role.open(
        author.workflow,
        "refine",
        JUDGE,
        store=author.conversation.store,
        engine=judge.engine,
        lead=False,
        spec={},
        watch=watch,
        title=f"The judge of {author.workflow}",
        settings=bench_settings(settings),
    )


class _Refinement:
    """One refinement on its way."""

    def __init__(
        self, author: Role, bench: Role | None, judge: Judge, task: str, rounds: int, again: str
    ) -> None:
        self.author = author
        self.bench = bench
        self.judge = judge
        self.form = None if isinstance(judge, ModelJudge) else form_judge(judge)
        self.task = task
        self.rounds = rounds
        self.again = again

    async def run(self) -> RefineResult:
        """Round after round."""
        done: list[Round] = []
        options = self.form.options() if self.form else {}
        question = self.task
        for number in range(1, self.rounds + 1):
            reply = await self.author.ask(number, question, **options)
            verdict = await self._verdict(number, reply.text)
            done.append(Round(number, question, reply.text, verdict, reply.node, reply.stored))
            if verdict.passed:
                break
            question = self.again.replace("{critique}", verdict.critique or NO_CRITIQUE)
        return await self._result(tuple(done))

    async def _verdict(self, number: int, answer: str) -> Verdict:
        """What was judged stays judged: the next question was made of it."""
        known: list[dict[str, Any]] = self.author.notes.setdefault("verdicts", [])
        if number <= len(known):
            verdict = Verdict(**known[number - 1])
        else:
            verdict = await self._judged(number, answer)
            known.append(
                {
                    "passed": verdict.passed,
                    "critique": verdict.critique,
                    "score": verdict.score,
                }
            )
            await self.author.note(verdicts=known)
        self.author.watch(Judged(self.author.workflow, AUTHOR, number, verdict))
        return verdict

    async def _judged(self, number: int, answer: str) -> Verdict:
        if isinstance(self.judge, ModelJudge) and self.bench:
            return await judged_by_model(self.bench, self.judge.rubric, self.task, number, answer)
        if self.form:
            return judged_by_form(self.form, answer)
        return await judged_by_function(as_function(self.judge), answer)

    async def _result(self, rounds: tuple[Round, ...]) -> RefineResult:
        last = rounds[-1]
        status = "passed" if last.verdict.passed else "failed"
        if self.author.notes.get("status") != status:
            await self.author.note(status=status, rounds=len(rounds))
        usage = self.author.usage + self.bench.usage if self.bench else self.author.usage
        self.author.watch(WorkflowFinished(self.author.workflow, "refine", last.verdict.passed))
        return RefineResult(
            workflow=self.author.workflow,
            conversation=self.author.conversation.id,
            passed=last.verdict.passed,
            answer=last.answer,
            rounds=rounds,
            usage=usage,
        )


def title_of(text: str, longest: int = 80) -> str:
    """The first line of a text, as a title."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= longest else line[: longest - 1] + "…"
