"""One call on its way to its result: find the tool, read the arguments, ask, run, try again.

Each step that ends the way early does so with an ``_Answer``: an outcome and a text for the model.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import anyio

from kedge.errors import InvalidArguments, KedgeError, ToolFailed, UnknownTool
from kedge.observe import bound, get_logger
from kedge.tools.approval import Allow, Approve, Decision, Edit, Refuse, ask, edited
from kedge.tools.attempt import Arguments, CancelledItself, OutOfTime, Parts, Stuck, attempt
from kedge.tools.failure import describe, place_of
from kedge.tools.output import bounded, sendable
from kedge.tools.record import OUTCOME, OnRun, Outcome, ToolRun
from kedge.tools.registry import AnyTool, Toolbox
from kedge.turns import FrozenMap, TextPart, ToolCallBlock, ToolResultBlock

log = get_logger("kedge.tools")

LEVELS: dict[Outcome, int] = {
    "ok": logging.DEBUG,
    "unknown": logging.WARNING,
    "invalid": logging.WARNING,
    "refused": logging.INFO,
    "failed": logging.WARNING,
    "timeout": logging.WARNING,
    "cancelled": logging.INFO,
}
LONGEST_PAUSE = 30.0
LONGEST_NOTE = 2_000


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What holds for all calls that run together."""

    toolbox: Toolbox
    approve: Approve | None
    on_run: OnRun | None
    max_output: int
    origin: str
    approving: anyio.Lock


class _Answer(Exception):
    """Ends the way of a call, with a text for the model."""

    def __init__(self, outcome: Outcome, text: str, error: BaseException | None = None) -> None:
        super().__init__(text)
        self.outcome: Outcome = outcome
        self.parts: Parts = (TextPart(sendable(text)),)
        self.error = error


