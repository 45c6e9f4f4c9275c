"""``ProviderCounter``: the provider counts, by its ``input_tokens`` endpoint."""

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from kedge.compaction.protocol import CompactionRequest
from kedge.engines import Engine
from kedge.engines.protocol import innermost
from kedge.turns import Block, Turn


@runtime_checkable
class CountsTokens(Protocol):
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
        found = None if engine is None else innermost(engine)
        if not isinstance(found, CountsTokens):
            return request.count(request.leading) + request.count(blocks)
        return await cast("CountsTokens", found).count_tokens(Turn((*request.leading, *blocks)))
