"""Format times, sizes, counts, ids and untrusted text for people."""

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime

from kedge._internal.json_text import escape_surrogates

TITLE_LENGTH = 80

_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
NO_VALUE = "\N{EN DASH}"


def format_size(count: float) -> str:
    """Format a number of bytes, such as ``5.4 kB``."""
    return _scale(count, _SIZES, " B", " ")


def format_number(value: float) -> str:
    """Format a count; from ten thousand on it is shortened, such as ``12.3k``."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    return _scale(value, _COUNTS, "", "")


def _scale(value: float, units: tuple[tuple[float, str], ...], plain: str, space: str) -> str:
    for unit, name in units:
        if abs(value) >= unit:
            scaled = value / unit
            number = f"{scaled:.1f}".removesuffix(".0") if scaled < 100 else f"{scaled:.0f}"
            return f"{number}{space}{name}"
    return f"{value:.0f}{plain}"


def format_duration(seconds: float | None) -> str:
    """Format a duration, such as ``420 ms``."""
    if seconds is None:
        return NO_VALUE
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min"


def format_percent(part: float, total: float) -> str:
    """Format a share in percent, or a dash if the total is zero."""
    if not total:
        return NO_VALUE
    value = 100 * part / total
    if 0 < value < 10 or 99 < value < 100:
        return f"{value:.1f} %"
    return f"{value:.0f} %"


def format_cost(dollars: float | None) -> str:
    """Format an amount in US dollars."""
    if dollars is None:
        return NO_VALUE
    if dollars and dollars < 1:
        return f"${dollars:.4f}"
    return f"${dollars:,.2f}"


def format_age(when: float | None, now: float | None = None) -> str:
    """Format a time relative to now, such as ``2 min ago`` or ``in 3 d``."""
    if when is None:
        return NO_VALUE
    if now is None:
        now = time.time()
    elapsed = now - when
    for unit, name in _AGES:
        if abs(elapsed) >= unit:
            distance = f"{abs(elapsed) / unit:.0f} {name}"
            return f"{distance} ago" if elapsed > 0 else f"in {distance}"
    return "just now" if elapsed >= 0 else "in a moment"


def format_time(when: float | None) -> str:
    """Format a time in full, in UTC."""
    if when is None:
        return NO_VALUE
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_timestamp(when: float) -> str:
    """Format a time in ISO 8601."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")


def shorten_id(name: str, length: int = 6) -> str:
    """Shorten a long id to its prefix and its end: ids start with a time, so their ends differ."""
    head, mark, tail = name.partition("_")
    if mark and len(tail) > length + 2:
        return f"{head}_…{tail[-length:]}"
    if len(name) > length + 10:
        return f"…{name[-length:]}"
    return name


def first_line(text: str, width: int) -> str:
    """Return the first line of a text, shortened to a width."""
    line = next(iter(text.strip().splitlines()), "")
    if len(line) > width:
        return line[: width - 1] + "…"
    return line


def make_title(text: str) -> str:
    """Return the beginning of a text as the title of a conversation, which has no NUL and no lone surrogates."""
    return escape_surrogates(first_line(text, TITLE_LENGTH).replace("\0", ""))


def pluralize(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun, such as ``2 blocks``."""
    if count == 1:
        return f"1 {one}"
    return f"{count:,} {many or one + 's'}"


def capitalize(text: str) -> str:
    """Return a text with a capital first letter; the rest is unchanged."""
    return f"{text[:1].upper()}{text[1:]}"


MARKDOWN_COSTS = {
    "[": 100,
    "\n": 50,
    **dict.fromkeys("*_`|~", 12),
    **dict.fromkeys("!#$%&+-:<=>@\\]^{}", 3),
}
"""The work of a Markdown parser for a character that may start syntax, in addition to 1 for every character.

A unit is about a microsecond. ``benchmarks.bench_markdown`` measures it for the worst known texts.
"""
MAX_MARKDOWN_WORK = 150_000
"""The work above which a text is shown as plain text: a parser cannot be interrupted."""


def estimate_markdown_work(text: str) -> int:
    """Return the most work that parsing a Markdown text takes."""
    return len(text) + sum(cost * text.count(mark) for mark, cost in MARKDOWN_COSTS.items())


_STYLES = re.compile(r"(\x1b\[(?:[0-2]|3[1-6])m)")
"""The styles that the command line writes."""


def sanitize_text(text: str) -> str:
    """Replace control characters, so that untrusted text cannot control a terminal."""
    return _replace_controls(text, lambda _: "�", kept="\n\t")


def _replace_controls(text: str, replace: Callable[[str], str], kept: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else replace(c) for c in text)


def sanitize_styled(text: str) -> str:
    """Replace control characters except for the styles of the command line."""
    if text.isprintable():
        return text
    parts = _STYLES.split(text)
    parts[::2] = map(sanitize_text, parts[::2])  # the others are the styles
    return "".join(parts)


def escape_text(text: str) -> str:
    r"""Replace control characters and line breaks by their escape sequences (``\n``, ``\x1b``)."""
    return _replace_controls(text, lambda c: repr(c)[1:-1])


def escape_json(text: str) -> str:
    """Escape the control characters inside the strings of a JSON text; those between values are kept."""
    return _replace_controls(text, _escape_json_character, kept="\n\t")


def _escape_json_character(character: str) -> str:
    return json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
