"""Content filters: edit or reject the content of blocks, for every component that sends or stores it.

A middleware processes a Turn only at its position in the stack, but content is added to a Turn at several
positions: tools append results inside a guard, a compactor sends history to a model outside of one, a
conversation stores blocks without any run. So a request carries the filters of all middlewares of the
stack, next to the position-dependent ones, and every component that sends or stores content applies them.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Literal, Protocol, TypeVar, cast

from kedge.turns.blocks import Block
from kedge.turns.turn import Turn

B = TypeVar("B", bound=Block)
Phase = Literal["input", "output"]
"""Content on its way to a model, or on its way from a model to the caller and the store."""
Phases = Iterable[Phase]
BOTH: tuple[Phase, ...] = ("output", "input")


class ContentFilter(Protocol):
    """Edits or rejects content; a middleware lists its filters in ``Engine.content_filters``."""

    @property
    def holds_output(self) -> bool:
        """Whether the content of an answer is shown only when it is complete."""
        ...

    def filter_block(self, block: Block, phase: Phase) -> Block:
        """Return the filtered block; the identical block if nothing changed.

        Raises:
            Blocked: A rule rejects the content.
        """
        ...

    def edit_text(self, text: str) -> str:
        """Return the text without anything that a rule of either phase matches. Never raises."""
        ...


Filters = Iterable[ContentFilter]


class ContentFilters(tuple[ContentFilter, ...]):
    """All content filters of one stack, outermost first, with their cached results for one run.

    Results are cached by block identity: applying the filters at every boundary of a run costs one
    lookup per block, and the same block always becomes the same block, so that a stored prefix is
    recognized as unchanged.
    """

    @cached_property
    def _results(self) -> dict[tuple[int, Phase, int], tuple[Block, Block]]:
        """The results, each with its block, which stays alive, so that its id is not reused."""
        return {}

    def with_filter(self, added: ContentFilter) -> "ContentFilters":
        """Return filters that contain ``added``; the same object if it contains ``added`` already."""
        if added in self:
            return self
        return ContentFilters((*self, added))

    def apply(self, block: B, phases: Phases = BOTH, filters: Filters | None = None) -> B:
        """Return the block after the filters.

        Args:
            block: The block.
            phases: The directions whose rules apply.
            filters: The filters to apply instead of all.

        Raises:
            Blocked: A rule rejects the content.
        """
        if filters is None:
            filters = self
        for phase in phases:
            for content_filter in filters:
                block = self._apply_one(content_filter, block, phase)
        return block

    def apply_to_turn(
        self, turn: Turn, phases: Phases = BOTH, filters: Filters | None = None
    ) -> Turn:
        """Return the Turn with every block filtered; the identical Turn if nothing changed. See ``apply``.

        Raises:
            Blocked: A rule rejects the content.
        """
        if filters is None:
            filters = self
        filters = tuple(filters)
        if not filters:
            return turn
        return turn.with_blocks(self.apply(block, phases, filters) for block in turn.blocks)

    def edit_text(self, text: str) -> str:
        """Return the text without anything that a rule matches. Never raises."""
        for content_filter in self:
            text = content_filter.edit_text(text)
        return text

    def _apply_one(self, content_filter: ContentFilter, block: B, phase: Phase) -> B:
        key = (id(content_filter), phase, id(block))
        cached = self._results.get(key)
        if cached is None:
            result = content_filter.filter_block(block, phase)
            cached = (block, result)
            self._results[key] = cached
            # A result is final: a replacement that matches its own pattern is not replaced again.
            self._results[id(content_filter), phase, id(result)] = (result, result)
        return cast("B", cached[1])  # a filter never changes the kind of a block
