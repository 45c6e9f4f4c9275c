"""Split surrogate pairs are joined, and lone surrogates become U+FFFD."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kedge.wire.fields import SurrogateJoiner, repair_surrogates

HIGH = "\ud83d"
LOW = "\ude00"


def test_surrogates_are_joined_or_replaced() -> None:
    """A pair becomes one character and a lone surrogate U+FFFD, also in the keys and strings of a nested value."""
    assert repair_surrogates(f"a{HIGH}{LOW}b") == "a\U0001f600b"
    assert repair_surrogates(f"a{HIGH}b{LOW}{HIGH}") == "a\ufffdb\ufffd\ufffd"
    nested = repair_surrogates({f"k{HIGH}": [f"{HIGH}{LOW}", 1, None, {"x": LOW}]})
    assert nested == {"k\ufffd": ["\U0001f600", 1, None, {"x": "\ufffd"}]}


def test_high_surrogate_waits_for_the_low_one() -> None:
    """A trailing high surrogate is held back until the next text under the same key."""
    split = SurrogateJoiner()
    assert split.feed("k", f"a{HIGH}") == "a"
    assert split.feed("other", "b") == "b"
    assert split.feed("k", f"{LOW}c") == "\U0001f600c"
    assert split.feed("k", HIGH) == ""
    split.discard("k")
    assert split.feed("k", LOW) == "\ufffd"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_text_split_between_code_units_is_joined(text: str, data: st.DataObject) -> None:
    """The joined deltas add up to the text, and no delta contains a surrogate."""
    raw = text.encode("utf-16-le")
    units = [raw[at : at + 2] for at in range(0, len(raw), 2)]
    positions = sorted(data.draw(st.lists(st.integers(0, len(units)), max_size=8)))
    edges = [0, *positions, len(units)]
    chunks = [
        b"".join(units[a:b]).decode("utf-16-le", "surrogatepass")
        for a, b in itertools.pairwise(edges)
    ]
    split = SurrogateJoiner()
    given_out = [split.feed("k", chunk) for chunk in chunks]
    assert "".join(given_out) == text
    assert not any(repair_surrogates(chunk) != chunk for chunk in given_out)
