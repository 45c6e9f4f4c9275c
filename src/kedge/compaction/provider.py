"""``ServerCompactor``: the provider compacts, and its compaction item becomes a block.

There are two methods. With ``context_management`` the server compacts while it answers, as soon as its
context is larger than a threshold; the item is part of the answer. With ``POST /responses/compact`` a
request is sent after an answer, for everything except the newest exchange. In both cases the item replaces
all blocks before it, and the next request begins with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

from kedge.compaction.base import (
    CompactionRequest,
    LimitCompactor,
    Replacement,
    cut_points,
)
from kedge.engines import Engine, unwrap
from kedge.errors import KedgeError
from kedge.events import Usage
from kedge.planning.anchors import check_positive_int
from kedge.planning.digests import is_compaction
from kedge.planning.render import COMPACTOR_ORIGIN
from kedge.turns import Block, Turn


@runtime_checkable
class SupportsTokenCounting(Protocol):
    """An engine whose provider counts tokens."""

    async def count_tokens(self, turn: Turn) -> int:
        """Return the tokens of a full request for a Turn."""
        ...


class ProviderCounter:
    """A counter that uses the provider: exact for its model, with one small request for each count.

    If the provider does not count, the local counter is used.

    Args:
        engine: The engine to use; by default that of the conversation.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    async def count(self, request: CompactionRequest, blocks: Sequence[Block]) -> int:
        """Return the tokens of these blocks after the leading ones of the request."""
        engine = self.engine or request.engine
        found = None if engine is None else unwrap(engine)
        if not isinstance(found, SupportsTokenCounting):
            return request.count(request.leading) + request.count(blocks)
        return await cast("SupportsTokenCounting", found).count_tokens(
            Turn((*request.leading, *blocks))
        )


MIN_NEW_TOKENS_DIVISOR = 4
"""The endpoint is called when at least ``max_tokens`` divided by this number are not compacted yet."""

CompactionMethod = Literal["context_management", "endpoint"]


@runtime_checkable
class SupportsCompaction(Protocol):
    """An engine whose provider has an endpoint for compaction."""

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Return the blocks that replace the Turn, and the usage."""
        ...


class ServerCompactor(LimitCompactor):
    """A compactor that uses the provider's compaction.

    Args:
        max_tokens: The number of tokens above which it compacts.
        how: ``"context_management"`` (while it answers) or ``"endpoint"`` (a request after the answer).

    Raises:
        InvalidSetting: ``max_tokens`` is below 1.
    """

    def __init__(self, max_tokens: int, how: CompactionMethod = "context_management") -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        self.how: CompactionMethod = how

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters that are added to every request of the conversation."""
        if self.how == "endpoint":
            return {}
        entry = {"type": "compaction", "compact_threshold": self.max_tokens}
        return {"context_management": [entry]}

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether the server has compacted, or has to compact."""
        if self.how == "endpoint":
            return request.size() > self.max_tokens
        return _context_start(request) > 0

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return the server's item and the blocks after it."""
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
        new = [block for block in request.blocks[:start] if block.origin != COMPACTOR_ORIGIN]
        if request.count(new) * MIN_NEW_TOKENS_DIVISOR < self.max_tokens:
            return Replacement(request.blocks)  # the newest exchange is long, not the history
        try:
            compacted, usage = await engine.compact(request.build_turn(request.blocks[:start]))
        except KedgeError as error:
            note = f"the server did not compact ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        # A server ignores everything before a compaction item, so other returned blocks are put after it.
        compacted.sort(key=lambda block: not is_compaction(block))
        return Replacement((*map(_detach_block, compacted), *request.blocks[start:]), usage=usage)


def _context_start(request: CompactionRequest) -> int:
    """Return the index of the newest compaction that is still valid: the server starts there."""
    if request.engine is None or not any(map(is_compaction, request.blocks)):
        return 0
    plan = unwrap(request.engine).plan(request.build_turn(request.blocks))
    return len(request.blocks) - plan.total_blocks


def _detach_block(block: Block) -> Block:
    """Return the block without its source, because no record has to match it any more."""
    return block.with_source(None).with_origin(COMPACTOR_ORIGIN)
