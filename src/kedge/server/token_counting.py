"""Count the tokens of texts and items, of a long request in a thread.

Counting the tokens of a megabyte takes up to half a second. So the code that counts the texts of a long request or
response is first run in a thread (``precount``). The counts are stored for the current request, and used
when the same code is run on the loop.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from typing import Any

from kedge._internal.responsive import compute
from kedge.server.object_forms import Item
from kedge.usage import tokens
from kedge.usage.tokens import CountText, to_compact_json

MIN_THREAD_CHARS = 100_000
"""The minimum number of characters of texts that are counted in a thread."""

_counter: ContextVar[CountText] = ContextVar("token counter", default=tokens.count_text)
"""Counts a text; in a request that was counted in a thread, it returns the stored counts."""


def count_text(text: str) -> int:
    """Count the tokens of a text."""
    return _counter.get()(text)


def count_items(items: Iterable[Item]) -> int:
    """Count the tokens of items; additive over the items."""
    return tokens.count_each(items, _counter.get())


def count_item(item: Item) -> int:
    """Count the tokens of one item."""
    return tokens.count_item(item, _counter.get())


def count_json(value: object) -> int:
    """Count the tokens of a value written as compact JSON."""
    return count_text(to_compact_json(value))


async def precount(work: Callable[[], object]) -> None:
    """Run a function that counts texts in a thread, and store the counts for the current request."""

    def store_counts() -> CountText:
        counter = cache(tokens.count_text)
        _counter.set(counter)  # in the context of this thread's call only
        work()
        return counter

    _counter.set(await compute(store_counts))


_get_type: Callable[[object], object] = type


def measure_texts(value: object) -> int:
    """Add up the lengths of all texts in a value of plain JSON types."""
    size = 0
    pending: list[Any] = [value]
    while pending:
        part = pending.pop()
        part_type = _get_type(part)
        if part_type is str:
            size += len(part)
        elif part_type is dict:
            pending += part.values()
        elif part_type is list or part_type is tuple:
            pending += part
    return size
