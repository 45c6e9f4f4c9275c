"""Compactors by limit, by trigger and strategy, and several in order; and functions that run a compactor.

A compactor is the caller's code and may send requests. If it raises, or leaves a call without its result,
its result is not used: the conversation continues uncompacted, with a note.

With ``ServerCompactor`` the provider compacts, and its compaction item becomes a block. There are two methods. With
``context_management`` the server compacts while it answers, as soon as its context is larger than a threshold; the
item is part of the answer. With ``POST /responses/compact`` a request is sent after an answer, for everything except
the newest exchange. In both cases the item replaces all blocks before it, and the next request begins with it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import is_
from typing import Any, Literal, cast

from msgspec.structs import replace

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_choice, check_positive_int
from kedge._internal.event_loops import await_value
from kedge.compaction import base
from kedge.compaction.base import CompactionRequest, CompactionResult, Replacement, component_name
from kedge.engines import Engine, unwrap
from kedge.errors import Blocked, KedgeError
from kedge.events import Usage
from kedge.observe import count, get_logger
from kedge.planning import find_problems, get_state
from kedge.planning.anchors import drop_changed_anchors
from kedge.planning.digests import is_compaction
from kedge.planning.render import COMPACTOR_ORIGIN
from kedge.turns import Block, SystemBlock, Turn, diff
from kedge.turns.content_filters import ContentFilters, Phase
from kedge.usage.tokens import DEFAULT_COUNTER, TokenCounter

log = get_logger("kedge.compaction")

_PHASES: dict[base.Occasion, tuple[Phase, ...]] = {
    "answered": ("output", "input"),  # it is from a model, and may be sent to another
    "pending": ("input",),
    "resend": ("input",),
}


async def run_compactor(compactor: base.Compactor, request: CompactionRequest) -> CompactionResult:
    """Run a compactor. If it fails or its result is invalid, nothing is changed.

    Args:
        compactor: The compactor.
        request: The conversation to compact.

    Returns:
        The result, or an unchanged one with a note.
    """
    by = component_name(compactor)
    try:
        result = await compactor.compact(request)
        if not (defect := _find_defect(request, result)):
            return result
    except Exception as error:  # the caller's code; the answer must not be lost
        log.debug("compaction failed", exc_info=error)
        defect = type(error).__name__
    log.warning("compaction failed, the conversation is unchanged: %s by %s", defect, by)
    count("compactions_total", by=by, outcome="failed")
    return base.unchanged_result(request, by, f"{by} failed ({defect}); nothing was changed")


@checked
async def compact_turn(
    turn: Turn,
    compactor: base.Compactor,
    *,
    engine: Engine | None = None,
    usage: Usage | None = None,
    counter: TokenCounter = DEFAULT_COUNTER,
    occasion: base.Occasion = "answered",
    filters: ContentFilters | None = None,
) -> tuple[Turn, CompactionResult]:
    """Run a compactor on a Turn. If the compactor fails, the Turn is unchanged.

    Args:
        turn: The Turn to compact.
        compactor: The compactor, which decides whether and how.
        engine: The engine that a compactor may send requests to.
        usage: The usage that the server reported with the last answer.
        counter: The token counter to use if the server did not report usage.
        occasion: When compaction runs.
        filters: The content filters of the stack: a compactor may send content to a model or have a
            provider count it, so it receives the filtered Turn, and its result is filtered again.

    Returns:
        The Turn to continue with, and the result.

    Raises:
        Blocked: A content filter rejects the Turn.
    """
    filters = filters or ContentFilters()
    original, turn = turn, filters.apply_to_turn(turn, _PHASES[occasion])
    request = CompactionRequest(
        turn.body,
        turn.leading,
        usage=usage,
        engine=engine,
        counter=counter,
        occasion=occasion,
        state=get_state(turn),
    )
    result = _filter_result(request, await run_compactor(compactor, request), filters)
    record_result(result, occasion, turn.id)
    if not result.changed:
        return original, result
    blocks = (*turn.leading, *result.blocks)
    short = Turn(blocks, id=turn.id, data=turn.data, extra=turn.extra)
    return drop_changed_anchors(short), result  # a cut cannot be undone


def _filter_result(
    request: CompactionRequest, result: CompactionResult, filters: ContentFilters
) -> CompactionResult:
    """Return the result with the blocks that the compactor added filtered; unchanged if they are rejected.

    The other blocks were filtered before, as the occasion requires. The answer that comes before a compaction
    is complete and paid for: a summary that a guard rejects must not make it an error.
    """
    own_ids = {id(block) for block in request.blocks}
    try:
        blocks = tuple(
            block if id(block) in own_ids else filters.apply(block) for block in result.blocks
        )
    except Blocked as error:
        note = f"a guard rejected its result ({error.rule}); nothing was changed"
        return replace(base.unchanged_result(request, result.by, note), usage=result.usage)
    if all(map(is_, blocks, result.blocks)):
        return result
    return replace(result, blocks=blocks, changes=diff(Turn(request.blocks), Turn(blocks)))


def record_result(result: CompactionResult, occasion: base.Occasion, turn_id: str) -> None:
    """Log and count the result of a compaction."""
    if result.changed:
        count("compactions_total", by=result.by, outcome="compacted")
        count("compaction_blocks_removed_total", len(result.removed))
        saved = max(0, (result.tokens_before or 0) - (result.tokens_after or 0))
        count("compaction_tokens_saved_total", saved)
        log.info("%s (%s)", str(result), occasion, turn_id=turn_id)
    elif result.notes:
        count("compactions_total", by=result.by, outcome="refused")
        log.warning("%s (%s)", str(result), occasion, turn_id=turn_id)


def _find_defect(request: CompactionRequest, result: CompactionResult) -> str:
    """Return the problem of a result: calls or results that lost their counterpart."""
    if not result.changed:
        return ""
    if not result.blocks or isinstance(result.blocks[0], SystemBlock):
        return "it left nothing, or a leading system block"
    added = _find_problem_keys(result.blocks) - _find_problem_keys(request.blocks)
    if added:
        return f"it left {len(added)} calls or results unpaired"
    return ""


def _find_problem_keys(blocks: Sequence[Block]) -> set[tuple[str, str]]:
    return {(problem.kind, problem.call_id) for problem in find_problems(Turn(blocks))}


class ProviderCounter:
    """A counter that uses the provider: exact for its model, with one small request for each count.

    If the provider does not count, the local counter is used.

    Args:
        engine: The engine to use; by default the engine of the conversation.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = base.check_engine(engine)

    async def count(self, request: CompactionRequest, blocks: Sequence[Block]) -> int:
        """Return the tokens of these blocks after the leading blocks of the request."""
        count_tokens = _find_method(self.engine or request.engine, "count_tokens")
        if count_tokens is None:
            return request.count(request.leading) + request.count(blocks)
        return await count_tokens(Turn((*request.leading, *blocks)))


