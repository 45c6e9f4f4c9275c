"""Interfaces of compaction: a trigger decides when, a strategy how, and a compactor both.

A strategy receives a request and returns the blocks that remain; the removed blocks and the saved tokens are
computed from them. Triggers and strategies may have plain or async methods, so a custom trigger is three lines
long.

A conversation grows at its end, and compaction counts all of it each time. Planning caches the digest of a
block's content in the block itself; token counts are cached under that digest, so a block that was counted
before costs one lookup, also after it was stored in state bytes.

A history may be cut at user blocks before which every call has its result. So a pair of call and result is never
separated, and the rest never begins with the answer to a question that was removed, nor with the correction of a
typed answer to it. A call without a result and all blocks after it are retained.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, Literal, Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import force_setattr, replace

from kedge._internal.argument_types import checked
from kedge._internal.bounded_dict import BoundedDict
from kedge._internal.event_loops import await_value
from kedge.engines import Engine
from kedge.engines.output_schema import CORRECTION_ORIGIN
from kedge.errors import InvalidSetting, UnsupportedBlock
from kedge.events import Usage
from kedge.events.types import Event
from kedge.planning import ConversationState, set_state
from kedge.planning.digests import ToolPairing
from kedge.turns import Block, Turn, TurnDiff, UserBlock, diff, dump_block, item_from_block
from kedge.turns.blocks import get_cached_digest
from kedge.usage.tokens import DEFAULT_COUNTER, TokenCounter

MAX_CACHED_COUNTS = 65_536
"""The maximum number of cached counts of about 150 bytes each."""


class BlockCounter:
    """A ``TokenCounter`` that also counts blocks, with a cache.

    Args:
        counter: The counter of texts and items.
    """

    def __init__(self, counter: TokenCounter = DEFAULT_COUNTER) -> None:
        self._counter = counter
        self._counts = BoundedDict[bytes | None, int](MAX_CACHED_COUNTS)
        self._lock = Lock()

    @staticmethod
    def of(counter: TokenCounter) -> "BlockCounter":
        """Return the counter itself if it counts blocks, else the block counter that uses it."""
        if isinstance(counter, BlockCounter):
            return counter
        if counter is DEFAULT_COUNTER:
            return DEFAULT_BLOCK_COUNTER
        try:
            return _counters.setdefault(counter, BlockCounter(counter))
        except TypeError:  # it cannot be hashed or weakly referenced: nothing is cached for it
            return BlockCounter(counter)

    def count_text(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._counter.count_text(text)

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Return the tokens of wire items."""
        return self._counter.count_items(items)

    def count_blocks(self, blocks: Iterable[Block]) -> int:
        """Return the tokens of blocks."""
        return sum(map(self.count_block, blocks))

    def count_block(self, block: Block) -> int:
        """Return the tokens of one block."""
        digest = get_cached_digest(block)
        if not digest:  # it was never planned, or is reasoning
            return self._counter.count_items([_render_item(block)])
        tokens = self._counts.get(digest)
        if tokens is None:
            tokens = self._counter.count_items([_render_item(block)])
            with self._lock:
                self._counts[digest] = tokens
        return tokens


def _render_item(block: Block) -> Mapping[str, Any]:
    try:
        return item_from_block(block)
    except UnsupportedBlock:
        # It cannot be sent, but is part of the size.
        return {"type": block.kind, **dump_block(block)}


DEFAULT_BLOCK_COUNTER = BlockCounter()
_counters: WeakKeyDictionary[TokenCounter, BlockCounter] = WeakKeyDictionary()


Occasion = Literal["answered", "pending", "resend"]
"""When compaction runs: after an answer, before a call, or before everything is sent again."""


