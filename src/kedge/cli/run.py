"""``kedge run``: run workflows from a file or from options, or resume them by id."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, assert_never, cast

import click
import msgspec
from msgspec import structs

from kedge._internal.display import first_line, pluralize, sanitize_text
from kedge.cli.base import ADVICE_KEY, Result, dim, echo, get_config, kedge_command, repeated_option
from kedge.cli.chat_tools import mcp_option, open_mcp_servers
from kedge.cli.store_options import (
    model_references,
    remember,
    require_confirmed,
    run_with_store,
    store_option,
)
from kedge.errors import InvalidWorkflow
from kedge.store import Store
from kedge.turns.frozen_json import thaw
from kedge.workflows import DebateResult, RefineResult, StepsResult, load_workflow, results
from kedge.workflows.specs import WorkflowResult, WorkflowSpec, read_spec, run_spec

LINE_WIDTH = 72


@contextmanager
def show_progress() -> Generator[results.WorkflowCallback]:
    """Show events on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield results.ignore_event
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with console.status("…") as status:

        def on_event(event: results.WorkflowEvent) -> None:
            line, status_text = format_event(event)
            if line:
                console.print(sanitize_text(line))
            if status_text:
                status.update(Text(sanitize_text(status_text)))

        yield on_event


def format_event(event: results.WorkflowEvent) -> tuple[str, str]:
    """Return a line about an event, and the status to show until the next one."""
    match event:
        case results.WorkflowStarted():
            verb = "resumed" if event.resumed else "started"
            unit = "step" if event.kind == "steps" else "round"
            limit = pluralize(event.total, unit)
            return f"{event.kind} {event.workflow} {verb}, at most {limit}", "starting"
        case results.QuestionAsked():
            return "", f"{event.number}: waiting for {event.role}"
        case results.QuestionAnswered():
            speaker = f"{event.number}: {event.role}"
            if event.stored:
                speaker += " (stored)"
            return f"{speaker}: {shorten_text(event.text)}", ""
        case results.AnswerJudged():
            return f"{event.number}: {_format_verdict(event.verdict)}", ""
        case results.RoundRuled():
            return f"{event.number}: ruling: {_format_ruling(event.ruling)}", ""
        case results.WorkflowFinished():
            return "", "finished"
        case _:
            assert_never(event)


def _format_verdict(verdict: results.Verdict) -> str:
    label = "verdict"
    if verdict.score is not None:
        label += f" [{verdict.score:g}]"
    if verdict.passed:
        return f"{label}: passed"
    return f"{label}: not passed: {shorten_text(verdict.critique)}"


def _format_ruling(ruling: results.Ruling) -> str:
    if not ruling.over:
        return "undecided"
    return f"decided, {_format_winner(ruling.winner)}"


def _format_winner(winner: str | None) -> str:
    if winner:
        return f"{winner} won"
    return "no winner"


def shorten_text(text: str) -> str:
    """Shorten a text to one line."""
    return first_line(" ".join(text.split()), LINE_WIDTH)


F = TypeVar("F", bound=Callable[..., Any])


@click.group("run")
def command() -> None:
    """Run a workflow from a TOML file or from options.

    Its conversations are in the store. After an interruption, --resume with its id continues it;
    stored answers are not requested again.
    """


