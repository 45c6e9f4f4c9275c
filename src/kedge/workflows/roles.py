"""A role of a workflow: a conversation whose questions have idempotency keys.

The id of the conversation is derived from the workflow's id and the role, and the key of a question from
the workflow's id and the question's number. So a workflow that is resumed after a crash finds what was
answered and sends nothing twice. Its spec, verdicts and status are in the conversation's data: a record
per workflow, because a conversation of the caller's may serve several workflows one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self, cast

from kedge.conversation import Conversation, Reply
from kedge.conversation.conversation import ConversationSettings, open_or_create
from kedge.engines import Engine, OutputSchema, to_output_schema
from kedge.engines.output_schema import CORRECTION_PROMPT, SchemaMismatch
from kedge.errors import InvalidSetting, InvalidWorkflow
from kedge.events import Usage
from kedge.store import ConversationRow, Store
from kedge.turns import new_id, user
from kedge.workflows.events import QuestionAnswered, QuestionAsked, WorkflowCallback, WorkflowKind

WORKFLOW_KEY = "workflow"
"""The key of a workflow in a conversation's data, its tags and the metadata of its questions."""
FURTHER_WORKFLOWS_KEY = "workflows"
"""The member of a conversation's data that holds the records of its second and later workflows, by id."""
ROUND_KEY = "round"


def new_workflow_id() -> str:
    """Return a new workflow id."""
    return new_id("wf")


def load_schema(result: Any, name: str = "answer") -> OutputSchema[Any]:
    """Return the schema of the answers of a workflow.

    Raises:
        InvalidWorkflow: It is neither a type with a JSON schema nor a valid JSON schema.
    """
    try:
        return to_output_schema(result, name)
    except InvalidSetting as error:
        raise InvalidWorkflow(str(error)) from error


def workflow_tag(workflow: str) -> str:
    """Return the tag of every conversation of a workflow."""
    return f"{WORKFLOW_KEY}:{workflow}"


