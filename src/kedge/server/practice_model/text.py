"""Texts of the practice model: letter case, counts, quotations and JSON."""

import json
from typing import Any

_OTHER_FORMS = str.maketrans(
    "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}\N{LATIN SMALL LETTER DOTLESS I}\N{LATIN SMALL LETTER LONG S}",
    "iis",
)


def fold_case(text: str) -> str:
    """Return the text in lower case; the letters that ``re.IGNORECASE`` matches with ``i`` and ``s`` become these."""
    if text.isascii():
        return text.lower()
    return text.translate(_OTHER_FORMS).lower()


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in plain digits, because programs parse the number."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def quote_text(text: str, max_length: int | None = None) -> str:
    """Quote a text, truncated to ``max_length`` characters unless that is None."""
    if max_length is not None and len(text) > max_length:
        text = text[:max_length].rstrip() + "…"
    return f'"{text}"'


def encode_json(value: Any) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
