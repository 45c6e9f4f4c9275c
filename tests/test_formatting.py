"""Numbers and times as a person would say them."""

import pytest

from kedge.web import words


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (words.format_size(0), "0 B"),
        (words.format_size(999), "999 B"),
        (words.format_size(1000), "1 kB"),
        (words.format_size(5_430), "5.4 kB"),
        (words.format_size(123_456_789), "123 MB"),
        (words.format_number(9_999), "9,999"),
        (words.format_number(12_345), "12.3k"),
        (words.format_number(3_000_000), "3M"),
        (words.format_duration(None), "\N{EN DASH}"),
        (words.format_duration(0.00004), "40 µs"),
        (words.format_duration(0.0042), "4.2 ms"),
        (words.format_duration(0.42), "420 ms"),
        (words.format_duration(4.2), "4.2 s"),
        (words.format_duration(600), "10 min"),
        (words.format_percent(1, 0), "\N{EN DASH}"),
        (words.format_percent(1, 3), "33 %"),
        (words.format_percent(1, 80), "1.2 %"),
        (words.format_percent(999, 1000), "99.9 %"),
        (words.format_percent(1, 1), "100 %"),
        (words.format_cost(None), "\N{EN DASH}"),
        (words.format_cost(0), "$0.00"),
        (words.format_cost(0.0031), "$0.0031"),
        (words.format_cost(1234.5), "$1,234.50"),
        (words.format_age(None), "\N{EN DASH}"),
        (words.format_age(100, lambda: 110), "just now"),
        (words.format_age(110, lambda: 100), "in a moment"),
        (words.format_age(0, lambda: 7200), "2 h ago"),
        (words.format_age(86_400 * 3, lambda: 0), "in 3 d"),
        (words.format_time(0), "1970-01-01 00:00:00 UTC"),
        (words.format_time(None), "\N{EN DASH}"),
        (words.format_timestamp(0), "1970-01-01T00:00:00+00:00"),
        (words.shorten_id("resp_0123456789abcdef"), "resp_…abcdef"),
        (words.shorten_id("resp_012"), "resp_012"),
        (words.shorten_id("a" * 40), "…aaaaaa"),
        (words.shorten_id("42"), "42"),
        (words.pluralize(1, "response"), "1 response"),
        (words.pluralize(1200, "reply", "replies"), "1,200 replies"),
    ],
)
def test_words_for_numbers(said: str, wanted: str) -> None:
    """Short, with units, and a dash for what is not known."""
    assert said == wanted
