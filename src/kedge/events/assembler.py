"""Assemble the events of a response into blocks, for every provider.

The assembler collects the events of each output item in an ``ItemBuilder``. A response is ``completed`` only if
its terminal event is ``completed`` *and* every item is known to be complete. A stream with a problem (an event
that could not be parsed, a gap, a late delta) is still complete if finished items cover all of it; otherwise it
has failed, and the outcome has the reason.
"""

import logging
from collections.abc import Iterator
from typing import Any

from kedge.errors import InvalidTurn
from kedge.events.fields import read_conversation_id
from kedge.events.output_items import EVENT_HANDLERS, MESSAGE, REASONING, ItemBuilder, OutputBuilder
from kedge.events.types import (
    AnomalyNoted,
    Event,
    Outcome,
    OutcomeStatus,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamFailed,
    TerminalEvent,
    TextDelta,
    Usage,
)
from kedge.turns import Block

log = logging.getLogger(__name__)

DAMAGED_STREAM = "damaged_stream"
"""The code of an outcome that failed because its stream is inconsistent."""


_NOT_STARTED = ResponseStarted()


class Assembler:
    """Builds the blocks and the outcome of one response from its events.

    Args:
        origin: The origin of the blocks.
        native_api: The API that items of unknown types are of; empty for the Responses API.
    """

    def __init__(self, *, origin: str = "engine", native_api: str = "") -> None:
        self._origin = origin
        self._native_api = native_api
        self._output = OutputBuilder()
        self._started = _NOT_STARTED
        self._terminal: TerminalEvent | None = None
        self._error: StreamFailed | None = None
        self._anomalies: dict[str, str] = {}
        self._anchor_problem = ""

    def feed(self, event: Event) -> None:
        """Add one event of the response; events that do not concern its blocks are ignored.

        Args:
            event: An event, in the order in which the decoder emitted it.
        """
        if self._terminal is not None:
            return
        handle = EVENT_HANDLERS.get(type(event))
        if handle is not None:
            handle(self._output, event)
        else:
            self._update_response(event)

    @property
    def response_id(self) -> str:
        """The id of the response; empty until it is known."""
        return self._response_field("response_id")

    def blocks(self, *, partial: bool = True) -> tuple[Block, ...]:
        """Return the blocks so far, in output order.

        Args:
            partial: Whether to include blocks that are not complete yet.
        """
        completed = self._resolve_status()[0] == "completed"
        return tuple(self._build_blocks(completed=completed, partial=partial))

    def unstreamed_text(self) -> Iterator[TextDelta | RefusalDelta]:
        """Yield deltas with the text of messages that arrived without any.

        They are for the end of the response: until then it may turn out that the server lost the context, and
        an answer that was not shown can be requested again.
        """
        return self._output.unstreamed_text()

    def finish(self) -> Outcome:
        """End the response.

        Returns:
            Its status, its blocks and the fields of the response.
        """
        status, code, message = self._resolve_status()
        blocks = tuple(self._build_blocks(completed=status == "completed", partial=True))
        if "unreadable" in self._anomalies and status == "completed":
            status, code, message = self._resolve_status()
            blocks = tuple(self._build_blocks(completed=False, partial=True))
        if status in ("failed", "cut"):
            log.warning(
                "the stream of response %r ended as %s (%s)", self.response_id, status, code
            )
        ended = self._terminal
        return Outcome(
            status,
            blocks,
            self.response_id,
            self._response_field("model"),
            self._get_usage(),
            self._response_field("created_at"),
            self._response_field("previous_response_id"),
            self._response_field("echoed"),
            ended.reason if isinstance(ended, ResponseIncomplete) else "",
            code,
            message,
            self._anchor_problem or self._output.anchor_problem,
            self._is_stored(),
            self._read_conversation(),
        )

    def _get_usage(self) -> Usage | None:
        """Return the token counts at the end of the response, or those of the error that ended it."""
        return next(
            (each.usage for each in (self._terminal, self._error) if each and each.usage), None
        )

    def _is_stored(self) -> bool | None:
        """Return whether the server stored the response, from the last event with this field."""
        for facts in (self._terminal, self._started):
            stored = facts.response.get("store") if facts else None
            if isinstance(stored, bool):
                return stored
        return None

    def _read_conversation(self) -> str | None:
        """Return the conversation object of the response, from the last event with this field."""
        for facts in (self._terminal, self._started):
            conversation_id = read_conversation_id(facts.response) if facts else None
            if conversation_id is not None:
                return conversation_id
        return None

    def _update_response(self, event: Event) -> None:
        """Apply an event that concerns the response itself."""
        match event:
            case ResponseStarted():
                self._started = event
            case ResponseCompleted() | ResponseIncomplete():
                self._terminal = event
                self._output.merge_listed(event.output or ())
            case ResponseFailed():
                self._terminal = event
            case StreamFailed():  # a terminal event may still follow
                self._error = self._error or event
            case AnomalyNoted(kind="contradiction" | "replaced_text"):
                self._anchor_problem = self._anchor_problem or event.detail
            case AnomalyNoted():
                self._anomalies.setdefault(event.kind, event.detail)
            case _:
                pass

    def _build_blocks(self, *, completed: bool, partial: bool) -> Iterator[Block]:
        for slot in self._output.sorted_items():
            cut = not completed and (slot.is_cut or not slot.is_finished)
            if cut and not partial:
                continue
            try:
                block = slot.build_block(
                    self.response_id, self._origin, self._native_api, partial=cut
                )
            except InvalidTurn as problem:
                log.warning("an item of type %r is invalid: %s", slot.type, problem)
                self._anomalies["unreadable"] = str(problem)
                continue
            if block is not None:
                yield block

    def _resolve_status(self) -> tuple[OutcomeStatus, str, str]:
        """Return the status, and the code and message of a failure."""
        ended, error = self._terminal, self._error
        if isinstance(ended, ResponseFailed):
            code, message = (error.code or error.kind, error.message) if error else ("", "")
            return "failed", ended.code or code, ended.message or message
        if error is not None:
            return "failed", error.code or error.kind or "error", error.message
        if ended is None and self.response_id and self._started.response.get("background") is True:
            return "running", "", ""
        if ended is None:
            return "cut", "", "the stream ended before the response was complete"
        if isinstance(ended, ResponseIncomplete):
            return "incomplete", "", ""
        problem = self._find_damage(ended)
        return ("failed", DAMAGED_STREAM, problem) if problem else ("completed", "", "")

    def _find_damage(self, ended: ResponseCompleted) -> str:
        """Return why a response with a ``completed`` event is not complete, or an empty string."""
        slots = self._output.sorted_items()
        loose = [slot for slot in slots if slot.item is None or slot.lacks_text]
        if "unresolved_call" in self._anomalies:
            return f"{self._anomalies['unresolved_call']} is not a complete tool call"
        if "unreadable" in self._anomalies:
            return f"an item is invalid: {self._anomalies['unreadable']}"
        if "malformed" in self._anomalies and not ended.output:
            return f"an event could not be parsed ({self._anomalies['malformed']})"
        if self._anomalies and any(slot.has_content for slot in loose):
            return f"an item may lack text: {next(iter(self._anomalies.values()))}"
        if self._anomalies and not ended.output and _has_index_gaps(slots):
            return f"an output item is missing: {next(iter(self._anomalies.values()))}"
        for slot in loose:
            if slot.type not in (MESSAGE, REASONING) and not slot.is_finished:
                return f"an item of type {slot.type!r} was started and never finished"
        return ""

    def _response_field(self, name: str) -> Any:
        """Return a field of the response from its end, or else from its start."""
        ended = self._terminal
        if name == "previous_response_id" and ended is not None and ended.echoed:
            return ended.previous_response_id
        return (ended is not None and getattr(ended, name)) or getattr(self._started, name)


def _has_index_gaps(slots: list[ItemBuilder]) -> bool:
    """Return whether an output index is missing."""
    return {slot.output_index for slot in slots} != set(range(len(slots)))
