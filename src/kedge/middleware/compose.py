"""Compose middleware, and report the changes of each one to the Turn.

A middleware may insert, remove, edit and reorder blocks; the planner ensures coherence with the server.
To attribute changes, the Turn is compared on both sides of every middleware: differences become
``TurnEdited`` events (collected in ``stream.trace``), and blocks that a middleware adds without an origin
are marked with its name.

Between two middlewares, around the outermost and around the engine there is one ``StackLayer``. It compares the Turn
that the middleware outside of it passes on with the one that this received, and the final Turn of what is inside of it
with the final Turn that the next layer has seen. A layer is one generator; a middleware that only changes the
Turn before it is sent has none, and its layer continues with the next one.

The stack of Chat and Conversation has compaction outermost, then the caller's middleware, then tools, and
repair next to the engine.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, TypedDict, Unpack, cast

from msgspec import structs

from kedge.compaction import Compactor
from kedge.engines.base import Engine, Events, Middleware, Request, find_filters
from kedge.engines.request_options import ContentFilter, ContentFilters, ResendLimit, TurnProbe
from kedge.errors import InvalidSetting, UnknownSetting, describe_type
from kedge.events.run import TurnEdited, TurnFinished
from kedge.middleware.base import BaseMiddleware, system_prompt
from kedge.middleware.base import repair as repairing
from kedge.middleware.compact import compact
from kedge.middleware.tools import ToolSelector, is_selector
from kedge.middleware.tools import tools as tooling
from kedge.planning import RequestPlan
from kedge.tools import Approver, Toolbox, Toolset
from kedge.tools.tool import build_toolbox
from kedge.turns import Turn, TurnDiff, diff
from kedge.turns.turn import check_turn
from kedge.usage.tokens import DEFAULT_COUNTER, TokenCounter

FILTERED_BY = "guard"
"""The reported name of changes by content filters."""


def with_middleware(engine: Engine, *middlewares: Middleware) -> Engine:
    """Wrap an engine in middleware.

    Args:
        engine: The engine to wrap; it may be a stack itself.
        *middlewares: Functions or classes that wrap an engine and return one; the first is the outermost.

    Returns:
        The stack, or the engine itself if there is nothing to wrap it in.

    Raises:
        InvalidSetting: An argument is not a middleware, for example because it was not called first, or not an engine.
    """
    if not isinstance(engine, Engine):  # pyright: ignore[reportUnnecessaryIsInstance]
        problem = f"middleware wraps an engine, not {describe_type(engine)}"
        raise InvalidSetting(f'{problem}; write connect("…")')
    stack = list(find_filters(engine))
    for middleware in reversed(middlewares):
        engine = _wrap(engine, middleware, stack)
    return engine


def _wrap(engine: Engine, middleware: Middleware, stack: list[ContentFilter]) -> Engine:
    """Return a middleware around an engine, in a layer.

    Its filters are added to those of the stack, because it may not expose those of the engine inside of it.
    """
    if not callable(middleware):
        kind = type(middleware).__name__
        raise InvalidSetting(f"a middleware is a function that wraps an engine, not {kind}")
    # A stack may be part of others, in which its outermost layer is inside of another middleware.
    layer = copy.copy(engine) if isinstance(engine, StackLayer) else StackLayer(engine)
    layer.stack = stack
    wrapped = middleware(layer)
    if wrapped is layer:
        return engine
    name = getattr(middleware, "__name__", "middleware")
    if not hasattr(wrapped, "events"):
        raise InvalidSetting(
            f"the middleware {name} returned {type(wrapped).__name__} in place of an engine; "
            f"if {name} makes a middleware, call it: {name}(…)"
        )
    layer.outside = getattr(wrapped, "name", "") or name
    stack[:] = dict.fromkeys((*find_filters(wrapped), *stack))
    return StackLayer(wrapped, layer.outside, stack)


class StackLayer(BaseMiddleware):
    """The layer around a middleware or an engine in a stack, which reports the changes of both sides.

    Args:
        inner: The middleware, or the engine.
        name: The name of the middleware; empty for the engine.
        stack: The content filters of the stack, shared by its parts; complete once the stack is built.
    """

    includes_inner_filters = True

    def __init__(
        self, inner: Engine, name: str = "", stack: list[ContentFilter] | None = None
    ) -> None:
        super().__init__(inner)
        self.name = name
        self.outside = ""
        """The name of the middleware outside of this layer; empty if there is none."""
        self.stack = list(find_filters(inner)) if stack is None else stack
        self.plain: BaseMiddleware | None = None
        """The middleware, if it only changes the Turn before it is sent, so that it has no generator."""
        if isinstance(inner, BaseMiddleware) and isinstance(inner.inner, StackLayer):
            self.plain = inner if inner.is_plain else None

    async def prepare(self, turn: Turn, request: Request) -> Request:
        """Return the request to send; called before each one, with the Turn exactly as it is sent."""
        return request

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The filters of the full stack, even if a middleware does not expose those of its inner engine."""
        return tuple(self.stack)

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn after the filters of the stack."""
        check_turn(turn)
        if self.outside:
            turn = ContentFilters(self.stack).apply_to_turn(turn, ("input",))
        return self.inner.plan(turn, **options)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of what is inside, with the changes to the Turn on both ways."""
        layer = self
        probe = received = request.probe or TurnProbe(turn)
        while True:
            if layer.outside and turn is not probe.turn:
                turn, changes = _track_edits(probe.turn, turn, layer.outside)
                if changes:
                    yield TurnEdited(layer.outside, changes, "in")
            if layer.outside and request.applied:
                given = turn
                turn = request.filters.apply_to_turn(given, ("input",), request.applied)
                if turn is not given:
                    yield TurnEdited(FILTERED_BY, diff(given, turn), "in")
            if layer.plain is None:
                break
            probe, turn = TurnProbe(turn), await layer.plain.change(turn, layer.plain.enter)
            layer = cast("StackLayer", layer.plain.inner)
        inside = TurnProbe(turn)
        request = structs.replace(request, probe=inside)
        if not layer.name:
            # All filters are applied, also those of guards inside, because only filtered content may be stored.
            turn = request.filters.apply_to_turn(turn, ("input",))
            request = await layer.prepare(turn, request)
        async with aclosing(layer.inner.events(turn, request)) as events:
            async for event in events:
                if not isinstance(event, TurnFinished):
                    yield event
                    continue
                finished = event.turn
                if layer.name and finished is not inside.turn:
                    finished, changes = _track_edits(inside.turn, finished, layer.name)
                    if changes:
                        yield TurnEdited(layer.name, changes, "out")
                received.turn = finished
                yield TurnFinished(finished)


