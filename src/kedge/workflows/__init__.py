"""Workflows: several turns that together do one thing, on chains that last.

    result = await refine("Solve it.", judge=check, store=store, engine="openai:gpt-5.1")
    result = await debate([Side("for", "openai:…"), Side("against", "xai:…")], question, …)
    result = await steps([Step("plan", "…"), Step("write", "Write it by this plan: {plan}")], …)

Every chain of a workflow is a conversation in the store. Every question has a key made of the workflow's
id and its place, so a workflow that was interrupted goes on where it stood, and no answer that came is
paid for again: call it again with the same ``workflow``.
"""

from kedge.workflows.debate import debate
from kedge.workflows.events import (
    Answered,
    Asked,
    Judged,
    Ruled,
    WorkflowEvent,
    WorkflowFinished,
    WorkflowStarted,
)
from kedge.workflows.judges import ModelJudge
from kedge.workflows.refine import refine
from kedge.workflows.reviewing import (
    Exchange,
    Workflow,
    WorkflowChain,
    list_workflows,
    load_workflow,
)
from kedge.workflows.steps import steps
from kedge.workflows.values import (
    Argument,
    DebateResult,
    RefineResult,
    Round,
    Ruling,
    Side,
    Step,
    StepResult,
    StepsResult,
    Verdict,
)

__all__ = [
    "Answered",
    "Argument",
    "Asked",
    "DebateResult",
    "Exchange",
    "Judged",
    "ModelJudge",
    "RefineResult",
    "Round",
    "Ruled",
    "Ruling",
    "Side",
    "Step",
    "StepResult",
    "StepsResult",
    "Verdict",
    "Workflow",
    "WorkflowChain",
    "WorkflowEvent",
    "WorkflowFinished",
    "WorkflowStarted",
    "debate",
    "list_workflows",
    "load_workflow",
    "refine",
    "steps",
]
