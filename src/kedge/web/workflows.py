"""Start workflows from the page and the API, and follow them while they run.

A workflow runs as a task of the server, with models of the server. Its judge is a model with a rubric,
because a judge that is a function would run code chosen by a client.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from kedge.errors import InvalidWorkflow, KedgeError, NotInStore
from kedge.web.runs import TurnRun
from kedge.web.schemas import NewWorkflow
from kedge.web.service import ConversationService
from kedge.web.shapes import WorkflowShape
from kedge.workflows import (
    ModelJudge,
    Side,
    Step,
    Workflow,
    debate,
    list_workflows,
    load_workflow,
    refine,
    steps,
)
from kedge.workflows.roles import new_workflow_id

RunnableWorkflow = Awaitable[Any]
MAX_WORKFLOWS = 200
"""The maximum number of workflows in a list."""


async def start_workflow(service: ConversationService, body: NewWorkflow) -> TurnRun:
    """Start a workflow, and return when it is stored.

    Raises:
        InvalidWorkflow: A member that its kind requires is missing; nothing was stored.
        InvalidSetting: The server has no such model; nothing was stored.
    """
    check_workflow(body)
    for model in (body.model, body.judge_model, *(side.model for side in body.sides)):
        service.models.check_name(model)
    run = TurnRun(new_workflow_id(), 0, body.question)

    async def work(run: TurnRun) -> None:
        def on_event(event: object) -> None:
            run.publish({"type": "progress", "event": type(event).__name__})

        try:
            await _build_workflow(service, body, run.conversation, on_event)
            run.finish("done", {"type": "done", "url": f"/workflows/{run.conversation}"})
        except asyncio.CancelledError:
            run.finish("cancelled", {"type": "cancelled", "url": f"/workflows/{run.conversation}"})
            raise
        except KedgeError as error:
            run.error = error
            run.finish("failed", {"type": "error", "message": str(error), "url": ""})

    service.runs.start(run, work)
    async for _ in run.follow():  # the first event: its conversations are stored by then
        break
    if run.error is not None:
        raise run.error
    return run


def check_workflow(body: NewWorkflow) -> None:
    """Raise ``InvalidWorkflow`` for a workflow that cannot run."""
    if body.kind == "steps":
        if not body.steps:
            raise InvalidWorkflow("steps: 'steps' is missing; add at least one step")
        return
    if not body.question:
        raise InvalidWorkflow(f"{body.kind}: 'question' is missing")
    if not body.rubric:
        raise InvalidWorkflow(
            f"{body.kind}: 'rubric' is missing; describe how the answers are judged"
        )
    if body.kind == "debate" and len(body.sides) < 2:
        raise InvalidWorkflow("debate: 'sides' needs at least two participants")


def _build_workflow(
    service: ConversationService, body: NewWorkflow, workflow: str, on_event: Any
) -> RunnableWorkflow:
    models = service.models
    engine = models.engine_for(body.model)
    common: dict[str, Any] = {"store": service.store, "workflow": workflow, "on_event": on_event}
    judge = ModelJudge(models.engine_for(body.judge_model or body.model), body.rubric)
    match body.kind:
        case "refine":
            return refine(body.question, judge=judge, engine=engine, rounds=body.rounds, **common)
        case "debate":
            sides = [
                Side(each.name, models.engine_for(each.model or body.model), each.brief)
                for each in body.sides
            ]
            return debate(body.question, sides, judge=judge, rounds=body.rounds, **common)
        case "steps":
            return steps(
                [Step(each.name, each.prompt) for each in body.steps], engine=engine, **common
            )


async def list_with_runs(
    service: ConversationService,
) -> list[tuple[Workflow, TurnRun | None]]:
    """List the newest workflows, the most recently changed first, each with its run if it is running here."""
    rows = await list_workflows(service.store, limit=MAX_WORKFLOWS)
    return [(row, next(iter(service.runs.list(row.id)), None)) for row in rows]


async def load_running(service: ConversationService, name: str) -> tuple[Workflow, TurnRun | None]:
    """Load a workflow, and its run if it is running here."""
    loaded = await load_workflow(service.store, name)
    return loaded, next(iter(service.runs.list(name)), None)


def find_workflow_run(service: ConversationService, name: str) -> TurnRun:
    """Return the run of a workflow.

    Raises:
        NotInStore: It is not running here.
    """
    run = next(iter(service.runs.list(name)), None)
    if run is None:
        raise NotInStore(f"workflow {name!r} is not running here")
    return run


def to_workflow_shape(workflow: Workflow, run: TurnRun | None) -> WorkflowShape:
    """Convert a workflow to its API form; one that is not running any more is interrupted."""
    conversations = {chain.role: chain.conversation for chain in workflow.chains}
    status = workflow_status(workflow, run)
    return WorkflowShape.of(workflow, status=status, conversations=conversations)


def workflow_status(workflow: Workflow, run: TurnRun | None) -> str:
    """Return the status of a workflow."""
    is_over = workflow.status == "running" and run is None
    return "interrupted" if is_over else workflow.status
