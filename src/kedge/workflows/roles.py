"""A role of a workflow: a conversation whose questions have idempotency keys.

The id of the conversation is derived from the workflow's id and the role, and the key of a question from
the workflow's id and the question's number. So a workflow that is resumed after a crash finds the stored
answers and sends nothing twice. Its spec, verdicts and status are in the conversation's data: a record
per workflow, because several workflows may use a caller's conversation one after the other.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeVar, cast

import msgspec
from msgspec.structs import asdict, replace

from kedge._internal.arguments import check_callback, check_type
from kedge.conversation import Conversation, ConversationSettings, Reply
from kedge.conversation.lookup import find_redo_target
from kedge.engines import Engine, to_output_schema
from kedge.engines.output_schema import CORRECTION_ORIGIN
from kedge.errors import (
    HeadConflict,
    InvalidWorkflow,
    NotInStore,
    OutputError,
    OutputInvalid,
    WorkflowFailed,
)
from kedge.events import Usage
from kedge.events.run import OutputRejected
from kedge.middleware.compose import resolve_tools
from kedge.providers.model_strings import check_model
from kedge.store import ConversationRow, Store
from kedge.store.open import StoreAddress, share_store
from kedge.turns import new_id, user
from kedge.turns.frozen_json import FrozenMap, thaw
from kedge.workflows.results import (
    QuestionAnswered,
    QuestionAsked,
    Ruling,
    Verdict,
    WorkflowCallback,
    WorkflowFinished,
    WorkflowKind,
    WorkflowStarted,
)

D = TypeVar("D", Verdict, Ruling)

WORKFLOW_KEY = "workflow"
"""The key of a workflow in a conversation's data, its tags and the metadata of its questions."""
MAX_ROLES = 1_000
"""The maximum number of conversations of one workflow that are read, with copies."""
FURTHER_WORKFLOWS_KEY = "workflows"
"""The member of a conversation's data with the records of its second and later workflows, by id."""
BLOCK_WORKFLOW_KEY = "kedge.workflow"
"""Metadata key of a message of a workflow: its id."""
ROUND_KEY = "kedge.round"
_DETERMINED_SETTINGS = frozenset({"model", "id", "title", "tags", "data"})
_JUDGE_SETTINGS = frozenset({"lease", "price"})
JUDGE_ROLE = "judge"
MAX_ATTEMPTS = 3
"""The maximum number of requests to a model judge for an answer of the requested form."""


def new_workflow_id() -> str:
    """Return a new workflow id."""
    return new_id("wf")


def workflow_tag(workflow: str) -> str:
    """Return the tag of every conversation of a workflow."""
    return f"{WORKFLOW_KEY}:{workflow}"


def role_conversation_id(workflow: str, role: str) -> str:
    """Return the id of the conversation that a workflow creates for a role."""
    return f"{workflow}.{role}"


