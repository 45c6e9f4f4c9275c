"""Base class for middleware: an engine around an engine, with hooks before and after a run."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import isawaitable, iscoroutine
from typing import Any

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.errors import InvalidTurn
from kedge.events.run import TurnFinished
from kedge.planning import RequestPlan
from kedge.turns import Turn


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

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def enter(self, turn: Turn) -> Turn:
        """Return the Turn to pass on to the inner engine."""
        return turn

    def leave(self, turn: Turn) -> Turn:
        """Return the final Turn, from the final Turn of the inner engine."""
        return turn

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn that ``enter`` returns."""
        return self.inner.plan(self.enter(turn), **options)

    def events(self, turn: Turn, request: Request) -> Events:
        """Return the inner engine's events, with the Turn changed by ``enter`` and ``leave``."""
        turn = request.filters.apply_to_turn(self.enter(turn), ("input",), request.applied)
        events = self.inner.events(turn, request)
        # Without ``leave`` there is nothing to wrap.
        return events if type(self).leave is BaseMiddleware.leave else self._leave_with(events)

    async def _leave_with(self, inner: Events) -> Events:
        async with aclosing(inner) as events:
            async for event in events:
                finished = isinstance(event, TurnFinished)
                yield TurnFinished(self.leave(event.turn)) if finished else event

    async def aclose(self) -> None:
        """Close the inner engine."""
        await self.inner.aclose()


TurnTransform = Callable[[Turn], Turn | Awaitable[Turn]]


def two_phase(
    before: TurnTransform | None = None, after: TurnTransform | None = None, *, name: str = ""
) -> Middleware:
    """Create a middleware from functions that change the Turn.

    Args:
        before: A function that is called with the Turn before it is sent, and returns the Turn to send; may be async.
        after: A function that is called with the returned Turn, and returns the final one; may be async.
        name: The name in traces and block origins; by default the name of the function.

    Returns:
        A middleware for ``with_middleware``.
    """
    label = name or getattr(before or after, "__name__", "") or "two_phase"

    return lambda engine: _TwoPhaseMiddleware(
        engine, before or _identity, after or _identity, label
    )


class _TwoPhaseMiddleware(BaseMiddleware):
    def __init__(
        self, inner: Engine, before: TurnTransform, after: TurnTransform, name: str
    ) -> None:
        super().__init__(inner)
        self.before, self.after, self.name = before, after, name

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn that ``before`` returns; an async ``before`` is skipped."""
        changed = self.before(turn)
        if isinstance(changed, Turn):
            return self.inner.plan(changed, **options)
        if iscoroutine(changed):
            changed.close()
        return self.inner.plan(turn, **options)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events between the two phases."""
        turn = await self._resolve(self.before(turn))
        turn = request.filters.apply_to_turn(turn, ("input",), request.applied)
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    yield TurnFinished(await self._resolve(self.after(event.turn)))
                else:
                    yield event

    async def _resolve(self, changed: Turn | Awaitable[Turn]) -> Turn:
        return _check_turn(await changed if isawaitable(changed) else changed, self.name)


def _check_turn(turn: object, name: str) -> Turn:
    if not isinstance(turn, Turn):
        raise InvalidTurn(
            f"the middleware {name} returned {type(turn).__name__} in place of a Turn; "
            "return the given Turn if there is nothing to change"
        )
    return turn


def _identity(turn: Turn) -> Turn:
    return turn
