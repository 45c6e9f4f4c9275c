"""Token counting, offline: exact for text, estimated for images and files.

``count_text`` and ``count_items`` use the default counter: tiktoken with the o200k_base vocabulary, which is
part of this package and loaded at the first count. For a model with another tokenizer, pass your own
``TokenCounter``. The estimates are constants of ``kedge.tokens.items``.
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
