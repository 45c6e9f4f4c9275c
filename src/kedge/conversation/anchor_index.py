"""The middleware next to the engine that connects a store to every request.

It receives a Turn exactly as it is about to be sent. It awaits ``request.before_send`` with it, so that new
blocks are stored before they are sent. If no record of the Turn itself is valid, it searches the store's
index for a response with the same content, from any conversation and process; the scope separates
accounts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from kedge.engines import Engine, Request, unwrap
from kedge.middleware.compose import StackLayer
from kedge.planning import AnchorRecord, covered_count, get_state
from kedge.planning.anchors import matches_prefix
from kedge.planning.digests import get_prefix_index
from kedge.store import Store
from kedge.turns import Turn


def with_stored_anchors(
    store: Store, get_retention: Callable[[], float | None] = lambda: None
) -> Callable[[Engine], StackLayer]:
    """Find anchors by content, in the index of a store.

    Args:
        store: The store whose responses may be continued.
        get_retention: Returns the seconds for which the provider is assumed to store a response.

    Returns:
        A middleware; it must be next to the engine.
    """
    return lambda engine: _StoredAnchors(engine, store, get_retention)


class _StoredAnchors(StackLayer):
    def __init__(
        self, inner: Engine, store: Store, get_retention: Callable[[], float | None]
    ) -> None:
        super().__init__(inner)
        self.store, self.get_retention = store, get_retention
        self.scope = getattr(unwrap(inner), "scope", "")

    async def prepare(self, turn: Turn, request: Request) -> Request:
        """Return the request with anchors from the index among its candidates."""
        if request.before_send is not None:
            await request.before_send(turn)
        anchors = await find_anchors(self.store, turn, self.scope, self.get_retention())
        candidates = (*request.candidates, *anchors)
        return structs.replace(request, candidates=candidates, before_send=None)


async def find_anchors(
    store: Store, turn: Turn, scope: str, retention: float | None = None
) -> list[AnchorRecord]:
    """Search the index of a store for responses that contain a prefix of this Turn.

    The index is not searched while a record of the Turn itself is valid: nearly always it is the
    longest, and missing a longer one only makes the request longer.

    Args:
        store: The store to search.
        turn: The Turn to send.
        scope: The provider, endpoint and account whose responses may be used.
        retention: Seconds for which the provider is assumed to store a response.

    Returns:
        The records of the longest prefixes found.
    """
    if not needs_lookup(turn, scope):
        return []
    covered, index = covered_count(turn), get_prefix_index(turn)
    digests = [index.digest(count) for count in range(covered, 0, -1)]
    return await store.candidates(scope, digests, retention=retention)


def needs_lookup(turn: Turn, scope: str) -> bool:
    """Return whether the index of a store is searched for a Turn: no record of the Turn itself is valid."""
    covered, index = covered_count(turn), get_prefix_index(turn)
    return bool(scope) and not any(
        record.scope == scope
        and record.status == "completed"
        and matches_prefix(record, index, covered)
        for record in reversed(get_state(turn).anchors)
    )


async def add_candidates(
    engine: Engine,
    store: Store,
    turn: Turn,
    options: Mapping[str, Any],
    retention: float | None = None,
) -> dict[str, Any]:
    """Return the options of a request with anchors from the index among its candidates, for a plan.

    Args:
        engine: The engine, with its middleware.
        store: The store whose responses may be continued.
        turn: The Turn to send.
        options: The options of ``Request.of``.
        retention: Seconds for which the provider is assumed to store a response.
    """
    sent = engine.plan(turn, **options).source  # as changed by middleware
    scope = getattr(unwrap(engine), "scope", "")
    found = await find_anchors(store, sent, scope, retention) if isinstance(sent, Turn) else []
    return {**options, "candidates": (*options.get("candidates", ()), *found)}
