"""``CompositeCompactor``: several compactors, one after the other."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from kedge.compaction.base import (
    CompactionRequest,
    CompactionResult,
    CompactionStrategy,
    CompactionTrigger,
    Compactor,
    Replacement,
    compact_if_triggered,
    component_name,
    unchanged_result,
)
from kedge.compaction.boundaries import (
    OVER_LIMIT_NOTE,
    check_positive_int,
    cut_points,
    find_first_fit,
)
from kedge.compaction.provider import ProviderCounter
from kedge.compaction.run import run_compactor
from kedge.events import Usage
from kedge.tokens import TokenCounter
from kedge.turns import Turn, diff


class SplitCompactor:
    """Compacts by ``strategy`` when ``trigger`` says so."""

    def __init__(self, trigger: CompactionTrigger, strategy: CompactionStrategy) -> None:
        self.trigger = trigger
        self.strategy = strategy
        self.name = f"{component_name(trigger)}+{component_name(strategy)}"

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact, if it is time to."""
        return await compact_if_triggered(self.trigger, self.strategy, request, by=self.name)


class MessageLimitCompactor:
    """Above ``max_messages`` blocks, keeps at most ``target_messages`` of them (default: as many).

    With a target below the maximum, compaction does not happen at every turn. Serves as trigger and
    as strategy too.
    """

    name = "MessageLimitCompactor"

    def __init__(self, max_messages: int, target_messages: int | None = None) -> None:
        self.max_messages = check_positive_int("max_messages", max_messages)
        target = max_messages if target_messages is None else target_messages
        self.target_messages = check_positive_int("target_messages", target, maximum=max_messages)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Cut off the oldest messages, if there are too many."""
        return await compact_if_triggered(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether there are more than ``max_messages`` blocks."""
        return len(request.blocks) > self.max_messages

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The newest blocks, from a user block on: ``target_messages`` at most."""
        blocks = request.blocks
        if len(blocks) <= self.target_messages:
            return Replacement(blocks)

        async def fits(start: int) -> bool:
            return len(blocks) - start <= self.target_messages

        start, met = await find_first_fit(cut_points(blocks), fits)
        return Replacement(blocks[start:], () if met else (OVER_LIMIT_NOTE,))


DEFAULT_TARGET_RATIO = 0.75


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
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        target = (
            max(1, int(max_tokens * DEFAULT_TARGET_RATIO))
            if target_tokens is None
            else target_tokens
        )
        self.target_tokens = check_positive_int("target_tokens", target, maximum=max_tokens)
        self.counter = counter

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Cut off the oldest exchanges, if the conversation is too large."""
        return await compact_if_triggered(
            self, self, await self._with_token_count(request), by=self.name
        )

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether the conversation has more than ``max_tokens``."""
        return (await self._with_token_count(request)).size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The newest exchanges that take ``target_tokens`` at most."""
        request = await self._with_token_count(request)
        left = self._tokens_after_cut(request)

        async def fits(start: int) -> bool:
            return await left(start) <= self.target_tokens

        if await fits(0):
            return Replacement(request.blocks)
        start, met = await find_first_fit(cut_points(request.blocks), fits)
        return Replacement(request.blocks[start:], () if met else (OVER_LIMIT_NOTE,))

    async def _with_token_count(self, request: CompactionRequest) -> CompactionRequest:
        """The request with our counter; counted by the provider, if that is who counts."""
        if isinstance(self.counter, ProviderCounter):
            if request.tokens is None and request.usage is None:
                tokens = await self.counter.count(request, request.blocks)
                return replace(request, tokens=tokens)
            return request
        return replace(request, counter=self.counter) if self.counter else request

    def _tokens_after_cut(self, request: CompactionRequest) -> Callable[[int], Awaitable[int]]:
        """How many tokens a cut at a place leaves."""
        if isinstance(counter := self.counter, ProviderCounter):
            return lambda start: counter.count(request, request.blocks[start:])
        blocks = request.suffix_tokens()
        # What the server counts besides the blocks (tools, a frame of its own) a cut does not touch.
        besides = max(request.size() - blocks[0], request.count(request.leading))

        async def left(start: int) -> int:
            return besides + blocks[start]

        return left


class CompositeCompactor:
    """Runs compactors in order; each sees what the one before has left.

    One that fails is passed over, with a note.
    """

    name = "CompositeCompactor"

    def __init__(self, *compactors: Compactor) -> None:
        self.compactors = compactors

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Let each compactor do its part."""
        result, step = unchanged_result(request, self.name), request
        for compactor in self.compactors:
            done = await run_compactor(compactor, step)
            step = step.next_request(done)
            result = _merge_results(result, done)
        changes = diff(Turn(request.blocks), Turn(result.blocks))
        return replace(result, changes=changes)


def _merge_results(first: CompactionResult, second: CompactionResult) -> CompactionResult:
    """Both results as one; the changes are those of the second, and are worked out anew later."""
    together = replace(
        second,
        notes=(*first.notes, *second.notes),
        usage=_add_usage(first.usage, second.usage),
    )
    if first.changed and second.changed:
        return replace(together, by=f"{first.by}, {second.by}", tokens_before=first.tokens_before)
    if second.changed:
        return together
    return replace(first, notes=together.notes, usage=together.usage)


def _add_usage(first: Usage | None, second: Usage | None) -> Usage | None:
    return first + second if first and second else first or second