class CompactionRequest(msgspec.Struct, frozen=True):
    """A conversation to compact.

    Attributes:
        blocks: The conversation without its leading system blocks.
        leading: The leading system blocks, which are never compacted.
        usage: The usage that the server reported with its last answer.
        engine: The engine that a compactor may send requests to.
        tokens: The size of the conversation, if it was counted already.
        counter: The token counter.
        occasion: When compaction runs.
        state: The anchors, so that a request about the old part can be a fork of the conversation instead of
            a full send.
    """

    blocks: tuple[Block, ...]
    leading: tuple[Block, ...] = ()
    usage: Usage | None = None
    engine: Engine | None = None
    tokens: int | None = None
    counter: TokenCounter = DEFAULT_COUNTER
    occasion: Occasion = "answered"
    state: ConversationState = ConversationState()

    def __post_init__(self) -> None:
        force_setattr(self, "blocks", tuple(self.blocks))
        force_setattr(self, "leading", tuple(self.leading))
        force_setattr(self, "counter", BlockCounter.of(self.counter))

    @property
    def forced(self) -> bool:
        """Whether compaction runs regardless of triggers."""
        return self.occasion == "resend"

    def count(self, blocks: Iterable[Block]) -> int:
        """Return the tokens of blocks; counts are cached."""
        return cast("BlockCounter", self.counter).count_blocks(blocks)

    def size(self) -> int:
        """Return the tokens of the conversation: already counted, reported by the server, or counted now."""
        if self.tokens is not None:
            return self.tokens
        if self.usage is not None:
            return context_tokens(self.usage)
        return self.count(self.leading) + self.count(self.blocks)

    def suffix_tokens(self) -> list[int]:
        """Return, for every index, the tokens of the blocks from there to the end."""
        counts = [self.count([block]) for block in reversed(self.blocks)]
        return [0, *accumulate(counts)][::-1]

    def build_turn(self, blocks: Sequence[Block]) -> Turn:
        """Return a Turn of some of the blocks that can be sent to the engine, with the anchors."""
        return set_state(Turn(blocks), self.state)


class Replacement(msgspec.Struct, frozen=True):
    """The blocks that a strategy returns, with notes and usage."""

    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    """Notes for the log and the result, such as a limit that could not be met."""
    usage: Usage | None = None
    """The tokens of its requests."""


class CompactionResult(msgspec.Struct, frozen=True):
    """The result of compaction.

    Attributes:
        blocks: The blocks that remain.
        by: The name of the compactor.
        changes: The blocks that were added, removed and modified.
        tokens_before: The size before; known if something changed.
        tokens_after: The size after; known if something changed.
        notes: Notes, such as a limit that could not be met.
        usage: The tokens of the requests of compaction.
    """

    blocks: tuple[Block, ...]
    by: str = ""
    changes: TurnDiff = TurnDiff()
    tokens_before: int | None = None
    tokens_after: int | None = None
    notes: tuple[str, ...] = ()
    usage: Usage | None = None

    @property
    def changed(self) -> bool:
        """Whether anything was removed, shortened or summarized."""
        return bool(self.changes)

    @property
    def removed(self) -> tuple[Block, ...]:
        """The blocks that were removed."""
        return self.changes.removed

    @property
    def added(self) -> tuple[Block, ...]:
        """The blocks that replace them, such as a summary."""
        return self.changes.added

    def __str__(self) -> str:
        if not self.changed:
            return "; ".join(("not compacted", *self.notes))
        count = f"-{len(self.removed)} +{len(self.added)} ~{len(self.changes.modified)} blocks"
        tokens = f"{self.tokens_before} to {self.tokens_after} tokens"
        return "; ".join((f"compacted by {self.by}: {count}, {tokens}", *self.notes))


class TurnCompacted(Event, frozen=True):
    """Old blocks of the Turn were replaced by fewer, or compaction failed."""

    result: CompactionResult
    occasion: Occasion


class Compactor(Protocol):
    """Decides when to compact, and does it."""

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Return the compacted conversation, or the unchanged one."""
        ...


class CompactionTrigger(Protocol):
    """Decides when to compact."""

    def should_compact(self, request: CompactionRequest) -> bool | Awaitable[bool]:
        """Return whether to compact now."""
        ...


class CompactionStrategy(Protocol):
    """Decides which blocks remain."""

    def compact_blocks(
        self, request: CompactionRequest
    ) -> Sequence[Block] | Replacement | Awaitable[Sequence[Block] | Replacement]:
        """Return the blocks that remain, in their order, and the blocks that replace the others."""
        ...


async def compact_if_triggered(
    trigger: CompactionTrigger, strategy: CompactionStrategy, request: CompactionRequest, *, by: str
) -> CompactionResult:
    """Run a strategy if its trigger returns true or compaction is forced."""
    if not request.forced and not await await_value(trigger.should_compact(request)):
        return unchanged_result(request, by)
    return build_result(request, await await_value(strategy.compact_blocks(request)), by)


class SelfTriggeredCompactor(CompactionTrigger, CompactionStrategy):
    """The base class of compactors that are their own trigger and strategy; they are named after their class."""

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact if the conversation is too large."""
        return await compact_if_triggered(self, self, request, by=component_name(self))


def unchanged_result(request: CompactionRequest, by: str, *notes: str) -> CompactionResult:
    """Return a result without changes."""
    return CompactionResult(
        request.blocks, by, tokens_before=request.tokens, tokens_after=request.tokens, notes=notes
    )


