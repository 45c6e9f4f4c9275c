"""Execution of one tool call: find the tool, parse the arguments, request approval, run, retry.

A step that ends the execution early raises ``_EarlyResult``: an outcome and a text for the model.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio
from msgspec import structs

from kedge.engines.content_filter import ContentFilters
from kedge.errors import InvalidArguments, KedgeError, ToolFailed, UnknownTool
from kedge.events.fields import repair_surrogates
from kedge.observe import bind_fields, get_logger
from kedge.text.display import capitalize
from kedge.tools.approval import Allow, Approver, Decision, Deny, Edit, apply_edit, request_approval
from kedge.tools.concurrency import ConcurrencyExhausted
from kedge.tools.invoke import (
    Arguments,
    AttemptTimeout,
    Parts,
    SelfCancelled,
    invoke_tool,
)
from kedge.tools.output import (
    describe_attachments,
    describe_error,
    locate_error,
    truncate_parts,
)
from kedge.tools.registry import AnyTool, Toolbox
from kedge.turns import FrozenMap, TextPart, ToolCallBlock, ToolResultBlock

ToolOutcome = Literal["ok", "unknown", "invalid", "refused", "failed", "timeout", "cancelled"]
"""The outcome of a call."""

OUTCOME_KEY = "kedge.outcome"
"""Metadata key of a result block: the outcome of the call."""


@dataclass(frozen=True, slots=True, repr=False)
class ToolRun:
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
MAX_RETRY_WAIT = 30.0
MAX_NOTE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class CallContext:
    """Settings shared by all calls of one ``run_calls``."""

    toolbox: Toolbox
    approve: Approver | None
    on_run: OnRun | None
    max_output: int
    origin: str
    filters: ContentFilters
    """The filters that are applied to the result before it is truncated."""
    text_only: bool = False
    """Whether images and files in results are replaced by descriptions, because the API accepts text only."""
    approval_lock: anyio.Lock = field(default_factory=anyio.Lock)


class _EarlyResult(Exception):
    """Ends the execution of a call with a text for the model."""

    def __init__(self, outcome: ToolOutcome, text: str, error: BaseException | None = None) -> None:
        super().__init__(text)
        self.outcome: ToolOutcome = outcome
        self.parts: Parts = (TextPart(repair_surrogates(text)),)
        self.error = error


class CallRunner:
    """Runs one call; ``get_record`` returns its record, also after a cancellation."""

    def __init__(self, context: CallContext, call: ToolCallBlock) -> None:
        self.context = context
        self.call = call
        self.record: ToolRun | None = None
        self.edited_call: ToolCallBlock | None = None
        self.note = ""
        self.clock = _RunTimer()

    async def run(self) -> None:
        """Run the call; log records written meanwhile carry its id."""
        with bind_fields(call_id=self.call.call_id):
            try:
                tool = self._find_tool()
                arguments = self._parse_arguments(tool, self.call)
                if await self._request_approval(tool):
                    arguments = self._parse_edited_arguments(tool)
                parts = await self._invoke_with_retries(tool, arguments)
            except _EarlyResult as early:
                self._finish(early.outcome, early.parts, early.error)
            else:
                self._finish("ok", parts)

    def get_record(self) -> ToolRun:
        """Return the record; a call without a result was cancelled."""
        if self.record:
            return self.record
        when = (
            "while it ran; it may have had an effect" if self.clock.start_count else "before it ran"
        )
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

    async def _request_approval(self, tool: AnyTool) -> bool:
        """Request approval if required, and return whether the arguments were changed."""
        approve = self.context.approve
        if approve is None and tool.approval:
            raise _EarlyResult(
                "refused", f"{tool.name} requires approval, and no approver is configured."
            )
        if approve is None or tool.approval is False:
            return False
        async with self.context.approval_lock:
            match await self._ask_approver(approve):
                case Allow():
                    return False
                case Deny(reason):
                    suffix = f": {reason}" if reason else "."
                    raise _EarlyResult("refused", f"The call was denied and did not run{suffix}")
                case Edit() as edit:
                    self._apply_edit(edit)
                    return True

    async def _ask_approver(self, approve: Approver) -> Decision:
        try:
            return await request_approval(approve, self.call)
        except Exception as error:
            raise self._approval_failure("the approver failed", error) from error

    def _apply_edit(self, edit: Edit) -> None:
        try:
            self.edited_call = apply_edit(self.call, edit)
        except KedgeError as error:
            raise self._approval_failure("the approver's arguments are not JSON", error) from error
        if edit.tell:
            shown = self.context.filters.apply(self.edited_call).arguments[:MAX_NOTE_CHARS]
            self.note = f"[The arguments were changed before the call ran, to: {shown}]"

    def _parse_edited_arguments(self, tool: AnyTool) -> Arguments:
        try:
            return self._parse_arguments(tool, self.edited_call or self.call)
        except _EarlyResult as early:
            problem = "the approver's arguments are invalid"
            raise self._approval_failure(problem, early.error or early) from early

    def _approval_failure(self, reason: str, error: BaseException) -> _EarlyResult:
        log.error("%s (call %s): %s", reason, self.call.call_id, _describe_location(error))
        return _EarlyResult(
            "refused", f"The call was not approved and did not run: {reason}.", error
        )

    async def _invoke_with_retries(self, tool: AnyTool, arguments: Arguments) -> Parts:
        failures = 0
        while True:
            try:
                return await invoke_tool(tool, arguments, self.clock.start)
            except Exception as error:
                self.clock.stop()
                failures += 1
                final = isinstance(error, ToolFailed) or not isinstance(error, tool.retry_on)
                if final or failures > tool.retries:
                    raise self._failure_result(tool, error) from error
                await self._wait_before_retry(tool, failures, error)
            # A failed attempt may have mutated its lists and models: parse them again.
            arguments = self._parse_arguments(tool, self.edited_call or self.call)

    async def _wait_before_retry(self, tool: AnyTool, failures: int, error: Exception) -> None:
        pause = min(tool.retry_wait * 2 ** min(failures - 1, 16), MAX_RETRY_WAIT)
        attempt = f"attempt {failures} of {tool.retries + 1}"
        location = self.call.call_id, _describe_location(error)
        text = "tool %s failed, %s, retrying in %g s (call %s): %s"
        log.info(text, tool.name, attempt, pause, *location)
        await anyio.sleep(pause)

    def _failure_result(self, tool: AnyTool, error: Exception) -> _EarlyResult:
        match error:
            case ToolFailed():
                return _EarlyResult("failed", str(error) or f"{tool.name} failed.", error)
            case AttemptTimeout():
                return _EarlyResult("timeout", f"{tool.name} timed out: {error}.", error)
            case ConcurrencyExhausted() | SelfCancelled():
                return _EarlyResult("failed", f"{tool.name} failed: {error}.", error)
            case _:
                shown = describe_error(error, self.context.filters.edit_text)
                return _EarlyResult("failed", f"{tool.name} failed: {shown}", error)

    def _finish(
        self, outcome: ToolOutcome, parts: Parts, error: BaseException | None = None
    ) -> ToolRun:
        self.clock.stop()
        if self.context.text_only:
            parts = describe_attachments(parts)
        result = self.context.filters.apply(
            ToolResultBlock(
                self.call.call_id,
                parts,
                self.call.custom,
                origin=self.context.origin,
                metadata=FrozenMap({OUTCOME_KEY: outcome}),
            )
        )
        shown = self._prepend_note(truncate_parts(result.parts, self.context.max_output))
        result = structs.replace(result, parts=shown)
        clock = self.clock
        times = clock.start_count, clock.seconds, clock.waiting_seconds()
        self.record = ToolRun(self.call, result, outcome, *times, error, self.edited_call)
        self._log_run(self.record)
        if self.context.on_run:
            self.context.on_run(self.record)
        return self.record

    def _prepend_note(self, parts: Parts) -> Parts:
        """Return the output, after a note if the approver changed the arguments."""
        match parts:
            case _ if not self.note or not self.clock.start_count:
                return parts
            case (TextPart(text), *rest):
                return (TextPart(f"{self.note}\n{text}"), *rest)
            case _:
                return (TextPart(self.note), *parts)

    def _log_run(self, run: ToolRun) -> None:
        log.log(
            OUTCOME_LEVELS.get(run.outcome, logging.WARNING),
            "tool %.64s: %s (call %s, %d attempt(s), %.3f s)%s",
            *(run.name, run.outcome, run.call_id, run.attempts, run.seconds),
            f": {_describe_location(run.error)}" if run.error else "",
            call_id=run.call_id,
        )


class _RunTimer:
    """Measures the running time and the waiting time of a call separately."""

    def __init__(self) -> None:
        self.start_count = 0
        self.seconds = 0.0
        self._created_at = time.perf_counter()
        self._started_at: float | None = None

    def start(self) -> None:
        self.start_count += 1
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        if self._started_at is not None:
            self.seconds += time.perf_counter() - self._started_at
            self._started_at = None

    def waiting_seconds(self) -> float:
        return max(0.0, time.perf_counter() - self._created_at - self.seconds)


def _describe_location(error: BaseException) -> str:
    return f"{type(error).__name__} at {locate_error(error)}"
