"""Workflows with a judge: ``refine`` and ``debate``.

``refine`` requests an answer, judges it, and sends the critique, until it passes or the limit is reached. In ``debate``
two or more models argue, each on a separate chain, until a judge decides. Only text is exchanged: each side has a
separate conversation, engine and provider, so no chain contains a response of another server.

The prompts are part of stored idempotency keys and must not change.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from kedge._internal.argument_types import checked_except
from kedge._internal.arguments import check_number, check_positive_int
from kedge._internal.display import make_title
from kedge._internal.event_loops import await_value
from kedge.conversation import Conversation
from kedge.engines import Engine, OutputSchema, to_output_schema
from kedge.engines.output_schema import SchemaMismatch
from kedge.errors import InvalidSetting, InvalidWorkflow, describe_type
from kedge.events import Usage
from kedge.store import Store
from kedge.store.open import StoreAddress
from kedge.turns.frozen_json import FrozenMap
from kedge.workflows.results import (
    AnswerJudged,
    DebateArgument,
    DebateResult,
    RefineResult,
    Round,
    RoundRuled,
    Ruling,
    Side,
    Verdict,
    WorkflowCallback,
    ignore_event,
)
from kedge.workflows.roles import JUDGE_ROLE, ModelJudge, Role, WorkflowRun

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
DEFAULT_CRITIQUE = "It does not meet what was asked for."


def _build_schema(title: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a decision, which is part of stored idempotency keys."""
    members = {"properties": properties, "required": list(properties)}
    return {"title": title, "type": "object", **members, "additionalProperties": False}


VERDICT_SCHEMA = _build_schema(
    "verdict",
    passed={"type": "boolean", "description": "Whether the answer meets the rubric."},
    critique={"type": "string", "description": "What to do better; empty if it passed."},
)

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