def _track_edits(before: Turn, after: Turn, name: str) -> tuple[Turn, TurnDiff]:
    """Return the new Turn with the added blocks marked, and the changes."""
    changes = diff(before, after)
    if "user" not in map(attrgetter("origin"), changes.added):
        return after, changes
    unmarked = {block.id for block in changes.added if block.origin == "user"}
    marked = (b.with_origin(name) if b.id in unmarked else b for b in after.blocks)
    return after.with_blocks(marked), changes


Tools = Toolset | ToolSelector
"""A toolbox; tools, functions, toolboxes and definitions; or a function that returns them for a Turn."""


SystemText = str | Callable[[Turn], str]
"""Instructions, or a function that returns them for a Turn."""


class StackSettings(TypedDict, total=False):
    """The keyword arguments of ``with_default_middleware``, with which a stack is built from settings."""

    system: SystemText
    tools: Tools
    approve: Approver | None
    middleware: Sequence[Middleware]
    compactor: Compactor | None
    counter: TokenCounter
    resend_limit: int | ResendLimit | None
    repair: bool


def check_stack(stack: StackSettings, further: Iterable[str], owner: str, advice: str = "") -> None:
    """Reject keyword arguments that are no settings of a stack.

    Args:
        stack: The keyword arguments.
        further: The names of the other settings of the owner, for the error.
        owner: What has these settings.
        advice: What to use for the purpose, if there is no similar name.

    Raises:
        UnknownSetting: There is no setting of this name.
    """
    known = StackSettings.__optional_keys__
    for name in stack.keys() - known:
        raise UnknownSetting(name, {*known, *further}, owner, advice)


def resolve_tools(tools: Tools) -> Toolbox | ToolSelector:
    """Return the toolbox for the ``tools`` of a program, or the function that returns them for a Turn.

    Raises:
        InvalidSetting: It is none of what ``tools`` accepts.
        InvalidTool: A function cannot be a tool, or two tools have the same name.
    """
    return tools if is_selector(tools) else build_toolbox(tools)


def with_default_middleware(
    engine: Engine,
    *,
    innermost: Callable[[Engine], StackLayer] = StackLayer,
    **settings: Unpack[StackSettings],
) -> Engine:
    """Return the engine in its stack; ``innermost`` is the middleware next to the engine."""
    tools, approve = settings.get("tools", ()), settings.get("approve")
    toolbox = resolve_tools(tools)
    middleware: object = settings.get("middleware", ())
    if not isinstance(middleware, Iterable):
        kind = type(middleware).__name__
        raise InvalidSetting(f"middleware must be a list, not {kind}: middleware=[guard(…)]")
    stack = list(cast("Iterable[Middleware]", middleware))
    if system := settings.get("system"):
        stack.insert(0, system_prompt(system))
    if (compactor := settings.get("compactor")) is not None:
        counter, limit = settings.get("counter", DEFAULT_COUNTER), settings.get("resend_limit")
        stack.insert(0, compact(compactor, engine=engine, counter=counter, resend_limit=limit))
    # Without tools, an approver still decides about those that are passed with a single message.
    has_tools = not isinstance(toolbox, Toolbox) or toolbox.definitions() or toolbox.sources
    if has_tools or approve is not None:
        stack.append(tooling(toolbox=toolbox, approve=approve))
    if settings.get("repair", True):
        stack.append(repairing())
    return with_middleware(innermost(engine), *stack)
