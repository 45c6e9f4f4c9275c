"""The Engine interface: send a Turn to a model and return the Turn with the model's blocks appended.

``stream`` returns the events of a run; ``run`` consumes them and returns the Turn. An engine implements
one async generator, ``events``, whose last event is ``TurnFinished``. A middleware wraps an engine and is
an engine, so a stack of middleware is an engine too.

    async with engine.stream(turn) as stream:
        async for event in stream:
            ...
    stream.turn
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from msgspec.structs import replace
from typing_extensions import TypeForm, TypeVar

from kedge.engines.reply import Reply, run_until_valid
from kedge.engines.request_options import (
    ContentFilter,
    ContentFilters,
    Request,
    RequestOptions,
    split_tools,
)
from kedge.engines.stream import Stream
from kedge.errors import InvalidTurn, describe_type
from kedge.event_loops import AsyncResource
from kedge.events import Event
from kedge.planning import AnchorRecord, RequestPlan, find_running
from kedge.schemas.output_schema import OutputSchema
from kedge.turns import Turn

if TYPE_CHECKING:
    from kedge.engines.sync import SyncEngine


def _with_tools(engine: "Engine", functions: Sequence[Any]) -> "Engine":
    """Return the engine in a tool loop, a middleware of a higher layer that is imported by its name."""
    middleware = import_module("kedge.middleware")
    # The approver of the stack decides about the tools of a single run, too.
    approvers = (each.approver for each in list_stack(engine) if each.approver is not None)
    tools = middleware.tools(*functions, approve=next(approvers, None))
    return middleware.with_middleware(engine, tools)


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
        await unwrap(self)._make_probes(self.plan(turn, **options), **options)  # noqa: SLF001
        return self.plan(turn, **options)

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
        if not isinstance(turn, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
            problem = f"an engine sends a Turn, not {describe_type(turn)}"
            raise InvalidTurn(f'{problem}; write Turn([user("…")])')
        if "tools" in options:
            functions, options["tools"] = split_tools(options["tools"])
            if functions:
                return _with_tools(self, functions).stream(turn, output=output, **options)
        request = Request.of(output=output, filters=find_filters(self), **options)
        inner = unwrap(self)
        source = self.events if request.output is None else partial(run_until_valid, self, inner)
        return Stream(partial(source, turn, request), inner, turn, request)

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


Middleware = Callable[[Engine], Engine]
"""Wraps an Engine and is an Engine."""


def require_running(turn: Turn, scope: str | None = None) -> AnchorRecord:
    """Return the record of the response in the background, or raise ``InvalidTurn`` if there is none."""
    running = find_running(turn, scope)
    if running is None:
        raise InvalidTurn(
            "no response to this Turn is generated in the background: it was not sent with "
            "background=True, was changed since, or is answered; send it with run"
        )
    return running


def list_stack(engine: Engine) -> list[Engine]:
    """Return a middleware stack from its outermost middleware to its engine."""
    found: list[Engine] = []
    current: Any = engine
    while Engine in type(current).__mro__:  # isinstance is ten times slower for an abstract class
        found.append(current)
        current = getattr(current, "inner", None)
    return found


def unwrap(engine: Engine) -> Engine:
    """Return the innermost engine of a middleware stack: the one that sends requests to a provider."""
    return list_stack(engine)[-1]


def find_filters(engine: Engine) -> ContentFilters:
    """Return the content filters of all middleware in a stack, for one run."""
    found: list[ContentFilter] = []
    for layer in list_stack(engine):
        found += layer.content_filters
        if layer.includes_inner_filters:
            break
    return ContentFilters(dict.fromkeys(found))
