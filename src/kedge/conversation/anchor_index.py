"""``recall``: the middleware next to the engine, through which a store takes part in every request.

It sees a Turn exactly as it is about to be sent. It says so, so that what is new can be made durable
first; and where the Turn's own records prove nothing, it looks in the store's index for a response
that remembers the same content, whoever asked for it, in whatever process: the scope tells the
accounts apart.
"""

from contextlib import aclosing
from dataclasses import dataclass, replace

from kedge.engines import Engine, Events, Middleware, Request, unwrap
from kedge.events import Event
from kedge.middleware import BaseMiddleware
from kedge.planning import AnchorRecord, covered_count, get_state, prefix_digest
from kedge.store import Store
from kedge.turns import Turn


@dataclass(frozen=True, slots=True)
class TurnPrepared(Event):
    """This Turn is about to be sent, as soon as whoever watches goes on."""

    turn: Turn


def with_stored_anchors(store: Store) -> Middleware:
    """Find anchors by content alone, in the store's index."""

    def wrap(engine: Engine) -> Engine:
        return _StoredAnchors(engine, store)

    return wrap


class _StoredAnchors(BaseMiddleware):
    name = "recall"

    def __init__(self, inner: Engine, store: Store) -> None:
        super().__init__(inner)
        self.store = store
        self.scope = getattr(unwrap(inner), "scope", "")

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events, after what was found in the index was added to the request."""
        yield TurnPrepared(turn)
        found = await find_anchors(self.store, turn, self.scope)
        if found:
            request = replace(request, candidates=(*request.candidates, *found))
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                yield event


async def find_anchors(store: Store, turn: Turn, scope: str) -> list[AnchorRecord]:
    """Responses in the store's index that remember a prefix of this Turn; the longest there are.

    Nothing is looked for while a record of the Turn itself proves something: it was recorded by the
    same hand, and is the longest but for rare cases that cost no more than a longer request.
    """
    covered = covered_count(turn)
    if not scope or not covered or _has_valid_anchor(turn, scope, covered):
        return []
    return await store.candidates(
        scope, [prefix_digest(turn, count) for count in range(covered, 0, -1)]
    )


def _has_valid_anchor(turn: Turn, scope: str, covered: int) -> bool:
    return any(
        record.scope == scope
        and record.status == "completed"
        and 0 < record.block_count <= covered
        and prefix_digest(turn, record.block_count) == record.digest
        for record in reversed(get_state(turn).anchors)
    )
