"""Numbers and times as a person would say them."""

import pytest

from kedge import formatting


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (formatting.format_size(0), "0 B"),
        (formatting.format_size(999), "999 B"),
        (formatting.format_size(1000), "1 kB"),
        (formatting.format_size(5_430), "5.4 kB"),
        (formatting.format_size(123_456_789), "123 MB"),
        (formatting.format_number(9_999), "9,999"),
        (formatting.format_number(12_345), "12.3k"),
        (formatting.format_number(3_000_000), "3M"),
        (formatting.format_duration(None), "\N{EN DASH}"),
        (formatting.format_duration(0.00004), "40 µs"),
        (formatting.format_duration(0.0042), "4.2 ms"),
        (formatting.format_duration(0.42), "420 ms"),
        (formatting.format_duration(4.2), "4.2 s"),
        (formatting.format_duration(600), "10 min"),
        (formatting.format_percent(1, 0), "\N{EN DASH}"),
        (formatting.format_percent(1, 3), "33 %"),
        (formatting.format_percent(1, 80), "1.2 %"),
        (formatting.format_percent(999, 1000), "99.9 %"),
        (formatting.format_percent(1, 1), "100 %"),
        (formatting.format_cost(None), "\N{EN DASH}"),
        (formatting.format_cost(0), "$0.00"),
        (formatting.format_cost(0.0031), "$0.0031"),
        (formatting.format_cost(1234.5), "$1,234.50"),
        (formatting.format_age(None), "\N{EN DASH}"),
        (formatting.format_age(100, 110), "just now"),
        (formatting.format_age(110, 100), "in a moment"),
        (formatting.format_age(0, 7200), "2 h ago"),
        (formatting.format_age(86_400 * 3, 0), "in 3 d"),
        (formatting.format_time(0), "1970-01-01 00:00:00 UTC"),
        (formatting.format_time(None), "\N{EN DASH}"),
        (formatting.format_timestamp(0), "1970-01-01T00:00:00+00:00"),
        (formatting.shorten_id("resp_0123456789abcdef"), "resp_…abcdef"),
        (formatting.shorten_id("resp_012"), "resp_012"),
        (formatting.shorten_id("a" * 40), "…aaaaaa"),
        (formatting.shorten_id("42"), "42"),
        (formatting.pluralize(1, "response"), "1 response"),
        (formatting.pluralize(1200, "reply", "replies"), "1,200 replies"),
    ],
)
def test_words_for_numbers(said: str, wanted: str) -> None:
    """Short, with units, and a dash for what is not known."""
    assert said == wanted
