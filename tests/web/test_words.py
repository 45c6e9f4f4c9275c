"""Numbers and times as a person would say them."""

import pytest

from kedge.web import words


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (words.size(0), "0 B"),
        (words.size(999), "999 B"),
        (words.size(1000), "1 kB"),
        (words.size(5_430), "5.4 kB"),
        (words.size(123_456_789), "123 MB"),
        (words.number(9_999), "9,999"),
        (words.number(12_345), "12.3k"),
        (words.number(3_000_000), "3M"),
        (words.duration(None), "\N{EN DASH}"),
        (words.duration(0.00004), "40 µs"),
        (words.duration(0.0042), "4.2 ms"),
        (words.duration(0.42), "420 ms"),
        (words.duration(4.2), "4.2 s"),
        (words.duration(600), "10 min"),
        (words.share(1, 0), "\N{EN DASH}"),
        (words.share(1, 3), "33 %"),
        (words.share(1, 80), "1.2 %"),
        (words.share(999, 1000), "99.9 %"),
        (words.share(1, 1), "100 %"),
        (words.money(None), "\N{EN DASH}"),
        (words.money(0), "$0.00"),
        (words.money(0.0031), "$0.0031"),
        (words.money(1234.5), "$1,234.50"),
        (words.ago(None), "\N{EN DASH}"),
        (words.ago(100, lambda: 110), "just now"),
        (words.ago(110, lambda: 100), "in a moment"),
        (words.ago(0, lambda: 7200), "2 h ago"),
        (words.ago(86_400 * 3, lambda: 0), "in 3 d"),
        (words.moment(0), "1970-01-01 00:00:00 UTC"),
        (words.moment(None), "\N{EN DASH}"),
        (words.stamp(0), "1970-01-01T00:00:00+00:00"),
        (words.short_id("resp_0123456789abcdef"), "resp_…abcdef"),
        (words.short_id("resp_012"), "resp_012"),
        (words.short_id("a" * 40), "…aaaaaa"),
        (words.short_id("42"), "42"),
        (words.plural(1, "response"), "1 response"),
        (words.plural(1200, "reply", "replies"), "1,200 replies"),
    ],
)
def test_words_for_numbers(said: str, wanted: str) -> None:
    """Short, with units, and a dash for what is not known."""
    assert said == wanted
