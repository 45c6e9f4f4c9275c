"""Start, list and find workflows.

A workflow runs as a task of the server, with models of the server. Its judge is a model with a rubric,
because a judge that is a function would run code chosen by a client.
"""

from collections.abc import Awaitable
from typing import Any

from msgspec.structs import replace

from kedge import workflows
from kedge.errors import InvalidWorkflow, NotInStore
from kedge.web import schemas
from kedge.web.runs import Run
from kedge.web.service import ConversationService
from kedge.workflows.roles import new_workflow_id

MAX_WORKFLOWS = 200
"""The maximum number of workflows in a list."""


async def start_workflow(service: ConversationService, body: schemas.NewWorkflow) -> Run:
    """Start a workflow, and return when it is stored.

    Raises:
        InvalidWorkflow: A member that its kind requires is missing; nothing was stored.
        InvalidSetting: The server has no such model; nothing was stored.
    """
    check_workflow(body)
    for model in (body.model, body.judge_model, *(side.model for side in body.sides)):
        service.models.check_name(model)
    run = Run(new_workflow_id(), 0, body.question)

    def on_event(event: object) -> None:
        run.publish({"type": "progress", "event": type(event).__name__})

    async def find_url(run: Run) -> str:
        return f"/workflows/{run.conversation}"

    async def work(run: Run) -> dict[str, Any]:
        await _build_workflow(service, body, run.conversation, on_event)
        return {"url": await find_url(run)}

    service.runs.start(run, work, find_url)
    async for _ in run.follow():  # the first event: its conversations are stored by then
        break
    if run.error is not None:
        raise run.error
    return run


def check_workflow(body: schemas.NewWorkflow) -> None:
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
    service: ConversationService, body: schemas.NewWorkflow, workflow: str, on_event: Any
) -> Awaitable[Any]:
    models = service.models
    engine = models.engine_for(body.model)
    judge = workflows.ModelJudge(models.engine_for(body.judge_model or body.model), body.rubric)
    match body.kind:
        case "refine":
            return workflows.refine(
                body.question,
                judge=judge,
                engine=engine,
                rounds=body.rounds,
                store=service.store,
                workflow=workflow,
                on_event=on_event,
            )
        case "debate":
            sides = [
                workflows.Side(side.name, models.engine_for(side.model or body.model), side.brief)
                for side in body.sides
            ]
            return workflows.debate(
                body.question,
                sides,
                judge=judge,
                rounds=body.rounds,
                store=service.store,
                workflow=workflow,
                on_event=on_event,
            )
        case "steps":
            return workflows.steps(
                [workflows.Step(step.name, step.prompt) for step in body.steps],
                engine=engine,
                store=service.store,
                workflow=workflow,
                on_event=on_event,
            )


async def list_known_workflows(service: ConversationService) -> list[workflows.Workflow]:
    """List the newest workflows, the most recently changed first."""
    rows = await workflows.list_workflows(service.store, limit=MAX_WORKFLOWS)
    return [_mark_interrupted(service, row) for row in rows]


async def load_known_workflow(service: ConversationService, name: str) -> workflows.Workflow:
    """Load a workflow."""
    return _mark_interrupted(service, await workflows.load_workflow(service.store, name))


def _mark_interrupted(
    service: ConversationService, workflow: workflows.Workflow
) -> workflows.Workflow:
    """Return a workflow with its status; a stored run that is not active here is interrupted."""
    if workflow.status == "running" and not service.runs.list(workflow.id):
        return replace(workflow, status="interrupted")
    return workflow


def find_workflow_run(service: ConversationService, name: str) -> Run:
    """Return the run of a workflow.

    Raises:
        NotInStore: It is not running here.
    """
    runs = service.runs.list(name)
    if not runs:
        raise NotInStore(f"workflow {name!r} is not running here")
    return runs[0]
