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
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack, cast

import msgspec
from msgspec.structs import force_setattr, replace
from typing_extensions import TypeForm, TypeVar

from kedge.engines.content_filter import ContentFilter, ContentFilters
from kedge.engines.output_schema import OutputSchema, to_output_schema
from kedge.engines.reply import (
    DEFAULT_OUTPUT_RETRIES,
    Reply,
    run_until_valid,
)
from kedge.engines.request_options import (
    KNOWN_PARAMS,
    OPTION_NAMES,
    BeforeSend,
    EphemeralBlocks,
    OfferedTools,
    RequestOptions,
    ResendLimit,
    WireTap,
    check_params,
    combine_params,
    to_definition,
)
from kedge.engines.stream import Stream
from kedge.errors import InvalidSetting, InvalidTurn, UnsupportedParameter, describe_type
from kedge.event_loops import AsyncResource
from kedge.events import Event
from kedge.planning import AnchorRecord, Mode, RequestPlan, find_running
from kedge.planning.state import validate_mode
from kedge.turns import SystemBlock, Turn, system
from kedge.turns.frozen_json import EMPTY, thaw, wrap_copy

if TYPE_CHECKING:
    from kedge.engines.sync import SyncEngine


@dataclass(slots=True)
class TurnProbe:
    """The last state of a Turn inside a middleware; see ``with_middleware``."""

    turn: Turn


