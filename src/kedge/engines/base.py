"""The Engine interface: send a Turn to a model and return the Turn with the model's blocks appended.

``stream`` returns the events of a run; ``run`` consumes them and returns the Turn. An engine implements
one async generator, ``events``, whose last event is ``TurnFinished``. A middleware has the type of what it
wraps, so a stack of middleware is an engine too.

    async with engine.stream(turn) as stream:
        async for event in stream:
            ...
    stream.turn
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

from kedge.engines.content_filter import ContentFilter, ContentFilters
from kedge.engines.request_options import check_params
from kedge.errors import KedgeError
from kedge.events import Event, ResponseStarted, Usage
from kedge.events.run import (
    VISIBLE_EVENTS,
    AnswerFinished,
    RequestPlanned,
    ToolFinished,
    TurnEdited,
    TurnFinished,
)
from kedge.observe import measure
from kedge.observe.logs import BOUND_FIELDS
from kedge.planning import AnchorRecord, Mode, RequestPlan, get_state
from kedge.turns import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    Turn,
    UserBlock,
    snapshot_block_ids,
)

if TYPE_CHECKING:
    from kedge.engines.sync import SyncEngine

WireTap = Callable[[bytes, bytes, int | None], None]
"""Called with the body of a request, the body of its reply, and the reply's status, if there was one."""


OfferedTools = Mapping[str, Any] | Iterable[Any]
"""A toolbox, or functions, tools, toolboxes and tool definitions."""

BeforeSend = Callable[[Turn], Awaitable[None]]
"""Awaited with each Turn exactly as it is about to be sent."""


@dataclass(slots=True)
class TurnProbe:
    """The Turn as last seen on its way through a middleware; see ``with_middleware``."""

    turn: Turn
    edits: list[TurnEdited] = field(default_factory=list[TurnEdited])
    """Changes on the way in that are not reported as events yet."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a request: how to send a Turn, and with which tools.

    ``params`` are further members of the request body, by the names of the provider's API.
    """

    model: str = ""
    mode: Mode | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    candidates: tuple[AnchorRecord, ...] = ()
    """Further anchors that may be used, such as those of a store's index."""
    streaming: bool = True
    resend_limit: int | None = None
    """Raise, rather than heal, if a full send would be more bytes than this."""
    probe: TurnProbe | None = None
    tap: WireTap | None = None
    """Called with each request and its reply, as they were transmitted."""
    before_send: BeforeSend | None = None
    """Awaited before each request of the run, for example to store what is sent."""
    filters: ContentFilters = field(default_factory=ContentFilters, compare=False, repr=False)
    """The content filters of the complete stack, for components that send or store content."""
    applied: tuple[ContentFilter, ...] = ()
    """The content filters outside of this position: what is added inside must pass them too."""

    @classmethod
    def of(
        cls,
        *,
        model: str = "",
        mode: Mode | None = None,
        tools: OfferedTools = (),
        candidates: tuple[AnchorRecord, ...] = (),
        streaming: bool = True,
        resend_limit: int | None = None,
        tap: WireTap | None = None,
        before_send: BeforeSend | None = None,
        **params: Any,
    ) -> "Request":
        """Make a request from keyword options.

        Args:
            model: The model to use instead of the engine's.
            mode: The mode to use instead of the conversation's or the engine's.
            tools: Tools to offer: a toolbox, or an iterable of functions, tools, toolboxes and
                definitions in the form of the Responses API. ``run`` and ``stream`` run the calls of
                functions, tools and toolboxes; calls of definitions are left to the caller.
            candidates: Further anchors that may be used, such as those of a store's index.
            streaming: Whether the answer is streamed.
            resend_limit: Raise ``ResendTooLong`` instead of healing by a full send of more bytes.
            tap: Called with each request body, reply body and status.
            before_send: Awaited with each Turn before it is sent.
            params: Members of the request body, by the names of the provider's API. Members that
                Kedge does not know go into the mapping ``extra_body``.

        Raises:
            UnsupportedParameter: A parameter is decided by the plan, or has an unknown name.
        """
        check_params(params, known_options=_OPTION_NAMES)
        functions, definitions = _split_tools(tools)
        return cls(
            model,
            mode,
            (*definitions, *_describe_tools(functions)),
            params,
            tuple(candidates),
            streaming,
            resend_limit,
            tap=tap,
            before_send=before_send,
        )

    def with_tools(self, tools: tuple[Mapping[str, Any], ...]) -> "Request":
        """Return the request with further tools."""
        return replace(self, tools=(*self.tools, *tools))


