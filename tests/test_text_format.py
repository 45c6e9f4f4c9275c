"""Tests of the formatting of numbers, sizes and times for display."""

import pytest

from kedge import text_format


@pytest.mark.parametrize(
    ("formatted", "expected"),
    [
        (text_format.format_size(0), "0 B"),
        (text_format.format_size(999), "999 B"),
        (text_format.format_size(1000), "1 kB"),
        (text_format.format_size(5_430), "5.4 kB"),
        (text_format.format_size(123_456_789), "123 MB"),
        (text_format.format_number(9_999), "9,999"),
        (text_format.format_number(12_345), "12.3k"),
        (text_format.format_number(3_000_000), "3M"),
        (text_format.format_duration(None), "\N{EN DASH}"),
        (text_format.format_duration(0.00004), "40 µs"),
        (text_format.format_duration(0.0042), "4.2 ms"),
        (text_format.format_duration(0.42), "420 ms"),
        (text_format.format_duration(4.2), "4.2 s"),
        (text_format.format_duration(600), "10 min"),
        (text_format.format_percent(1, 0), "\N{EN DASH}"),
        (text_format.format_percent(1, 3), "33 %"),
        (text_format.format_percent(1, 80), "1.2 %"),
        (text_format.format_percent(999, 1000), "99.9 %"),
        (text_format.format_percent(1, 1), "100 %"),
        (text_format.format_cost(None), "\N{EN DASH}"),
        (text_format.format_cost(0), "$0.00"),
        (text_format.format_cost(0.0031), "$0.0031"),
        (text_format.format_cost(1234.5), "$1,234.50"),
        (text_format.format_age(None), "\N{EN DASH}"),
        (text_format.format_age(100, 110), "just now"),
        (text_format.format_age(110, 100), "in a moment"),
        (text_format.format_age(0, 7200), "2 h ago"),
        (text_format.format_age(86_400 * 3, 0), "in 3 d"),
        (text_format.format_time(0), "1970-01-01 00:00:00 UTC"),
        (text_format.format_time(None), "\N{EN DASH}"),
        (text_format.format_timestamp(0), "1970-01-01T00:00:00+00:00"),
        (text_format.shorten_id("resp_0123456789abcdef"), "resp_…abcdef"),
        (text_format.shorten_id("resp_012"), "resp_012"),
        (text_format.shorten_id("a" * 40), "…aaaaaa"),
        (text_format.shorten_id("42"), "42"),
        (text_format.pluralize(1, "response"), "1 response"),
        (text_format.pluralize(1200, "reply", "replies"), "1,200 replies"),
    ],
)
def test_formatted_values(formatted: str, expected: str) -> None:
    """Values are short, with units, and unknown values are a dash."""
    assert formatted == expected
