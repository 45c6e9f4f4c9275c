"""Count the tokens of blocks, each of them once.

A conversation grows at its end, and compaction counts all of it each time. Planning caches the digest of what
a model sees of a block in the block itself; counts are cached under that digest, so a block that was counted
before costs one lookup, also after it went through state bytes.
"""

from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

from kedge.errors import UnsupportedBlock
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import Block, dump_block, item_from_block
from kedge.turns.blocks import get_cached_digest

MAX_CACHED_COUNTS = 65_536
"""The maximum number of cached counts; each takes about 150 bytes."""


class BlockCounter:
    """A ``TokenCounter`` that also counts blocks, with a cache.

    Args:
        counter: Counts texts and items.
    """

    def __init__(self, counter: TokenCounter = DEFAULT_COUNTER) -> None:
        self._counter = counter
        self._counts: dict[bytes | None, int] = {}
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
        except TypeError:  # neither hashable nor weakly referenced: nothing is cached for it
            return BlockCounter(counter)

    def count_text(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._counter.count_text(text)

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Return the tokens of wire items."""
        return self._counter.count_items(items)

    def count_blocks(self, blocks: Iterable[Block]) -> int:
        """Return the tokens of blocks."""
        blocks = tuple(blocks)
        # One lookup per block, in one pass: nearly all of them are known.
        counts: list[int | None] = list(map(self._counts.get, map(get_cached_digest, blocks)))
        for index, tokens in enumerate(counts):
            if tokens is None:
                counts[index] = self.count_block(blocks[index])
        return sum(cast("list[int]", counts))

    def count_block(self, block: Block) -> int:
        """Return the tokens of one block."""
        leaf = get_cached_digest(block)
        if not leaf:  # never planned, or reasoning, which has no digest
            return self._counter.count_items([_render_item(block)])
        known = self._counts.get(leaf)
        if known is None:
            known = self._counter.count_items([_render_item(block)])
            self._cache_count(leaf, known)
        return known

    def _cache_count(self, leaf: bytes, tokens: int) -> None:
        with self._lock:
            if len(self._counts) >= MAX_CACHED_COUNTS:
                # The oldest half is removed at once: entries are in insertion order.
                for old in list(self._counts)[: MAX_CACHED_COUNTS // 2]:
                    del self._counts[old]
            self._counts[leaf] = tokens


def _render_item(block: Block) -> Mapping[str, Any]:
    try:
        return item_from_block(block)
    except UnsupportedBlock:
        # Not sendable, but part of the size nevertheless.
        return {"type": block.kind, **dump_block(block)}


DEFAULT_BLOCK_COUNTER = BlockCounter()
_counters: WeakKeyDictionary[TokenCounter, BlockCounter] = WeakKeyDictionary()
