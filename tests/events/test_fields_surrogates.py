"""Torn characters: halves that meet become one, lone halves become U+FFFD."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kedge.events.fields import (
    SurrogateJoiner,
    has_surrogates,
    join_surrogates,
    repair_surrogates,
)

HIGH, LOW = "\ud83d", "\ude00"


def test_halves_that_meet_become_one_character() -> None:
    """As JSON means them."""
    assert join_surrogates(f"a{HIGH}{LOW}b") == "a\U0001f600b"


def test_lone_halves_are_replaced_one_by_one() -> None:
    """Nothing else is lost with them."""
    assert join_surrogates(f"a{HIGH}b{LOW}{HIGH}") == "a\ufffdb\ufffd\ufffd"


def test_a_nested_value_is_repaired() -> None:
    """Texts and keys, in objects and arrays; everything else is left as it is."""
    assert repair_surrogates({f"k{HIGH}": [f"{HIGH}{LOW}", 1, None, {"x": LOW}]}) == {
        "k\ufffd": ["\U0001f600", 1, None, {"x": "\ufffd"}]
    }


def test_only_torn_text_is_torn() -> None:
    """Whole characters of any plane are whole."""
    assert not has_surrogates("plain")
    assert not has_surrogates("Zürich \U0001f600")
    assert has_surrogates(f"x{LOW}")


def test_a_first_half_waits_for_its_second() -> None:
    """And not longer than that."""
    split = SurrogateJoiner()
    assert split.feed("k", f"a{HIGH}") == "a"
    assert split.feed("other", "b") == "b"
    assert split.feed("k", f"{LOW}c") == "\U0001f600c"
    assert split.feed("k", HIGH) == ""
    split.discard("k")
    assert split.feed("k", LOW) == "\ufffd"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_any_text_cut_between_any_two_code_units_is_put_together(
    text: str, data: st.DataObject
) -> None:
    """Cut where JSON escapes can be cut, the deltas add up to the text and each is clean."""
    raw = text.encode("utf-16-le")
    units = [raw[at : at + 2] for at in range(0, len(raw), 2)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(units)), max_size=8)))
    edges = [0, *cuts, len(units)]
    pieces = [
        b"".join(units[a:b]).decode("utf-16-le", "surrogatepass")
        for a, b in itertools.pairwise(edges)
    ]
    split = SurrogateJoiner()
    given_out = [split.feed("k", piece) for piece in pieces]
    assert "".join(given_out) == text
    assert not any(has_surrogates(piece) for piece in given_out)