class Role:
    """A role of a workflow with its conversation.

    ``notes`` is the workflow's record in the conversation's data: spec, verdicts, status.
    """

    def __init__(
        self,
        workflow: str,
        role: str,
        conversation: Conversation,
        notes: dict[str, Any],
        watch: WorkflowCallback,
        *,
        owned: bool = False,
    ) -> None:
        self.workflow = workflow
        self.role = role
        self.conversation = conversation
        self.notes = notes
        self.watch = watch
        self.usage = Usage()
        self._owned = owned

    @classmethod
    async def open(
        cls,
        workflow: str,
        kind: WorkflowKind,
        role: str,
        *,
        store: Store,
        engine: Engine | str,
        lead: bool,
        spec: Mapping[str, Any],
        watch: WorkflowCallback,
        title: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open the conversation of a role, or create it."""
        name = f"{workflow}.{role}"
        new = _new_notes(workflow, kind, role, lead=lead, spec=spec)
        conversation = await open_or_create(
            store,
            name,
            engine,
            cast("ConversationSettings", dict(settings or {})),
            title=title,
            tags=_chain_tags(workflow, kind, lead=lead),
            data={WORKFLOW_KEY: new},
        )
        notes = _check_notes(find_notes(conversation.row, workflow), workflow, kind)
        return cls(workflow, role, conversation, notes, watch, owned=isinstance(engine, str))

    @classmethod
    async def adopt(
        cls,
        workflow: str,
        kind: WorkflowKind,
        role: str,
        conversation: Conversation,
        *,
        spec: Mapping[str, Any],
        watch: WorkflowCallback,
    ) -> Self:
        """Use a conversation of the caller's as the lead of a workflow."""
        row = await conversation.store.conversation(conversation.id)
        notes = find_notes(row, workflow)
        adopted = cls(workflow, role, conversation, notes, watch)
        if not notes:
            await conversation.tag(*_chain_tags(workflow, kind, lead=True))
            await adopted.update_notes(**_new_notes(workflow, kind, role, lead=True, spec=spec))
        _check_notes(notes, workflow, kind)
        return adopted

    @property
    def is_resumed(self) -> bool:
        """Whether the workflow has sent a question before."""
        return any(
            block.metadata.get(WORKFLOW_KEY) == self.workflow for block in self.conversation.turn
        )

    async def ask(self, number: int, message: str, *, part: str = "", **options: Any) -> Reply:
        """Send the question of this number (and part) once; later calls return the stored answer."""
        self.watch(QuestionAsked(self.workflow, self.role, number))
        block = user(message, metadata={WORKFLOW_KEY: self.workflow, ROUND_KEY: number})
        key = f"{self.workflow}/{self.role}/{number}{part}"
        reply = await self.conversation.send(block, key=key, **options)
        self.usage += reply.usage
        self.watch(QuestionAnswered(self.workflow, self.role, number, reply.text, reply.stored))
        return reply

    async def ask_typed(
        self,
        number: int,
        message: str,
        schema: OutputSchema[Any],
        *,
        attempts: int = 3,
        prompt: str = CORRECTION_PROMPT,
        on_mismatch: Callable[[SchemaMismatch], None] | None = None,
    ) -> tuple[Any, Reply, int] | None:
        """Send a question until its answer matches a schema.

        Each attempt is a question of its own with a key of its own, because a resumed workflow continues
        with the next one. Stored answers do not count as attempts.

        Returns:
            The value, the reply and the number of attempts; None if no answer matched.
        """
        asked, attempt, left = message, 1, attempts
        while left:
            part = "" if attempt == 1 else f".{attempt}"
            reply = await self.ask(number, asked, part=part, **schema.request_options())
            try:
                return schema.parse(reply.text), reply, attempt
            except SchemaMismatch as mismatch:
                if on_mismatch:
                    on_mismatch(mismatch)
                asked = prompt.format(problems=mismatch)
            attempt, left = attempt + 1, left - (not reply.stored)
        return None

    async def update_notes(self, **changes: Any) -> None:
        """Change the workflow's record in the store; the records of other workflows are not touched."""
        self.notes.update(changes)
        store, name = self.conversation.store, self.conversation.id
        data = deepcopy(dict((await store.conversation(name)).data))
        first = data.get(WORKFLOW_KEY)
        if first and first.get("id") != self.workflow:
            data.setdefault(FURTHER_WORKFLOWS_KEY, {})[self.workflow] = self.notes
        else:
            data[WORKFLOW_KEY] = self.notes
        row = await store.update(name, data=data)
        self.conversation.row = replace(row, head=self.conversation.head)

    async def aclose(self) -> None:
        """Close the engine if it was connected here; an engine of the caller's stays open."""
        if self._owned:
            await self.conversation.aclose()


def _new_notes(
    workflow: str, kind: WorkflowKind, role: str, *, lead: bool, spec: Mapping[str, Any]
) -> dict[str, Any]:
    notes: dict[str, Any] = {"id": workflow, "kind": kind, "role": role}
    return {**notes, "lead": True, "status": "running", "spec": dict(spec)} if lead else notes


def _chain_tags(workflow: str, kind: WorkflowKind, *, lead: bool) -> Sequence[str]:
    return (workflow_tag(workflow), *((WORKFLOW_KEY, f"{WORKFLOW_KEY}:{kind}") if lead else ()))


def list_notes(row: ConversationRow) -> list[dict[str, Any]]:
    """Return copies of the records of all workflows of a conversation, the first workflow first."""
    first: dict[str, Any] | None = row.data.get(WORKFLOW_KEY)
    further: Mapping[str, dict[str, Any]] = row.data.get(FURTHER_WORKFLOWS_KEY) or {}
    return deepcopy([*([first] if first else []), *further.values()])


def find_notes(row: ConversationRow, workflow: str) -> dict[str, Any]:
    """Return a copy of the record of one workflow; empty if the conversation has none."""
    return next(
        (notes for notes in list_notes(row) if notes.get("id") == workflow), dict[str, Any]()
    )


def _check_notes(notes: dict[str, Any], workflow: str, kind: WorkflowKind) -> dict[str, Any]:
    if notes.get("kind") != kind:
        found = f"a {notes['kind']} workflow" if "kind" in notes else "not a workflow"
        raise InvalidWorkflow(
            f"{workflow} is {found}, not a {kind} workflow; resume it as what it is, or use another id"
        )
    return notes
