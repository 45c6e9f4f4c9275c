"""Read workflows from a store, for pages, reports and resuming."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kedge._internal.argument_types import checked
from kedge.engines.output_schema import CORRECTION_ORIGIN
from kedge.errors import NotInStore
from kedge.store import ConversationRow, RequestRecord, Store
from kedge.store.open import StoreAddress, use_store
from kedge.turns import AssistantBlock, UserBlock
from kedge.turns.frozen_json import EMPTY, FrozenMap
from kedge.workflows import roles
from kedge.workflows.results import Ruling, Verdict, WorkflowKind

WorkflowStatus = Literal[
    "running", "passed", "failed", "decided", "undecided", "finished", "interrupted"
]
"""The status of a workflow; a view shows one as interrupted that is running nowhere."""


class WorkflowExchange(msgspec.Struct, frozen=True):
    """A question of a workflow and its answer; ``number`` is the round or step.

    ``response_id`` is the response with the answer, ``anchor`` the one that its request was chained on, if any.
    """

    number: int
    question: str
    answer: str
    response_id: str = ""
    anchor: str = ""
    model: str = ""


class WorkflowChain(msgspec.Struct, frozen=True):
    """The conversation of one role of a workflow, with its exchanges."""

    role: str
    conversation: str
    exchanges: tuple[WorkflowExchange, ...] = ()


class Workflow(msgspec.Struct, frozen=True):
    """A stored workflow, running or finished.

    ``verdicts`` are those of a refinement, one per round; ``rulings`` those of a debate.
    ``list_workflows`` returns ``chains`` without their exchanges.
    """

    id: str
    kind: WorkflowKind
    status: WorkflowStatus
    title: str = ""
    spec: FrozenMap = EMPTY
    chains: tuple[WorkflowChain, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    rulings: tuple[Ruling, ...] = ()
    created_at: float = 0.0
    updated_at: float = 0.0


@checked
async def list_workflows(
    store: Store | StoreAddress, *, kind: WorkflowKind | None = None, limit: int = 100
) -> list[Workflow]:
    """List the workflows of a store, the most recently changed first.

    Args:
        store: The store to read, or its address.
        kind: ``"refine"``, ``"debate"`` or ``"steps"``; all kinds by default.
        limit: The maximum number of workflows.

    Returns:
        The workflows; their chains have no exchanges.
    """
    async with use_store(store) as opened:
        return await _list_workflows(opened, kind, limit)


async def _list_workflows(store: Store, kind: WorkflowKind | None, limit: int) -> list[Workflow]:
    tag = roles.WORKFLOW_KEY
    if kind is not None:
        tag = f"{roles.WORKFLOW_KEY}:{kind}"
    workflows: list[Workflow] = []
    for row in await store.conversations(tag=tag, archived=None, limit=limit):
        for notes in reversed(roles.list_notes(row)):
            if not notes.get("lead") or kind not in (None, notes["kind"]):
                continue
            role_rows = await roles.load_rows(store, notes["id"])
            lead_row, _ = role_rows[0]
            if row.number == lead_row.number:
                chains = tuple(
                    WorkflowChain(role_notes["role"], role_row.id)
                    for role_row, role_notes in role_rows
                )
                workflows.append(_parse_workflow(row, notes, chains))
    return workflows[:limit]


@checked
async def load_workflow(store: Store | StoreAddress, workflow: str) -> Workflow:
    """Load a workflow with its chains.

    Args:
        store: The store to read, or its address.
        workflow: The id of the workflow.

    Raises:
        NotInStore: If there is no workflow with this id.
    """
    async with use_store(store) as opened:
        rows = await roles.load_rows(opened, workflow)
        if not rows or not rows[0][1].get("lead"):
            raise NotInStore(f"there is no workflow {workflow!r} in this store")
        chains = [
            WorkflowChain(notes["role"], row.id, await _load_exchanges(opened, row, workflow))
            for row, notes in rows
        ]
    lead_row, lead_notes = rows[0]
    return _parse_workflow(lead_row, lead_notes, tuple(chains))


async def _load_exchanges(
    store: Store, row: ConversationRow, workflow: str
) -> tuple[WorkflowExchange, ...]:
    path = await store.load(row)
    records = {record.provider_response_id: record for record in await store.responses(row)}
    exchanges: list[WorkflowExchange] = []
    is_ours = False
    for block in path.blocks:
        match block:
            case UserBlock() if is_ours and block.origin == CORRECTION_ORIGIN:
                exchanges.append(WorkflowExchange(exchanges[-1].number, block.text, ""))
            case UserBlock():
                is_ours = block.metadata.get(roles.BLOCK_WORKFLOW_KEY) == workflow
                if is_ours:
                    number = int(block.metadata.get(roles.ROUND_KEY, 0))
                    exchanges.append(WorkflowExchange(number, block.text, ""))
            case AssistantBlock() if is_ours:
                record = records.get(block.response_id)
                exchanges[-1] = _add_answer(exchanges[-1], block, record)
            case _:
                pass
    return tuple(exchanges)


def _add_answer(
    exchange: WorkflowExchange, block: AssistantBlock, record: RequestRecord | None
) -> WorkflowExchange:
    """Return an exchange with a further block of its answer, and with the record of its request."""
    exchange = replace(
        exchange,
        answer="\n\n".join(filter(None, (exchange.answer, block.text))),
        response_id=block.response_id,
    )
    if record is None:
        return exchange
    return replace(exchange, anchor=record.anchor, model=record.model)


def _parse_workflow(
    row: ConversationRow, notes: Mapping[str, Any], chains: tuple[WorkflowChain, ...]
) -> Workflow:
    return Workflow(
        id=notes["id"],
        kind=notes["kind"],
        status=notes["status"],
        title=row.title,
        spec=FrozenMap(notes.get("spec")),
        chains=chains,
        verdicts=tuple(Verdict(**each) for each in notes.get("verdicts", ())),
        rulings=tuple(Ruling(**each) for each in notes.get("rulings", ())),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