class Role(msgspec.Struct):
    """A role of a workflow with its conversation.

    ``notes`` is the workflow's record in the conversation's data: spec, verdicts, status.
    """

    workflow: str
    role: str
    conversation: Conversation
    notes: dict[str, Any]
    on_event: WorkflowCallback
    usage: Usage = Usage()

    def report_start(self, total: int) -> None:
        """Report that the workflow has started, or is resumed if it has sent a question before."""
        is_resumed = any(
            block.metadata.get(BLOCK_WORKFLOW_KEY) == self.workflow
            for block in self.conversation.turn
        )
        self.on_event(WorkflowStarted(self.workflow, self.notes["kind"], total, is_resumed))

    async def finish(self, status: str, passed: bool | None = None, **changes: Any) -> None:
        """Store the status of a workflow that has ended, unless it is stored already, and report it."""
        if self.notes.get("status") != status:
            await self.update_notes(status=status, **changes)
        self.on_event(WorkflowFinished(self.workflow, self.notes["kind"], passed))

    async def ask(
        self,
        number: int,
        message: str,
        *,
        on_rejected: Callable[[Sequence[str]], None] | None = None,
        **options: Any,
    ) -> Reply[Any]:
        """Send the question of this number once; later calls return the stored answer."""
        self.on_event(QuestionAsked(self.workflow, self.role, number))
        block = user(message, metadata={BLOCK_WORKFLOW_KEY: self.workflow, ROUND_KEY: number})
        key = f"{self.workflow}/{self.role}/{number}"
        async with self.conversation.stream(block, key=key, streaming=False, **options) as stream:
            async for event in stream:
                if isinstance(event, OutputRejected):
                    self._report_answer(number, event.text)
                    if on_rejected:
                        on_rejected(event.problems)
                    self.on_event(QuestionAsked(self.workflow, self.role, number))
        reply = stream.reply
        self.usage += reply.usage
        self._report_answer(number, reply.text, is_stored=reply.stored)
        return reply

    def _report_answer(self, number: int, text: str, *, is_stored: bool = False) -> None:
        self.on_event(QuestionAnswered(self.workflow, self.role, number, text, is_stored))

    async def ask_typed(
        self,
        number: int,
        message: str,
        result: Any,
        problem: str = "the judge did not answer in the requested format",
        *,
        attempts: int = MAX_ATTEMPTS,
        on_rejected: Callable[[Sequence[str]], None] | None = None,
    ) -> tuple[Reply[Any], int]:
        """Send a question until its answer matches a schema, like ``Conversation.send``.

        A resumed workflow continues with the last answer; stored answers do not count as attempts.

        Returns:
            The reply and the number of answers.

        Raises:
            WorkflowFailed: No answer matched; ``problem`` says whose.
        """
        try:
            reply = await self.ask(
                number,
                message,
                on_rejected=on_rejected,
                output=to_output_schema(result, "answer"),
                output_retries=attempts - 1,
            )
        except OutputError as error:
            self._report_answer(number, error.text)
            if on_rejected:
                problems: Sequence[str] = (error.text,)
                if isinstance(error, OutputInvalid):
                    problems = error.problems
                on_rejected(problems)
            conversation = self.conversation
            with suppress(HeadConflict, NotInStore):  # the last answer becomes visible
                end = await find_redo_target(
                    conversation.store, conversation.row, conversation.head
                )
                await conversation.goto(end.id)
            raise WorkflowFailed(self.workflow, f"{problem}, {attempts} times") from error
        blocks = reply.turn.blocks
        questions = [i for i, block in enumerate(blocks) if BLOCK_WORKFLOW_KEY in block.metadata]
        return reply, 1 + sum(
            block.origin == CORRECTION_ORIGIN for block in blocks[max(questions, default=0) :]
        )

    async def update_notes(self, **changes: Any) -> None:
        """Change the workflow's record in the store; the records of other workflows are not touched."""
        await self._change_notes(lambda notes: {**notes, **changes})

    async def resolve_decision(
        self, name: str, number: int, kind: type[D], decide: Callable[[], Awaitable[D]]
    ) -> D:
        """Return the decision of a judge about a round: the stored one, or else a new one, which is stored.

        Later questions depend on it. So if several processes run one workflow, all continue with the decision
        that was stored first.

        Args:
            name: The member of the record: ``verdicts`` or ``rulings``.
            number: The number of the round.
            kind: The type of the decision.
            decide: A function that requests a decision.
        """
        if number > len(self.notes.get(name, ())):
            decision = asdict(await decide())

            def add(notes: dict[str, Any]) -> dict[str, Any]:
                decisions: list[Any] = notes.get(name, [])
                if number <= len(decisions):
                    return notes
                return {**notes, name: [*decisions, decision]}

            await self._change_notes(add)
        return kind(**self.notes[name][number - 1])

    async def _change_notes(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        def compute(row: ConversationRow) -> dict[str, Any]:
            current = find_notes(row, self.workflow) or self.notes
            notes = change(current)
            if notes is current:
                return {}
            first: Any = row.data.get(WORKFLOW_KEY)
            if not first or (_is_record(first) and first["id"] == self.workflow):
                return {"data": {**row.data, WORKFLOW_KEY: notes}}
            further: Mapping[str, Any] = row.data.get(FURTHER_WORKFLOWS_KEY) or {}
            added = {FURTHER_WORKFLOWS_KEY: {**further, self.workflow: notes}}
            return {"data": {**row.data, **added}}

        await self.conversation.update_with(compute)
        self.notes = find_notes(self.conversation.row, self.workflow)


class ModelJudge(msgspec.Struct, frozen=True):
    """A model that judges by a rubric, on a separate chain.

    In a refinement it receives the task and each answer; in a debate the question and the arguments.

    Args:
        engine: An engine or a model string.
        rubric: The criteria.
    """

    engine: Engine | str
    rubric: str

    def __post_init__(self) -> None:
        check_type("the rubric of a judge", str, self.rubric)
        check_model(self.engine)


class WorkflowRun(msgspec.Struct):
    """A running workflow, which opens its roles; ``async with`` closes the engines that are connected here.

    Attributes:
        kind: The kind of the workflow.
        workflow: Its id; a new one if it is empty.
        spec: Data to store with its first role, the lead.
        on_event: A function that is called with every event.
        settings: Settings of the conversations of its roles.
    """

    kind: WorkflowKind
    workflow: str
    spec: Mapping[str, Any]
    on_event: WorkflowCallback
    settings: Mapping[str, Any]
    stack: AsyncExitStack = msgspec.field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        if taken := sorted(self.settings.keys() & _DETERMINED_SETTINGS):
            problem = f"a workflow determines {', '.join(taken)} of its conversations; leave it out"
            raise InvalidWorkflow(f"{problem}, or pass conversation=")
        check_callback("on_event", self.on_event)
        self.workflow = self.workflow or new_workflow_id()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    def hold_store(self, store: Store | StoreAddress) -> Store:
        """Return a store, or the one at an address, which is open until the end of the workflow."""
        shared_store = share_store(store)
        self.stack.push_async_callback(shared_store.aclose)
        return shared_store.resource

    async def open_role(
        self, role: str, store: Store, engine: Engine | str, title: str = "", *, lead: bool = False
    ) -> Role:
        """Open the conversation of a role, or create it.

        Raises:
            InvalidWorkflow: The id belongs to a workflow of another kind.
        """
        if lead:
            await self._check_kind(store)
        if (
            "tools" in self.settings
        ):  # the next role reads them, too, and an iterator can be read only once
            self.settings = {**self.settings, "tools": resolve_tools(self.settings["tools"])}
        conversation = Conversation(
            engine,
            store=store,
            id=role_conversation_id(self.workflow, role),
            title=title,
            tags=self._build_tags(lead=lead),
            data={WORKFLOW_KEY: self._build_notes(role, lead=lead)},
            **cast("ConversationSettings", dict(self.settings)),
        )
        self.stack.push_async_callback(conversation.aclose)
        return self._check_role(role, conversation, await conversation.require_row())

    async def open_lead(
        self,
        role: str,
        conversation: Conversation | None,
        store: Store | StoreAddress | None,
        engine: Engine | str | None,
        title: str,
    ) -> Role:
        """Open the lead of a workflow: a caller's conversation, or one in a store.

        Raises:
            InvalidWorkflow: Neither is given, or both are; there are settings beside a conversation; or the id is of
                another kind.
        """
        if conversation is None:
            if store is None or engine is None:
                raise InvalidWorkflow("a workflow needs a conversation, or a store and an engine")
            return await self.open_role(role, self.hold_store(store), engine, title, lead=True)
        unused = self.settings.keys() - _JUDGE_SETTINGS
        if store is not None:
            unused |= {"store"}
        if engine is not None:
            unused |= {"engine"}
        if unused:
            listed = ", ".join(sorted(unused))
            raise InvalidWorkflow(f"conversation= has its own {listed}; leave it out")
        row = await conversation.store.conversation(await conversation.require_row())
        if find_notes(row, self.workflow):
            return self._check_role(role, conversation, row)
        await self._check_kind(conversation.store)
        lead = Role(self.workflow, role, conversation, {}, self.on_event)
        await conversation.tag(*self._build_tags(lead=True))
        await lead.update_notes(**self._build_notes(role, lead=True))
        return lead

    async def open_judge(self, judge: object, store: Store, subject: str) -> Role | None:
        """Open the chain of a judge that is a model, without tools; return None for any other judge."""
        if not isinstance(judge, ModelJudge):
            return None
        settings = {name: self.settings[name] for name in self.settings.keys() & _JUDGE_SETTINGS}
        title = f"{JUDGE_ROLE}: {subject}"
        run = replace(self, settings=settings)
        return await run.open_role(JUDGE_ROLE, store, judge.engine, title)

    def _build_tags(self, *, lead: bool) -> Sequence[str]:
        tags = [workflow_tag(self.workflow)]
        if lead:
            tags += [WORKFLOW_KEY, f"{WORKFLOW_KEY}:{self.kind}"]
        return tags

    def _build_notes(self, role: str, *, lead: bool) -> dict[str, Any]:
        notes: dict[str, Any] = {"id": self.workflow, "kind": self.kind, "role": role}
        if lead:
            notes |= {"lead": True, "status": "running", "spec": dict(self.spec)}
        return notes

    async def _check_kind(self, store: Store) -> None:
        """Raise ``InvalidWorkflow`` if the id belongs to a workflow of another kind, whose roles have other names."""
        kinds = [notes["kind"] for _, notes in await load_rows(store, self.workflow)]
        if kinds and self.kind not in kinds:
            raise self._build_kind_error(f"a {kinds[0]} workflow")

    def _check_role(self, role: str, conversation: Conversation, row: ConversationRow) -> Role:
        """Return a role, or raise ``InvalidWorkflow`` if its conversation is part of another workflow."""
        notes = find_notes(row, self.workflow)
        if notes.get("kind") != self.kind:
            if "kind" not in notes:
                raise self._build_kind_error("not a workflow")
            raise self._build_kind_error(f"a {notes['kind']} workflow")
        return Role(self.workflow, role, conversation, notes, self.on_event)

    def _build_kind_error(self, actual: str) -> InvalidWorkflow:
        return InvalidWorkflow(
            f"{self.workflow} is {actual}, not a {self.kind} workflow; resume it as what it is, or "
            "use another id"
        )


def _is_record(value: object) -> bool:
    """Return whether data is the record of a workflow, and not an application's under the same name."""
    return isinstance(value, FrozenMap) and {"id", "kind", "role"} <= value.keys()


def list_notes(row: ConversationRow) -> list[dict[str, Any]]:
    """Return copies of the records of all workflows of a conversation, the first workflow first."""
    further: Mapping[str, Any] = row.data.get(FURTHER_WORKFLOWS_KEY) or {}
    records: list[Any] = [row.data.get(WORKFLOW_KEY), *further.values()]
    return [thaw(each) for each in records if _is_record(each)]


def find_notes(row: ConversationRow, workflow: str) -> dict[str, Any]:
    """Return a copy of the record of one workflow; empty if the conversation has none."""
    return next(
        (notes for notes in list_notes(row) if notes.get("id") == workflow), dict[str, Any]()
    )


async def load_rows(store: Store, workflow: str) -> list[tuple[ConversationRow, Mapping[str, Any]]]:
    """Return the conversations of a workflow with their records, the leading one first and the others by their age.

    A fork or an imported copy of a conversation has its tags and data, but is not part of the workflow: of each role,
    the conversation that the workflow created is used, or else the oldest.
    """
    rows = await store.conversations(tag=workflow_tag(workflow), archived=None, limit=MAX_ROLES)
    roles: dict[str, tuple[ConversationRow, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        notes = find_notes(row, workflow)
        if not notes:
            continue
        role = notes["role"]
        if role not in roles or row.id == role_conversation_id(workflow, role):
            roles[role] = row, notes

    def rank(entry: tuple[ConversationRow, Mapping[str, Any]]) -> tuple[bool, float]:
        row, notes = entry
        return not notes.get("lead"), row.created_at

    return sorted(roles.values(), key=rank)
