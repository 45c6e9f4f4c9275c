"""What compaction is made of: when (a trigger), how (a strategy), and both at once (a compactor).

A strategy takes a request and gives the blocks that shall stay, and that is all it must do; what was
removed and how many tokens it saved is worked out from there. Triggers and strategies may be plain or
async methods, so a custom trigger is three lines long.
"""

from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from itertools import accumulate
from typing import Literal, Protocol, TypeVar, cast

from kedge.compaction.token_counting import BlockCounter
from kedge.engines import Engine
from kedge.events import Usage
from kedge.events.types import Event
from kedge.planning import ConversationState, set_state
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import Block, Turn, TurnDiff, diff

T = TypeVar("T")

Occasion = Literal["answered", "pending", "resend"]
"""When compaction runs: after an answer, before a call, or before everything is sent once more."""


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """What a compactor is asked to make shorter.

    ``blocks`` is the conversation without its ``leading`` system blocks, which are never compacted.
    ``usage`` is what the server said of its last answer, ``tokens`` the size if somebody counted
    already. ``state`` holds the anchors, so that a model can be asked about the old part as a fork of the
    conversation rather than by sending it all again.
    """

    blocks: tuple[Block, ...]
    leading: tuple[Block, ...] = ()
    usage: Usage | None = None
    engine: Engine | None = None
    tokens: int | None = None
    counter: TokenCounter = DEFAULT_COUNTER
    occasion: Occasion = "answered"
    state: ConversationState = field(default_factory=ConversationState)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "leading", tuple(self.leading))
        object.__setattr__(self, "counter", BlockCounter.of(self.counter))

    @property
    def forced(self) -> bool:
        """Whether compaction is wanted whatever the triggers say."""
        return self.occasion == "resend"

    def count(self, blocks: Iterable[Block]) -> int:
        """Count the tokens of some blocks; those that were counted before cost next to nothing."""
        return cast("BlockCounter", self.counter).count_blocks(blocks)

    def size(self) -> int:
        """The tokens of the conversation: as counted already, as the server said, or counted now."""
        if self.tokens is not None:
            return self.tokens
        if self.usage is not None:
            return context_tokens(self.usage)
        return self.count(self.leading) + self.count(self.blocks)

    def suffix_tokens(self) -> list[int]:
        """For every place, the tokens of the blocks from there to the end."""
        counts = [self.count([block]) for block in reversed(self.blocks)]
        return [0, *accumulate(counts)][::-1]

    def build_turn(self, blocks: Sequence[Block]) -> Turn:
        """A Turn of some of the blocks that can be sent to the engine, on its anchors."""
        return set_state(Turn(blocks), self.state)

    def next_request(self, result: "CompactionResult") -> "CompactionRequest":
        """The request for whoever comes next: it sees what the one before has left."""
        if not result.changed:
            return self
        return replace(self, blocks=result.blocks, usage=None, tokens=result.tokens_after)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a strategy may return instead of bare blocks, if it has more to say."""

    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    """What a person should know, such as a limit that could not be met."""
    usage: Usage | None = None
    """The tokens that a model took to make it."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What compaction did: the blocks that stay, what changed, and the tokens before and after.

    The tokens are known whenever something changed.
    """

    blocks: tuple[Block, ...]
    by: str = ""
    changes: TurnDiff = field(default_factory=TurnDiff)
    tokens_before: int | None = None
    tokens_after: int | None = None
    notes: tuple[str, ...] = ()
    usage: Usage | None = None

    @property
    def changed(self) -> bool:
        """Whether anything was removed, shortened or summarised."""
        return bool(self.changes)

    @property
    def removed(self) -> tuple[Block, ...]:
        """The blocks that are gone."""
        return self.changes.removed

    @property
    def added(self) -> tuple[Block, ...]:
        """The blocks that stand for them, such as a summary."""
        return self.changes.added

    def __str__(self) -> str:
        if not self.changed:
            return "; ".join(("not compacted", *self.notes))
        count = f"-{len(self.removed)} +{len(self.added)} ~{len(self.changes.modified)} blocks"
        tokens = f"{self.tokens_before} to {self.tokens_after} tokens"
        return "; ".join((f"compacted by {self.by}: {count}, {tokens}", *self.notes))


@dataclass(frozen=True, slots=True)
class TurnCompacted(Event):
    """Old blocks of the Turn were replaced by fewer, or could not be."""

    result: CompactionResult
    occasion: Occasion


class Compactor(Protocol):
    """Decides when to compact, and does it."""

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Make the conversation shorter, if it is time to."""
        ...


class CompactionTrigger(Protocol):
    """Decides when to compact."""

    def should_compact(self, request: CompactionRequest) -> bool | Awaitable[bool]:
        """Whether it is time to."""
        ...


class CompactionStrategy(Protocol):
    """Decides what stays."""

    def compact_blocks(
        self, request: CompactionRequest
    ) -> Sequence[Block] | Replacement | Awaitable[Sequence[Block] | Replacement]:
        """The blocks that stay, in their order, and what stands for the others."""
        ...


async def compact_if_triggered(
    trigger: CompactionTrigger, strategy: CompactionStrategy, request: CompactionRequest, *, by: str
) -> CompactionResult:
    """Run a strategy if its trigger says so (or compaction is forced)."""
    if not request.forced and not await resolve(trigger.should_compact(request)):
        return unchanged_result(request, by)
    return build_result(request, await resolve(strategy.compact_blocks(request)), by)


def unchanged_result(request: CompactionRequest, by: str, *notes: str) -> CompactionResult:
    """The result of leaving everything as it is."""
    return CompactionResult(
        request.blocks, by, tokens_before=request.tokens, tokens_after=request.tokens, notes=notes
    )


def build_result(
    request: CompactionRequest, replacement: Sequence[Block] | Replacement, by: str
) -> CompactionResult:
    """The result of what a strategy made."""
    if not isinstance(replacement, Replacement):
        replacement = Replacement(tuple(replacement))
    changes = diff(Turn(request.blocks), Turn(replacement.blocks))
    if not changes:
        return replace(unchanged_result(request, by, *replacement.notes), usage=replacement.usage)
    before = request.size()
    gone = (*changes.removed, *(old for old, _ in changes.modified))
    come = (*changes.added, *(new for _, new in changes.modified))
    after = max(0, before - request.count(gone) + request.count(come))
    return CompactionResult(
        replacement.blocks, by, changes, before, after, replacement.notes, replacement.usage
    )


def component_name(component: object) -> str:
    """The name under which a trigger, strategy or compactor is logged."""
    name = getattr(component, "name", "")
    return name if isinstance(name, str) and name else type(component).__name__


def context_tokens(usage: Usage) -> int:
    """The tokens of a context after an answer: all that went in and out, without thoughts."""
    return max(0, usage.input_tokens + usage.output_tokens - usage.reasoning_tokens)


async def resolve(value: T | Awaitable[T]) -> T:
    """The value, awaited if it has to be."""
    return await value if isawaitable(value) else cast("T", value)


class AnyTrigger:
    """Compacts when one of its triggers would; the later ones are asked only if needed."""

    def __init__(self, *triggers: CompactionTrigger) -> None:
        self.triggers = triggers

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether one of them says so."""
        for trigger in self.triggers:
            if await resolve(trigger.should_compact(request)):
                return True
        return False


class AllTriggers:
    """Compacts when all of its triggers would; without any, never."""

    def __init__(self, *triggers: CompactionTrigger) -> None:
        self.triggers = triggers

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether all of them say so."""
        for trigger in self.triggers:
            if not await resolve(trigger.should_compact(request)):
                return False
        return bool(self.triggers)
