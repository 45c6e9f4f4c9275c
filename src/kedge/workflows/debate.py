"""``debate``: two or more models argue, each on a separate chain, until a judge decides.

Only text is exchanged: each side has a separate conversation, engine and provider, so no chain contains a
response of another server. The prompts are part of stored idempotency keys and must not change.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import anyio

from kedge.errors import InvalidWorkflow, KedgeError
from kedge.events import Usage
from kedge.store import Store
from kedge.text.display import first_line
from kedge.turns.frozen_json import FrozenMap
from kedge.workflows.judges import (
    JUDGE_ROLE,
    ModelJudge,
    ask_structured,
    call_judge,
    open_judge_role,
)
from kedge.workflows.refine import TITLE_LENGTH
from kedge.workflows.results import (
    DebateArgument,
    DebateResult,
    RoundRuled,
    Ruling,
    Side,
    WorkflowCallback,
    WorkflowFinished,
    WorkflowStarted,
    ignore_event,
)
from kedge.workflows.roles import Role, WorkflowRun, load_schema, new_workflow_id

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


async def debate(
    question: str,
    sides: Sequence[Side],
    *,
    judge: DebateJudge,
    store: Store,
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
        store: The store of the conversations.
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
    _validate_debate(sides, rounds, judge)
    stored_spec = {
        "question": question,
        "rounds": rounds,
        "sides": [{"name": side.name, "brief": side.brief} for side in sides],
        **(spec or {}),
    }
    async with AsyncExitStack() as stack:
        name = workflow or new_workflow_id()
        run = WorkflowRun(name, "debate", stored_spec, on_event, settings, stack)
        roles: list[Role] = []
        subject = first_line(question, TITLE_LENGTH)
        for side in sides:
            title = f"{side.name}: {subject}"
            is_lead = not roles
            roles.append(await run.open_role(side.name, store, side.engine, title, lead=is_lead))
        judge_role = await open_judge_role(run, judge, store, subject)
        on_event(WorkflowStarted(name, "debate", rounds, roles[0].is_resumed))
        return await _Debate(sides, roles, judge_role, judge, question, rounds).run()


def _validate_debate(sides: Sequence[Side], rounds: int, judge: object) -> None:
    names = [side.name for side in sides]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InvalidWorkflow("a debate needs two or more sides with unique names")
    if JUDGE_ROLE in names or "" in names or any("/" in name for name in names):
        raise InvalidWorkflow(
            "a side must not be named 'judge', and its name must not contain a slash"
        )
    if rounds < 1:
        raise InvalidWorkflow("a debate needs at least one round")
    if not isinstance(judge, ModelJudge) and not callable(judge):
        raise InvalidWorkflow("the judge of a debate must be a function or a ModelJudge")


@dataclass(frozen=True, slots=True)
class _Debate:
    """A running debate."""

    sides: Sequence[Side]
    roles: Sequence[Role]
    judge_role: Role | None
    judge: DebateJudge
    question: str
    rounds: int

    @property
    def lead(self) -> Role:
        """The role with the record of the workflow."""
        return self.roles[0]

    async def run(self) -> DebateResult:
        """Run the rounds."""
        arguments: list[DebateArgument] = []
        ruling = Ruling(over=False)
        number = 0
        for number in range(1, self.rounds + 1):
            arguments.extend(await self._run_round(number, arguments))
            ruling = await self._resolve_ruling(number, tuple(arguments))
            if ruling.over:
                break
        return await self._build_result(tuple(arguments), ruling, number)

    async def _run_round(
        self, number: int, arguments: Sequence[DebateArgument]
    ) -> list[DebateArgument]:
        """Request the arguments of all sides concurrently, without those of the same round."""
        answers: dict[int, DebateArgument] = {}
        failed: dict[int, KedgeError] = {}

        async def speak(index: int) -> None:
            role = self.roles[index]
            try:
                reply = await role.ask(number, self._build_question(index, arguments))
            except (
                KedgeError
            ) as error:  # the other requests finish, because they are billed already
                failed[index] = error
                return
            answers[index] = DebateArgument(
                number, role.role, reply.text, reply.node, role.conversation.id, reply.stored
            )

        async with anyio.create_task_group() as group:
            for index in range(len(self.roles)):
                group.start_soon(speak, index)
        if failed:
            raise failed[min(failed)]
        return [answers[index] for index in range(len(self.roles))]

    def _build_question(self, index: int, arguments: Sequence[DebateArgument]) -> str:
        side = self.sides[index]
        if not arguments:
            brief = f"You stand for this: {side.brief}" if side.brief else ""
            return OPENING_PROMPT.format(name=side.name, question=self.question, brief=brief)
        newest = [each for each in arguments[-len(self.sides) :] if each.side != side.name]
        return REBUTTAL_PROMPT.format(quoted=_quote_arguments(newest))

    async def _resolve_ruling(self, number: int, arguments: tuple[DebateArgument, ...]) -> Ruling:
        """Return the stored ruling of a round, or request one."""
        known: list[dict[str, Any]] = self.lead.notes.get("rulings", [])
        if number > len(known):
            ruling = await self._judge_round(number, arguments)
            if ruling.winner and ruling.winner not in {side.name for side in self.sides}:
                raise InvalidWorkflow(
                    f"the judge named a winner who is not a side: {ruling.winner!r}"
                )
            known = await self.lead.add_decision("rulings", number, ruling)
        ruling = Ruling(**known[number - 1])
        self.lead.on_event(RoundRuled(self.lead.workflow, number, ruling))
        return ruling

    async def _judge_round(self, number: int, arguments: tuple[DebateArgument, ...]) -> Ruling:
        if self.judge_role and isinstance(self.judge, ModelJudge):
            return await self._judge_with_model(
                self.judge_role, self.judge.rubric, number, arguments
            )
        return _to_ruling(await call_judge(cast("DebateJudgeFunction", self.judge), arguments))

    async def _judge_with_model(
        self, judge_role: Role, rubric: str, number: int, arguments: tuple[DebateArgument, ...]
    ) -> Ruling:
        last = number == self.rounds
        prompt = JUDGE_LAST_PROMPT if last else JUDGE_ROUND_PROMPT
        text = prompt.format(number=number, quoted=_quote_arguments(arguments[-len(self.sides) :]))
        if number == 1:
            text = f"{JUDGE_OPENING_PROMPT.format(rubric=rubric, question=self.question)}\n{text}"
        value = await ask_structured(judge_role, number, text, load_schema(self._ruling_schema()))
        winner = "" if value["winner"] == "nobody" else value["winner"]
        return Ruling(last or value["decided"], winner, value["reason"])

    def _ruling_schema(self) -> dict[str, Any]:
        names = [side.name for side in self.sides]
        return {
            "title": "ruling",
            "type": "object",
            "properties": {
                "decided": {"type": "boolean", "description": "Whether the debate is over."},
                "winner": {"type": "string", "enum": [*names, "nobody"]},
                "reason": {"type": "string"},
            },
            "required": ["decided", "winner", "reason"],
            "additionalProperties": False,
        }

    async def _build_result(
        self, arguments: tuple[DebateArgument, ...], ruling: Ruling, rounds: int
    ) -> DebateResult:
        status = "decided" if ruling.over else "undecided"
        if self.lead.notes.get("status") != status:
            await self.lead.update_notes(status=status, rounds=rounds)
        everyone = [*self.roles, *([self.judge_role] if self.judge_role else [])]
        self.lead.on_event(WorkflowFinished(self.lead.workflow, "debate", ruling.over))
        return DebateResult(
            workflow=self.lead.workflow,
            question=self.question,
            arguments=arguments,
            ruling=ruling,
            rounds=rounds,
            conversations=FrozenMap({role.role: role.conversation.id for role in everyone}),
            usage=sum((role.usage for role in everyone), Usage()),
        )


def _to_ruling(value: object) -> Ruling:
    match value:
        case Ruling():
            return value
        case None:
            return Ruling(over=False)
        case str():
            return Ruling(over=True, winner=value)
        case _:
            raise InvalidWorkflow(
                "the judge of a debate returns a Ruling, the name of the winner, or None, "
                f"not a {type(value).__name__}"
            )


def _quote_arguments(arguments: Sequence[DebateArgument]) -> str:
    return "\n\n".join(f"{each.side} says:\n{each.text}" for each in arguments)
