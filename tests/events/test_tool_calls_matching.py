"""Matching the items of two lists."""

from operator import itemgetter

from hypothesis import given
from hypothesis import strategies as st

from kedge.events.tool_calls import match_items

BY_ID, BY_INDEX = (itemgetter(0), itemgetter(0)), (itemgetter(1), itemgetter(1))

Item = tuple[str, int]


def test_first_key_has_precedence() -> None:
    """A match by the first key takes precedence over an earlier match by the second key."""
    known: list[Item] = [("a", 0), ("b", 1)]
    assert match_items([("x", 1), ("b", 0)], known, BY_ID, BY_INDEX) == [None, ("b", 1)]
    assert match_items([("x", 0), ("b", 7)], known, BY_ID, BY_INDEX) == [("a", 0), ("b", 1)]


def test_empty_key_does_not_match() -> None:
    """Two items with an empty key are not matched by it."""
    assert match_items([("", 5)], [("", 0)], BY_ID) == [None]


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3)), max_size=6),
    st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3)), max_size=6),
)
def test_no_match_is_used_twice(listed: list[Item], known: list[Item]) -> None:
    """Each known item is matched with at most one listed item."""
    numbered = list(enumerate(known))
    pairs = match_items(
        listed,
        numbered,
        (itemgetter(0), lambda each: each[1][0]),
        (itemgetter(1), lambda each: each[1][1]),
    )
    claimed = [each[0] for each in pairs if each is not None]
    assert len(claimed) == len(set(claimed))
    assert len(pairs) == len(listed)
