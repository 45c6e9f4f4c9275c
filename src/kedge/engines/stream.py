"""Streams: the events of a run, and after the last event its result.

``RunStream`` is shared by engines, Chat and Conversation; ``Stream`` is that of an engine. A stream of a typed
answer also has the partial values received so far.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from msgspec.structs import replace
from typing_extensions import TypeVar

from kedge.engines.reply import Reply, answer_text
from kedge.engines.request_log import RequestLog
from kedge.engines.request_options import Request
from kedge.errors import EngineError, KedgeError
from kedge.event_loops import AsyncResource
from kedge.events import Event, ResponseStarted, TextDelta, Usage
from kedge.events import run as run_events
from kedge.events.request_record import keep_request, sum_usage
from kedge.events.run import AnswerFinished, TurnFinished
from kedge.observe.logs import BOUND_FIELDS
from kedge.planning import RequestPlan, get_state, record_response
from kedge.schemas.output_schema import OutputSchema
from kedge.turns import Block, Turn

if TYPE_CHECKING:
    from kedge.engines.base import Engine

R = TypeVar("R")
OutputT = TypeVar("OutputT", default=None)
ReplyT = TypeVar("ReplyT", bound=Reply[Any])


class RunStream(AsyncResource, Generic[R]):
    """An iterator over the events of a run that has a result once it is exhausted.

    Use it as a context manager, so that leaving early closes the run. Iteration adds no further generator:
    each event passes through ``__anext__`` only.
    """

    _before_end: ClassVar[str] = "its reply"
    """What cannot be read before the end, and what to do after a run without an end."""

    def __init__(
        self, open_source: "Callable[[], _EventSource]", schema: OutputSchema[Any] | None = None
    ) -> None:
        # Opened by the first step, so that an error at the start of a run is raised by the iteration.
        self._open_source = open_source
        self._source: _EventSource | None = None
        self._closed = False
        self._log_context: Mapping[str, str] | None = None
        """The ids of log records that are written during a step of the run; None for those of the caller."""
        self.schema = schema
        """The schema of the answer, if it is typed."""
        self._value: R | None = None
        """The result of the run."""
        self._output: Any = None
        self._output_text = ""
        self._output_item: tuple[str, int, int] | None = None

    async def finish(self) -> R:
        """Consume the remaining events, close the run and return the result."""
        try:
            async for _ in self:
                pass
        finally:
            await self.aclose()
        return self._result()

    async def text_deltas(self) -> AsyncGenerator[str]:
        """Consume the events and yield the text of the answer as it arrives.

        With tools, the text before and after a call is yielded.
        """
        async for event in self:
            if isinstance(event, TextDelta):
                yield event.delta

    @property
    def partial_output(self) -> Any:
        """The JSON values of a typed answer received so far; None before the first one.

        They are not validated: members may be missing, and the last text may be cut.
        """
        return self.schema.parse_partial(self._output_text) if self.schema else None

    async def partial_outputs(self) -> AsyncGenerator[Any]:
        """Consume the events and yield the JSON values of a typed answer as they arrive.

        After an answer that does not match the schema, the values of the next answer follow.
        """
        shown, parsed_length = None, 0
        async for event in self:
            if not isinstance(event, TextDelta | TurnFinished):
                continue
            # A value is parsed from the start of the text, so a long text is not parsed for every delta.
            added = len(self._output_text) - parsed_length
            if isinstance(event, TextDelta) and 0 <= added < parsed_length // 100:
                continue
            parsed_length, value = len(self._output_text), self.partial_output
            if value is not None and value != shown:
                shown = value
                yield value

    def _track_output(self, event: Event) -> None:
        """Record the text and the value of a typed answer."""
        match event:
            case run_events.RequestPlanned():
                self._output_text = ""
            case TextDelta():
                item = event.item_id, event.output_index, event.content_index
                if item != self._output_item:
                    self._output_text, self._output_item = "", item
                self._output_text += event.delta
            case run_events.OutputAccepted():
                self._output = event.value
            case _:
                pass

    def _result(self) -> R:
        """Return the result, or raise ``KedgeError`` while there is none."""
        if self._value is None:
            problem = "the stream has not ended: iterate over it to the end before reading "
            raise KedgeError(problem + self._before_end)
        return self._value

    def _handle_event(self, event: Event) -> Event:
        """Record an event before it is returned to the caller, and return it in the form for the caller."""
        return event

    def _handle_end(self) -> None:
        """Build the result; the source is exhausted."""

    def _handle_error(self, error: Exception) -> None:
        """Add information to an error before it is raised."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        before = BOUND_FIELDS.get()
        if self._closed and self._source is None:
            raise StopAsyncIteration
        try:
            if self._source is None:
                self._source = self._open_source()
            # Between two events, the ids of the caller are in effect.
            BOUND_FIELDS.set(before if self._log_context is None else self._log_context)
            try:
                event = await self._source.__anext__()
            finally:
                BOUND_FIELDS.set(before)
            if self.schema is not None:
                self._track_output(event)
            event = self._handle_event(event)
        except StopAsyncIteration:
            self._handle_end()
            raise
        except Exception as error:
            self._handle_error(error)
            raise
        return event

    async def aclose(self) -> None:
        """Close the run; events that were not consumed are lost."""
        self._closed = True
        if self._source is not None:
            await self._source.aclose()


