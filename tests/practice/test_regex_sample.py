"""Patterns of schemas are read, never run: examples fit, and matching agrees with ``re``."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.practice.regex_sample import UnsupportedPattern, pattern_matches, sample_match

PATTERN_EXAMPLES = [
    ("^abc$", "abc"),
    ("^[A-Z]{2}-\\d+$", "AA-0"),
    ("^(foo|bar)+$", "foo"),
    ("^[^a-z0-9]x?$", "A"),
    ("^\\w{2,5}?\\s\\S\\.$", "aa a."),
    ("(?:x|y)*z", "z"),
    ("^#?([a-f0-9]{6}|[a-f0-9]{3})$", "aaaaaa"),
    ("^[\\w.-]+@[\\w-]+\\.[a-z]{2,}$", "a@a.aa"),
    ("[]a]", "]"),
    ("[a-]{3}", "aaa"),
    ("\\t\\n\\/", "\t\n/"),
    ("^.{0,3}$", ""),
    ("\\D\\W[^\\w\\s]", "a--"),
    ("", ""),
]


@pytest.mark.parametrize(("pattern", "text"), PATTERN_EXAMPLES)
def test_a_pattern_has_an_example(pattern: str, text: str) -> None:
    """The simplest text, and it fits, here and for ``re``."""
    assert sample_match(pattern) == text
    assert pattern_matches(pattern, text)
    assert re.search(pattern, text, re.ASCII)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?<x>a)", "\\1", "a**", "[a", "(a", "a)", "a{x}", "a{2", "\\", "a{9999}", "\\bx",
     "(" * 40 + ")" * 40, "[^aA0_\\-. ~é]", "x" * 2_000, "(a{99}){99}"],
)  # fmt: skip
def test_what_cannot_be_read_says_so(pattern: str) -> None:
    """Look-around, back references, broken and enormous patterns."""
    with pytest.raises(UnsupportedPattern):
        sample_match(pattern)


atoms = st.sampled_from(["a", "b", ".", "\\d", "\\w", "[ab]", "[^a]", "[0-4]", "^", "$"])
patterns = st.recursive(
    atoms,
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"]))
    ),
    max_leaves=5,
)


@given(patterns, st.text(alphabet="ab14_\n", max_size=6))
def test_matching_agrees_with_re(pattern: str, text: str) -> None:
    """The same texts fit as for Python (whose ``$`` alone also stops before a last line break)."""
    expected = re.search(pattern.replace("$", "\\Z"), text, re.ASCII)
    assert pattern_matches(pattern, text) == bool(expected)


def test_a_spiteful_pattern_is_answered() -> None:
    """What takes ``re`` longer than the age of the universe is nothing here."""
    assert not pattern_matches("^(?:a+)+$", "a" * 200 + "b")
