"""``kedge run``: workflows on the command line, from a file or from options; resumed by their id."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar, assert_never

import anyio
import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.frame import config_of, setting
from kedge.cli.output import dim, say, say_json
from kedge.cli.workflow_progress import watching
from kedge.config.places import store_url
from kedge.errors import InvalidWorkflow, KedgeError
from kedge.store import open_store
from kedge.workflows import DebateResult, RefineResult, StepsResult, load_workflow
from kedge.workflows.events import Kind, WorkflowEvent, WorkflowStarted
from kedge.workflows.forms import plain_value
from kedge.workflows.specs import Result, Spec, read_spec, run_spec

F = TypeVar("F", bound=Callable[..., Any])


@click.group("run", short_help="Run a workflow: refine, debate or steps.")
def command() -> None:
    """Run a workflow, from a TOML file or from options.

    Every chain of it is a conversation in the store. If it is interrupted, --resume with its id goes on
    where it stood, and nothing that was answered is paid for again.
    """


def _shared(function: F) -> F:
    """What every workflow takes."""
    for option in (
        setting("store"),
        click.option("--resume", metavar="ID", default="", help="Go on with this workflow."),
        click.option("--id", "name", metavar="ID", default="", help="Begin it under this name."),
        click.option("--model", help="A model string, in place of the file's."),
        click.argument("file", required=False, type=click.Path()),
    ):
        function = option(function)
    return function


@kedge_command("refine", short_help="Ask until a judge is content.")
@_shared
@click.option("--task", help="What is asked.")
@click.option("--rounds", type=click.IntRange(1), help="How often at most.  [default: 4]")
@click.option("--judge", "function", metavar="MODULE:FUNCTION", help="A function that judges.")
@click.option("--schema", metavar="FILE", help="A JSON schema that the answer must fit.")
@click.option("--rubric", help="What a model judges by.")
@click.option("--judge-model", help="The model that judges, if it is another one.")
def refine(
    *,
    file: str | None,
    resume: str,
    name: str,
    store: str,
    as_json: bool,
    model: str | None,
    task: str | None,
    rounds: int | None,
    function: str | None,
    schema: str | None,
    rubric: str | None,
    judge_model: str | None,
) -> None:
    """Ask a model, judge its answer, and ask again with the critique, until it is good."""
    judge = _given(function=function, schema=schema, rubric=rubric, model=judge_model)
    spec = _spec(file, model=model, task=task, rounds=rounds, judge=judge or None)
    _run("refine", spec, resume, name, store, as_json=as_json)


@kedge_command("debate", short_help="Let models argue, and a judge decide.")
@_shared
@click.option("--question", help="What it is about.")
@click.option("--rounds", type=click.IntRange(1), help="How many at most.  [default: 3]")
@click.option(
    "--side", "sides", multiple=True, metavar="NAME=MODEL", help="One who argues; two at least."
)
@click.option("--judge", "function", metavar="MODULE:FUNCTION", help="A function that judges.")
@click.option("--rubric", help="What a model judges by.")
@click.option("--judge-model", help="The model that judges, if it is another one.")
def debate(
    *,
    file: str | None,
    resume: str,
    name: str,
    store: str,
    as_json: bool,
    model: str | None,
    question: str | None,
    rounds: int | None,
    sides: tuple[str, ...],
    function: str | None,
    rubric: str | None,
    judge_model: str | None,
) -> None:
    """Let two or more models challenge and rebut one another, each on its own chain."""
    judge = _given(function=function, rubric=rubric, model=judge_model)
    named = [dict(zip(("name", "model"), side.partition("=")[::2], strict=True)) for side in sides]
    spec = _spec(
        file,
        model=model,
        question=question,
        rounds=rounds,
        sides=named or None,
        judge=judge or None,
    )
    _run("debate", spec, resume, name, store, as_json=as_json)


@kedge_command("steps", short_help="Run prompts one after the other.")
@_shared
@click.option("--input", "inputs", multiple=True, metavar="NAME=TEXT", help="An input of prompts.")
def steps(
    *,
    file: str | None,
    resume: str,
    name: str,
    store: str,
    as_json: bool,
    model: str | None,
    inputs: tuple[str, ...],
) -> None:
    """Run a pipeline of prompts, each on the chain so far, with the results before it."""
    spec = _spec(file, model=model)
    if inputs:
        parted = [each.partition("=") for each in inputs]
        given = {name: value for name, _, value in parted}
        spec["inputs"] = {**spec.get("inputs", {}), **given}
    _run("steps", spec, resume, name, store, as_json=as_json)


for each in (refine, debate, steps):
    command.add_command(each)


def _given(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _spec(file: str | None, **members: Any) -> Spec:
    """What the file says, with what the options say in its place."""
    return {**(read_spec(file) if file else {}), **_given(**members)}


def _run(kind: Kind, spec: Spec, resume: str, name: str, store: str, *, as_json: bool) -> None:
    if resume and (name or spec):
        raise InvalidWorkflow("a workflow that is resumed has everything; give --resume alone")
    if not resume:
        spec = {"model": config_of()["model"], **spec}
    begun: list[str] = []
    with watching() as watch:

        def noting(event: WorkflowEvent) -> None:
            if isinstance(event, WorkflowStarted):
                begun.append(event.workflow)
            watch(event)

        async def work() -> Result:
            async with await open_store(store_url(store)) as opened:
                known = spec
                if resume:
                    found = await load_workflow(opened, resume)
                    if "file" not in found.spec:
                        raise InvalidWorkflow(f"{resume} was begun by a program; resume it there")
                    known = dict(found.spec["file"])
                return await run_spec(kind, known, opened, workflow=resume or name, watch=noting)

        try:
            result = anyio.run(work)
        except (KedgeError, KeyboardInterrupt) as error:
            if begun and not as_json:
                advice = f"It is kept; go on with: kedge run {kind} --resume {begun[0]}"
                click.echo(dim(advice), err=True)
            if isinstance(error, KeyboardInterrupt):
                raise click.exceptions.Exit(130) from None
            raise
    if as_json:
        say_json(_report(result))
    else:
        _show(result)


def _report(result: Result) -> dict[str, Any]:
    if isinstance(result, StepsResult):
        told = {each.name: plain_value(each.value) for each in result.steps}
        usage = asdict(result.usage)
        steps = [
            {"name": each.name, "question": each.question, "answer": each.answer}
            for each in result.steps
        ]
        return {
            "workflow": result.workflow,
            "conversation": result.conversation,
            "results": told,
            "steps": steps,
            "usage": usage,
        }
    return asdict(result)


def _show(result: Result) -> None:
    match result:
        case RefineResult():
            for each in result.rounds:
                verdict = "good" if each.verdict.passed else each.verdict.critique or "not good"
                say(f"{dim(f'round {each.number}')}  {each.answer}")
                say(f"{dim('judged ')}  {verdict}")
            say()
            outcome = "passed" if result.passed else "not passed"
            say(dim(f"[{outcome} after {len(result.rounds)} rounds, {result.workflow}]"))
        case DebateResult():
            for argument in result.arguments:
                say(f"{dim(f'round {argument.round}')}  {argument.side}: {argument.text}")
            say()
            if result.ruling.reason:
                say(f"{dim('judge  ')}  {result.ruling.reason}")
            winner = result.winner or "nobody"
            say(dim(f"[{winner} won after {result.rounds} rounds, {result.workflow}]"))
        case StepsResult():
            for step in result.steps:
                say(f"{dim(step.name)}  {step.answer}")
            say()
            say(dim(f"[{len(result.steps)} steps, {result.workflow}]"))
        case _:
            assert_never(result)