def _split_tools(tools: OfferedTools) -> tuple[list[Any], tuple[Mapping[str, Any], ...]]:
    """Return the tools and functions that a run calls, and the definitions that it only offers."""
    functions: list[Any] = []
    definitions: list[Mapping[str, Any]] = []
    offered: Iterable[Any] = [tools] if isinstance(tools, Mapping) else tools
    for each in offered:
        if not hasattr(each, "definitions") and isinstance(each, Mapping):
            definitions.append(cast("Mapping[str, Any]", each))
        else:  # a function, a tool or a toolbox
            functions.append(each)
    return functions, tuple(definitions)


def _describe_tools(functions: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the definitions of functions and tools."""
    return import_module("kedge.tools").Toolbox(*functions).definitions() if functions else []


def _with_tools(engine: "Engine", functions: Sequence[Any]) -> "Engine":
    """Return the engine in a tool loop: a middleware of a layer above, hence loaded by its name."""
    middleware = import_module("kedge.middleware")
    return middleware.with_middleware(engine, middleware.tools(*functions))


_OPTION_NAMES = frozenset(each.name for each in fields(Request)) - {
    "params",
    "probe",
    "filters",
    "applied",
}

Events = AsyncGenerator[Event, None]


class Engine(ABC):
    """Sends Turns to a model."""

    name: str = ""
    text_only_results: bool = False
    """Whether the API accepts only text in tool results; images and files are described there."""

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The content filters that this engine adds to its stack; see ``find_filters``."""
        return ()

    @abstractmethod
    def events(self, turn: Turn, request: Request) -> Events:
        """Run the request and yield its events; the last event is ``TurnFinished``."""

    @abstractmethod
    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return what would be sent now, and why, without sending it."""

    def stream(self, turn: Turn, **options: Any) -> "Stream":
        """Send the Turn and return its events; options are those of ``Request.of``."""
        functions, options["tools"] = _split_tools(options.get("tools", ()))
        if functions:
            return _with_tools(self, functions).stream(turn, **options)
        request = replace(Request.of(**options), filters=ContentFilters(find_filters(self)))
        return Stream(lambda: self.events(turn, request), turn, request.filters)

    async def run(self, turn: Turn, **options: Any) -> Turn:
        """Send the Turn, and return it with the answer appended."""
        options.setdefault("streaming", False)
        async with self.stream(turn, **options) as stream:
            return await stream.finish()

    @property
    def sync(self) -> "SyncEngine":
        """The methods of this engine for sync code: ``engine.sync.run(turn)``."""
        from kedge.engines.sync import SyncEngine  # imports this module

        return SyncEngine(self)

    async def aclose(self) -> None:  # noqa: B027 - most engines have nothing to close
        """Close connections; the engine may be used again afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


Middleware = Callable[[Engine], Engine]
"""Wraps an Engine and is an Engine."""


_UNINHERITED_IDS = frozenset({"turn_id", "response_id"})
"""Ids that a nested run (of a tool, of a compactor) does not inherit."""


def unwrap(engine: Engine) -> Engine:
    """Return the innermost engine of a middleware stack: the one that sends requests to a provider."""
    while isinstance(inner := getattr(engine, "inner", None), Engine):
        engine = inner
    return engine


def find_filters(engine: Engine) -> tuple[ContentFilter, ...]:
    """Return the content filters of all middleware in a stack, outermost first."""
    found: dict[ContentFilter, None] = {}
    current: object = engine
    while isinstance(current, Engine):
        found.update(dict.fromkeys(current.content_filters))
        current = getattr(current, "inner", None)
    return tuple(found)


R = TypeVar("R")


class _EventSource(Protocol):
    """An async generator of events, or another stream."""

    def __anext__(self) -> Awaitable[Any]: ...

    def aclose(self) -> Awaitable[object]: ...


class RunStream(ABC, Generic[R]):
    """An iterator over the events of a run that has a result once it is exhausted.

    Use it as a context manager, so that leaving early closes the run. Iteration adds no generator of its
    own: each event passes through ``__anext__`` only.
    """

    def __init__(self, open_source: Callable[[], _EventSource]) -> None:
        # Opened by the first step: whatever fails while a run starts is raised by the iteration.
        self._open_source = open_source
        self._source: _EventSource | None = None
        self._closed = False

    async def finish(self) -> R:
        """Consume the remaining events and return the result."""
        async for _ in self:
            pass
        return self._result()

    @abstractmethod
    def _result(self) -> R:
        """Return the result, or raise ``KedgeError`` while there is none."""

    def _handle_event(self, event: Event) -> None:
        """Record an event before the caller gets it."""

    def _handle_end(self) -> None:
        """Build the result; the source is exhausted."""

    def _handle_error(self, error: Exception) -> None:
        """Complete an error before it is raised."""

    async def _next_event(self) -> Event:
        return await self._opened_source().__anext__()

    def _opened_source(self) -> _EventSource:
        if self._source is None:
            if self._closed:
                raise StopAsyncIteration
            self._source = self._open_source()
        return self._source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._next_event()
            self._handle_event(event)
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Stream(RunStream[Turn]):
    """The events of one run, and at its end the Turn."""

    def __init__(
        self,
        open_source: Callable[[], Events],
        turn: Turn,
        filters: ContentFilters | None = None,
    ) -> None:
        super().__init__(open_source)
        self._turn: Turn | None = None
        self._sent_turn = self._partial_turn = turn
        self._tool_results: list[Block] = []
        self.filters = ContentFilters() if filters is None else filters
        """The content filters of the stack that runs."""
        self.plans: list[RequestPlan] = []
        """The plan of every request of this run, in order."""
        self.answers: list[AnswerFinished] = []
        """Every finished response of this run, in order."""
        self.trace: list[TurnEdited] = []
        """The changes that each middleware made to the Turn."""
        self._log_context = _build_log_context(turn)
        self._sent_at = 0.0
        self._has_output = True

    @property
    def turn(self) -> Turn:
        """The Turn with the answer; available once the stream has ended."""
        if self._turn is None:
            raise KedgeError(
                "the stream has not ended: iterate over it to the end before asking for its Turn; "
                "the Turn you sent is unchanged and can be sent again"
            )
        return self._turn

    @property
    def reached(self) -> Turn:
        """The Turn so far, at any time: with every finished answer and tool result.

        Continue from it after a run that was cancelled; the middleware ``repair`` completes calls that
        have no result yet.
        """
        return self._turn or self._partial_turn.append(*self._tool_results)

    @property
    def plan(self) -> RequestPlan | None:
        """The plan of the newest request."""
        return self.plans[-1] if self.plans else None

    @property
    def usage(self) -> Usage:
        """The tokens of all responses of this run."""
        return sum((a.outcome.usage for a in self.answers if a.outcome.usage), Usage())

    @property
    def text(self) -> str:
        """The text of the answer; available once the stream has ended."""
        return answer_text(self.turn, self._sent_turn)

    def _result(self) -> Turn:
        return self.turn

    def _handle_event(self, event: Event) -> None:
        match event:
            case TurnFinished():
                self._turn = event.turn
            case RequestPlanned():
                self.plans.append(event.plan)
                self._sent_at, self._has_output = time.perf_counter(), False
            case ResponseStarted():
                self._log_context = {**self._log_context, "response_id": event.response_id}
            case AnswerFinished():
                self.answers.append(event)
                self._partial_turn, self._tool_results = event.turn, []
                measure("responses_duration_seconds", time.perf_counter() - self._sent_at)
            case ToolFinished():
                self._tool_results.append(event.result)
            case TurnEdited():
                self.trace.append(event)
            case _ if not self._has_output and isinstance(event, VISIBLE_EVENTS):
                self._has_output = True
                measure("responses_first_output_seconds", time.perf_counter() - self._sent_at)
            case _:
                pass

    async def _next_event(self) -> Event:
        """Return the next event; what is logged meanwhile carries the ids of this run.

        They are bound for this step only: between two events the caller's own ids hold.
        """
        before = BOUND_FIELDS.get()
        BOUND_FIELDS.set(self._log_context)
        try:
            return await self._opened_source().__anext__()
        finally:
            BOUND_FIELDS.set(before)


def _build_log_context(turn: Turn) -> dict[str, str]:
    """Return the ids for log records of this run: its own, and those bound around it."""
    conversation = get_state(turn).conversation_id
    own = {"turn_id": turn.id, **({"conversation_id": conversation} if conversation else {})}
    around = {
        name: value for name, value in BOUND_FIELDS.get().items() if name not in _UNINHERITED_IDS
    }
    return {**own, **around}


def answer_text(turn: Turn, sent: Turn | None = None) -> str:
    """Return the text of the assistant blocks at the end of a Turn.

    Args:
        turn: The Turn with the answer.
        sent: The Turn that was sent: its blocks are not part of the answer.
    """
    known = snapshot_block_ids(sent) if sent is not None else frozenset[str]()
    texts: list[str] = []
    for block in reversed(turn.blocks):
        if block.id in known:
            break
        if isinstance(block, AssistantBlock):
            texts.append(block.text)
        elif not isinstance(block, ReasoningBlock | OpaqueBlock):
            break
    return "\n\n".join(text for text in reversed(texts) if text)


def last_response_id(turn: Turn) -> str:
    """Return the provider's id of the response at the end of a Turn; empty if there is none."""
    for block in reversed(turn.blocks):
        if isinstance(block, UserBlock):
            break
        if block.response_id:
            return block.response_id
    return ""