_EventSource = AsyncGenerator[Any, None] | RunStream[Any]


class Stream(RunStream[Turn], Generic[OutputT]):
    """The events of one run, and at its end the Turn and the typed value of the answer."""

    _before_end = "its Turn; the Turn you sent is unchanged and can be sent again"

    def __init__(
        self,
        open_source: Callable[[], _EventSource],
        engine: "Engine",
        turn: Turn,
        request: Request,
    ) -> None:
        super().__init__(open_source, request.output)
        self._sent_turn = self._partial_turn = turn
        self._tool_results: list[Block] = []
        self.filters = request.filters
        """The content filters of the stack that runs."""
        self.log = RequestLog(engine, request)
        """The records of the requests of this run."""
        self.answers: list[AnswerFinished] = []
        """Every finished response of this run, in order."""
        self.trace: list[run_events.TurnEdited] = []
        """The changes to the Turn by each middleware."""
        # The ids bound by the caller, and those of the Turn. A nested run (of a tool, of a compactor) does not inherit
        # those of the outer Turn and response.
        conversation = get_state(turn).conversation_id
        ids = {"conversation_id": conversation} if conversation else {}
        ids |= {**BOUND_FIELDS.get(), "turn_id": turn.id}
        ids.pop("response_id", None)
        self._log_context = self.log.ids = ids

    @property
    def turn(self) -> Turn:
        """The Turn with the answer; available once the stream has ended."""
        return self._result()

    @property
    def reached(self) -> Turn:
        """The Turn so far, at any time: with every finished answer and tool result.

        Continue from it after a run that was cancelled; the middleware ``repair`` completes calls that
        have no result yet.
        """
        return self._value or self._partial_turn.append(*self._tool_results)

    @property
    def plans(self) -> list[RequestPlan]:
        """The plan of every request of this run, in order."""
        return self.log.plans

    @property
    def plan(self) -> RequestPlan | None:
        """The plan of the newest request."""
        return self.plans[-1] if self.plans else None

    @property
    def usage(self) -> Usage:
        """The tokens of all responses of this run, also of those that were incomplete, failed or discarded."""
        return sum_usage(self.log.records)

    def build_reply(self, kind: type[ReplyT], **members: Any) -> ReplyT:
        """Return a reply with the records of the requests of this run, and with further members."""
        requests = tuple(self.log.records)
        return kind(requests=requests, plan=self.plan, output=self.output, **members)

    @property
    def reply(self) -> Reply[OutputT]:
        """The reply; available once the stream has ended."""
        reply: Reply[Any] = self.build_reply(Reply, text=self.text, turn=self.turn)
        return reply

    @property
    def text(self) -> str:
        """The text of the answer; available once the stream has ended."""
        return answer_text(self.turn, self._sent_turn)

    @property
    def output(self) -> OutputT:
        """The typed value of the answer, if one was requested; available once the stream has ended."""
        _ = self.turn  # raises before the end
        return self._output

    def _handle_event(self, event: Event) -> Event:
        if self.log.has_output and isinstance(event, run_events.VISIBLE_EVENTS):
            return event
        self.log.record_event(event)
        if isinstance(event, AnswerFinished | TurnFinished):
            last = self.log.records[-1] if self.log.records else None
            if last and last.status == "running":
                event = replace(event, turn=keep_request(event.turn, last))
        match event:
            case TurnFinished():
                self._value = event.turn
            case ResponseStarted():
                ids = {**self.log.ids, "response_id": event.response_id}
                self._log_context = self.log.ids = ids
                if event.background and event.response_id:
                    self._keep_running(event.response_id)
            case AnswerFinished():
                self.answers.append(event)
                self._partial_turn, self._tool_results = event.turn, []
            case run_events.ToolFinished():
                self._tool_results.append(event.result)
            case run_events.TurnEdited():
                self.trace.append(event)
            case _:
                pass
        return event

    def _keep_running(self, response_id: str) -> None:
        """Record a response in the background at its start, because the run may be left before its end."""
        plan = self.plan
        if plan is not None and isinstance(plan.source, Turn):
            self._tool_results = []
            now, sent = time.time(), plan.source
            turn = record_response(
                sent, (), response_id=response_id, plan=plan, created_at=now, status="running"
            )
            self._partial_turn = keep_request(turn, self.log.current)

    def _handle_error(self, error: Exception) -> None:
        if isinstance(error, EngineError):
            self.log.record_error(error)

    async def aclose(self) -> None:
        """Close the run; a request without an end is recorded as stopped."""
        await super().aclose()
        self.log.stop()
