"""The Engine interface: send a Turn to a model and return the Turn with the model's blocks appended.

``stream`` returns the events of a run, and at its end the result; ``run`` consumes them and returns the Turn. An
engine implements one async generator, ``events``, whose last event is ``TurnFinished``. A middleware wraps an engine
and is an engine, so a stack of middleware is an engine too. ``RunStream`` is shared by engines, Chat and Conversation,
``Stream`` is that of an engine; a stream of a typed answer also has the partial values received so far.

    async with engine.stream(turn) as stream:
        async for event in stream:
            ...
    stream.turn
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, Unpack

from msgspec.structs import replace
from typing_extensions import TypeForm, TypeVar

from kedge._internal.event_loops import AsyncResource
from kedge.engines.options import RequestOptions, list_options
from kedge.engines.output_schema import OutputSchema
from kedge.engines.reply import Reply, answer_text, run_until_valid
from kedge.engines.request import Request
from kedge.engines.request_log import RequestLog
from kedge.errors import EngineError, InvalidTurn, KedgeError
from kedge.events import Event, ResponseStarted, TextDelta, Usage
from kedge.events import run as run_events
from kedge.events.request_record import keep_request, sum_usage
from kedge.events.run import AnswerFinished, TurnFinished
from kedge.observe.logs import BOUND_FIELDS
from kedge.planning import AnchorRecord, RequestPlan, find_running, get_state, record_running
from kedge.tools.definitions import split_tools
from kedge.turns import Block, Turn
from kedge.turns.content_filters import ContentFilter, ContentFilters
from kedge.turns.turn import check_turn

if TYPE_CHECKING:
    from kedge.engines.sync import SyncEngine


Events = AsyncGenerator[Event, None]
"""The events of a run, ending with ``TurnFinished``, as returned by ``Engine.events``."""
T = TypeVar("T", default=None)
Output = TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None
"""The type of an answer."""


class Engine(AsyncResource, ABC):
    """Sends Turns to a model."""

    name: str = ""
    model: str = ""
    """The model, unless a request names another."""
    text_only_results: bool = False
    """Whether the API accepts only text in tool results; images and files are described there."""
    foreign_params: frozenset[str] = frozenset()
    """Parameters of other APIs that this one rejects, so that they are not suggested for a misspelled one."""
    approver: Callable[..., Any] | None = None
    """Decides about tool calls before they run, also about those of tools that are passed to ``run``."""

    @cached_property
    def prompted_models(self) -> set[str]:
        """The models that rejected a structured output format, and are sent the schema as text."""
        return set()

    def prompt_for_output(self, request: Request) -> Request:
        """Return the request with the schema of its answer as its model accepts it: a parameter, or system text."""
        if request.output is None or (request.model or self.model) not in self.prompted_models:
            return request
        texts = filter(None, (request.ephemeral, request.output.build_instructions()))
        return replace(request, output=None, ephemeral="\n\n".join(texts))

    includes_inner_filters: bool = False
    """Whether ``content_filters`` has those of the engines inside, too."""

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The content filters that this engine adds to its stack; see ``find_filters``."""
        return ()

    @abstractmethod
    def events(self, turn: Turn, request: Request) -> Events:
        """Run the request and yield its events; the last event is ``TurnFinished``."""

    @abstractmethod
    def plan(self, turn: Turn, **options: Unpack[RequestOptions]) -> RequestPlan:
        """Return the plan for sending the Turn now, without sending it."""

    async def probe_and_plan(self, turn: Turn, **options: Unpack[RequestOptions]) -> RequestPlan:
        """Return the plan for sending the Turn now, after the probes that the request would make.

        A probe asks the server who it is and what it stores; it uses no tokens.

        Args:
            turn: The Turn.
            **options: See ``RequestOptions``.

        Returns:
            The plan, which is not ``conditional``.
        """
        plan_options: Any = list_options(options)
        plan = self.plan(turn, **plan_options)
        await unwrap(self)._make_probes(plan, **plan_options)  # noqa: SLF001
        return self.plan(turn, **plan_options)

    async def _make_probes(self, plan: RequestPlan, **options: Unpack[RequestOptions]) -> None:
        """Make the probes that a plan depends on; an engine without evidence about its server needs none."""

    def stream(
        self, turn: Turn, *, output: Output[T] = None, **options: Unpack[RequestOptions]
    ) -> "Stream[T]":
        """Send the Turn and return its events.

        Args:
            turn: The Turn to send.
            output: The type of the answer: any type that pydantic supports, or a JSON schema. At the end
                the stream has the value as ``output``.
            **options: See ``RequestOptions``.

        Raises:
            InvalidTurn: The argument is not a Turn.
        """
        check_turn(turn)
        if "tools" in options:
            functions, options["tools"] = split_tools(options["tools"])
            if functions:
                from kedge.engines.tool_loop import wrap_in_tool_loop  # imports this module

                looped = wrap_in_tool_loop(self, functions)
                return looped.stream(turn, output=output, **options)
        inner = unwrap(self)
        request = Request.of(
            output=output, filters=find_filters(self), foreign=inner.foreign_params, **options
        )
        if request.output is None:
            open_source = partial(self.events, turn, request)
        else:
            open_source = partial(run_until_valid, self, inner, turn, request)
        return Stream(open_source, inner, turn, request)

    async def run(
        self, turn: Turn, *, output: Any = None, **options: Unpack[RequestOptions]
    ) -> Turn:
        """Send the Turn, and return it with the answer appended.

        Args:
            turn: The Turn to send.
            output: The type of the answer; ``ask`` returns its value as well.
            **options: See ``RequestOptions``.

        Returns:
            The Turn with the answer.

        Raises:
            EngineError: The request failed.
            OutputInvalid: The answer does not match ``output``, also after retries.
            OutputRefused: The model refused to answer, and ``output`` requests a value.
        """
        options.setdefault("streaming", False)
        return await self.stream(turn, output=output, **options).finish()

    async def ask(
        self, turn: Turn, *, output: Output[T] = None, **options: Unpack[RequestOptions]
    ) -> Reply[T]:
        """Send the Turn, and return the reply, with a typed value if one is requested.

        Args:
            turn: The Turn to send.
            output: The type of the answer: any type that pydantic supports, or a JSON schema.
            **options: See ``RequestOptions``.

        Returns:
            The reply; ``reply.output`` is the value and ``reply.turn`` the Turn with the answer.

        Raises:
            EngineError: The request failed; ``AnswerIncomplete`` if the answer was cut off.
            OutputInvalid: The answer does not match ``output``, also after retries.
            OutputRefused: The model refused to answer, and ``output`` requests a value.

        Example:
            ```python
            reply = await engine.ask(Turn([user("A trip to Lisbon for 3 days")]), output=Trip)
            print(reply.output.city)
            ```
        """
        options.setdefault("streaming", False)
        stream = self.stream(turn, output=output, **options)
        await stream.finish()
        return stream.reply

    async def poll(self, turn: Turn, **options: Unpack[RequestOptions]) -> Turn:
        """Wait for a response that the server generates in the background, and return the Turn with it.

        Args:
            turn: The Turn that ``run(turn, background=True)`` returned, also if it was stored meanwhile.
            **options: See ``RequestOptions``.

        Returns:
            The Turn with the answer.

        Raises:
            InvalidTurn: No response to this Turn is generated in the background.
            EngineError: The response failed, or cannot be fetched; nothing was requested again.

        Example:
            ```python
            turn = await engine.run(turn, background=True)
            turn = await engine.poll(turn)
            ```
        """
        require_running(turn)
        return await self.run(turn, **{**options, "background": False})

    async def cancel(self, turn: Turn) -> Turn:
        """Stop a response that the server generates in the background.

        Args:
            turn: The Turn that ``run(turn, background=True)`` returned.

        Returns:
            The Turn, which can be sent again; with the answer, if it was complete before.

        Raises:
            InvalidTurn: No response to this Turn is generated in the background.
            EngineError: The server did not stop it.
        """
        inner = unwrap(self)
        if inner is self:
            raise InvalidTurn(f"{self.name} does not generate responses in the background")
        return await inner.cancel(turn)

    @property
    def sync(self) -> "SyncEngine":
        """The methods of this engine for sync code: ``engine.sync.run(turn)``."""
        from kedge.engines.sync import SyncEngine  # imports this module

        return SyncEngine(self)

    async def aclose(self) -> None:
        """Close connections; the engine may be used again afterwards."""


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
        if self.schema is None:
            return None
        return self.schema.parse_partial(self._output_text)

    async def partial_outputs(self) -> AsyncGenerator[Any]:
        """Consume the events and yield the JSON values of a typed answer as they arrive.

        After an answer that does not match the schema, the values of the next answer follow.
        """
        shown = None
        parsed_length = 0
        async for event in self:
            if not isinstance(event, TextDelta | TurnFinished):
                continue
            # A value is parsed from the start of the text, so a long text is not parsed for every delta.
            added = len(self._output_text) - parsed_length
            if isinstance(event, TextDelta) and 0 <= added < parsed_length // 100:
                continue
            parsed_length = len(self._output_text)
            value = self.partial_output
            if value is not None and value != shown:
                shown = value
                yield value

    def _track_output(self, event: Event) -> None:
        """Record the text and the value of a typed answer."""
        match event:
            case run_events.RequestPlanned():
                self._output_text = ""
            case TextDelta():
                item = (event.item_id, event.output_index, event.content_index)
                if item != self._output_item:
                    self._output_item = item
                    self._output_text = ""
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
            if self._log_context is not None:
                BOUND_FIELDS.set(self._log_context)
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
        self._sent_turn = turn
        self._partial_turn = turn
        """The Turn so far, with every finished answer."""
        self._tool_results: list[Block] = []
        """The results of tools that are not part of it yet."""
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
        ids: dict[str, str] = {}
        conversation_id = get_state(turn).conversation_id
        if conversation_id:
            ids["conversation_id"] = conversation_id
        ids |= {**BOUND_FIELDS.get(), "turn_id": turn.id}
        ids.pop("response_id", None)
        self._log_context = ids
        self.log.ids = ids

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
        if not self.plans:
            return None
        return self.plans[-1]

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
        if isinstance(event, AnswerFinished | TurnFinished) and self.log.records:
            record = self.log.records[-1]
            if record.status == "running":
                event = replace(event, turn=keep_request(event.turn, record))
        match event:
            case TurnFinished():
                self._value = event.turn
            case ResponseStarted():
                ids = {**self.log.ids, "response_id": event.response_id}
                self._log_context = ids
                self.log.ids = ids
                if event.background and event.response_id:
                    self._keep_running(event)
            case AnswerFinished():
                self.answers.append(event)
                self._partial_turn = event.turn
                self._tool_results = []
            case run_events.ToolFinished():
                self._tool_results.append(event.result)
            case run_events.TurnEdited():
                self.trace.append(event)
            case _:
                pass
        return event

    def _keep_running(self, event: ResponseStarted) -> None:
        """Record a response in the background at its start, because the run may be left before its end."""
        plan = self.plan
        request = self.log.current.sent_request
        if plan is not None and isinstance(plan.source, Turn) and request is not None:
            self._tool_results = []
            is_stored = event.stored is not False
            turn = record_running(plan.source, request, event.response_id, is_stored=is_stored)
            self._partial_turn = keep_request(turn, self.log.current)

    def _handle_error(self, error: Exception) -> None:
        if isinstance(error, EngineError):
            self.log.record_error(error)

    async def aclose(self) -> None:
        """Close the run; a request without an end is recorded as stopped."""
        try:
            await super().aclose()
        finally:
            self.log.stop()


