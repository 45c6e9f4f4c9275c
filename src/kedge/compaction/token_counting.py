"""Counting the tokens of blocks, each of them once.

A conversation grows at its end, and compaction counts all of it again and again. Planning keeps the
digest of what a model sees of a block in the block itself; counts are remembered under that digest, so a
block that was counted before costs one look into a table, also after it went through state bytes.
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
"""How many counts of blocks are kept; each takes about 150 bytes."""


class BlockCounter:
    """A ``TokenCounter`` that also counts blocks, and remembers what it counted."""

    def __init__(self, counter: TokenCounter = DEFAULT_COUNTER) -> None:
        self._counter = counter
        self._counts: dict[bytes | None, int] = {}
        self._lock = Lock()

    @staticmethod
    def of(counter: TokenCounter) -> "BlockCounter":
        """The counter itself if it counts blocks; otherwise the one that does so by means of it."""
        if isinstance(counter, BlockCounter):
            return counter
        if counter is DEFAULT_COUNTER:
            return DEFAULT_BLOCK_COUNTER
        try:
            return _counters.setdefault(counter, BlockCounter(counter))
        except TypeError:  # neither hashed nor weakly held: nothing is remembered for it
            return BlockCounter(counter)

    def count_text(self, text: str) -> int:
        """Count the tokens of a text."""
        return self._counter.count_text(text)

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Count the tokens of wire items."""
        return self._counter.count_items(items)

    def count_blocks(self, blocks: Iterable[Block]) -> int:
        """Count the tokens of blocks."""
        blocks = tuple(blocks)
        # One look a block, in one sweep: nearly all of them are known.
        counts: list[int | None] = list(map(self._counts.get, map(get_cached_digest, blocks)))
        for place, tokens in enumerate(counts):
            if tokens is None:
                counts[place] = self.count_block(blocks[place])
        return sum(cast("list[int]", counts))

    def count_block(self, block: Block) -> int:
        """Count the tokens of one block."""
        leaf = get_cached_digest(block)
        if not leaf:  # never planned, or reasoning, of which no digest is kept
            return self._counter.count_items([_render_item(block)])
        known = self._counts.get(leaf)
        if known is None:
            known = self._counter.count_items([_render_item(block)])
            self._cache_count(leaf, known)
        return known

    def _cache_count(self, leaf: bytes, tokens: int) -> None:
        with self._lock:
            if len(self._counts) >= MAX_CACHED_COUNTS:
                # The oldest half goes at once: entries are in the order in which they came.
                for old in list(self._counts)[: MAX_CACHED_COUNTS // 2]:
                    del self._counts[old]
            self._counts[leaf] = tokens


def _render_item(block: Block) -> Mapping[str, Any]:
    try:
        return item_from_block(block)
    except UnsupportedBlock:
        # Not sendable as it is; it takes room nevertheless.
        return {"type": block.kind, **dump_block(block)}


DEFAULT_BLOCK_COUNTER = BlockCounter()
_counters: WeakKeyDictionary[TokenCounter, BlockCounter] = WeakKeyDictionary()
