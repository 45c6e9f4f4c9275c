"""What an Engine is: it takes a Turn to a model and returns the Turn with the model's blocks appended.

There is one composing method, ``stream``; ``run`` is a stream that nobody watches. An engine implements
it as one async generator, ``events``, whose last event is ``TurnFinished``. A middleware has the type of
what it wraps, so a stack of them is an engine too.

    async with engine.stream(turn) as stream:
        async for event in stream:
            ...
    stream.turn
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Self

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
from kedge.turns import AssistantBlock, Block, OpaqueBlock, ReasoningBlock, Turn

WireTap = Callable[[bytes, bytes, int | None], None]
"""Is given the body of a request, the body of its reply, and the reply's status, if there was one."""


@dataclass(slots=True)
class TurnProbe:
    """Where a Turn was last seen on its way through a middleware; see ``with_middleware``."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Request:
    """What goes with a Turn: how to send it, and with which tools.

    ``params`` are further members of the request's body, as the provider names them.
    """

    model: str = ""
    mode: Mode | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    candidates: tuple[AnchorRecord, ...] = ()
    """Further anchors that may be tried, such as those of a store's index."""
    streaming: bool = True
    resend_limit: int | None = None
    """Refuse, rather than heal, when everything would be sent again and is more bytes than this."""
    probe: TurnProbe | None = None
    tap: WireTap | None = None
    """Is told each request and its reply, as they went over the wire."""

    @classmethod
    def of(
        cls,
        *,
        model: str = "",
        mode: Mode | None = None,
        tools: tuple[Mapping[str, Any], ...] = (),
        candidates: tuple[AnchorRecord, ...] = (),
        streaming: bool = True,
        resend_limit: int | None = None,
        tap: WireTap | None = None,
        **params: Any,
    ) -> "Request":
        """Make a request from keyword options.

        Args:
            model: The model to use instead of the engine's.
            mode: The mode to use instead of the conversation's or the engine's.
            tools: Tool definitions to offer.
            candidates: Further anchors that may be used, such as those of a store's index.
            streaming: Whether the answer is streamed.
            resend_limit: Raise ``ResendTooLong`` instead of healing by a full send of more bytes.
            tap: Called with each request body, reply body and status.
            params: Members of the request body, by the names of the provider's API. Members that
                Kedge does not know go into the mapping ``extra_body``.

        Raises:
            UnsupportedParameter: A parameter is decided by the plan, or has an unknown name.
        """
        check_params(params, known_options=_OPTION_NAMES)
        return cls(
            model, mode, tuple(tools), params, tuple(candidates), streaming, resend_limit, tap=tap
        )

    def with_tools(self, tools: tuple[Mapping[str, Any], ...]) -> "Request":
        """The same request, offering further tools."""
        return replace(self, tools=(*self.tools, *tools))


_OPTION_NAMES = frozenset(each.name for each in fields(Request)) - {"params", "probe"}

Events = AsyncGenerator[Event, None]


class Engine(ABC):
    """Takes a Turn to a model."""

    name: str = ""

    @abstractmethod
    def events(self, turn: Turn, request: Request) -> Events:
        """Do the work, telling what happens; the last event is ``TurnFinished``."""

    @abstractmethod
    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """What would be sent now, and why: a dry run."""

    def stream(self, turn: Turn, **options: Any) -> "Stream":
        """Send the Turn, and watch what happens; options are those of ``Request.of``."""
        return Stream(self.events(turn, Request.of(**options)), turn)

    async def run(self, turn: Turn, **options: Any) -> Turn:
        """Send the Turn, and return it with the answer appended."""
        options.setdefault("streaming", False)
        async with self.stream(turn, **options) as stream:
            return await stream.finish()

    async def aclose(self) -> None:  # noqa: B027 - most engines hold nothing
        """Let go of connections; the engine may be used again afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


Middleware = Callable[[Engine], Engine]
"""Wraps an Engine and is an Engine."""


_UNINHERITED_IDS = frozenset({"turn_id", "response_id"})
"""Ids that a run inside another one (of a tool, of a compactor) does not inherit."""


def unwrap(engine: Engine) -> Engine:
    """The engine at the heart of a stack of middleware: the one that talks to a provider."""
    while isinstance(inner := getattr(engine, "inner", None), Engine):
        engine = inner
    return engine


class Stream(AbstractAsyncContextManager["Stream"]):
    """The events of one run, and at its end the Turn."""

    def __init__(self, events: Events, turn: Turn) -> None:
        self._events = events
        self._turn: Turn | None = None
        self._partial_turn = turn
        self._tool_results: list[Block] = []
        self.plans: list[RequestPlan] = []
        """The plan of every request of this run, in order."""
        self.answers: list[AnswerFinished] = []
        """Every finished response of this run, in order."""
        self.trace: list[TurnEdited] = []
        """What each middleware added, removed and edited."""
        self._log_context = _build_log_context(turn)
        self._sent_at = 0.0
        self._has_output = True

    @property
    def turn(self) -> Turn:
        """The Turn with the answer; only once the stream has ended."""
        if self._turn is None:
            raise KedgeError(
                "the stream has not ended: iterate over it to the end before asking for its Turn; "
                "the Turn you sent is unchanged and can be sent again"
            )
        return self._turn

    @property
    def reached(self) -> Turn:
        """The Turn as far as it got, at any time: with every finished answer and tool result.

        After a run that was cancelled this is what to go on from; calls that have no result yet are
        for the middleware ``repair`` to complete.
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
        """What the model said at last; only once the stream has ended."""
        return answer_text(self.turn)

    async def finish(self) -> Turn:
        """Watch to the end, and return the Turn."""
        async for _ in self:
            pass
        return self.turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self._next_event()
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
        return event

    async def _next_event(self) -> Event:
        """The next event; what is logged on the way to it carries the ids of this run.

        They are bound for this step only: between two events the caller's own ids hold.
        """
        before = BOUND_FIELDS.get()
        BOUND_FIELDS.set(self._log_context)
        try:
            return await anext(self._events)
        finally:
            BOUND_FIELDS.set(before)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._events.aclose()


def _build_log_context(turn: Turn) -> dict[str, str]:
    """What a log calls this run by: its own ids, and what is bound around it."""
    conversation = get_state(turn).conversation_id
    own = {"turn_id": turn.id, **({"conversation_id": conversation} if conversation else {})}
    around = {
        name: value for name, value in BOUND_FIELDS.get().items() if name not in _UNINHERITED_IDS
    }
    return {**own, **around}


def answer_text(turn: Turn) -> str:
    """What the model said at the end of a Turn: the text of its last blocks."""
    said: list[str] = []
    for block in reversed(turn.blocks):
        if isinstance(block, AssistantBlock):
            said.append(block.text)
        elif not isinstance(block, ReasoningBlock | OpaqueBlock):
            break
    return "\n\n".join(text for text in reversed(said) if text)
