"""Long runs of blanks are counted separately without changing the count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge import tokens

BLANKS = [" ", "\t", "\x0c", "\u00a0", "\u2003", "\u3000"]


def count_pieces(text: str) -> int:
    return sum(len(tokens.get_encoding().encode_ordinary(part)) for part in tokens.split_text(text))


def count_exact(text: str) -> int:
    return len(tokens.get_encoding().encode_ordinary(text))


@for_each(
    ("blank", "before", "after"),
    [(blank, "x", "y") for blank in BLANKS]
    + [(" ", "", ""), (" ", "a\n", "."), ("\u3000", "\n", "\n")],
)
def test_a_run_of_one_blank_is_counted_exactly(blank: str, before: str, after: str) -> None:
    """A long run of one blank character is counted exactly, with any text before and after it."""
    text = before + blank * 150_011 + after
    assert count_pieces(text) == count_exact(text)


def test_run_of_mixed_blanks_is_counted_approximately() -> None:
    """Each split inside a run of mixed blanks adds at most two tokens and never removes one."""
    text = "x" + " \t\u00a0\t" * 40_001 + "y"
    cuts = sum(1 for _ in tokens.split_text(text))
    assert 0 <= count_pieces(text) - count_exact(text) <= 2 * cuts


small = st.lists(
    st.sampled_from(["a", "B", "1", ".", "'s", "\n", "\r\n", "/", "\x1c"])
    | st.builds(str.__mul__, st.sampled_from([" ", "\t"]), st.integers(1, 40)),
    max_size=12,
).map("".join)


@given(small)
def test_splitting_runs_does_not_change_the_count(text: str) -> None:
    """Splitting a text at long runs does not change its count, for any text and low limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "MAX_BLANK_RUN", 4)
        patch.setattr(tokens, "CHUNK_LENGTH", 1_000)
        patch.setattr(tokens, "_LONG_RUN_PATTERN", tokens.compile_long_run(4))
        assert "".join(tokens.split_text(text)) == text
        if "\t" not in text or " " not in text:
            assert count_pieces(text) == count_exact(text)
