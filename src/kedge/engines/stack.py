"""A stack of middleware around an engine, which reports the changes of each middleware to the Turn.

A middleware may insert, remove, edit and reorder blocks; the planner ensures coherence with the server.
To attribute changes, the Turn is compared on both sides of every middleware: differences become
``TurnEdited`` events (collected in ``stream.trace``), and blocks that a middleware adds without an origin
are marked with its name.

Between two middlewares, around the outermost and around the engine there is one ``StackLayer``. It compares the Turn
that the outer middleware passes on with the Turn that the outer middleware received, and the final Turn of the inner
part with the final Turn that the next layer has seen. A layer is one generator; a middleware that only changes the
Turn before it is sent has none, and its layer continues with the next one.
"""

import copy
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isawaitable, iscoroutine
from operator import attrgetter
from typing import Any, cast

from msgspec import structs

from kedge.engines.base import Engine, Events, Middleware, find_filters
from kedge.engines.request import Request, TurnProbe
from kedge.errors import InvalidSetting, InvalidTurn, describe_type
from kedge.events.run import TurnEdited, TurnFinished
from kedge.planning import RequestPlan
from kedge.turns import Turn, TurnDiff, diff
from kedge.turns.content_filters import ContentFilter, ContentFilters
from kedge.turns.turn import check_turn

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
    if isinstance(engine, StackLayer):
        # A stack may be part of others, in which its outermost layer is inside of another middleware.
        layer = copy.copy(engine)
    else:
        layer = StackLayer(engine)
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


@dataclass(eq=False, repr=False)
class BaseMiddleware(Engine):
    """An engine around another one. Override ``enter``, ``leave`` or ``events``.

    Args:
        inner: The engine to wrap.

    Example:
        ```python
        class Stamp(BaseMiddleware):
            name = "stamp"

            def enter(self, turn: Turn) -> Turn:
                return turn.append(user("(sent on a Sunday)"))
        ```
    """

    name = "middleware"
    inner: Engine

    @property
    def is_plain(self) -> bool:
        """Whether the middleware only has ``enter``, so that its stack needs no generator for it."""
        kind = type(self)
        return kind.events is BaseMiddleware.events and kind.leave is BaseMiddleware.leave

    def enter(self, turn: Turn) -> "Turn | Awaitable[Turn]":
        """Return the Turn to pass on to the inner engine; may be async."""
        return turn

    def leave(self, turn: Turn) -> "Turn | Awaitable[Turn]":
        """Return the final Turn, from the final Turn of the inner engine; may be async."""
        return turn

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn that ``enter`` returns; an async ``enter`` is skipped."""
        changed = self.enter(turn)
        if isinstance(changed, Turn):
            turn = changed
        elif iscoroutine(changed):
            changed.close()
        return self.inner.plan(turn, **options)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, with the Turn changed by ``enter`` and ``leave``."""
        turn = await self.change(turn, self.enter)
        turn = request.filters.apply_to_turn(turn, ("input",), request.applied)
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    yield TurnFinished(await self.change(event.turn, self.leave))
                else:
                    yield event

    async def change(self, turn: Turn, transform: "TurnTransform") -> Turn:
        """Return the Turn that ``enter`` or ``leave`` returns.

        Raises:
            InvalidTurn: It returned something else.
        """
        changed: object = transform(turn)
        if isawaitable(changed):
            changed = await changed
        if not isinstance(changed, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(
                f"the middleware {self.name} returned {type(changed).__name__} in place of a Turn; "
                "return the given Turn if there is nothing to change"
            )
        return changed

    async def aclose(self) -> None:
        """Close the inner engine."""
        await self.inner.aclose()


TurnTransform = Callable[[Turn], Turn | Awaitable[Turn]]


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
        if stack is None:
            stack = list(find_filters(inner))
        self.stack = stack
        self.plain: BaseMiddleware | None = None
        """The middleware, if it only changes the Turn before it is sent, so that it has no generator."""
        is_in_stack = isinstance(getattr(inner, "inner", None), StackLayer)
        if is_in_stack and isinstance(inner, BaseMiddleware) and inner.is_plain:
            self.plain = inner

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
        """Yield the events of what is inside, with the changes to the Turn on both ways.

        A probe is a place for one Turn that two layers share. The layer around a middleware writes the Turn that it
        passes to the middleware, and the next layer inside compares it with the Turn that it receives: the difference
        is the change of the middleware on the way in. On the way out, the inner layer writes the final Turn into the
        same probe before it yields it, and the outer layer compares that with the Turn that the middleware returns.
        """
        layer = self
        # The final Turn is written into the probe of the layer outside, even if the loop below continues with other
        # layers: they are inside of plain middlewares, which do not see the final Turn.
        received = request.probe or TurnProbe(turn)
        probe = received
        while True:
            if layer.outside and turn is not probe.turn:
                turn, changes = _track_edits(probe.turn, turn, layer.outside)
                if changes:
                    yield TurnEdited(layer.outside, changes, "in")
            if layer.outside and request.applied:
                unfiltered = turn
                turn = request.filters.apply_to_turn(unfiltered, ("input",), request.applied)
                if turn is not unfiltered:
                    yield TurnEdited(FILTERED_BY, diff(unfiltered, turn), "in")
            if layer.plain is None:
                break
            # A plain middleware has no generator: it is called here, and its layer is the next one of the loop.
            probe = TurnProbe(turn)
            turn = await layer.plain.change(turn, layer.plain.enter)
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
