"""``with_middleware``: a fold, and an eye on what each middleware does to the Turn.

A middleware may do anything to a Turn: insert, remove, edit, reorder; coherence with the server is the
planner's job. So that people can see who did what, the Turn is compared on both sides of every
middleware: differences become ``TurnEdited`` events (collected in ``stream.trace``), and a block that a
middleware added without saying so is marked with its name.
"""

from contextlib import aclosing
from dataclasses import replace
from functools import reduce
from operator import is_

from kedge.engines.base import Engine, Events, Middleware, Request, TurnProbe
from kedge.events.run import TurnEdited, TurnFinished
from kedge.middleware.base import BaseMiddleware
from kedge.turns import Turn, TurnDiff, diff


def with_middleware(engine: Engine, *middlewares: Middleware) -> Engine:
    """Wrap an engine; the first middleware is the outermost."""
    return reduce(_wrap, reversed(middlewares), engine)


def _wrap(engine: Engine, middleware: Middleware) -> Engine:
    inside = _InnerObserver(engine)
    made = middleware(inside)
    if made is inside:
        return engine
    inside.name = getattr(made, "name", "") or getattr(middleware, "__name__", "middleware")
    return _OuterObserver(made, inside.name)


class _OuterObserver(BaseMiddleware):
    """The outer face of a middleware: where the Turn is seen before it goes in, and after."""

    def __init__(self, inner: Engine, name: str) -> None:
        super().__init__(inner)
        self.name = name

    async def events(self, turn: Turn, request: Request) -> Events:
        """The middleware's events, and what it changed on the way out."""
        probe = TurnProbe(turn)
        inner = self.inner.events(turn, replace(request, probe=probe))
        async with aclosing(inner) as events:
            async for event in events:
                if not isinstance(event, TurnFinished):
                    yield event
                    continue
                finished, changes = _track_edits(probe.turn, event.turn, self.name)
                if changes:
                    yield TurnEdited(self.name, changes, "out")
                yield TurnFinished(finished)


class _InnerObserver(BaseMiddleware):
    """The inner face of a middleware: where the Turn is seen as it goes on to the next engine."""

    async def events(self, turn: Turn, request: Request) -> Events:
        """The next engine's events, preceded by what the middleware changed on the way in."""
        probe = request.probe or TurnProbe(turn)
        turn, changes = _track_edits(probe.turn, turn, self.name)
        if changes:
            yield TurnEdited(self.name, changes, "in")
        inner = self.inner.events(turn, replace(request, probe=None))
        async with aclosing(inner) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    probe.turn = event.turn
                yield event


def _track_edits(before: Turn, after: Turn, name: str) -> tuple[Turn, TurnDiff]:
    """What changed, and the new Turn with the added blocks marked."""
    changes = _diff_turns(before, after)
    unmarked = {block.id for block in changes.added if block.origin == "user"}
    if unmarked:
        after = after.with_blocks(
            block.with_origin(name) if block.id in unmarked else block for block in after.blocks
        )
    return after, changes


def _diff_turns(before: Turn, after: Turn) -> TurnDiff:
    """The difference; quick where nothing changed or blocks were only appended."""
    shared = len(before.blocks)
    if len(after.blocks) >= shared and all(map(is_, before.blocks, after.blocks)):
        return TurnDiff(added=after.blocks[shared:])
    return diff(before, after)
