"""Run the calls of a model: validated, approved, in parallel, each with exactly one result."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import structs

from kedge._internal.argument_types import check_fields, checked
from kedge._internal.display import capitalize
from kedge._internal.event_loops import await_value
from kedge._internal.wait_policy import WaitPolicy
from kedge.errors import InvalidArguments, ToolFailed, UnknownTool
from kedge.observe import get_logger
from kedge.observe.logs import BOUND_FIELDS
from kedge.tools import invoke
from kedge.tools.errors import describe_error, locate_error
from kedge.tools.invoke import MAX_OUTPUT, Arguments, Parts
from kedge.tools.signature import is_async
from kedge.tools.toolbox import (
    AnyTool,
    Toolbox,
    Toolset,
    build_toolbox,
)
from kedge.turns import TextPart, ToolCallBlock, ToolResultBlock, tool_call
from kedge.turns.content_filters import ContentFilters
from kedge.turns.frozen_json import unchecked_map, wrap_copy
from kedge.wire.fields import repair_surrogates


class Allow(msgspec.Struct, frozen=True):
    """Run the call unchanged."""


class Deny(msgspec.Struct, frozen=True):
    """Do not run the call.

    Args:
        reason: The reason, which is returned to the model as the result of the call.
    """

    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


class Edit(msgspec.Struct, frozen=True):
    """Run the call with other arguments.

    Args:
        arguments: The new arguments, as a mapping or as JSON text.
        tell: Whether the result shows the new arguments to the model.
    """

    arguments: str | Mapping[str, Any]
    tell: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.arguments, str):
            structs.force_setattr(self, "arguments", wrap_copy(self.arguments))


Decision = Allow | Deny | Edit
"""The decision of an approver."""
Approver = Callable[[ToolCallBlock], Decision | bool | Awaitable[Decision | bool]]
"""Decides about a call before it runs, sync or async; True and False are ``Allow`` and ``Deny``."""

ToolOutcome = Literal["ok", "unknown", "invalid", "refused", "failed", "timeout", "cancelled"]
"""The outcome of a call."""

OUTCOME_KEY = "kedge.outcome"
"""Metadata key of a result block: the outcome of the call."""


class ToolRun(msgspec.Struct, frozen=True):
    """The record of one call, passed to ``on_run``. Its ``repr`` shows neither arguments nor output."""

    call: ToolCallBlock
    result: ToolResultBlock
    outcome: ToolOutcome
    attempts: int
    """The number of times the function was started."""
    seconds: float
    """Running time of all attempts."""
    waited: float
    """Time spent on approval, waiting for the concurrency limit, and pauses between attempts."""
    error: BaseException | None = None
    edited: ToolCallBlock | None = None
    """The call with the approver's changes, if there were any."""

    @property
    def call_id(self) -> str:
        """The id of the call and of its result."""
        return self.call.call_id

    @property
    def name(self) -> str:
        """The name of the tool, as the model wrote it."""
        return self.call.name

    def __repr__(self) -> str:
        times = f"{self.attempts} attempt(s), {self.seconds:.3f} s"
        return f"<ToolRun {self.call_id} {self.name}: {self.outcome}, {times}>"


OnRun = Callable[[ToolRun], object]
"""Called with the record of each call."""


log = get_logger("kedge.tools")

OUTCOME_LEVELS = {"ok": logging.DEBUG, "refused": logging.INFO, "cancelled": logging.INFO}
"""The log level of a call by its outcome; that of others is WARNING."""
ATTEMPT_WAITS = WaitPolicy("a tool that failed, as often as it permits", first=1.0, longest=30.0)
"""The first pause is set by each tool."""
MAX_NOTE_CHARS = 2_000


class CallContext(msgspec.Struct, frozen=True):
    """Settings shared by all calls of one ``run_calls``."""

    toolbox: Toolbox
    approve: Approver | None = None
    on_run: OnRun | None = None
    max_output: int = MAX_OUTPUT
    origin: str = "tools"
    filters: ContentFilters = msgspec.field(default_factory=ContentFilters)
    """The filters that are applied to the result before it is truncated."""
    text_only: bool = False
    """Whether images and files in results are replaced by descriptions, because the API accepts text only."""
    keeps_all_parts: bool = False
    """Whether results are not for a model, and also audio remains, which no API of a model accepts in a result."""
    approval_lock: anyio.Lock = msgspec.field(default_factory=anyio.Lock)


