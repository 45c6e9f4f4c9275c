"""``ServerCompactor``: the provider compacts, and its compaction item is carried as a block.

There are two ways. With ``context_management`` the server compacts while it answers, as soon as its
context is larger than a threshold; the item comes with the answer. With ``POST /responses/compact`` it is
asked after an answer, for everything but the newest exchange. Either way the item stands for all that was
before it, which is then no longer kept, and the next request begins with it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from kedge.compaction.boundaries import cut_points
from kedge.compaction.limits import whole_number
from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_when,
)
from kedge.engines import innermost
from kedge.errors import KedgeError
from kedge.events import Usage
from kedge.planning.ledger import is_compaction
from kedge.turns import ITEM_ID, OUTPUT_INDEX, RESPONSE_ID, Block, Turn

WORTH = 4
"""The server is asked once there is a quarter of the maximum that it has not compacted yet."""

How = Literal["context_management", "endpoint"]


@runtime_checkable
class Compacts(Protocol):
    """An engine whose provider compacts a Turn when asked to."""

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """The blocks that stand for the Turn from now on, and what it cost."""
        ...


class ServerCompactor:
    """Lets the provider compact above ``max_tokens``.

    ``how`` is ``"context_management"`` (while it answers) or ``"endpoint"`` (asked after the answer).
    """

    name = "ServerCompactor"

    def __init__(self, max_tokens: int, how: How = "context_management") -> None:
        self.max_tokens = whole_number("max_tokens", max_tokens)
        self.how: How = how

    @property
    def params(self) -> Mapping[str, Any]:
        """What goes into every request of the conversation."""
        if self.how == "endpoint":
            return {}
        entry = {"type": "compaction", "compact_threshold": self.max_tokens}
        return {"context_management": [entry]}

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Take over what the server compacted, or have it compact."""
        return await compact_when(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether the server has compacted, or shall."""
        if self.how == "endpoint":
            return request.size() > self.max_tokens
        return _beginning(request) > 0

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The server's item, and what came after it."""
        if self.how == "endpoint":
            return await self._asked(request)
        start = _beginning(request)
        return Replacement(
            (*map(_as_ours, request.blocks[start : start + 1]), *request.blocks[start + 1 :])
        )

    async def _asked(self, request: CompactionRequest) -> Replacement:
        engine = None if request.engine is None else innermost(request.engine)
        if not isinstance(engine, Compacts):
            return Replacement(request.blocks, ("this engine's provider does not compact",))
        start = (cut_points(request.blocks) or [0])[-1]
        new = [block for block in request.blocks[:start] if block.origin != self.name]
        if request.count(new) * WORTH < self.max_tokens:
            return Replacement(request.blocks)  # the newest exchange is what is long, not the past
        try:
            made, usage = await engine.compact(request.turn(request.blocks[:start]))
        except KedgeError as error:
            note = f"the server did not compact ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        # What is before a compaction item is gone for a server, so what it gave back goes behind it.
        made.sort(key=lambda block: not is_compaction(block))
        return Replacement((*map(_as_ours, made), *request.blocks[start:]), usage=usage)


def _beginning(request: CompactionRequest) -> int:
    """Where the conversation begins for the server: at its newest compaction that still holds."""
    if request.engine is None or not any(map(is_compaction, request.blocks)):
        return 0
    plan = innermost(request.engine).plan(request.turn(request.blocks))
    return len(request.blocks) - plan.full_blocks


def _as_ours(block: Block) -> Block:
    """The block as one that was put there on purpose: no record has to prove it any more."""
    unmarked = block.with_metadata({RESPONSE_ID: None, ITEM_ID: None, OUTPUT_INDEX: None})
    return unmarked.with_origin(ServerCompactor.name)
