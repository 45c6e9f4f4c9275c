"""Small words for people: how long ago, how much, how many."""

import time

_AGES = ((86_400 * 365, "year"), (86_400, "day"), (3600, "hour"), (60, "minute"))


def format_age(moment: float, now: float | None = None) -> str:
    """How long ago that was."""
    passed = max((time.time() if now is None else now) - moment, 0)
    for seconds, name in _AGES:
        if passed >= seconds:
            return f"{pluralize(int(passed // seconds), name)} ago"
    return "just now"


def pluralize(number: int, word: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def shorten_id(name: str, width: int = 16) -> str:
    """The beginning of an id, enough to find it by."""
    return name if len(name) <= width else f"{name[: width - 1]}…"


def format_percent(part: float, whole: float) -> str:
    """``37 %``, or nothing of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else ""


def sanitize_text(text: str) -> str:
    """Text of a model without what would command a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
