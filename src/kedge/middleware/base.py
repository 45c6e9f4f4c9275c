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

    def enter(self, turn: Turn) -> "Turn | Awaitable[Turn]":
        """Return the Turn to pass on to the inner engine; may be async."""
        return turn

    def leave(self, turn: Turn) -> "Turn | Awaitable[Turn]":
        """Return the final Turn, from the final Turn of the inner engine; may be async."""
        return turn

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn that ``enter`` returns; an async ``enter`` is skipped."""
        changed = self.enter(turn)
        if iscoroutine(changed):
            changed.close()
        return self.inner.plan(changed if isinstance(changed, Turn) else turn, **options)

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
        returned = transform(turn)
        changed: object = await returned if isawaitable(returned) else returned
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

    return lambda engine: _TwoPhaseMiddleware(engine, before, after, label)


class _TwoPhaseMiddleware(BaseMiddleware):
    def __init__(
        self, inner: Engine, before: TurnTransform | None, after: TurnTransform | None, name: str
    ) -> None:
        super().__init__(inner)
        self.before, self.after, self.name = before, after, name

    def enter(self, turn: Turn) -> Turn | Awaitable[Turn]:
        """Return the Turn that ``before`` returns."""
        return self.before(turn) if self.before else turn

    def leave(self, turn: Turn) -> Turn | Awaitable[Turn]:
        """Return the Turn that ``after`` returns."""
        return self.after(turn) if self.after else turn
