"""Tests of the display of numbers, sizes and times for display."""

from for_each import for_each
from kedge._internal import display


@for_each(
    ("formatted", "expected"),
    [
        (display.format_size(0), "0 B"),
        (display.format_size(5_430), "5.4 kB"),
        (display.format_size(123_456_789), "123 MB"),
        (display.format_number(9_999), "9,999"),
        (display.format_number(12_345), "12.3k"),
        (display.format_duration(None), "\N{EN DASH}"),
        (display.format_duration(0.00004), "40 µs"),
        (display.format_duration(0.42), "420 ms"),
        (display.format_duration(4.2), "4.2 s"),
        (display.format_duration(600), "10 min"),
        (display.format_percent(1, 0), "\N{EN DASH}"),
        (display.format_percent(1, 80), "1.2 %"),
        (display.format_percent(999, 1000), "99.9 %"),
        (display.format_cost(None), "\N{EN DASH}"),
        (display.format_cost(0.0031), "$0.0031"),
        (display.format_cost(1234.5), "$1,234.50"),
        (display.format_age(110, 100), "in a moment"),
        (display.format_age(0, 7200), "2 h ago"),
        (display.format_age(86_400 * 3, 0), "in 3 d"),
        (display.format_age(None), "\N{EN DASH}"),
        (display.format_time(None), "\N{EN DASH}"),
        (display.format_time(0), "1970-01-01 00:00:00 UTC"),
        (display.format_timestamp(0), "1970-01-01T00:00:00+00:00"),
        (display.shorten_id("resp_0123456789abcdef"), "resp_…abcdef"),
        (display.shorten_id("a" * 40), "…aaaaaa"),
        (display.pluralize(1, "response"), "1 response"),
        (display.pluralize(1200, "reply", "replies"), "1,200 replies"),
    ],
)
def test_formatted_values(formatted: str, expected: str) -> None:
    """Values are short, with units, and unknown values are a dash."""
    assert formatted == expected
