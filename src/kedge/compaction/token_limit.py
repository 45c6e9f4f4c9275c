"""``TokenLimitCompactor``: keeps as much of the newest history as a number of tokens allows."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from kedge.compaction.boundaries import cut_points, first_fitting
from kedge.compaction.limits import TOO_LONG, whole_number
from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_when,
)
from kedge.compaction.provider_counter import ProviderCounter
from kedge.tokens import TokenCounter

TARGET_SHARE = 0.75


class TokenLimitCompactor:
    """Above ``max_tokens``, cuts the oldest exchanges off until ``target_tokens`` are left.

    The default target is 75 % of the maximum, so that compaction does not happen at every turn. The size
    is what the server said of its last answer, if it said so, and otherwise counted; the target is met by
    both measures. ``counter`` is a ``TokenCounter``, or a ``ProviderCounter`` to let the provider
    count. Serves as trigger and as strategy too.
    """

    name = "TokenLimitCompactor"

    def __init__(
        self,
        max_tokens: int,
        target_tokens: int | None = None,
        *,
        counter: TokenCounter | ProviderCounter | None = None,
    ) -> None:
        self.max_tokens = whole_number("max_tokens", max_tokens)
        target = max(1, int(max_tokens * TARGET_SHARE)) if target_tokens is None else target_tokens
        self.target_tokens = whole_number("target_tokens", target, most=max_tokens)
        self.counter = counter

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Cut off the oldest exchanges, if the conversation is too large."""
        return await compact_when(self, self, await self._measured(request), by=self.name)

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether the conversation has more than ``max_tokens``."""
        return (await self._measured(request)).size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The newest exchanges that take ``target_tokens`` at most."""
        request = await self._measured(request)
        left = self._left(request)

        async def fits(start: int) -> bool:
            return await left(start) <= self.target_tokens

        if await fits(0):
            return Replacement(request.blocks)
        start, met = await first_fitting(cut_points(request.blocks), fits)
        return Replacement(request.blocks[start:], () if met else (TOO_LONG,))

    async def _measured(self, request: CompactionRequest) -> CompactionRequest:
        """The request with our counter; counted by the provider, if that is who counts."""
        if isinstance(self.counter, ProviderCounter):
            if request.tokens is None and request.usage is None:
                tokens = await self.counter.count(request, request.blocks)
                return replace(request, tokens=tokens)
            return request
        return replace(request, counter=self.counter) if self.counter else request

    def _left(self, request: CompactionRequest) -> Callable[[int], Awaitable[int]]:
        """How many tokens a cut at a place leaves."""
        if isinstance(counter := self.counter, ProviderCounter):
            return lambda start: counter.count(request, request.blocks[start:])
        blocks = request.tokens_left()
        # What the server counts besides the blocks (tools, a frame of its own) a cut does not touch.
        besides = max(request.size() - blocks[0], request.count(request.leading))

        async def left(start: int) -> int:
            return besides + blocks[start]

        return left
