"""View models of workflows: a debate as columns, a refinement and a pipeline as rounds."""

from collections.abc import Sequence

from kedge.web.markdown import to_html
from kedge.web.views import Cell, RoundView, WorkflowView
from kedge.workflows import Workflow, WorkflowChain, WorkflowExchange
from kedge.workflows.debate import JUDGE_ROLE

_SUCCESS_STATUSES = frozenset({"passed", "decided", "finished"})


def build_workflow_view(workflow: Workflow) -> WorkflowView:
    """Build the view of a workflow."""
    sides = [chain for chain in workflow.chains if chain.role != JUDGE_ROLE]
    draw = _build_debate_rounds if workflow.kind == "debate" else _build_rounds
    return WorkflowView(
        id=workflow.id,
        kind=workflow.kind,
        title=_title(workflow),
        question=str(workflow.spec.get("question", "")),
        status=workflow.status,
        rounds=draw(workflow, sides),
        verdict=_format_verdict(workflow),
        good=None if workflow.status == "running" else workflow.status in _SUCCESS_STATUSES,
        chains=tuple((chain.role, chain.conversation) for chain in workflow.chains),
    )


def _title(workflow: Workflow) -> str:
    """Return the question, without the name of the leading participant."""
    return str(workflow.spec.get("question") or workflow.title or workflow.id)


def _build_rounds(workflow: Workflow, sides: Sequence[WorkflowChain]) -> tuple[RoundView, ...]:
    exchanges = sides[0].exchanges if sides else ()
    names = list(workflow.spec.get("steps", ()))
    return tuple(
        RoundView(
            _step_title(names, each.number) if workflow.kind == "steps" else f"Round {index + 1}",
            (_build_cell(each, workflow, index),),
        )
        for index, each in enumerate(exchanges)
    )


def _step_title(names: Sequence[str], number: int) -> str:
    known = 1 <= number <= len(names)
    return f"Step {number}: {names[number - 1]}" if known else f"Step {number}"


def _build_cell(exchange: WorkflowExchange, workflow: Workflow, index: int) -> Cell:
    verdict = workflow.verdicts[index] if index < len(workflow.verdicts) else None
    cell = Cell("Answer", to_html(exchange.answer), exchange.question)
    if verdict is None:
        return cell
    score = "" if verdict.score is None else f", {verdict.score:g}"
    label = f"{'passed' if verdict.passed else 'not passed'}{score}"
    return Cell(cell.title, cell.html, cell.question, label, verdict.critique, good=verdict.passed)


def _build_debate_rounds(
    workflow: Workflow, sides: Sequence[WorkflowChain]
) -> tuple[RoundView, ...]:
    length = max((len(side.exchanges) for side in sides), default=0)
    return tuple(
        RoundView(
            f"Round {index + 1}",
            tuple(_build_argument_cell(side, index) for side in sides),
            _format_ruling(workflow, index),
        )
        for index in range(length)
    )


def _build_argument_cell(side: WorkflowChain, index: int) -> Cell:
    if index >= len(side.exchanges):
        return Cell(side.role, to_html("*No answer yet.*"))
    exchange = side.exchanges[index]
    return Cell(side.role, to_html(exchange.answer), exchange.question)


def _format_ruling(workflow: Workflow, index: int) -> str:
    if index >= len(workflow.rulings):
        return ""
    ruling = workflow.rulings[index]
    decision = "Decided" if ruling.over else "Undecided"
    winner = f" for {ruling.winner}" if ruling.winner else ""
    return f"{decision}{winner}. {ruling.reason}".strip()


def _format_verdict(workflow: Workflow) -> str:
    if workflow.rulings and workflow.status != "running":
        last = workflow.rulings[-1]
        won = f"{last.winner} won." if last.winner else "No winner."
        return f"{won} {last.reason}".strip()
    if workflow.kind == "refine" and workflow.verdicts and workflow.status != "running":
        passed = workflow.verdicts[-1].passed
        return "The last answer passed." if passed else "No answer passed."
    return ""
