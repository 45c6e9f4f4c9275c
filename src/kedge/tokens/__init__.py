"""Counting tokens: exact for text, an honest estimate for the rest, always offline.

``count_text`` and ``count_items`` use the default counter (tiktoken, with the o200k_base
vocabulary that ships inside this package, read at the first count). Whoever has a better
counter for a model passes any ``TokenCounter``. Numbers for pictures, files and the frame around
an item are the constants of ``kedge.tokens.items``.
"""

from kedge.tokens.counter import (
    DEFAULT_COUNTER,
    TiktokenCounter,
    TokenCounter,
    count_items,
    count_json,
    count_text,
)

__all__ = [
    "DEFAULT_COUNTER",
    "TiktokenCounter",
    "TokenCounter",
    "count_items",
    "count_json",
    "count_text",
]