def _find_method(engine: Engine | None, name: str) -> Callable[[Turn], Awaitable[Any]] | None:
    """Return a method that only the engines of some providers have."""
    if engine is None:
        return None
    return getattr(unwrap(engine), name, None)


MIN_NEW_TOKENS_DIVISOR = 4
"""The endpoint is called when at least ``max_tokens`` divided by this number are not compacted yet."""

CompactionMethod = Literal["context_management", "endpoint"]


class ServerCompactor(base.SelfTriggeredCompactor):
    """A compactor that uses the provider's compaction.

    Args:
        max_tokens: The number of tokens above which it compacts.
        how: ``"context_management"`` (while it answers) or ``"endpoint"`` (a request after the answer).

    Raises:
        InvalidSetting: ``max_tokens`` is below 1, or there is no such method.
    """

    def __init__(self, max_tokens: int, how: CompactionMethod = "context_management") -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        check_choice("how", how, ("context_management", "endpoint"))
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
        compact = _find_method(request.engine, "compact")
        if compact is None:
            return Replacement(request.blocks, ("this engine's provider does not compact",))
        start = (base.cut_points(request.blocks) or [0])[-1]
        new = [block for block in request.blocks[:start] if block.origin != COMPACTOR_ORIGIN]
        if request.count(new) * MIN_NEW_TOKENS_DIVISOR < self.max_tokens:
            return Replacement(request.blocks)  # the newest exchange is long, not the history
        try:
            compacted, usage = await compact(request.build_turn(request.blocks[:start]))
        except KedgeError as error:
            note = f"the server did not compact ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        replaced = [_detach_block(block) for block in cast("list[Block]", compacted)]
        return Replacement((*replaced, *request.blocks[start:]), usage=usage)


def _context_start(request: CompactionRequest) -> int:
    """Return the index of the newest compaction that is still valid: the server starts there."""
    if request.engine is None or not any(map(is_compaction, request.blocks)):
        return 0
    plan = unwrap(request.engine).plan(request.build_turn(request.blocks))
    return len(request.blocks) - plan.total_blocks


def _detach_block(block: Block) -> Block:
    """Return the block without its source, because no record has to match it any more."""
    return block.with_source(None).with_origin(COMPACTOR_ORIGIN)