Middleware = Callable[[Engine], Engine]
"""Wraps an Engine and is an Engine."""


def require_running(turn: Turn, scope: str | None = None) -> AnchorRecord:
    """Return the record of the response in the background, or raise ``InvalidTurn`` if there is none."""
    check_turn(turn)
    running = find_running(turn, scope)
    if running is None:
        raise InvalidTurn(
            "no response to this Turn is generated in the background: it was not sent with "
            "background=True, was changed since, or is answered; send it with run"
        )
    return running


def list_stack(engine: Engine) -> list[Engine]:
    """Return a middleware stack from its outermost middleware to its engine."""
    layers: list[Engine] = []
    current: Any = engine
    while Engine in type(current).__mro__:  # isinstance is ten times slower for an abstract class
        layers.append(current)
        current = getattr(current, "inner", None)
    return layers


def unwrap(engine: Engine) -> Engine:
    """Return the innermost engine of a middleware stack: the one that sends requests to a provider."""
    return list_stack(engine)[-1]


def find_filters(engine: Engine) -> ContentFilters:
    """Return the content filters of all middleware in a stack, for one run."""
    filters: list[ContentFilter] = []
    for layer in list_stack(engine):
        filters += layer.content_filters
        if layer.includes_inner_filters:
            break
    return ContentFilters(dict.fromkeys(filters))
