"""The first ASCII texts of a process are counted as tiktoken counts them."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.tokens import ascii_counter
from kedge.tokens.ascii_counter import AsciiCounter
from kedge.tokens.counter import get_encoding
from kedge.tokens.o200k_base import read_vocabulary

load_vocabulary = cache(read_vocabulary)


def count_with_tiktoken(text: str) -> int:
    return len(get_encoding().encode_ordinary(text))


words = st.sampled_from(["The", " quick", " brown's", "I'LL", "'tis", " fooBar", "HTTPServer"])
other_words = st.sampled_from(["antidisestablishmentarianism", "qzxvw", "snake_case", "123456"])
signs = st.sampled_from(['{"name":', '"},', "/v1/", "<|endoftext|>", "://", "...", "='"])
blanks = st.sampled_from(["\r\n", "\n\n", "  ", " \t", "\x0b", "\x0c", "\x1c", "\x1f", "\x00"])
ascii_texts = (
    st.lists(words | other_words | signs | blanks, max_size=30).map("".join)
    | st.text(st.characters(max_codepoint=127))
    | st.text("aAsS' \n\r\t.,/9", max_size=60)
)


@given(ascii_texts)
def test_count_equals_tiktoken(text: str) -> None:
    """Any text that is counted has the number of tokens of tiktoken; nearly every text is counted."""
    count = AsciiCounter(load_vocabulary()).count(text)
    longest = max(map(len, ascii_counter._PIECE.findall(text)), default=0)
    if longest > ascii_counter.MAX_PIECE_LENGTH:
        assert count is None
    else:
        assert count == count_with_tiktoken(text)


def test_every_ascii_pair_is_counted_as_by_tiktoken() -> None:
    """Every pair of ASCII characters is split and counted as by tiktoken, between two words."""
    counter = AsciiCounter(load_vocabulary())
    counter._remaining_length = 1_000_000
    for first in map(chr, range(128)):
        text = "".join(f"ab{first}{chr(second)}Cd" for second in range(128))
        assert counter.count(text) == count_with_tiktoken(text)


@pytest.mark.parametrize("text", ["ü", "a\u017f", "x" * 65, " " * 1_000, "a b " * 2_501])
def test_other_texts_are_not_counted(text: str) -> None:
    """Texts with other characters, long words and long texts are not counted."""
    assert AsciiCounter(load_vocabulary()).count(text) is None


def test_total_length_is_limited() -> None:
    """After a total length, texts are not counted: building the encoding is then worthwhile."""
    counter = AsciiCounter(load_vocabulary())
    text = "ten chars. " * 500
    assert counter.count(text) == count_with_tiktoken(text)
    assert counter.count(text) is None
    assert counter.count("ten chars.") == count_with_tiktoken("ten chars.")
