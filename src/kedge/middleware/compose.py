"""Compose middleware, and report the changes of each one to the Turn.

A middleware may insert, remove, edit and reorder blocks; the planner ensures coherence with the server.
To attribute changes, the Turn is compared on both sides of every middleware: differences become
``TurnEdited`` events (collected in ``stream.trace``), and blocks that a middleware adds without an origin
are marked with its name.

Each middleware costs one additional generator. Before a run, comparing needs no generator: the engine
passed to a middleware is a plain call that compares, records the edits in the probe and calls the next engine.
After it, the generator around a middleware reports those edits, and stores its final Turn in the probe of the
next outer middleware, which compares it with that middleware's final Turn.

The stack of Chat and Conversation has compaction outermost, then the caller's middleware, then tools, and
repair next to the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, cast

from kedge.compaction import Compactor
from kedge.engines.base import (
    Engine,
    Events,
    Middleware,
    Request,
    TurnProbe,
    find_filters,
)
from kedge.engines.content_filter import ContentFilter, ContentFilters
from kedge.engines.request_options import ResendLimit
from kedge.errors import InvalidSetting
from kedge.events.run import TurnEdited, TurnFinished
from kedge.middleware.base import BaseMiddleware
from kedge.middleware.compact import compact
from kedge.middleware.repair import repair as repairing
from kedge.middleware.system_prompt import system_prompt
from kedge.middleware.tools import ToolSelector, Toolset, build_toolbox
from kedge.middleware.tools import tools as tooling
from kedge.planning import RequestPlan
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.tools import Approver, Tool, Toolbox
from kedge.turns import Turn, TurnDiff, diff
from kedge.turns.turn import has_prefix

NO_DIFFERENCE = TurnDiff()
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
        InvalidSetting: An argument is not a middleware, for example because it was not called first.
    """
    stack = _StackFilters(find_filters(engine))
    wrapped = engine
    for middleware in reversed(middlewares):
        wrapped = _wrap(wrapped, middleware, stack)
    return wrapped


class _StackFilters:
    """The content filters of a stack, shared by its parts; complete once the stack is built."""

    def __init__(self, filters: tuple[ContentFilter, ...]) -> None:
        self.filters = filters

    def add(self, engine: Engine) -> None:
        """Add the filters of a middleware, which may not expose those of the engine inside of it."""
        self.filters = tuple(dict.fromkeys((*find_filters(engine), *self.filters)))


def _wrap(engine: Engine, middleware: Middleware, stack: _StackFilters) -> Engine:
    is_wrapped = isinstance(engine, _Observed | InnermostMiddleware)
    inside = _Inside(engine if is_wrapped else InnermostMiddleware(engine), stack)
    if not callable(middleware):
        raise InvalidSetting(
            f"a middleware is a function that wraps an engine, not {type(middleware).__name__}"
        )
    wrapped = middleware(inside)
    if wrapped is inside:
        return engine
    name = getattr(middleware, "__name__", "middleware")
    if not hasattr(wrapped, "events"):
        raise InvalidSetting(
            f"the middleware {name} returned {type(wrapped).__name__} in place of an engine; "
            f"if {name} makes a middleware, call it: {name}(…)"
        )
    inside.name = getattr(wrapped, "name", "") or name
    stack.add(wrapped)
    return _Observed(wrapped, inside.name, stack)


class _Inside(BaseMiddleware):
    """The engine passed to a middleware: compares the Turn that the middleware passes on."""

    includes_inner_filters = True

    def __init__(self, inner: Engine, stack: _StackFilters) -> None:
        super().__init__(inner)
        self.stack = stack

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The filters of the full stack, which a middleware needs for a separate run."""
        return self.stack.filters

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn after the filters of the stack."""
        filters = ContentFilters(self.stack.filters)
        return self.inner.plan(filters.apply_to_turn(turn, ("input",)), **options)

    def events(self, turn: Turn, request: Request) -> Events:
        """Record the changes of the middleware, and continue with the next engine."""
        probe = request.probe
        if probe is not None:
            turn, changes = _track_edits(probe.turn, turn, self.name)
            if changes:
                probe.edits.append(TurnEdited(self.name, changes, "in"))
        filtered = request.filters.apply_to_turn(turn, ("input",), request.applied)
        if probe is not None and filtered is not turn:
            changes = _diff_turns(turn, filtered)
            probe.edits.append(TurnEdited(FILTERED_BY, changes, "in"))
        return self.inner.events(filtered, request)