class _EarlyResult(Exception):
    """Ends the execution of a call with a text for the model."""

    def __init__(self, outcome: ToolOutcome, text: str, error: BaseException | None = None) -> None:
        super().__init__(text)
        self.outcome: ToolOutcome = outcome
        self.parts: Parts = (TextPart(repair_surrogates(text)),)
        self.error = error


class CallRunner:
    """Runs one call; it has no ``record`` until the call has ended."""

    def __init__(self, context: CallContext, call: ToolCallBlock) -> None:
        self.context = context
        self.call = call
        self.record: ToolRun | None = None
        self.edited_call: ToolCallBlock | None = None
        self.note = ""
        self.attempts = 0
        self.seconds = 0.0
        self._created_at = time.perf_counter()
        self._started_at: float | None = None

    async def run(self) -> None:
        """Run the call in a task of its own, in which log records carry its id."""
        BOUND_FIELDS.set({**BOUND_FIELDS.get(), "call_id": self.call.call_id})
        try:
            tool = self._find_tool()
            arguments = self._parse_arguments(tool, self.call)
            has_approver = self.context.approve is not None
            if tool.approval or (tool.approval is None and has_approver):
                arguments = await self._request_approval(tool, arguments)
            parts = await self._invoke_with_retries(tool, arguments)
        except _EarlyResult as early:
            self._finish(early.outcome, early.parts, early.error)
        else:
            self._finish("ok", parts)

    def report_cancelled(self) -> ToolRun:
        """Return the record of a call that has none: it was cancelled."""
        when = "while it ran; it may have had an effect" if self.attempts else "before it ran"
        return self._finish("cancelled", (TextPart(f"This call was cancelled {when}."),))

    def _find_tool(self) -> AnyTool:
        try:
            tool = self.context.toolbox[self.call.name]
        except UnknownTool as error:
            raise _EarlyResult("unknown", capitalize(str(error)), error) from error
        if tool.custom != self.call.custom:
            takes = "free text, as a custom tool call" if tool.custom else "JSON arguments"
            raise _EarlyResult("invalid", f"{tool.name} expects {takes}.")
        return tool

    def _parse_arguments(self, tool: AnyTool, call: ToolCallBlock) -> Arguments:
        try:
            return tool.reader.parse_arguments(call)
        except InvalidArguments as error:
            listed = "\n".join(f"- {problem}" for problem in error.problems)
            text = f"The arguments of {tool.name} are invalid:\n{listed}\nCorrect them and call it again."
            raise _EarlyResult("invalid", text, error) from error
        except Exception as error:  # raised by a validator of the tool
            raise self._failure_result(tool, error) from error

    async def _request_approval(self, tool: AnyTool, arguments: Arguments) -> Arguments:
        """Return the arguments to run with, unless the approver denies the call or fails."""
        if self.context.approve is None:
            raise _EarlyResult(
                "refused", f"{tool.name} requires approval, and no approver is configured."
            )
        problem = "the approver failed"
        try:
            async with self.context.approval_lock:
                decision = await self._ask_approver()
            if isinstance(decision, Edit):
                problem = "the approver's arguments are not JSON"
                edited = tool_call(self.call.name, decision.arguments).arguments
                self.edited_call = structs.replace(self.call, arguments=edited)
                problem = "the approver's arguments are invalid"
                arguments = self._parse_arguments(tool, self.edited_call)
        except Exception as error:
            cause = (isinstance(error, _EarlyResult) and error.error) or error
            location = _describe_location(cause)
            log.error("%s (call %s): %s", problem, self.call.call_id, location)  # noqa: TRY400 - a traceback has content
            text = f"The call was not approved and did not run: {problem}."
            raise _EarlyResult("refused", text, cause) from error
        if isinstance(decision, Deny):
            text = "The call was denied and did not run."
            if decision.reason:
                text = f"The call was denied and did not run: {decision.reason}"
            raise _EarlyResult("refused", text)
        if isinstance(decision, Edit) and decision.tell:
            shown = self.context.filters.apply(self.edited_call or self.call).arguments
            self.note = (
                f"[The arguments were changed before the call ran, to: {shown[:MAX_NOTE_CHARS]}]"
            )
        return arguments

    async def _ask_approver(self) -> Decision:
        approve: Any = self.context.approve
        if is_async(approve):
            returned = approve(self.call)
        else:
            returned = await anyio.to_thread.run_sync(approve, self.call, abandon_on_cancel=True)
        decided = await await_value(returned)
        if isinstance(decided, bool):
            return Allow() if decided else Deny()
        if isinstance(decided, Allow | Deny | Edit):
            return decided
        raise TypeError(
            f"an approver returns Allow(), Deny(reason) or Edit(arguments), not {decided!r:.100}"
        )

    async def _invoke_with_retries(self, tool: AnyTool, arguments: Arguments) -> Parts:
        failures = 0
        while True:
            try:
                return await invoke.invoke_tool(tool, arguments, self._start_attempt)
            except Exception as error:
                self._stop_attempt()
                failures += 1
                final = isinstance(error, ToolFailed) or not isinstance(error, tool.retry_on)
                if final or failures > tool.retries:
                    raise self._failure_result(tool, error) from error
                await self._wait_before_retry(tool, failures, error)
            # A failed attempt may have mutated its lists and models: parse them again.
            arguments = self._parse_arguments(tool, self.edited_call or self.call)

    def _start_attempt(self) -> None:
        self.attempts += 1
        self._started_at = time.perf_counter()

    def _stop_attempt(self) -> None:
        if self._started_at is not None:
            self.seconds += time.perf_counter() - self._started_at
            self._started_at = None

    async def _wait_before_retry(self, tool: AnyTool, failures: int, error: Exception) -> None:
        pause = dataclasses.replace(ATTEMPT_WAITS, first=tool.retry_wait).pause(failures - 1)
        attempt = f"attempt {failures} of {tool.retries + 1}"
        log.info(
            "tool %s failed, %s, retrying in %g s (call %s): %s",
            tool.name,
            attempt,
            pause,
            self.call.call_id,
            _describe_location(error),
        )
        await anyio.sleep(pause)

    def _failure_result(self, tool: AnyTool, error: Exception) -> _EarlyResult:
        match error:
            case ToolFailed():
                return _EarlyResult("failed", str(error) or f"{tool.name} failed.", error)
            case invoke.AttemptTimeout():
                return _EarlyResult("timeout", f"{tool.name} timed out: {error}.", error)
            case invoke.ConcurrencyExhausted() | invoke.SelfCancelled():
                return _EarlyResult("failed", f"{tool.name} failed: {error}.", error)
            case _:
                shown = describe_error(error, self.context.filters.edit_text)
                return _EarlyResult("failed", f"{tool.name} failed: {shown}", error)

    def _finish(
        self, outcome: ToolOutcome, parts: Parts, error: BaseException | None = None
    ) -> ToolRun:
        self._stop_attempt()
        if not self.context.keeps_all_parts:
            parts = invoke.describe_attachments(parts, text_only=self.context.text_only)
        result = self.context.filters.apply(
            ToolResultBlock(
                self.call.call_id,
                parts,
                self.call.custom,
                origin=self.context.origin,
                metadata=unchecked_map({OUTCOME_KEY: outcome}),
            )
        )
        shown = invoke.truncate_parts(result.parts, self.context.max_output)
        if self.note and self.attempts:
            shown = _prepend_note(shown, self.note)
        result = structs.replace(result, parts=shown)
        waited = max(0.0, time.perf_counter() - self._created_at - self.seconds)
        record = ToolRun(
            self.call,
            result,
            outcome,
            self.attempts,
            self.seconds,
            waited,
            error,
            self.edited_call,
        )
        self.record = record
        _log_run(record)
        if self.context.on_run:
            self.context.on_run(record)
        return record


