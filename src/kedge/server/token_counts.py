"""Token counting that does not block the event loop.

Counting a megabyte takes up to half a second. So the code that counts the texts of a long request or
response is first run in a thread (``precount``). The counts are stored for the current request, and used
when the same code is run on the loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from typing import Any

from kedge import tokens
from kedge.server.item_forms import Item
from kedge.tokens import items as item_counts
from kedge.tokens.items import CountText, to_compact_json

MIN_THREAD_CHARS = 100_000
"""The minimum number of characters of texts that are counted in a thread."""

_counter: ContextVar[CountText | None] = ContextVar("token counter of the request", default=None)
"""Returns the stored counts of the current request; None if nothing was counted in a thread."""


def _get_counter() -> CountText:
    return _counter.get() or tokens.count_text


def count_text(text: str) -> int:
    """Count the tokens of a text."""
    return _get_counter()(text)


def count_items(items: Iterable[Item]) -> int:
    """Count the tokens of items; additive over the items."""
    return item_counts.count_each(items, _get_counter())


def count_item(item: Item) -> int:
    """Count the tokens of one item."""
    return item_counts.count_item(item, _get_counter())


def count_json(value: object) -> int:
    """Count the tokens of a value written as compact JSON."""
    return count_text(to_compact_json(value))


async def precount(length: int, count: Callable[[], object]) -> None:
    """Run a function that counts texts of this length in a thread, if they are long."""
    if length >= MIN_THREAD_CHARS:
        _counter.set(await asyncio.to_thread(_store_counts, count))


def _store_counts(count: Callable[[], object]) -> CountText:
    counter = cache(tokens.count_text)
    _counter.set(counter)  # in the context of this thread's call only
    count()
    return counter


_get_type: Callable[[object], object] = type


def measure_texts(value: object) -> int:
    """Add up the lengths of all texts in a value of plain JSON types."""
    size = 0
    pending: list[Any] = [value]
    while pending:
        each = pending.pop()
        kind = _get_type(each)
        if kind is str:
            size += len(each)
        elif kind is dict:
            pending += each.values()
        elif kind is list or kind is tuple:
            pending += each
    return size
