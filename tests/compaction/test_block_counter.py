"""Counting the tokens of blocks, with caching."""

from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from compaction.histories import make_exchanges
from kedge.compaction import BlockCounter, base
from kedge.planning import prefix_digest
from kedge.turns import Block, Turn, item_from_block, reasoning
from kedge.usage.tokens import DEFAULT_COUNTER, TiktokenCounter, count_items
from strategies import blocks


class RecordingCounter(TiktokenCounter):
    """A counter that records how many items it has counted."""

    item_count = 0

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Return the default count of items, and add their number to ``item_count``."""
        item_list = list(items)
        self.item_count += len(item_list)
        return super().count_items(item_list)


def test_only_new_blocks_are_counted() -> None:
    """Blocks with a digest are counted once, even in other objects; reasoning, which has none, each time."""
    counter = RecordingCounter()
    blocks = BlockCounter(counter)
    prefix_digest(Turn(make_exchanges(10)))
    for length in (10, 11, 12):
        turn = Turn([*make_exchanges(length), reasoning("one two three"), reasoning("one")])
        prefix_digest(turn)
        assert blocks.count_blocks(turn.blocks) == count_items(map(item_from_block, turn.blocks))
    assert counter.item_count == 24 + 3 * 2


@given(st.lists(blocks(), max_size=4))
def test_any_block_has_a_count(block_list: list[Block]) -> None:
    """Every block has a count, even one that cannot be sent."""
    assert BlockCounter().count_blocks(block_list) >= 4 * len(block_list)


def test_counter_is_wrapped_once() -> None:
    """The wrapper of a counter is reused, and a counter that cannot be hashed gets a new one."""
    counter = RecordingCounter()
    assert BlockCounter.of(counter) is BlockCounter.of(counter)
    assert BlockCounter.of(DEFAULT_COUNTER) is base.DEFAULT_BLOCK_COUNTER
    block_counter = BlockCounter()
    assert BlockCounter.of(block_counter) is block_counter

    class Slotted(RecordingCounter):
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

    assert BlockCounter.of(Slotted()).count_text("a") == 1
    assert BlockCounter().count_items([{"type": "message", "content": "a"}]) == 5


def test_cache_is_bounded(monkeypatch: Any) -> None:
    """The cache drops the oldest counts first."""
    monkeypatch.setattr(base, "MAX_CACHED_COUNTS", 8)
    counter = RecordingCounter()
    blocks = BlockCounter(counter)
    turn = Turn(make_exchanges(10))
    prefix_digest(turn)
    blocks.count_blocks(turn.blocks)
    assert len(blocks._counts) <= 8
    blocks.count_blocks(turn.blocks[-2:])
    assert counter.item_count == 20
