"""Workflows as the store knows them: for pages, reports, and whoever wants to go on with one.

A debate is drawn as columns, one for each chain; a refinement as rounds, with what was thought of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kedge.errors import NotInStore
from kedge.store import ConversationRow, Store
from kedge.turns import AssistantBlock, UserBlock
from kedge.workflows.events import WorkflowKind
from kedge.workflows.results import Ruling, Verdict
from kedge.workflows.roles import ROUND_KEY, WORKFLOW_KEY, workflow_tag

WorkflowStatus = Literal["running", "passed", "failed", "decided", "undecided", "finished"]


@dataclass(frozen=True, slots=True)
class WorkflowExchange:
    """A question of a workflow and its answer; ``number`` is its round or step."""

    number: int
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class WorkflowChain:
    """One chain of a workflow: who speaks on it, and what was said."""

    role: str
    conversation: str
    exchanges: tuple[WorkflowExchange, ...] = ()


@dataclass(frozen=True, slots=True)
class Workflow:
    """A workflow, as far as it has come.

    ``verdicts`` are those of a refinement, one for each round; ``rulings`` those of a debate. A list of
    workflows comes without ``chains``.
    """

    id: str
    kind: WorkflowKind
    status: WorkflowStatus
    title: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    chains: tuple[WorkflowChain, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    rulings: tuple[Ruling, ...] = ()
    created_at: float = 0.0
    updated_at: float = 0.0


async def list_workflows(
    store: Store, *, kind: WorkflowKind | None = None, limit: int = 100
) -> list[Workflow]:
    """The workflows of a store, the one that changed last first."""
    tag = f"{WORKFLOW_KEY}:{kind}" if kind else WORKFLOW_KEY
    rows = await store.conversations(tag=tag, archived=None, limit=limit)
    return [_parse_workflow(row) for row in rows]


async def load_workflow(store: Store, workflow: str) -> Workflow:
    """A workflow with its chains; ``NotInStore`` if there is none of this id."""
    rows = await store.conversations(tag=workflow_tag(workflow), archived=None, limit=1_000)
    lead = next((row for row in rows if _workflow_notes(row).get("lead")), None)
    if lead is None:
        raise NotInStore(f"there is no workflow {workflow!r} in this store")
    rest = sorted((row for row in rows if row.id != lead.id), key=lambda row: row.created_at)
    chains = tuple([await _load_chain(store, row, workflow) for row in (lead, *rest)])
    return _parse_workflow(lead, chains)


async def _load_chain(store: Store, row: ConversationRow, workflow: str) -> WorkflowChain:
    loaded = await store.load(row)
    exchanges: list[WorkflowExchange] = []
    for block in loaded.blocks:
        match block:
            case UserBlock() if block.metadata.get(WORKFLOW_KEY) == workflow:
                exchanges.append(
                    WorkflowExchange(int(block.metadata.get(ROUND_KEY, 0)), block.text, "")
                )
            case AssistantBlock() if exchanges:
                last = exchanges[-1]
                text = f"{last.answer}\n\n{block.text}" if last.answer else block.text
                exchanges[-1] = WorkflowExchange(last.number, last.question, text)
            case _:
                pass
    return WorkflowChain(_workflow_notes(row)["role"], row.id, tuple(exchanges))


def _parse_workflow(row: ConversationRow, chains: tuple[WorkflowChain, ...] = ()) -> Workflow:
    notes = _workflow_notes(row)
    return Workflow(
        id=notes["id"],
        kind=notes["kind"],
        status=notes["status"],
        title=row.title,
        spec=notes.get("spec", {}),
        chains=chains,
        verdicts=tuple(Verdict(**each) for each in notes.get("verdicts", ())),
        rulings=tuple(Ruling(**each) for each in notes.get("rulings", ())),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _workflow_notes(row: ConversationRow) -> dict[str, Any]:
    return cast("dict[str, Any]", dict(row.data).get(WORKFLOW_KEY) or {})