class Request(msgspec.Struct, frozen=True):
    """The options of a request, as ``RequestOptions`` describes them, in the form that engines and middleware use.

    Attributes:
        params: The parameters: members of the request body, by the names of the provider's API.
        probe: The last state of the Turn inside the middleware that receives this request.
        filters: The content filters of the full stack, for components that send or store content.
        applied: The content filters outside of this position, which must also be applied to content added here.
        output: The schema of the answer, if it is typed.
    """

    model: str = ""
    mode: Mode | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = EMPTY
    candidates: tuple[AnchorRecord, ...] = ()
    streaming: bool = True
    resend_limit: int | ResendLimit | None = None
    probe: TurnProbe | None = None
    tap: WireTap | None = None
    before_send: BeforeSend | None = None
    heal: bool = True
    keep_reasoning: bool = True
    ephemeral: str = ""
    filters: ContentFilters = msgspec.field(default_factory=ContentFilters)
    applied: tuple[ContentFilter, ...] = ()
    output: OutputSchema[Any] | None = None
    output_retries: int = DEFAULT_OUTPUT_RETRIES

    def __post_init__(self) -> None:
        force_setattr(self, "tools", tuple(map(to_definition, self.tools)))
        force_setattr(self, "params", wrap_copy(self.params))

    @classmethod
    def of(cls, *, output: Any = None, **options: Unpack[RequestOptions]) -> "Request":
        """Make a request from keyword options.

        Args:
            output: The type of the answer: any type that pydantic supports, or a JSON schema.
            **options: See ``RequestOptions``.

        Raises:
            UnsupportedParameter: A parameter is decided by the plan, or has an unknown name.
            InvalidSetting: There is no such mode, or ``output`` has no JSON schema.
        """
        given: dict[str, Any] = {**options}
        params = {name: given.pop(name) for name in options if name not in OPTION_NAMES}
        if params:
            check_params(params, known_options=OPTION_NAMES | {"output"})
        text: Mapping[str, Any] = params.get("text") or {}
        if output is not None and text.get("format"):
            raise UnsupportedParameter(
                "text.format", "set one of the two", "output= determines text.format"
            )
        functions, definitions = _split_tools(given.pop("tools", ()))
        given |= {
            "mode": validate_mode(given.get("mode")),
            "tools": (*definitions, *_describe_tools(functions)),
            "candidates": tuple(given.get("candidates", ())),
            "ephemeral": _join_ephemeral(given.get("ephemeral", ())),
        }
        schema = None if output is None else to_output_schema(output)
        return cls(params=params, output=schema, **given)

    def resolve_params(self, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parameters of an engine and of this request, and the members of ``extra_body``.

        The parameters have the format of a typed answer.
        """
        params, extra = combine_params(defaults, thaw(self.params))
        if self.output is not None:
            params["text"] = {**(params.get("text") or {}), **self.output.request_options()["text"]}
        return params, extra

    def prompt_for_output(self, schema: OutputSchema[Any]) -> "Request":
        """Return the request with the schema of the answer as system text, not as a parameter."""
        texts = filter(None, (self.ephemeral, schema.build_instructions()))
        return replace(self, output=None, ephemeral="\n\n".join(texts))

    def add_ephemeral(self, plan: RequestPlan) -> RequestPlan:
        """Return the plan with the system text of this run behind its instructions.

        Instructions are sent with every request and are not part of a digest or a stored context. So the
        text does not change what the server remembers, and the response becomes an anchor as usual.
        """
        if not self.ephemeral:
            return plan
        text = self.filters.apply(system(self.ephemeral), ("input",)).text
        return replace(plan, instructions="\n\n".join(filter(None, (plan.instructions, text))))


def _join_ephemeral(blocks: EphemeralBlocks) -> str:
    listed = [blocks] if isinstance(blocks, str | SystemBlock) else blocks
    texts: list[str] = []
    for each in listed:
        if not isinstance(each, str | SystemBlock):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "pass text or system blocks; append other blocks to the Turn"
            raise UnsupportedParameter("ephemeral", remedy)
        texts.append(each if isinstance(each, str) else each.text)
    return "\n\n".join(texts)


def _split_tools(tools: OfferedTools) -> tuple[list[Any], tuple[Mapping[str, Any], ...]]:
    """Return the tools and functions that a run calls, and the definitions that it only offers."""
    functions: list[Any] = []
    definitions: list[Mapping[str, Any]] = []
    if not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"tools must be a list, not {type(tools).__name__}: tools=[function]")
    offered: Iterable[Any] = [tools] if isinstance(tools, Mapping) else tools
    for each in offered:
        if not hasattr(each, "definitions") and isinstance(each, Mapping):
            definitions.append(cast("Mapping[str, Any]", each))
        else:  # a function, a tool or a toolbox
            functions.append(each)
    return functions, tuple(definitions)


def _describe_tools(functions: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    """Return the definitions of functions and tools."""
    return (
        import_module("kedge.tools").Toolbox(*functions).frozen_definitions() if functions else ()
    )


def _with_tools(engine: "Engine", functions: Sequence[Any]) -> "Engine":
    """Return the engine in a tool loop, a middleware of a higher layer that is imported by its name."""
    middleware = import_module("kedge.middleware")
    approver = _find_approver(engine)
    return middleware.with_middleware(engine, middleware.tools(*functions, approve=approver))


def _find_approver(engine: "Engine") -> Callable[..., Any] | None:
    """Return the approver of a stack: it decides about the tools of a single run, too."""
    return next((each.approver for each in iter_stack(engine) if each.approver is not None), None)


Events = AsyncGenerator[Event, None]
"""The events of a run, ending with ``TurnFinished``, as returned by ``Engine.events``."""
T = TypeVar("T", default=None)


class Engine(AsyncResource, ABC):
    """Sends Turns to a model."""

    name: str = ""
    text_only_results: bool = False
    """Whether the API accepts only text in tool results; images and files are described there."""
    approver: Callable[..., Any] | None = None
    """Decides about tool calls before they run, also about those of tools that are passed to ``run``."""

    @cached_property
    def prompted_models(self) -> set[str]:
        """The models that rejected a structured output format, and are sent the schema as text."""
        return set()

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
        self,
        turn: Turn,
        *,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
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
        functions, options["tools"] = _split_tools(options.get("tools", ()))
        if functions:
            return _with_tools(self, functions).stream(turn, output=output, **options)
        request = Request.of(output=output, **options)
        filters, schema = request.filters, request.output
        filters.add(*find_filters(self))
        inner = unwrap(self)
        model = request.model or str(getattr(inner, "model", ""))

        def open_events() -> Events:
            if schema is None:
                return self.events(turn, request)
            prompted = request.prompt_for_output(schema)
            return run_until_valid(
                lambda turn, is_prompted: self.events(turn, prompted if is_prompted else request),
                turn,
                schema,
                model=model,
                prompted_models=inner.prompted_models,
                heal=request.heal,
                retries=request.output_retries,
                filters=filters,
            )

        settings = {name: request.params[name] for name in request.params if name in KNOWN_PARAMS}
        return Stream(
            open_events, turn, filters, schema, provider=inner.name, model=model, settings=settings
        )

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
        async with self.stream(turn, output=output, **options) as stream:
            return await stream.finish()

    async def ask(
        self,
        turn: Turn,
        *,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
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
        async with self.stream(turn, output=output, **options) as stream:
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


def iter_stack(engine: Engine) -> Iterator[Engine]:
    """Yield a middleware stack from its outermost middleware to its engine."""
    current: object = engine
    while Engine in type(current).__mro__:  # isinstance is ten times slower for an abstract class
        yield cast("Engine", current)
        current = getattr(current, "inner", None)


def unwrap(engine: Engine) -> Engine:
    """Return the innermost engine of a middleware stack: the one that sends requests to a provider."""
    for each in iter_stack(engine):
        engine = each
    return engine


def find_filters(engine: Engine) -> tuple[ContentFilter, ...]:
    """Return the content filters of all middleware in a stack, outermost first."""
    found: list[ContentFilter] = []
    for layer in iter_stack(engine):
        found += layer.content_filters
        if layer.includes_inner_filters:
            break
    return tuple(dict.fromkeys(found))