class _Observed(BaseMiddleware):
    """A middleware in a stack, with its changes reported as events."""

    includes_inner_filters = True

    def __init__(self, inner: Engine, name: str, stack: _StackFilters) -> None:
        super().__init__(inner)
        self.name = name
        self.stack = stack

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The filters of the stack, even if a middleware does not expose those of its inner engine."""
        return self.stack.filters

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the middleware's events, and its changes before and after the run."""
        probe = TurnProbe(turn)
        inner = self.inner.events(turn, request.with_probe(probe))
        async with aclosing(inner) as events:
            try:
                async for event in events:
                    while probe.edits:
                        yield probe.edits.pop(0)
                    if not isinstance(event, TurnFinished):
                        yield event
                        continue
                    finished, changes = _track_edits(probe.turn, event.turn, self.name)
                    if changes:
                        yield TurnEdited(self.name, changes, "out")
                    if request.probe is not None:
                        request.probe.turn = finished
                    yield TurnFinished(finished)
            except Exception:
                while probe.edits:  # report the changes before a failure
                    yield probe.edits.pop(0)
                raise


class InnermostMiddleware(BaseMiddleware):
    """The middleware next to the engine: receives each Turn exactly as it is sent, and does not change it."""

    async def prepare(self, turn: Turn, request: Request) -> Request:
        """Return the request to send; called before each one."""
        return request

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the engine's events; content that a filter of the stack rejects is not sent to it."""
        # All filters are applied, also those of guards inside, because only filtered content may be stored.
        turn = request.filters.apply_to_turn(turn, ("input",))
        request = await self.prepare(turn, request)
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished) and request.probe is not None:
                    request.probe.turn = event.turn
                yield event


def _track_edits(before: Turn, after: Turn, name: str) -> tuple[Turn, TurnDiff]:
    """Return the new Turn with the added blocks marked, and the changes."""
    changes = _diff_turns(before, after)
    if not changes.added:
        return after, changes
    unmarked = {block.id for block in changes.added if block.origin == "user"}
    if unmarked:
        after = after.with_blocks(
            block.with_origin(name) if block.id in unmarked else block for block in after.blocks
        )
    return after, changes


def _diff_turns(before: Turn, after: Turn) -> TurnDiff:
    """Return the difference; fast if nothing changed or blocks were only appended."""
    if has_prefix(after, before):
        length = len(before)
        return NO_DIFFERENCE if length == len(after) else TurnDiff(after[length:])
    return diff(before, after)


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


def with_default_middleware(
    engine: Engine,
    *,
    system: SystemText = "",
    tools: Tools = (),
    approve: Approver | None = None,
    middleware: Sequence[Middleware] = (),
    compactor: Compactor | None = None,
    counter: TokenCounter = DEFAULT_COUNTER,
    resend_limit: int | ResendLimit | None = None,
    repair: bool = True,
    innermost: Callable[[Engine], InnermostMiddleware] = InnermostMiddleware,
) -> Engine:
    """Return the engine in its stack; ``innermost`` is the middleware next to the engine."""
    toolbox = (
        tools
        if callable(tools) and not isinstance(tools, Toolbox | Tool)
        else build_toolbox(cast("object", tools))
    )
    if not isinstance(middleware, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"middleware must be a list, not {type(middleware).__name__}: middleware=[guard(…)]"
        )
    stack = [*([system_prompt(system)] if system else []), *middleware]
    if compactor is not None:
        stack.insert(
            0, compact(compactor, engine=engine, counter=counter, resend_limit=resend_limit)
        )
    # Without tools, an approver still decides about those that are passed with a single message.
    if (
        not isinstance(toolbox, Toolbox)
        or toolbox.definitions()
        or toolbox.sources
        or approve is not None
    ):
        stack.append(tooling(toolbox=toolbox, approve=approve))
    if repair:
        stack.append(repairing())
    return with_middleware(innermost(engine), *stack)
