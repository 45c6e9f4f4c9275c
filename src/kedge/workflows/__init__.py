"""Workflows: several requests toward one result, on stored conversations.

    result = await refine("Solve it.", judge=check, store=store, engine="openai:gpt-5.1")
    result = await debate(question, [Side("for", "openai:…"), Side("against", "xai:…")], …)
    result = await steps([Step("plan", "…"), Step("write", "Write it by this plan: {plan}")], …)

Every chain of a workflow is a conversation in the store. Every question has an idempotency key derived from the
workflow's id and its position, so an interrupted workflow can be resumed without requesting a stored answer
again: call it with the same ``workflow``.
"""

from kedge.workflows.history import (
    Workflow,
    WorkflowChain,
    WorkflowExchange,
    list_workflows,
    load_workflow,
)
from kedge.workflows.judges import debate, refine
from kedge.workflows.results import (
    AnswerJudged,
    DebateArgument,
    DebateResult,
    QuestionAnswered,
    QuestionAsked,
    RefineResult,
    Round,
    RoundRuled,
    Ruling,
    Side,
    Step,
    StepResult,
    StepsResult,
    Verdict,
    WorkflowEvent,
    WorkflowFinished,
    WorkflowStarted,
)
from kedge.workflows.roles import ModelJudge
from kedge.workflows.steps import steps

__all__ = [
    "AnswerJudged",
    "DebateArgument",
    "DebateResult",
    "ModelJudge",
    "QuestionAnswered",
    "QuestionAsked",
    "RefineResult",
    "Round",
    "RoundRuled",
    "Ruling",
    "Side",
    "Step",
    "StepResult",
    "StepsResult",
    "Verdict",
    "Workflow",
    "WorkflowChain",
    "WorkflowEvent",
    "WorkflowExchange",
    "WorkflowFinished",
    "WorkflowStarted",
    "debate",
    "list_workflows",
    "load_workflow",
    "refine",
    "steps",
]