def _log_run(run: ToolRun) -> None:
    location = ""
    if run.error is not None:
        location = f": {_describe_location(run.error)}"
    log.log(
        OUTCOME_LEVELS.get(run.outcome, logging.WARNING),
        "tool %.64s: %s (call %s, %d attempt(s), %.3f s)%s",
        run.name,
        run.outcome,
        run.call_id,
        run.attempts,
        run.seconds,
        location,
        call_id=run.call_id,
    )


def _prepend_note(parts: Parts, note: str) -> Parts:
    match parts:
        case (TextPart(text), *rest):
            return (TextPart(f"{note}\n{text}"), *rest)
        case _:
            return (TextPart(note), *parts)


def _describe_location(error: BaseException) -> str:
    return f"{type(error).__name__} at {locate_error(error)}"


@checked
async def run_calls(
    toolbox: Toolset,
    calls: Sequence[ToolCallBlock],
    *,
    approve: Approver | None = None,
    on_run: OnRun | None = None,
    max_output: int = MAX_OUTPUT,
    origin: str = "tools",
    filters: ContentFilters | None = None,
    text_only: bool = False,
    keeps_all_parts: bool = False,
) -> list[ToolResultBlock]:
    """Run tool calls in parallel.

    Args:
        toolbox: The tools that may be called: a toolbox, a list of tools or one of them.
        calls: The calls of a model.
        approve: A function that is called before each call that needs approval, one call at a time.
        on_run: A function that receives the record of each finished call; it must not block or raise.
        max_output: Maximum characters of text in one result; longer text is truncated with a note.
        origin: The ``origin`` of the result blocks.
        filters: Content filters for the results, applied before they are truncated.
        text_only: Whether images and files in the results are replaced by descriptions, as audio is.
        keeps_all_parts: Whether nothing is replaced, because the results are not for a model.

    Returns:
        One result for each call, in the order of the calls.
    """
    if filters is None:
        filters = ContentFilters()
    context = CallContext(
        build_toolbox(toolbox),
        approve,
        on_run,
        max_output,
        origin,
        filters,
        text_only,
        keeps_all_parts,
    )
    return [record.result for record in await _run_all(context, calls)]


