"""A chain of a workflow: a conversation with a role, whose questions have keys.

The id of the conversation is made of the workflow's and the role, and the key of a question of the
workflow's and its place, so that whoever goes on after a crash finds what there is, and asks for nothing
twice. What is known besides (the spec, verdicts, how it ended) stands in the conversation's data.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

from kedge.conversation import Conversation, Reply
from kedge.engines import Engine
from kedge.errors import InvalidWorkflow, NotInStore
from kedge.events import Usage
from kedge.store import Store
from kedge.turns import new_id, user
from kedge.workflows.events import QuestionAnswered, QuestionAsked, WorkflowCallback, WorkflowKind

WORKFLOW_KEY = "workflow"
"""Where a conversation's data, its tags and the metadata of its questions tell of a workflow."""
ROUND_KEY = "round"


def new_workflow_id() -> str:
    """A name for a workflow."""
    return new_id("wf")


def workflow_tag(workflow: str) -> str:
    """The tag of every chain of a workflow."""
    return f"{WORKFLOW_KEY}:{workflow}"


class Role:
    """One role of a workflow, and its conversation."""

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
        """The chain of a role: as it is in the store, or a new one."""
        name = f"{workflow}.{role}"
        given = dict(settings or {})
        try:
            talk = await Conversation.open(store, name, engine, **given)
        except NotInStore:
            notes = _new_notes(workflow, kind, role, lead=lead, spec=spec)
            tags = _chain_tags(workflow, kind, lead=lead)
            talk = await Conversation.create(
                store, engine, id=name, title=title, tags=tags, data={WORKFLOW_KEY: notes}, **given
            )
        notes = _read_notes(talk, workflow, kind)
        return cls(workflow, role, talk, notes, watch, owned=isinstance(engine, str))

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
        """A conversation of the caller's as the leading chain of a workflow."""
        known = _copy_data(conversation).get(WORKFLOW_KEY)
        if not known or known.get("id") != workflow:
            notes = _new_notes(workflow, kind, role, lead=True, spec=spec)
            data = {**_copy_data(conversation), WORKFLOW_KEY: notes}
            await conversation.tag(*_chain_tags(workflow, kind, lead=True))
            row = await conversation.store.update(conversation.id, data=data)
            conversation.row = replace(row, head=conversation.head)
        return cls(workflow, role, conversation, _read_notes(conversation, workflow, kind), watch)

    @property
    def is_resumed(self) -> bool:
        """Whether something was said already."""
        return any(
            block.metadata.get(WORKFLOW_KEY) == self.workflow for block in self.conversation.turn
        )

    async def ask(self, number: int, message: str, *, part: str = "", **options: Any) -> Reply:
        """Ask the question of this number (and part), once and for all."""
        self.watch(QuestionAsked(self.workflow, self.role, number))
        block = user(message, metadata={WORKFLOW_KEY: self.workflow, ROUND_KEY: number})
        key = f"{self.workflow}/{self.role}/{number}{part}"
        reply = await self.conversation.send(block, key=key, **options)
        self.usage += reply.usage
        self.watch(QuestionAnswered(self.workflow, self.role, number, reply.text, reply.stored))
        return reply

    async def update_notes(self, **changes: Any) -> None:
        """Write something down about the workflow, for good."""
        self.notes.update(changes)
        data = {**_copy_data(self.conversation), WORKFLOW_KEY: self.notes}
        await self.conversation.store.update(self.conversation.id, data=data)

    async def aclose(self) -> None:
        """Let go of the connections that were made here; an engine of the caller's stays open."""
        if self._owned:
            await self.conversation.aclose()


def _new_notes(
    workflow: str, kind: WorkflowKind, role: str, *, lead: bool, spec: Mapping[str, Any]
) -> dict[str, Any]:
    notes: dict[str, Any] = {"id": workflow, "kind": kind, "role": role}
    return {**notes, "lead": True, "status": "running", "spec": dict(spec)} if lead else notes


def _chain_tags(workflow: str, kind: WorkflowKind, *, lead: bool) -> Sequence[str]:
    return (workflow_tag(workflow), *((WORKFLOW_KEY, f"{WORKFLOW_KEY}:{kind}") if lead else ()))


def _read_notes(conversation: Conversation, workflow: str, kind: WorkflowKind) -> dict[str, Any]:
    notes: dict[str, Any] = _copy_data(conversation).get(WORKFLOW_KEY) or dict[str, Any]()
    if notes.get("kind") != kind:
        raise InvalidWorkflow(
            f"the workflow {workflow} is a {notes.get('kind', 'stranger')}, not a {kind}; "
            "go on with it as what it is, or use another id"
        )
    return notes


def _copy_data(conversation: Conversation) -> dict[str, Any]:
    return deepcopy(dict(conversation.row.data))
