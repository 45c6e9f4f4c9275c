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


def test_cache_drops_old_leaves_first() -> None:
    """A context remains in the cache while the cache has a child of it; only a leaf can be discarded."""
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
    cache.discard(11)  # has a child: not discarded
    cache.discard(12)
    assert [bool(cache.get(number)) for number in (10, 11, 12)] == [True, True, False]
    cache.put(20, 10, extend_context(new[0], (), (), 0, 10))
    cache.discard(20)
    cache.discard(10)  # still has a child
    assert cache.get(10)
    cache.clear()
    assert cache.get(10) is None
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
    assert [bool(cache.get(number)) for number in (0, 1, 10, 11, 12)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    cache.get(10)
    cache.put(1, None, root)
    assert [bool(cache.get(number)) for number in (10, 11, 12)] == [True, False, True]


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


def test_least_recently_used_lane_is_dropped_first() -> None:
    """The memory of a connection counts ancestors, and has the newest response even if it is too large."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(1_000))
    memory.store("b", "resp_2", make_context(1_000, make_context(500)))
    memory.store("a", "resp_3", make_context(1_000))
    memory.store("c", "resp_4", make_context(500))
    assert memory.find("resp_2") is None
    assert memory.find("resp_3")
    assert memory.find("resp_4")
    memory.store("d", "resp_5", make_context(9_000))
    assert memory.find("resp_4") is None
    assert memory.find("resp_5")
    memory.forget("d", "resp_4")
    assert memory.find("resp_5")
    memory.store("d", "resp_6", None)  # the database has it
    assert memory.find("resp_5") is None
    assert len(memory) == 0
    for _ in range(2):
        memory.clear()
        for lane in "ab":
            memory.store(lane, lane, make_context(1_500))
        assert [lane for lane in "ab" if memory.find(lane)] == ["a", "b"]
