"""The counters: a protocol two methods wide, and the default that tiktoken does.

Conversations repeat themselves: the same texts are counted again on every request of a chain. So
counts are remembered in a bounded memory. Short texts are their own keys; long ones are kept under
their hash, so that the memory never holds on to a megabyte of somebody's text.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, Protocol

from kedge.tokens.items import as_json, count_all
from kedge.tokens.pieces import pieces
from kedge.tokens.vocabulary import encoding

SHORT = 1_024
REMEMBERED = 16_384
REMEMBERED_LONG = 4_096


class TokenCounter(Protocol):
    """Counts tokens as some model would."""

    def count_text(self, text: str) -> int:
        """Count the tokens of a text."""
        ...

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Count the tokens of wire items; additive over the items."""
        ...


class TiktokenCounter:
    """Counts with tiktoken's o200k_base, offline. Any thread may use it."""

    def __init__(self) -> None:
        # Bound to the instance, so that the memory goes when the counter goes.
        self._short = lru_cache(maxsize=REMEMBERED)(_count)
        self._long: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()

    def count_text(self, text: str) -> int:
        """Count the tokens of a text; special tokens in it are read as ordinary text."""
        return self._short(text) if len(text) <= SHORT else self._count_long(text)

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Count the tokens of wire items; additive over the items."""
        return count_all(items, self.count_text)

    def count_json(self, value: object) -> int:
        """Count the tokens of a value written as compact JSON: tools, formats."""
        return self.count_text(as_json(value))

    def _count_long(self, text: str) -> int:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (known := self._long.get(key)) is not None:
                self._long.move_to_end(key)
                return known
        tokens = _count(text)  # outside the lock: a long text takes its time
        with self._lock:
            self._long[key] = tokens
            while len(self._long) > REMEMBERED_LONG:
                self._long.popitem(last=False)
        return tokens


def _count(text: str) -> int:
    encode = encoding().encode_ordinary
    return sum(len(encode(piece)) for piece in pieces(text))


DEFAULT_COUNTER = TiktokenCounter()
count_text = DEFAULT_COUNTER.count_text
count_items = DEFAULT_COUNTER.count_items
count_json = DEFAULT_COUNTER.count_json
