"""Contexts share their ancestors, and the caches of contexts are bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.server.practice_model.items import message_count
from kedge.server.practice_model.request import Item
from kedge.server.storage.context import (
    EMPTY_CONTEXT,
    ITEM_OVERHEAD_BYTES,
    PART_OVERHEAD_BYTES,
    Context,
    ContextCache,
    ContextItems,
    SocketMemory,
    extend_context,
)


def make_item(number: int) -> dict[str, int]:
    return {"number": number}


def make_message(text: str) -> Item:
    return {"id": f"msg_{text}", "type": "message", "role": "user", "content": text}


SIZE = 10 + PART_OVERHEAD_BYTES + ITEM_OVERHEAD_BYTES
"""The size of one part of a chain in bytes."""


def make_chain(length: int, size: int = 10) -> list[Context]:
    contexts: list[Context] = []
    context = EMPTY_CONTEXT
    for number in range(length):
        items = [make_item(number)]
        context = extend_context(context, items, items, 1, size)
        contexts.append(context)
    return contexts


def test_model_items_are_context_items_and_new_items() -> None:
    """Indexing, slicing and iterating give the same items as a plain list, and messages are counted."""
    context = EMPTY_CONTEXT
    for number in range(3):
        items: list[Item] = [make_message(f"{number}"), {"id": f"rs_{number}", "type": "reasoning"}]
        context = extend_context(context, items, items, tokens=1, size=1)
    new = [make_message("new"), make_message("newer")]
    expected = [*context.list_model_items(), *new]
    positions = range(-len(expected), len(expected))
    assert [ContextItems(context, new)[index] for index in positions] == [
        expected[index] for index in positions
    ]
    for part in (slice(-1), slice(1), slice(1, None), slice(6, None), slice(7, 9), slice(7, 2)):
        assert list(ContextItems(context, new)[part]) == expected[part]
    assert list(ContextItems(context, new)[::-2]) == expected[::-2]
    assert list(reversed(ContextItems(context, new))) == expected[::-1]
    assert list(ContextItems(context, new)) == expected
    with pytest.raises(IndexError):
        ContextItems(context, new)[len(expected)]
    assert message_count(ContextItems(context, new)) == message_count(expected) == 5


def test_digests_do_not_depend_on_when_they_are_computed() -> None:
    """A context has the same prefixes whether or not its parents have computed their digests."""

    def extend(*, compute: bool) -> list[tuple[bytes, int]]:
        context = EMPTY_CONTEXT
        for number in range(4):
            items = [make_message(f"{number}")] if number else []
            context = extend_context(context, items, items, tokens=number, size=1)
            if compute:
                context.compute_digests()
        return list(context.iter_prefixes())

    assert extend(compute=True) == extend(compute=False)
    assert len(extend(compute=False)) == 3


def test_digests_do_not_depend_on_the_parts_of_a_context() -> None:
    """The prefixes are those of the items, however many of them each request added."""
    items = [make_message(f"{number}") for number in range(4)]
    whole = extend_context(EMPTY_CONTEXT, items, items, tokens=1, size=1)
    context = EMPTY_CONTEXT
    for part in (items[:1], items[1:3], items[3:]):
        context = extend_context(context, part, part, tokens=1, size=1)
    digests = [digest for digest, _ in context.iter_prefixes()]
    assert digests == [digest for digest, _ in whole.iter_prefixes()]
    assert len(set(digests)) == 4


def put_chain(cache: ContextCache, first: int, length: int = 3) -> list[Context]:
    """Cache the contexts of a chain by consecutive numbers, and return them."""
    contexts = make_chain(length)
    parent: int | None = None
    for number, context in enumerate(contexts, start=first):
        cache.put(number, parent, context)
        parent = number
    return contexts


def list_cached(cache: ContextCache, *numbers: int) -> list[int]:
    """Return which of these numbers have a cached context."""
    return [number for number in numbers if cache.get(number) is not None]


def test_cache_drops_old_leaves_first() -> None:
    """A context remains in the cache while the cache has a child of it."""
    cache = ContextCache(max_bytes=5 * SIZE)
    old = put_chain(cache, 0)
    put_chain(cache, 10)
    assert list_cached(cache, 0, 1, 2, 10, 11, 12) == [0, 1, 10, 11, 12]
    assert cache.get(1) is old[1]
    assert cache.used_bytes == 5 * SIZE


def test_only_a_leaf_is_discarded() -> None:
    """A context becomes a leaf when its last child is discarded."""
    cache = ContextCache(max_bytes=5 * SIZE)
    root, *_ = put_chain(cache, 10)
    cache.discard(11)
    assert list_cached(cache, 10, 11, 12) == [10, 11, 12]
    cache.discard(12)
    assert list_cached(cache, 10, 11, 12) == [10, 11]
    cache.put(20, 10, extend_context(root, (), (), 0, 10))
    cache.discard(20)
    cache.discard(10)  # still has a child
    assert list_cached(cache, 10, 11) == [10, 11]
    cache.discard(11)
    cache.discard(10)
    assert list_cached(cache, 10, 11) == []


def test_a_cleared_cache_is_empty() -> None:
    """No context is left, and no size."""
    cache = ContextCache(max_bytes=5 * SIZE)
    put_chain(cache, 0)
    cache.clear()
    assert list_cached(cache, 0, 1, 2) == []
    assert cache.used_bytes == 0


def test_what_was_used_last_is_dropped_last() -> None:
    """A context counts as used when it is read, and not when its last child is dropped."""
    cache = ContextCache(max_bytes=3 * SIZE)
    root, child, *others = [*make_chain(2), *(make_chain(1)[0] for _ in range(3))]
    cache.put(0, None, root)
    cache.put(1, 0, child)
    cache.put(10, None, others[0])
    cache.put(11, None, others[1])
    cache.put(12, None, others[2])
    assert list_cached(cache, 0, 1, 10, 11, 12) == [10, 11, 12]
    cache.get(10)
    cache.put(1, None, root)
    assert list_cached(cache, 10, 11, 12) == [10, 12]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40))), st.integers(0, 20_000))
def test_the_cache_never_exceeds_its_bound(steps: list[tuple[int, int]], maximum: int) -> None:
    """The cache stays within its limit, and each cached context has its parent cached."""
    cache = ContextCache(max_bytes=maximum)
    contexts: dict[int, tuple[int | None, Context]] = {}
    for number, (parent, size) in enumerate(steps):
        above = contexts.get(parent)
        context = extend_context(
            above[1] if above else EMPTY_CONTEXT, [make_item(number)], [make_item(number)], 1, size
        )
        contexts[number] = (parent if above else None, context)
        cache.put(number, *contexts[number])
        assert cache.used_bytes <= maximum
        cached = {n for n in contexts if n in cache._entries}
        assert sum(contexts[n][1].size for n in cached) == cache.used_bytes
        assert all(contexts[n][0] is None or contexts[n][0] in cached for n in cached)


def make_context(size: int, parent: Context = EMPTY_CONTEXT) -> Context:
    """Return a context about this many bytes larger than its parent."""
    return extend_context(parent, [], [], 0, size)


def list_found(memory: SocketMemory, *ids: str) -> list[str]:
    """Return which of these responses are in the memory of a connection."""
    return [id_ for id_ in ids if memory.find(id_) is not None]


def test_least_recently_used_lane_is_dropped_first() -> None:
    """The size of a response in the memory of a connection includes its ancestors."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(1_000))
    memory.store("b", "resp_2", make_context(1_000, make_context(500)))
    memory.store("a", "resp_3", make_context(1_000))
    memory.store("c", "resp_4", make_context(500))
    assert list_found(memory, "resp_2", "resp_3", "resp_4") == ["resp_3", "resp_4"]


def test_the_newest_response_is_never_dropped() -> None:
    """A response that is larger than the memory replaces all others."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(500))
    memory.store("b", "resp_2", make_context(9_000))
    assert list_found(memory, "resp_1", "resp_2") == ["resp_2"]


def test_a_lane_forgets_only_the_response_that_is_named() -> None:
    """A newer response of the lane remains."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_2", make_context(500))
    memory.forget("a", "resp_1")
    assert list_found(memory, "resp_2") == ["resp_2"]
    memory.forget("a", "resp_2")
    assert len(memory) == 0


def test_a_stored_response_replaces_the_previous_one_of_its_lane() -> None:
    """The database has it, so it takes no memory."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(500))
    memory.store("a", "resp_2", None)
    assert list_found(memory, "resp_1", "resp_2") == []
    assert len(memory) == 0


def test_a_cleared_memory_can_be_filled_again() -> None:
    """Its size is that of an empty memory."""
    memory = SocketMemory(4_500)
    for _ in range(2):
        memory.clear()
        for lane in "ab":
            memory.store(lane, lane, make_context(1_500))
        assert list_found(memory, "a", "b") == ["a", "b"]
