"""``steps``: a pipeline of prompts on one chain, with typed results between them.

The prompts are part of stored idempotency keys and must not change.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from kedge._internal.argument_types import checked_except
from kedge.conversation import Conversation
from kedge.engines import Engine, OutputSchema, to_output_schema
from kedge.engines.output_schema import SchemaMismatch
from kedge.errors import InvalidJSON, InvalidSetting, InvalidWorkflow, WorkflowFailed
from kedge.store import Store
from kedge.store.open import StoreAddress
from kedge.turns.frozen_json import freeze_map
from kedge.workflows.results import (
    AnswerJudged,
    Step,
    StepResult,
    StepsResult,
    Verdict,
    WorkflowCallback,
    ignore_event,
)
from kedge.workflows.roles import Role, WorkflowRun

STEPS_ROLE = "steps"


@checked_except("on_event")
async def steps(
    pipeline: Sequence[Step],
    *,
    inputs: Mapping[str, Any] | None = None,
    store: Store | StoreAddress | None = None,
    engine: Engine | str | None = None,
    conversation: Conversation | None = None,
    workflow: str = "",
    on_event: WorkflowCallback = ignore_event,
    spec: dict[str, Any] | None = None,
    **settings: Any,
) -> StepsResult:
    """Send prompts one after the other on one chain, each with the results of earlier ones.

    Args:
        pipeline: The steps, in order.
        inputs: Values for the placeholders of the prompts.
        conversation: The conversation to use; or pass ``store`` and ``engine`` for a new one.
        store: The store of a new conversation, or its address.
        engine: An engine or a model string.
        workflow: The id of an interrupted pipeline to resume, or the id of a new one.
        on_event: A function that is called with every event.
        spec: Data to store with the workflow.
        settings: Settings of ``Conversation``.

    Returns:
        The result of every step.

    Raises:
        InvalidWorkflow: A step or an input is invalid.
        WorkflowFailed: An answer did not match its schema.
    """
    _validate_pipeline(pipeline, inputs or {})
    values = dict(inputs or {})
    schemas = [_build_schema(step) for step in pipeline]
    stored_spec = {"steps": [step.name for step in pipeline], "inputs": values, **(spec or {})}
    async with WorkflowRun("steps", workflow, stored_spec, on_event, settings) as run:
        title = " → ".join(step.name for step in pipeline)
        role = await run.open_lead(STEPS_ROLE, conversation, store, engine, title)
        role.report_start(len(pipeline))
        done: list[StepResult] = []
        for number, (step, schema) in enumerate(zip(pipeline, schemas, strict=True), 1):
            result = await _run_step(role, number, step, values, schema)
            values[step.name] = result.value
            if schema is not None:
                values[step.name] = schema.to_json(result.value)
            done.append(result)
        await role.finish("finished")
        return StepsResult(role.workflow, role.conversation.id, tuple(done), role.usage)


def _build_schema(step: Step) -> OutputSchema[Any] | None:
    """Return the schema of the answer to a step; None if the answer is text."""
    if step.result is None:
        return None
    return to_output_schema(step.result, step.name)


def _validate_pipeline(pipeline: Sequence[Step], inputs: Mapping[str, Any]) -> None:
    if not pipeline:
        raise InvalidWorkflow("a pipeline needs at least one step")
    try:
        freeze_map(inputs, "inputs")
    except InvalidJSON as error:
        raise InvalidSetting(str(error)) from error
    names = set(inputs)
    for step in pipeline:
        if step.name in names:
            raise InvalidWorkflow(f"the name {step.name!r} is used twice")
        check_names(step.prompt, names, f"the step {step.name}")
        names.add(step.name)


async def _run_step(
    role: Role, number: int, step: Step, values: Mapping[str, Any], schema: OutputSchema[Any] | None
) -> StepResult:
    """Run one step; an answer that does not match is requested again."""
    question = fill_template(step.prompt, values, f"the step {step.name}")

    def report(problems: Sequence[str]) -> None:
        verdict = Verdict(passed=False, critique=str(SchemaMismatch(problems)))
        role.on_event(AnswerJudged(role.workflow, role.role, number, verdict))

    attempts = 1
    if schema is None:
        reply = await role.ask(number, question)
        value: Any = reply.text
    else:
        problem = f"the answer to the step {step.name} did not match its schema"
        try:
            reply, attempts = await role.ask_typed(
                number, question, schema, problem, attempts=step.attempts, on_rejected=report
            )
        except WorkflowFailed:
            await role.update_notes(status="failed")
            raise
        value = reply.output
    return StepResult(step.name, question, reply.text, value, reply.node, attempts, reply.stored)


_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(?P<path>[A-Za-z_][\w.]*)\}|(?P<stray>[{}])")
_BRACES = {"{{": "{", "}}": "}"}


def check_names(template: str, available: Collection[str], location: str) -> None:
    """Raise ``InvalidWorkflow`` if a template has a single brace, or uses an unknown name."""
    for match in _PLACEHOLDER.finditer(template):
        if match["stray"]:
            raise InvalidWorkflow(
                f"{location}: the prompt has a single {match['stray']!r}; write it twice for a literal brace"
            )
        name = (match["path"] or "").partition(".")[0]
        if name and name not in available:
            listed = ", ".join(sorted(available)) or "nothing yet"
            raise InvalidWorkflow(f"{location}: the prompt uses {name!r}; there is {listed}")


def fill_template(template: str, values: Mapping[str, Any], location: str) -> str:
    """Return the template with its placeholders filled in."""

    def fill(match: re.Match[str]) -> str:
        if match[0] in _BRACES:
            return _BRACES[match[0]]
        value = _lookup_value(match["path"], values, location)
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)

    return _PLACEHOLDER.sub(fill, template)


def _lookup_value(path: str, values: Mapping[str, Any], location: str) -> Any:
    value: Any = values
    for step in path.split("."):
        match value:
            case Mapping() if step in value:
                value = cast("Mapping[str, Any]", value)[step]
            case list() if step.isdecimal() and int(step) < len(cast("list[Any]", value)):
                value = cast("list[Any]", value)[int(step)]
            case _:
                raise InvalidWorkflow(f"{location}: there is no {path!r} to put into the prompt")
    return value
