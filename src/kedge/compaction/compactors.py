"""Compactors by limit, by trigger and strategy, and several in order."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from kedge.compaction.base import (
    OVER_LIMIT_NOTE,
    CompactionRequest,
    CompactionResult,
    CompactionStrategy,
    CompactionTrigger,
    Compactor,
    Replacement,
    await_value,
    check_component,
    compact_if_triggered,
    component_name,
    cut_points,
    find_first_fit,
    unchanged_result,
)
from kedge.compaction.provider import ProviderCounter
from kedge.compaction.run import run_compactor
from kedge.events import Usage
from kedge.planning.anchors import check_positive_int
from kedge.tokens import TokenCounter
from kedge.turns import Turn, diff


class SplitCompactor:
    """Compacts with a strategy when a trigger returns true.

    Args:
        trigger: An object with a method ``should_compact(request)``.
        strategy: An object with a method ``compact_blocks(request)``.

    Raises:
        InvalidSetting: An argument is not an instance of its kind, for example because they are swapped.
    """

    def __init__(self, trigger: CompactionTrigger, strategy: CompactionStrategy) -> None:
        check_component("trigger", trigger, "should_compact")
        check_component("strategy", strategy, "compact_blocks")
        self.trigger = trigger
        self.strategy = strategy
        self.name = f"{component_name(trigger)}+{component_name(strategy)}"

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact if the trigger returns true."""
        return await compact_if_triggered(self.trigger, self.strategy, request, by=self.name)


async def cut_until(
    request: CompactionRequest, fits: Callable[[int], bool | Awaitable[bool]]
) -> Replacement:
    """Return the blocks after the earliest cut that fits, or all of them if they fit."""
    if await await_value(fits(0)):
        return Replacement(request.blocks)
    start, met = await find_first_fit(cut_points(request.blocks), fits)
    return Replacement(request.blocks[start:], () if met else (OVER_LIMIT_NOTE,))


class MessageLimitCompactor:
    """Removes the oldest exchanges when there are too many blocks. Also a trigger and a strategy.

    Args:
        max_messages: The number of blocks above which it compacts.
        target_messages: The maximum number of blocks that remain; by default ``max_messages``. With a
            lower one, compaction does not happen at every turn.

    Raises:
        InvalidSetting: A number is below 1, or the target above the maximum.
    """

    name = "MessageLimitCompactor"

    def __init__(self, max_messages: int, target_messages: int | None = None) -> None:
        self.max_messages = check_positive_int("max_messages", max_messages)
        target = max_messages if target_messages is None else target_messages
        self.target_messages = check_positive_int("target_messages", target, maximum=max_messages)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Remove the oldest exchanges if there are too many blocks."""
        return await compact_if_triggered(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether there are more than ``max_messages`` blocks."""
        return len(request.blocks) > self.max_messages

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return the newest blocks, starting at a user block: at most ``target_messages``."""
        excess = len(request.blocks) - self.target_messages
        return await cut_until(request, lambda start: start >= excess)


DEFAULT_TARGET_RATIO = 0.75


class TokenLimitCompactor:
    """Removes the oldest exchanges when there are too many tokens. Also a trigger and a strategy.

    The size is the usage that the server reported with its last answer, or counted if there is none; the
    target is met by both measures.

    Args:
        max_tokens: The number of tokens above which it compacts.
        target_tokens: The maximum number of tokens that remain; by default 75 % of ``max_tokens``, so
            that compaction does not happen at every turn.
        counter: A ``TokenCounter``, or a ``ProviderCounter`` to let the provider count. Usage that the
            server reported takes precedence over it when the limit is checked.

    Raises:
        InvalidSetting: A number is below 1, or the target above the maximum.
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
        """Remove the oldest exchanges if the conversation is too large."""
        return await compact_if_triggered(
            self, self, await self._with_token_count(request), by=self.name
        )

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether the conversation has more than ``max_tokens``."""
        return (await self._with_token_count(request)).size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return the newest exchanges with at most ``target_tokens``."""
        request = await self._with_token_count(request)
        count_after_cut = self._tokens_after_cut(request)

        async def fits(start: int) -> bool:
            return await count_after_cut(start) <= self.target_tokens

        return await cut_until(request, fits)

    async def _with_token_count(self, request: CompactionRequest) -> CompactionRequest:
        """Return the request with this compactor's counter, or with the provider's count."""
        if isinstance(self.counter, ProviderCounter):
            if request.tokens is None and request.usage is None:
                tokens = await self.counter.count(request, request.blocks)
                return replace(request, tokens=tokens)
            return request
        return replace(request, counter=self.counter) if self.counter else request

    def _tokens_after_cut(self, request: CompactionRequest) -> Callable[[int], Awaitable[int]]:
        """Return a function from the index of a cut to the tokens that it leaves."""
        if isinstance(counter := self.counter, ProviderCounter):
            return lambda start: counter.count(request, request.blocks[start:])
        blocks = request.suffix_tokens()
        # Tokens that the server counts in addition to the blocks (tools, framing) are not affected by a cut.
        overhead = max(request.size() - blocks[0], request.count(request.leading))

        async def count_after_cut(start: int) -> int:
            return overhead + blocks[start]

        return count_after_cut


class CompositeCompactor:
    """Runs compactors in order; each receives the result of the previous one.

    A compactor that fails is skipped, with a note.

    Args:
        *compactors: The compactors, as separate arguments.

    Raises:
        InvalidSetting: An argument is not a compactor, for example a list of them.
    """

    name = "CompositeCompactor"

    def __init__(self, *compactors: Compactor) -> None:
        for compactor in compactors:
            check_component("a compactor of CompositeCompactor", compactor, "compact")
        self.compactors = compactors

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Run each compactor."""
        result, step = unchanged_result(request, self.name), request
        for compactor in self.compactors:
            done = await run_compactor(compactor, step)
            step = step.next_request(done)
            result = _merge_results(result, done)
        changes = diff(Turn(request.blocks), Turn(result.blocks))
        return replace(result, changes=changes)


def _merge_results(first: CompactionResult, second: CompactionResult) -> CompactionResult:
    """Return both results as one; the changes are those of the second, and are recomputed later."""
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
