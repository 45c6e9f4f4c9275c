"""``kedge run``: run workflows from a file or from options, or resume them by id."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import reduce
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
            limit = pluralize(event.total, "step" if event.kind == "steps" else "round")
            return f"{event.kind} {event.workflow} {verb}, at most {limit}", "starting"
        case results.QuestionAsked():
            return "", f"{event.number}: waiting for {event.role}"
        case results.QuestionAnswered():
            stored = " (stored)" if event.stored else ""
            return f"{event.number}: {event.role}{stored}: {shorten_text(event.text)}", ""
        case results.AnswerJudged():
            verdict = event.verdict
            text = "passed" if verdict.passed else f"not passed: {shorten_text(verdict.critique)}"
            score = "" if verdict.score is None else f" [{verdict.score:g}]"
            return f"{event.number}: verdict{score}: {text}", ""
        case results.RoundRuled():
            ruling = event.ruling
            decided = f"decided, {_format_winner(ruling.winner)}"
            return f"{event.number}: ruling: {decided if ruling.over else 'undecided'}", ""
        case results.WorkflowFinished():
            return "", "finished"
        case _:
            assert_never(event)


def _format_winner(winner: str | None) -> str:
    return f"{winner} won" if winner else "no winner"


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
    return lambda function: reduce(lambda added, option: option(added), options, function)


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


for each in (refine, debate, steps):
    command.add_command(each)


def _parse_input(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=TEXT", param_hint="--input")
    return name, value


_JUDGE_OPTIONS = {
    **{name: name for name in ("function", "schema", "rubric")},
    "judge_model": "model",
}
"""The options about the judge, and their members of its table."""


def _build_spec(file: str | None, options: Mapping[str, Any]) -> WorkflowSpec:
    """Read the spec file; options override it."""
    spec = read_spec(file) if file else {}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    judge = {key: given.pop(name) for name, key in _JUDGE_OPTIONS.items() if name in given}
    if judge:
        given["judge"] = judge
    if sides := given.get("sides"):
        given["sides"] = [
            dict(zip(("name", "model"), side.partition("=")[::2], strict=True)) for side in sides
        ]
    if inputs := given.get("inputs"):
        given["inputs"] = {**spec.get("inputs", {}), **dict(map(_parse_input, inputs))}
    return {**spec, **given}


async def _load_spec(store: Store, kind: results.WorkflowKind, workflow: str) -> WorkflowSpec:
    """Return the stored spec of a workflow; what it names must have been used or confirmed here."""
    found = await load_workflow(store, workflow)
    if found.kind != kind:
        raise InvalidWorkflow(
            f"{workflow} is a {found.kind} workflow; continue with: kedge run {found.kind} --resume {workflow}"
        )
    if "file" not in found.spec:
        raise InvalidWorkflow(f"{workflow} was started by a program; resume it there")
    spec: WorkflowSpec = thaw(found.spec["file"])
    advice = "resume it on a terminal to confirm, or start the workflow from a file of your own"
    require_confirmed(_spec_references(spec), f"the workflow {workflow}", advice)
    return spec


def _spec_references(spec: WorkflowSpec) -> list[str]:
    """Return the references of a spec: addresses, functions to run, files to read."""
    folder = spec.get("folder", "")
    judge = _as_table(spec.get("judge"))
    sides, steps = ([_as_table(each) for each in spec.get(key) or ()] for key in ("sides", "steps"))
    models = [each.get("model") for each in (spec, judge, *sides)]
    references = model_references(*(model for model in models if isinstance(model, str) and model))
    if function := judge.get("function"):
        references.append(f"function {function} in {folder or 'the current folder'}")
    files = [each.get("schema") for each in (judge, *steps)]
    references += [f"file {Path(folder, each)}" for each in files if isinstance(each, str)]
    return references


def _as_table(value: object) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}


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
    meta = click.get_current_context().meta
    with show_progress() as on_event:

        def record_start(event: results.WorkflowEvent) -> None:
            if isinstance(event, results.WorkflowStarted):
                meta[ADVICE_KEY] = f"Continue with: kedge run {kind} --resume {event.workflow}"
            on_event(event)

        async def work(opened: Store) -> WorkflowResult:
            known = await _load_spec(opened, kind, resume) if resume else spec
            async with open_mcp_servers(mcp_servers) as boxes:
                workflow = resume or name
                return await run_spec(
                    kind, known, opened, workflow=workflow, on_event=record_start, tools=boxes
                )

        try:
            result = run_with_store(work, make=True, connects=True)
        except KeyboardInterrupt:
            if ADVICE_KEY in meta:
                echo(dim(meta[ADVICE_KEY]), err=True)
            raise
    return Result(_result_to_json(result), lambda: _print_result(result))


def _result_to_json(result: WorkflowResult) -> dict[str, Any]:
    if isinstance(result, StepsResult):
        from pydantic_core import to_jsonable_python  # which takes time to import

        return {
            "workflow": result.workflow,
            "conversation": result.conversation,
            "results": {each.name: to_jsonable_python(each.value) for each in result.steps},
            "steps": [
                {"name": each.name, "question": each.question, "answer": each.answer}
                for each in result.steps
            ],
            "usage": structs.asdict(result.usage),
        }
    return msgspec.to_builtins(result, enc_hook=dict)  # of read-only mappings


def _print_lines(*lines: tuple[str, str]) -> None:
    for label, text in lines:
        echo(f"{dim(sanitize_text(label))}  {sanitize_text(text)}")


def _print_result(result: WorkflowResult) -> None:
    match result:
        case RefineResult():
            for each in result.rounds:
                verdict = "passed" if each.verdict.passed else each.verdict.critique or "not passed"
                _print_lines((f"round {each.number}", each.answer), ("verdict", verdict))
            echo()
            rounds = pluralize(len(result.rounds), "round")
            outcome = f"{'passed' if result.passed else 'not passed'} after {rounds}"
        case DebateResult():
            _print_lines(*((f"round {e.round}", f"{e.side}: {e.text}") for e in result.arguments))
            echo()
            if result.ruling.reason:
                _print_lines(("judge  ", result.ruling.reason))
            outcome = f"{_format_winner(result.winner)} after {pluralize(result.rounds, 'round')}"
        case StepsResult():
            _print_lines(*((step.name, step.answer) for step in result.steps))
            echo()
            outcome = pluralize(len(result.steps), "step")
        case _:
            assert_never(result)
    echo(dim(f"[{outcome}, {result.workflow}]"))