def build_result(
    request: CompactionRequest, replacement: Sequence[Block] | Replacement, by: str
) -> CompactionResult:
    """Return the result for the output of a strategy."""
    if not isinstance(replacement, Replacement):
        replacement = Replacement(tuple(replacement))
    changes = diff(Turn(request.blocks), Turn(replacement.blocks))
    if not changes:
        return replace(unchanged_result(request, by, *replacement.notes), usage=replacement.usage)
    before = request.size()
    removed = (*changes.removed, *(old for old, _ in changes.modified))
    added = (*changes.added, *(new for _, new in changes.modified))
    after = max(0, before - request.count(removed) + request.count(added))
    return CompactionResult(
        replacement.blocks, by, changes, before, after, replacement.notes, replacement.usage
    )


def check_component(role: str, component: object, method: str) -> None:
    """Check that a trigger, strategy or compactor is an instance with the method of its role.

    A wrong one would fail at the first compaction, where errors are caught: it would never run, and only a
    log record would show it.

    Raises:
        InvalidSetting: It is a class, a list, or an object without that method.
    """
    if isinstance(component, type):
        raise InvalidSetting(
            f"{role} must be an instance, not the class {component.__name__}: "
            f"call {component.__name__}(…) first"
        )
    if not callable(getattr(component, method, None)):
        raise InvalidSetting(
            f"{role} must have a method {method}(request), which {type(component).__name__} has not; "
            "check the number and the order of the arguments"
        )


def check_engine(engine: Engine | None) -> Engine | None:
    """Return the engine of a compactor; raise InvalidSetting if it is something else, such as a model string."""
    if engine is not None:
        check_component("engine", engine, "stream")
    return engine


def component_name(component: object) -> str:
    """Return the name of a trigger, strategy or compactor for the log."""
    name = getattr(component, "name", "")
    if isinstance(name, str) and name:
        return name
    return type(component).__name__


def context_tokens(usage: Usage) -> int:
    """Return the tokens of a context after an answer: input and output without reasoning."""
    if usage.context_tokens:
        return usage.context_tokens
    return max(0, usage.input_tokens + usage.output_tokens - usage.reasoning_tokens)


class TriggerGroup:
    """The base class of triggers that combine others."""

    def __init__(self, *triggers: CompactionTrigger) -> None:
        for trigger in triggers:
            check_component(f"a trigger of {type(self).__name__}", trigger, "should_compact")
        self.triggers = triggers

    async def _has(self, decision: bool, request: CompactionRequest) -> bool:
        """Return whether any trigger decides so; later ones are called only if needed."""
        for trigger in self.triggers:
            if bool(await await_value(trigger.should_compact(request))) is decision:
                return True
        return False


class AnyTrigger(TriggerGroup):
    """Compacts when any of its triggers does; later ones are called only if needed.

    Args:
        *triggers: The triggers.

    Raises:
        InvalidSetting: An argument is not a trigger.
    """

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether any of the triggers returns true."""
        return await self._has(True, request)


class AllTriggers(TriggerGroup):
    """Compacts when all of its triggers do; without any, never.

    Args:
        *triggers: The triggers.

    Raises:
        InvalidSetting: An argument is not a trigger.
    """

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether all of the triggers return true."""
        return bool(self.triggers) and not await self._has(False, request)


OVER_LIMIT_NOTE = "the newest exchange alone exceeds the limit; it remains complete"


@checked
def advance_to_first_user_message(blocks: Sequence[Block], start: int = 0) -> tuple[Block, ...]:
    """Return the blocks from the first user block at or after an index on.

    Args:
        blocks: The blocks.
        start: The index to start from.

    Returns:
        The blocks from there; empty if there is no user block.
    """
    for index in range(start, len(blocks)):
        if isinstance(blocks[index], UserBlock):
            return tuple(blocks[index:])
    return ()


@checked
def cut_points(blocks: Sequence[Block]) -> list[int]:
    """Return every index at which the history may begin, in order; the last is the newest exchange."""
    pairing = ToolPairing()
    points: list[int] = []
    for index, block in enumerate(blocks):
        is_message = isinstance(block, UserBlock) and block.origin != CORRECTION_ORIGIN
        if is_message and not pairing.open:
            points.append(index)
        pairing.add(index, block)
    return points


async def find_first_fit(
    points: Sequence[int], fits: Callable[[int], bool | Awaitable[bool]]
) -> tuple[int, bool]:
    """Return the earliest cut after which the rest fits, and True; else the last cut, and False.

    A later cut leaves fewer blocks, so this is a binary search.
    """
    low = 0
    high = len(points)
    while low < high:
        middle = (low + high) // 2
        if await await_value(fits(points[middle])):
            high = middle
        else:
            low = middle + 1
    if low < len(points):
        return points[low], True
    last = points[-1] if points else 0
    return last, False