async def _run_all(context: CallContext, calls: Sequence[ToolCallBlock]) -> list[ToolRun]:
    runners = [CallRunner(context, call) for call in calls]
    escaped: list[BaseException] = []
    try:
        # Also for a single call: a task of its own tells whether the call is cancelled, or its function by itself.
        async with anyio.create_task_group() as group:
            for runner in runners:
                group.start_soon(_run_call, runner, group, escaped)
    finally:
        records = [runner.record or runner.report_cancelled() for runner in runners]
    if escaped:
        raise escaped[0]
    return records


async def iter_runs(
    context: CallContext, calls: Sequence[ToolCallBlock]
) -> AsyncGenerator[ToolRun]:
    """Run tool calls in parallel and yield the record of each as soon as it has a result.

    If the caller stops iterating or is cancelled, the remaining calls are cancelled. ``context.on_run`` also receives
    their records.
    """
    if len(calls) == 1:  # a single call needs no queue
        yield (await _run_all(context, calls))[0]
        return
    done: asyncio.Queue[ToolRun | None] = asyncio.Queue()
    escaped: list[BaseException] = []

    def report(run: ToolRun) -> None:
        if context.on_run:
            context.on_run(run)
        done.put_nowait(run)

    async def run_all() -> None:
        # SystemExit raised in a task of its own would end the event loop, also that of other callers.
        try:
            await _run_all(structs.replace(context, on_run=report), calls)
        except (SystemExit, KeyboardInterrupt) as error:
            escaped.append(error)

    work = asyncio.ensure_future(run_all())
    work.add_done_callback(lambda _: done.put_nowait(None))
    try:
        while run := await done.get():
            yield run
        await work
        if escaped:
            raise escaped[0]
    finally:
        work.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(work, return_exceptions=True)


async def _run_call(runner: CallRunner, group: TaskGroup, escaped: list[BaseException]) -> None:
    """Run one call; exceptions that must not become results are raised by ``run_calls``."""
    try:
        await runner.run()
    except anyio.get_cancelled_exc_class():
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by run_calls, out of any group
        escaped.append(error)
        group.cancel_scope.cancel()
