"""``ServerCompactor``: the provider compacts, and its compaction item is carried as a block.

There are two ways. With ``context_management`` the server compacts while it answers, as soon as its
context is larger than a threshold; the item comes with the answer. With ``POST /responses/compact`` it is
asked after an answer, for everything but the newest exchange. Either way the item stands for all that was
before it, which is then no longer kept, and the next request begins with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

from kedge.compaction.base import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_if_triggered,
)
from kedge.compaction.boundaries import check_positive_int, cut_points
from kedge.engines import Engine, unwrap
from kedge.errors import KedgeError
from kedge.events import Usage
from kedge.planning.digests import is_compaction
from kedge.turns import ITEM_ID, OUTPUT_INDEX, RESPONSE_ID, Block, Turn


@runtime_checkable
class SupportsTokenCounting(Protocol):
    """An engine whose provider counts for it."""

    async def count_tokens(self, turn: Turn) -> int:
        """Count the tokens of what a Turn would send."""
        ...


class ProviderCounter:
    """Asks the provider of the conversation (or of ``engine``) how many tokens blocks take.

    Exact for the model at hand, at the price of one small request for each count. Where the provider
    does not count, the local counter does.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    async def count(self, request: CompactionRequest, blocks: Sequence[Block]) -> int:
        """Count the tokens of these blocks behind the leading ones of the request."""
        engine = self.engine or request.engine
        found = None if engine is None else unwrap(engine)
        if not isinstance(found, SupportsTokenCounting):
            return request.count(request.leading) + request.count(blocks)
        return await cast("SupportsTokenCounting", found).count_tokens(
            Turn((*request.leading, *blocks))
        )


MIN_NEW_TOKENS_DIVISOR = 4
"""The server is asked once there is a quarter of the maximum that it has not compacted yet."""

CompactionMethod = Literal["context_management", "endpoint"]


@runtime_checkable
class SupportsCompaction(Protocol):
    """An engine whose provider compacts a Turn when asked to."""

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """The blocks that stand for the Turn from now on, and what it cost."""
        ...


class ServerCompactor:
    """Lets the provider compact above ``max_tokens``.

    ``how`` is ``"context_management"`` (while it answers) or ``"endpoint"`` (asked after the answer).
    """

    name = "ServerCompactor"

    def __init__(self, max_tokens: int, how: CompactionMethod = "context_management") -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        self.how: CompactionMethod = how

    @property
    def params(self) -> Mapping[str, Any]:
        """What goes into every request of the conversation."""
        if self.how == "endpoint":
            return {}
        entry = {"type": "compaction", "compact_threshold": self.max_tokens}
        return {"context_management": [entry]}

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Take over what the server compacted, or have it compact."""
        return await compact_if_triggered(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether the server has compacted, or shall."""
        if self.how == "endpoint":
            return request.size() > self.max_tokens
        return _context_start(request) > 0

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The server's item, and what came after it."""
        if self.how == "endpoint":
            return await self._call_endpoint(request)
        start = _context_start(request)
        return Replacement(
            (*map(_detach_block, request.blocks[start : start + 1]), *request.blocks[start + 1 :])
        )

    async def _call_endpoint(self, request: CompactionRequest) -> Replacement:
        engine = None if request.engine is None else unwrap(request.engine)
        if not isinstance(engine, SupportsCompaction):
            return Replacement(request.blocks, ("this engine's provider does not compact",))
        start = (cut_points(request.blocks) or [0])[-1]
        new = [block for block in request.blocks[:start] if block.origin != self.name]
        if request.count(new) * MIN_NEW_TOKENS_DIVISOR < self.max_tokens:
            return Replacement(request.blocks)  # the newest exchange is what is long, not the past
        try:
            made, usage = await engine.compact(request.build_turn(request.blocks[:start]))
        except KedgeError as error:
            note = f"the server did not compact ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        # What is before a compaction item is gone for a server, so what it gave back goes behind it.
        made.sort(key=lambda block: not is_compaction(block))
        return Replacement((*map(_detach_block, made), *request.blocks[start:]), usage=usage)


def _context_start(request: CompactionRequest) -> int:
    """Where the conversation begins for the server: at its newest compaction that still holds."""
    if request.engine is None or not any(map(is_compaction, request.blocks)):
        return 0
    plan = unwrap(request.engine).plan(request.build_turn(request.blocks))
    return len(request.blocks) - plan.full_blocks


def _detach_block(block: Block) -> Block:
    """The block as one that was put there on purpose: no record has to prove it any more."""
    unmarked = block.with_metadata({RESPONSE_ID: None, ITEM_ID: None, OUTPUT_INDEX: None})
    return unmarked.with_origin(ServerCompactor.name)
