"""Contexts share their past, and the cache of them keeps within its bounds."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.server.storage.context import (
    EMPTY_CONTEXT,
    ITEM_OVERHEAD_BYTES,
    PART_OVERHEAD_BYTES,
    Context,
    ContextCache,
    extend_context,
)


def make_item(number: int) -> dict[str, int]:
    return {"number": number}


SIZE = 10 + PART_OVERHEAD_BYTES + ITEM_OVERHEAD_BYTES
"""What one part of a chain counts for."""


def make_chain(length: int, size: int = 10) -> list[Context]:
    contexts: list[Context] = []
    context = EMPTY_CONTEXT
    for number in range(length):
        items = [make_item(number)]
        context = extend_context(context, items, items, 1, size)
        contexts.append(context)
    return contexts


def test_a_context_is_its_parents_plus_its_own() -> None:
    """Items come oldest first and sums are kept along the way."""
    first, second = make_chain(2)
    assert second.parent is first
    assert second.list_items() == [make_item(0), make_item(1)]
    assert second.tokens == 2
    assert EMPTY_CONTEXT.list_items() == []


def test_the_last_parts_can_be_cut_off() -> None:
    """What a forgetful server would hold."""
    last = make_chain(5)[-1]
    assert last.last_parts(2).list_items() == [make_item(3), make_item(4)]
    assert last.last_parts(2).tokens == 2
    assert last.last_parts(0).list_items() == []
    assert last.last_parts(9).list_items() == last.list_items()


def test_the_cache_drops_the_ends_of_old_chains_first() -> None:
    """A context that others are built upon stays as long as they do."""
    cache = ContextCache(max_bytes=5 * SIZE)
    old, new = make_chain(3), make_chain(3)
    for number, context in enumerate(old):
        cache.put(number, number - 1 if number else None, context)
    for number, context in enumerate(new, start=10):
        cache.put(number, number - 1 if number > 10 else None, context)
    assert cache.get(2) is None
    assert cache.get(1) is old[1]
    assert all(cache.get(number) for number in (10, 11, 12))
    assert cache.used_bytes == 5 * SIZE


def test_what_cannot_be_counted_is_not_kept() -> None:
    """A context whose parent was dropped would hold on to it unseen."""
    cache = ContextCache(max_bytes=100_000)
    first, second = make_chain(2)
    cache.put(1, 0, second)
    assert cache.get(1) is None
    cache.put(0, None, first)
    cache.put(1, 0, second)
    assert cache.get(1) is second


def test_a_deleted_end_is_forgotten() -> None:
    """And frees its parent to be dropped in its turn."""
    cache = ContextCache(max_bytes=100_000)
    first, second = make_chain(2)
    cache.put(0, None, first)
    cache.put(1, 0, second)
    cache.discard(0)  # has a child: stays
    cache.discard(1)
    assert cache.get(1) is None
    assert cache.get(0) is first
    cache.clear()
    assert cache.get(0) is None
    assert cache.used_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40))), st.integers(0, 20_000))
def test_the_cache_never_exceeds_its_bound(steps: list[tuple[int, int]], most: int) -> None:
    """However chains grow and fork; and every cached context has its parent cached."""
    cache = ContextCache(max_bytes=most)
    contexts: dict[int, tuple[int | None, Context]] = {}
    for number, (parent, size) in enumerate(steps):
        above = contexts.get(parent)
        context = extend_context(
            above[1] if above else EMPTY_CONTEXT, [make_item(number)], [make_item(number)], 1, size
        )
        contexts[number] = (parent if above else None, context)
        cache.put(number, *contexts[number])
        assert cache.used_bytes <= most
        held = {n for n in contexts if n in cache._entries}
        assert sum(contexts[n][1].size for n in held) == cache.used_bytes
        assert all(contexts[n][0] is None or contexts[n][0] in held for n in held)