class Settling:
    """One call on its way; ``settled`` gives its record, whatever has happened."""

    def __init__(self, terms: CallTerms, call: ToolCallBlock) -> None:
        self.terms = terms
        self.call = call
        self.record: ToolRun | None = None
        self.edited: ToolCallBlock | None = None
        self.note = ""
        self.clock = _Clock()

    async def settle(self) -> None:
        """Bring the call to its result; what is logged on the way carries its id."""
        with bound(call_id=self.call.call_id):
            await self._settle()

    async def _settle(self) -> None:
        try:
            tool = self._tool()
            arguments = self._arguments(tool, self.call)
            if await self._is_edited(tool):
                arguments = self._edited_arguments(tool)
            parts = await self._attempts(tool, arguments)
        except _Answer as answer:
            self._finish(answer.outcome, answer.parts, answer.error)
        else:
            self._finish("ok", parts)

    def settled(self) -> ToolRun:
        """The record; a call that came to no result was cancelled."""
        if self.record:
            return self.record
        when = "while it ran; it may have had an effect" if self.clock.starts else "before it ran"
        return self._finish("cancelled", (TextPart(f"This call was cancelled {when}."),))

    def _tool(self) -> AnyTool:
        try:
            tool = self.terms.toolbox[self.call.name]
        except UnknownTool as error:
            raise _Answer("unknown", _sentence(str(error)), error) from error
        if tool.custom != self.call.custom:
            takes = "free text, as a custom tool call" if tool.custom else "JSON arguments"
            raise _Answer("invalid", f"{tool.name} takes {takes}.")
        return tool

    def _arguments(self, tool: AnyTool, call: ToolCallBlock) -> Arguments:
        try:
            return tool.reader.read(call)
        except InvalidArguments as error:
            listed = "\n".join(f"- {problem}" for problem in error.problems)
            text = f"The arguments of {tool.name} do not fit:\n{listed}\nCall it again, corrected."
            raise _Answer("invalid", text, error) from error
        except Exception as error:  # a validator that the tool brought along
            raise _failure(tool, error) from error

    async def _is_edited(self, tool: AnyTool) -> bool:
        """Ask for approval where it is due; tell whether the arguments were changed."""
        approve = self.terms.approve
        if approve is None and tool.approval:
            raise _Answer("refused", f"{tool.name} needs approval, and nobody is there to give it.")
        if approve is None or tool.approval is False:
            return False
        async with self.terms.approving:
            match await self._ask(approve):
                case Allow():
                    return False
                case Refuse(reason):
                    why = f": {reason}" if reason else "."
                    raise _Answer("refused", f"The call was refused and did not run{why}")
                case Edit() as edit:
                    self._edit(edit)
                    return True

    async def _ask(self, approve: Approve) -> Decision:
        try:
            return await ask(approve, self.call)
        except Exception as error:
            raise self._unapproved("the approver failed", error) from error

    def _edit(self, edit: Edit) -> None:
        try:
            self.edited = edited(self.call, edit)
        except KedgeError as error:
            raise self._unapproved("the approver's arguments are not JSON", error) from error
        if edit.tell:
            shown = self.edited.arguments[:LONGEST_NOTE]
            self.note = f"[The arguments were changed before the call ran, to: {shown}]"

    def _edited_arguments(self, tool: AnyTool) -> Arguments:
        try:
            return self._arguments(tool, self.edited or self.call)
        except _Answer as answer:
            why = "the approver's arguments do not fit"
            raise self._unapproved(why, answer.error or answer) from answer

    def _unapproved(self, why: str, error: BaseException) -> _Answer:
        log.error("%s (call %s): %s", why, self.call.call_id, _where(error))
        return _Answer("refused", f"The call was not approved and did not run: {why}.", error)

    async def _attempts(self, tool: AnyTool, arguments: Arguments) -> Parts:
        failures = 0
        while True:
            try:
                return await attempt(tool, arguments, self.clock.start)
            except Exception as error:
                self.clock.stop()
                failures += 1
                final = isinstance(error, ToolFailed) or not isinstance(error, tool.retry_on)
                if final or failures > tool.retries:
                    raise _failure(tool, error) from error
                await self._pause(tool, failures, error)
            # A failed attempt may have changed its lists and models: read them afresh.
            arguments = self._arguments(tool, self.edited or self.call)

    async def _pause(self, tool: AnyTool, failures: int, error: Exception) -> None:
        pause = min(tool.retry_wait * 2 ** min(failures - 1, 16), LONGEST_PAUSE)
        log.info(
            "tool %s failed, attempt %d of %d, again in %g s (call %s): %s",
            *(tool.name, failures, tool.retries + 1, pause, self.call.call_id, _where(error)),
        )
        await anyio.sleep(pause)

    def _finish(
        self, outcome: Outcome, parts: Parts, error: BaseException | None = None
    ) -> ToolRun:
        self.clock.stop()
        result = ToolResultBlock(
            self.call.call_id,
            self._noted(bounded(parts, self.terms.max_output)),
            self.call.custom,
            origin=self.terms.origin,
            metadata=FrozenMap({OUTCOME: outcome}),
        )
        clock = self.clock
        times: dict[str, Any] = {"seconds": clock.seconds, "waited": clock.waited()}
        self.record = ToolRun(
            self.call, result, outcome, clock.starts, error=error, edited=self.edited, **times
        )
        self._log(self.record)
        if self.terms.on_run:
            self.terms.on_run(self.record)
        return self.record

    def _noted(self, parts: Parts) -> Parts:
        """The output, after a note if it is the output of other arguments than the model's."""
        match parts:
            case _ if not self.note or not self.clock.starts:
                return parts
            case (TextPart(text), *rest):
                return (TextPart(f"{self.note}\n{text}"), *rest)
            case _:
                return (TextPart(self.note), *parts)

    def _log(self, run: ToolRun) -> None:
        log.log(
            LEVELS[run.outcome],
            "tool %.64s: %s (call %s, %d attempt(s), %.3f s)%s",
            *(run.name, run.outcome, run.call_id, run.attempts, run.seconds),
            f": {_where(run.error)}" if run.error else "",
            call_id=run.call_id,
        )


class _Clock:
    """Tells the time that a function ran from the time that its call waited."""

    def __init__(self) -> None:
        self.starts = 0
        self.seconds = 0.0
        self._made = time.perf_counter()
        self._started: float | None = None

    def start(self) -> None:
        self.starts += 1
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    def waited(self) -> float:
        return max(0.0, time.perf_counter() - self._made - self.seconds)


def _failure(tool: AnyTool, error: Exception) -> _Answer:
    match error:
        case ToolFailed():
            return _Answer("failed", str(error) or f"{tool.name} failed.", error)
        case OutOfTime():
            return _Answer("timeout", f"{tool.name} ran out of time: {error}.", error)
        case Stuck() | CancelledItself():
            return _Answer("failed", f"{tool.name} failed: {error}.", error)
        case _:
            return _Answer("failed", f"{tool.name} failed: {describe(error)}", error)


def _where(error: BaseException) -> str:
    return f"{type(error).__name__} at {place_of(error)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