@checked_except("judge", "on_event")
async def refine(
    task: str,
    *,
    judge: Judge,
    store: Store | StoreAddress | None = None,
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
        store: The store of a new conversation, or its address.
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
    check_positive_int("rounds", rounds)
    schema = find_judge_schema(judge)
    if schema is None and not isinstance(judge, ModelJudge) and not callable(judge):
        raise InvalidSetting(
            "a judge must be a function, a JSON schema, a pydantic model or a ModelJudge, "
            f"not {describe_type(judge)}"
        )
    stored_spec = {"task": task, "rounds": rounds, **(spec or {})}
    async with WorkflowRun("refine", workflow, stored_spec, on_event, settings) as run:
        subject = make_title(task)
        author = await run.open_lead(AUTHOR_ROLE, conversation, store, engine, subject)
        judge_role = await run.open_judge(judge, author.conversation.store, subject)
        author.report_start(rounds)
        decide = partial(_judge_answer, judge, judge_role, schema, task)
        options = schema.request_options() if schema else {}
        done = await _run_refinement(author, decide, task, rounds, again, options)
        usage = author.usage
        if judge_role is not None:
            usage += judge_role.usage
        return RefineResult(
            workflow=author.workflow,
            conversation=author.conversation.id,
            passed=done[-1].verdict.passed,
            answer=done[-1].answer,
            rounds=done,
            usage=usage,
        )


def find_judge_schema(judge: Any) -> OutputSchema[Any] | None:
    """Return the schema of a judge that is a schema."""
    is_pydantic_model = isinstance(judge, type) and hasattr(judge, "model_json_schema")
    if is_pydantic_model or isinstance(judge, Mapping | OutputSchema):
        return to_output_schema(judge)
    return None


async def _run_refinement(
    author: Role,
    decide: Callable[[int, str], Awaitable[Verdict]],
    task: str,
    rounds: int,
    retry_prompt: str,
    options: Mapping[str, Any],
) -> tuple[Round, ...]:
    """Run the rounds of a refinement."""
    done: list[Round] = []
    question = task
    verdict = Verdict(passed=False)
    for number in range(1, rounds + 1):
        reply = await author.ask(number, question, **options)
        judge = partial(decide, number, reply.text)
        verdict = await author.resolve_decision("verdicts", number, Verdict, judge)
        author.on_event(AnswerJudged(author.workflow, AUTHOR_ROLE, number, verdict))
        done.append(Round(number, question, reply.text, verdict, reply.node, reply.stored))
        if verdict.passed:
            break
        question = retry_prompt.replace("{critique}", verdict.critique or DEFAULT_CRITIQUE)
    status = "passed" if verdict.passed else "failed"
    await author.finish(status, verdict.passed, rounds=len(done))
    return tuple(done)


async def _judge_answer(
    judge: Judge,
    judge_role: Role | None,
    schema: OutputSchema[Any] | None,
    task: str,
    number: int,
    answer: str,
) -> Verdict:
    if isinstance(judge, ModelJudge) and judge_role:
        prompt = FIRST_PROMPT if number == 1 else LATER_PROMPT
        text = prompt.format(rubric=judge.rubric, task=task, answer=answer)
        reply, _ = await judge_role.ask_typed(number, text, VERDICT_SCHEMA)
        if reply.output["passed"]:
            return Verdict(passed=True)
        return Verdict(passed=False, critique=reply.output["critique"])
    if schema:
        try:
            schema.parse(answer)
        except SchemaMismatch as mismatch:
            return Verdict(passed=False, critique=f"The answer must fit its schema:\n{mismatch}")
        return Verdict(passed=True)
    return _to_verdict(await await_value(cast("JudgeFunction", judge)(answer)))


def _to_verdict(value: object) -> Verdict:
    match value:
        case Verdict():
            return value
        case bool():
            return Verdict(value)
        case int() | float():
            check_number("the score of a judge", value)
            return Verdict(value >= PASSING_SCORE, score=float(value))
        case str():
            return Verdict(not value, value)
        case _:
            raise InvalidSetting(
                "a judge returns True or False, a score, a critique (empty to accept) or a Verdict, "
                f"not {describe_type(value)}"
            )


OPENING_PROMPT = """\
You take part in a debate, as {name}. The question:
{question}
{brief}
Give your position and your best reasons, in a few sentences."""
REBUTTAL_PROMPT = """\
{quoted}

Challenge what is wrong in that, and answer what was said against you. Where you were wrong, say so."""
JUDGE_OPENING_PROMPT = """\
You judge a debate, by this rubric:
{rubric}

The question:
{question}
"""
JUDGE_ROUND_PROMPT = "Round {number}:\n{quoted}\n\nIs it decided, and who has won?"
JUDGE_LAST_PROMPT = "Round {number}, the last:\n{quoted}\n\nDecide now: who has won?"

RulingValue = Ruling | str | None
DebateJudgeFunction = Callable[[tuple[DebateArgument, ...]], RulingValue | Awaitable[RulingValue]]
DebateJudge = ModelJudge | DebateJudgeFunction


@checked_except("judge", "on_event")
async def debate(
    question: str,
    sides: Sequence[Side],
    *,
    judge: DebateJudge,
    store: Store | StoreAddress,
    rounds: int = 3,
    workflow: str = "",
    on_event: WorkflowCallback = ignore_event,
    spec: dict[str, Any] | None = None,
    **settings: Any,
) -> DebateResult:
    """Run a debate about a question until a judge decides.

    Args:
        question: The question.
        sides: The participants, at least two.
        judge: A ``ModelJudge``, or a function of all arguments so far that returns a ``Ruling``, the name of
            the winner, or ``None`` to continue.
        store: The store of the conversations, or its address.
        rounds: Maximum number of rounds.
        workflow: The id of an interrupted debate to resume, or the id of a new one.
        on_event: A function that is called with every event.
        spec: Data to store with the workflow.
        settings: Settings of ``Conversation``.

    Returns:
        The arguments and the last ruling.

    Raises:
        InvalidWorkflow: The sides, the judge or the rounds are invalid.
        WorkflowFailed: A side or the judge gave no usable answer.
    """
    check_positive_int("rounds", rounds)
    _validate_debate(sides, judge)
    stored_spec = {
        "question": question,
        "rounds": rounds,
        "sides": [{"name": side.name, "brief": side.brief} for side in sides],
        **(spec or {}),
    }
    async with WorkflowRun("debate", workflow, stored_spec, on_event, settings) as run:
        roles: list[Role] = []
        held_store = run.hold_store(store)
        subject = make_title(question)
        for side in sides:
            title = f"{side.name}: {subject}"
            is_lead = not roles
            role = await run.open_role(side.name, held_store, side.engine, title, lead=is_lead)
            roles.append(role)
        judge_role = await run.open_judge(judge, held_store, subject)
        roles[0].report_start(rounds)
        return await _Debate(sides, roles, judge_role, judge, question, rounds).run()


def _validate_debate(sides: Sequence[Side], judge: object) -> None:
    names = [side.name for side in sides]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InvalidWorkflow("a debate needs two or more sides with unique names")
    if JUDGE_ROLE in names or "" in names or any("/" in name for name in names):
        raise InvalidWorkflow("a side must not be named 'judge', and its name must have no slash")
    if not isinstance(judge, ModelJudge) and not callable(judge):
        raise InvalidSetting(
            f"the judge of a debate must be a function or a ModelJudge, not {describe_type(judge)}"
        )


class _Debate(msgspec.Struct, frozen=True):
    """A running debate."""

    sides: Sequence[Side]
    roles: Sequence[Role]
    judge_role: Role | None
    judge: DebateJudge
    question: str
    rounds: int

    async def run(self) -> DebateResult:
        """Run the rounds."""
        lead = self.roles[0]  # which has the record of the workflow
        arguments: list[DebateArgument] = []
        ruling = Ruling(over=False)
        number = 0
        for number in range(1, self.rounds + 1):
            arguments.extend(await self._run_round(number, arguments))
            judge = partial(self._judge_round, number, tuple(arguments))
            ruling = await lead.resolve_decision("rulings", number, Ruling, judge)
            lead.on_event(RoundRuled(lead.workflow, number, ruling))
            if ruling.over:
                break
        await lead.finish("decided" if ruling.over else "undecided", ruling.over, rounds=number)
        everyone = list(self.roles)
        if self.judge_role is not None:
            everyone.append(self.judge_role)
        return DebateResult(
            workflow=lead.workflow,
            question=self.question,
            arguments=tuple(arguments),
            ruling=ruling,
            rounds=number,
            conversations=FrozenMap({role.role: role.conversation.id for role in everyone}),
            usage=sum((role.usage for role in everyone), Usage()),
        )

    async def _run_round(
        self, number: int, arguments: Sequence[DebateArgument]
    ) -> list[DebateArgument]:
        """Request the arguments of all sides concurrently, without those of the same round."""
        questions = [
            role.ask(number, self._build_question(side, arguments))
            for role, side in zip(self.roles, self.sides, strict=True)
        ]
        # All requests finish, also if one fails, because they are billed already.
        replies = await asyncio.gather(*questions, return_exceptions=True)
        new_arguments: list[DebateArgument] = []
        for role, reply in zip(self.roles, replies, strict=True):
            if isinstance(reply, BaseException):
                raise reply
            argument = DebateArgument(
                round=number,
                side=role.role,
                text=reply.text,
                node=reply.node,
                conversation=role.conversation.id,
                stored=reply.stored,
            )
            new_arguments.append(argument)
        return new_arguments

    def _build_question(self, side: Side, arguments: Sequence[DebateArgument]) -> str:
        if not arguments:
            brief = f"You stand for this: {side.brief}" if side.brief else ""
            return OPENING_PROMPT.format(name=side.name, question=self.question, brief=brief)
        last_round = arguments[-len(self.sides) :]
        others = [argument for argument in last_round if argument.side != side.name]
        return REBUTTAL_PROMPT.format(quoted=_quote_arguments(others))

    async def _judge_round(self, number: int, arguments: tuple[DebateArgument, ...]) -> Ruling:
        if self.judge_role and isinstance(self.judge, ModelJudge):
            return await self._judge_with_model(
                self.judge_role, self.judge.rubric, number, arguments
            )
        decision = await await_value(cast("DebateJudgeFunction", self.judge)(arguments))
        ruling = _to_ruling(decision)
        if ruling.winner and ruling.winner not in {side.name for side in self.sides}:
            raise InvalidWorkflow(f"the judge named a winner who is not a side: {ruling.winner!r}")
        return ruling

    async def _judge_with_model(
        self, judge_role: Role, rubric: str, number: int, arguments: tuple[DebateArgument, ...]
    ) -> Ruling:
        is_last = number == self.rounds
        prompt = JUDGE_LAST_PROMPT if is_last else JUDGE_ROUND_PROMPT
        text = prompt.format(number=number, quoted=_quote_arguments(arguments[-len(self.sides) :]))
        if number == 1:
            text = f"{JUDGE_OPENING_PROMPT.format(rubric=rubric, question=self.question)}\n{text}"
        names = [side.name for side in self.sides]
        schema = _build_schema(
            "ruling",
            decided={"type": "boolean", "description": "Whether the debate is over."},
            winner={"type": "string", "enum": [*names, "nobody"]},
            reason={"type": "string"},
        )
        reply, _ = await judge_role.ask_typed(number, text, schema)
        ruling = reply.output
        winner = ruling["winner"]
        if winner == "nobody":
            winner = ""
        return Ruling(is_last or ruling["decided"], winner, ruling["reason"])


def _to_ruling(value: object) -> Ruling:
    match value:
        case Ruling():
            return value
        case None:
            return Ruling(over=False)
        case str():
            return Ruling(over=True, winner=value)
        case _:
            raise InvalidSetting(
                "the judge of a debate returns a Ruling, the name of the winner, or None, "
                f"not {describe_type(value)}"
            )


def _quote_arguments(arguments: Sequence[DebateArgument]) -> str:
    return "\n\n".join(f"{each.side} says:\n{each.text}" for each in arguments)