class SplitCompactor:
    """Compacts with a strategy when a trigger returns true.

    Args:
        trigger: An object with a method ``should_compact(request)``.
        strategy: An object with a method ``compact_blocks(request)``.

    Raises:
        InvalidSetting: An argument is not an instance of its kind, for example because they are swapped.
    """

    def __init__(self, trigger: base.CompactionTrigger, strategy: base.CompactionStrategy) -> None:
        base.check_component("trigger", trigger, "should_compact")
        base.check_component("strategy", strategy, "compact_blocks")
        self.trigger = trigger
        self.strategy = strategy
        self.name = f"{component_name(trigger)}+{component_name(strategy)}"

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact if the trigger returns true."""
        return await base.compact_if_triggered(self.trigger, self.strategy, request, by=self.name)


async def cut_until(
    request: CompactionRequest, fits: Callable[[int], bool | Awaitable[bool]]
) -> Replacement:
    """Return the blocks after the earliest cut that fits, or all of them if they fit."""
    if await await_value(fits(0)):
        return Replacement(request.blocks)
    start, does_fit = await base.find_first_fit(base.cut_points(request.blocks), fits)
    rest = request.blocks[start:]
    if not does_fit:
        return Replacement(rest, (base.OVER_LIMIT_NOTE,))
    return Replacement(rest)


class MessageLimitCompactor(base.SelfTriggeredCompactor):
    """Removes the oldest exchanges when there are too many blocks. Also a trigger and a strategy.

    Args:
        max_messages: The number of blocks above which it compacts.
        target_messages: The maximum number of blocks that remain; by default ``max_messages``. With a
            lower one, compaction does not happen at every turn.

    Raises:
        InvalidSetting: A number is below 1, or the target above the maximum.
    """

    def __init__(self, max_messages: int, target_messages: int | None = None) -> None:
        self.max_messages = check_positive_int("max_messages", max_messages)
        if target_messages is None:
            target_messages = max_messages
        self.target_messages = check_positive_int(
            "target_messages", target_messages, maximum=max_messages
        )

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether there are more than ``max_messages`` blocks."""
        return len(request.blocks) > self.max_messages

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return the newest blocks, starting at a user block: at most ``target_messages``."""
        excess = len(request.blocks) - self.target_messages
        return await cut_until(request, lambda start: start >= excess)


DEFAULT_TARGET_RATIO = 0.75


MAX_TOKENS = 2**53
"""The largest limit of tokens, of which a float can represent every part."""


class TokenLimitCompactor(base.SelfTriggeredCompactor):
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

    def __init__(
        self,
        max_tokens: int,
        target_tokens: int | None = None,
        *,
        counter: TokenCounter | ProviderCounter | None = None,
    ) -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens, maximum=MAX_TOKENS)
        if target_tokens is None:
            target_tokens = max(1, int(max_tokens * DEFAULT_TARGET_RATIO))
        self.target_tokens = check_positive_int("target_tokens", target_tokens, maximum=max_tokens)
        if counter is not None and not isinstance(counter, ProviderCounter):
            base.check_component("counter", counter, "count_items")
        self.counter = counter

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Remove the oldest exchanges if the conversation is too large."""
        return await super().compact(await self._with_token_count(request))

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether the conversation has more than ``max_tokens``."""
        return (await self._with_token_count(request)).size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return the newest exchanges with at most ``target_tokens``."""
        request = await self._with_token_count(request)
        if isinstance(counter := self.counter, ProviderCounter):

            async def fits(start: int) -> bool:
                return await counter.count(request, request.blocks[start:]) <= self.target_tokens

            return await cut_until(request, fits)
        tokens = request.suffix_tokens()
        # Tokens that the server counts in addition to the blocks (tools, framing) are not affected by a cut.
        overhead = max(request.size() - tokens[0], request.count(request.leading))
        room = self.target_tokens - overhead
        return await cut_until(request, lambda start: tokens[start] <= room)

    async def _with_token_count(self, request: CompactionRequest) -> CompactionRequest:
        """Return the request with this compactor's counter, or with the provider's count."""
        if isinstance(self.counter, ProviderCounter):
            if request.tokens is None and request.usage is None:
                tokens = await self.counter.count(request, request.blocks)
                return replace(request, tokens=tokens)
            return request
        if self.counter:
            return replace(request, counter=self.counter)
        return request


class CompositeCompactor:
    """Runs compactors in order; each receives the result of the previous one.

    A compactor that fails is skipped, with a note.

    Args:
        *compactors: The compactors, as separate arguments.

    Raises:
        InvalidSetting: An argument is not a compactor, for example a list of them.
    """

    def __init__(self, *compactors: base.Compactor) -> None:
        for compactor in compactors:
            base.check_component("a compactor of CompositeCompactor", compactor, "compact")
        self.compactors = compactors

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Run each compactor."""
        result = base.unchanged_result(request, component_name(self))
        next_request = request
        for compactor in self.compactors:
            step = await run_compactor(compactor, next_request)
            if step.changed:
                next_request = replace(
                    next_request, blocks=step.blocks, usage=None, tokens=step.tokens_after
                )
            result = _merge_results(result, step)
        changes = diff(Turn(request.blocks), Turn(result.blocks))
        return replace(result, changes=changes)


def _merge_results(first: CompactionResult, second: CompactionResult) -> CompactionResult:
    """Return both results as one, with the changes of the second one, which are computed again later."""
    usage = first.usage or second.usage
    if first.usage and second.usage:
        usage = first.usage + second.usage
    notes = (*first.notes, *second.notes)
    if not second.changed:
        return replace(first, notes=notes, usage=usage)
    if not first.changed:
        return replace(second, notes=notes, usage=usage)
    return replace(
        second,
        notes=notes,
        usage=usage,
        by=f"{first.by}, {second.by}",
        tokens_before=first.tokens_before,
    )