def _add_all(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options."""

    def add(function: F) -> F:
        for option in options:
            function = option(function)
        return function

    return add


_MODEL_HELP = "A model string; overrides the file.  [default: the configured one]"
_workflow_options = _add_all(
    store_option,
    mcp_option,
    click.option("--resume", metavar="ID", default="", help="Continue the workflow with this id."),
    click.option("--id", "name", metavar="ID", default="", help="Start it under this id."),
    click.option("--model", help=_MODEL_HELP),
    click.argument("file", required=False, type=click.Path()),
)
"""Adds the options of every workflow."""


def _judge_options(rounds: int) -> Callable[[F], F]:
    """Return the options of a workflow with a judge, and with this number of rounds by default."""
    most = f"Maximum number of rounds.  [default: {rounds}]"
    return _add_all(
        click.option("--judge-model", help="The model that judges.  [default: --model]"),
        click.option("--rubric", help="The rubric for a model as judge."),
        click.option(
            "--judge", "function", metavar="MODULE:FUNCTION", help="A function that judges."
        ),
        click.option("--rounds", type=click.IntRange(1), help=most),
    )


@kedge_command("refine", short_help="Ask again until a judge accepts the answer.")
@_workflow_options
@click.option("--task", help="The task.")
@_judge_options(4)
@click.option("--schema", metavar="FILE", help="A JSON schema that the answer must match.")
def refine(**options: Any) -> Result:
    """Ask a model, judge its answer, and ask again with the critique until it passes.

    FILE is a TOML file (docs/workflows.md); options override it.
    """
    return _run_workflow("refine", **options)


@kedge_command("debate", short_help="Let models debate, and a judge decide.")
@_workflow_options
@click.option("--question", help="The question.")
@repeated_option("--side", "sides", "NAME=MODEL", "A participant; at least two.")
@_judge_options(3)
def debate(**options: Any) -> Result:
    """Let two or more models debate, each in its own conversation, until a judge decides.

    FILE is a TOML file (docs/workflows.md); options override it.
    """
    return _run_workflow("debate", **options)


@kedge_command("steps", short_help="Run prompts one after another.")
@_workflow_options
@repeated_option("--input", "inputs", "NAME=TEXT", "A value for {NAME} in the prompts.")
def steps(**options: Any) -> Result:
    """Run a pipeline of prompts in one conversation; prompts can use earlier results.

    FILE is a TOML file with the prompts (docs/workflows.md); options override it.
    """
    return _run_workflow("steps", **options)


for subcommand in (refine, debate, steps):
    command.add_command(subcommand)


def _parse_input(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=TEXT", param_hint="--input")
    return name, value


def _parse_side(text: str) -> dict[str, str]:
    name, _, model = text.partition("=")
    return {"name": name, "model": model}


_JUDGE_OPTIONS = {
    "function": "function",
    "schema": "schema",
    "rubric": "rubric",
    "judge_model": "model",
}
"""The options about the judge, and their members of its table."""


def _build_spec(file: str | None, options: Mapping[str, Any]) -> WorkflowSpec:
    """Read the spec file; options override it."""
    spec: WorkflowSpec = {}
    if file:
        spec = read_spec(file)
    members = {name: value for name, value in options.items() if value not in (None, ())}
    judge = {key: members.pop(name) for name, key in _JUDGE_OPTIONS.items() if name in members}
    if judge:
        members["judge"] = judge
    if "sides" in members:
        members["sides"] = [_parse_side(text) for text in members["sides"]]
    if "inputs" in members:
        inputs = dict(_parse_input(text) for text in members["inputs"])
        members["inputs"] = {**spec.get("inputs", {}), **inputs}
    return {**spec, **members}


async def _load_spec(store: Store, kind: results.WorkflowKind, workflow: str) -> WorkflowSpec:
    """Return the stored spec of a workflow; what it names must have been used or confirmed here."""
    stored = await load_workflow(store, workflow)
    if stored.kind != kind:
        raise InvalidWorkflow(
            f"{workflow} is a {stored.kind} workflow; continue with: "
            f"kedge run {stored.kind} --resume {workflow}"
        )
    if "file" not in stored.spec:
        raise InvalidWorkflow(f"{workflow} was started by a program; resume it there")
    spec: WorkflowSpec = thaw(stored.spec["file"])
    advice = "resume it on a terminal to confirm, or start the workflow from a file of your own"
    require_confirmed(_spec_references(spec), f"the workflow {workflow}", advice)
    return spec


def _spec_references(spec: WorkflowSpec) -> list[str]:
    """Return the references of a spec: addresses, functions to run, files to read."""
    folder = spec.get("folder", "")
    judge = _as_table(spec.get("judge"))
    sides = [_as_table(side) for side in spec.get("sides") or ()]
    steps = [_as_table(step) for step in spec.get("steps") or ()]

    models = [table.get("model") for table in (spec, judge, *sides)]
    references = model_references(*(model for model in models if isinstance(model, str) and model))
    function = judge.get("function")
    if function:
        references.append(f"function {function} in {folder or 'the current folder'}")
    files = [table.get("schema") for table in (judge, *steps)]
    references += [f"file {Path(folder, file)}" for file in files if isinstance(file, str)]
    return references


def _as_table(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    return dict(cast("Mapping[str, Any]", value))


def _run_workflow(
    kind: results.WorkflowKind,
    *,
    file: str | None,
    resume: str,
    name: str,
    mcp_servers: tuple[str, ...],
    **members: Any,
) -> Result:
    spec = _build_spec(file, members)
    if resume and (name or spec):
        raise InvalidWorkflow(
            "--resume takes everything from the store; give no file and no other options"
        )
    if not resume:
        spec = {"model": get_config()["model"], **spec}
        remember(_spec_references(spec))

    async def work(opened: Store) -> WorkflowResult:
        workflow_spec = spec
        if resume:
            workflow_spec = await _load_spec(opened, kind, resume)
        async with open_mcp_servers(mcp_servers) as boxes:
            return await run_spec(
                kind,
                workflow_spec,
                opened,
                workflow=resume or name,
                on_event=on_event,
                tools=boxes,
            )

    with show_progress() as show_event, _advise_to_resume(kind) as record_start:

        def on_event(event: results.WorkflowEvent) -> None:
            record_start(event)
            show_event(event)

        result = run_with_store(work, make=True, connects_models=True)
    return Result(_result_to_json(result), lambda: _print_result(result))


@contextmanager
def _advise_to_resume(kind: results.WorkflowKind) -> Generator[results.WorkflowCallback]:
    """Yield a function for events, after whose first one each error and Ctrl-C names the command that continues."""
    meta = click.get_current_context().meta

    def record_start(event: results.WorkflowEvent) -> None:
        if isinstance(event, results.WorkflowStarted):
            meta[ADVICE_KEY] = f"Continue with: kedge run {kind} --resume {event.workflow}"

    try:
        yield record_start
    except KeyboardInterrupt:
        if ADVICE_KEY in meta:
            echo(dim(meta[ADVICE_KEY]), err=True)
        raise


def _result_to_json(result: WorkflowResult) -> dict[str, Any]:
    if isinstance(result, StepsResult):
        from pydantic_core import to_jsonable_python  # which takes time to import

        return {
            "workflow": result.workflow,
            "conversation": result.conversation,
            "results": {step.name: to_jsonable_python(step.value) for step in result.steps},
            "steps": [
                {"name": step.name, "question": step.question, "answer": step.answer}
                for step in result.steps
            ],
            "usage": structs.asdict(result.usage),
        }
    return msgspec.to_builtins(result, enc_hook=dict)  # of read-only mappings


def _print_line(label: str, text: str) -> None:
    echo(f"{dim(sanitize_text(label))}  {sanitize_text(text)}")


def _print_result(result: WorkflowResult) -> None:
    match result:
        case RefineResult():
            for judged in result.rounds:
                _print_line(f"round {judged.number}", judged.answer)
                verdict = judged.verdict.critique or "not passed"
                if judged.verdict.passed:
                    verdict = "passed"
                _print_line("verdict", verdict)
            echo()
            outcome = "passed" if result.passed else "not passed"
            outcome += f" after {pluralize(len(result.rounds), 'round')}"
        case DebateResult():
            for argument in result.arguments:
                _print_line(f"round {argument.round}", f"{argument.side}: {argument.text}")
            echo()
            if result.ruling.reason:
                _print_line("judge  ", result.ruling.reason)
            outcome = f"{_format_winner(result.winner)} after {pluralize(result.rounds, 'round')}"
        case StepsResult():
            for step in result.steps:
                _print_line(step.name, step.answer)
            echo()
            outcome = pluralize(len(result.steps), "step")
        case _:
            assert_never(result)
    echo(dim(f"[{outcome}, {result.workflow}]"))
