"""Contexts: all items up to a point of a chain, as a shared, immutable tree.

A ``Context`` is its parent's context plus the items that one request added. The totals that every
turn needs (tokens, open calls) are stored with it, so the cost of the next turn depends on its items,
not on the length of the chain; branches share their history.

``ContextCache`` stores recent contexts in memory, within a size limit. A context refers to its
ancestors, so only a leaf (a context without cached children) can be evicted; its parent then becomes
a leaf. The cache only saves reads of the database.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, overload

from kedge.server.coherence import EMPTY_COHERENCE, Coherence
from kedge.server.object_forms import Item
from kedge.server.practice_model.items import CountedItems, message_count
from kedge.server.prompt_cache import EMPTY_DIGEST, Prefix, hash_items


@dataclass(slots=True, eq=False)
class Context:
    """One point of a chain: all items up to and including ``items``.

    ``model_items`` are the ``items`` as the model sees them: a compaction is replaced by the items in it.
    ``tokens``, ``coherence``, ``length`` (the number of the items that a model sees) and ``messages`` (the
    messages among them) are about the complete context, ``own_tokens`` and ``size`` about this part. A context is
    immutable; the digests are computed when they are first needed.
    """

    parent: "Context | None"
    items: tuple[Item, ...]
    model_items: tuple[Item, ...]
    tokens: int
    own_tokens: int
    coherence: Coherence
    size: int
    length: int = 0
    messages: int = 0
    known_digests: tuple[bytes, ...] | None = field(default=None, init=False)

    def list_items(self) -> list[Item]:
        """Return every item, oldest first."""
        return list(chain.from_iterable(part.items for part in self._parts()))

    def list_model_items(self) -> list[Item]:
        """Return every item as a model sees it, oldest first."""
        return list(chain.from_iterable(part.model_items for part in self._parts()))

    def iter_prefixes(self) -> Iterator[Prefix]:
        """Yield the prefixes of this context, longest first; the tokens are known at the ends of parts."""
        part: Context | None = self
        while part is not None:
            tokens = part.tokens
            for digest in part.compute_digests()[:0:-1]:
                yield digest, tokens
                tokens = 0
            part = part.parent

    def compute_digests(self) -> tuple[bytes, ...]:
        """Return the digest of the context before this part, and of the context up to each item of it.

        They are not needed for a context that is too short for the prompt cache, or is never continued.
        """
        pending: list[Context] = []
        part: Context | None = self
        while part is not None and part.known_digests is None:
            pending.append(part)
            part = part.parent
        digests: tuple[bytes, ...] = (EMPTY_DIGEST,)
        if part is not None and part.known_digests is not None:
            digests = part.known_digests
        for part in reversed(pending):
            digests = (digests[-1], *hash_items(digests[-1], part.model_items))
            part.known_digests = digests
        return digests

    def iter_reversed(self) -> Iterator[Item]:
        """Yield every item as a model sees it, newest first."""
        part: Context | None = self
        while part is not None:
            yield from reversed(part.model_items)
            part = part.parent

    def total_size(self) -> int:
        """Return the approximate size of the complete context in bytes."""
        return sum(part.size for part in self._parts())

    def last_parts(self, number: int) -> "Context":
        """Return the context of the last ``number`` parts only."""
        context = EMPTY_CONTEXT
        parts = self._parts()
        for part in parts[max(len(parts) - number, 0) :]:
            context = extend_context(context, part.items, part.model_items, part.own_tokens, size=0)
        return context

    def _parts(self) -> "list[Context]":
        parts: list[Context] = []
        part: Context | None = self
        while part is not None:
            parts.append(part)
            part = part.parent
        parts.reverse()
        return parts


EMPTY_CONTEXT = Context(None, (), (), 0, 0, EMPTY_COHERENCE, 0)
"""The context without any items."""


def extend_context(
    parent: Context, items: Sequence[Item], model_items: Sequence[Item], tokens: int, size: int
) -> Context:
    """Add one part to a context, with its ``tokens`` and its ``size`` (its length as JSON)."""
    own_items = tuple(items)
    own_model_items = own_items
    if model_items is not items:
        own_model_items = tuple(model_items)
    return Context(
        parent=parent,
        items=own_items,
        model_items=own_model_items,
        tokens=parent.tokens + tokens,
        own_tokens=tokens,
        coherence=parent.coherence.extend(own_items),
        size=size + PART_OVERHEAD_BYTES + ITEM_OVERHEAD_BYTES * len(own_items),
        length=parent.length + len(own_model_items),
        messages=parent.messages + message_count(own_model_items),
    )


class ContextItems(CountedItems):
    """The items that a model sees: the items of a context, and the new items after them.

    If a model reads only the newest items, or only counts the messages, the cost is the same at any depth:
    the list of all items is built when one before the new ones is read.

    Args:
        context: The context.
        new: The items after it.
    """

    __slots__ = ("_context", "_list", "_new", "_start")

    def __init__(self, context: Context, new: Sequence[Item]) -> None:
        self._context = context
        self._start = context.length
        self._new = new
        self._list: list[Item] | None = None

    @property
    def message_count(self) -> int:
        """The number of messages."""
        return self._context.messages + message_count(self._new)

    def __len__(self) -> int:
        return self._start + len(self._new)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step == 1 and first >= self._start:
                return self._new[first - self._start : max(stop - self._start, 0)]
        elif -len(self._new) <= index < 0:
            return self._new[index]
        elif index >= self._start:
            return self._new[index - self._start]
        return self._build_list()[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._build_list())

    def __reversed__(self) -> Iterator[Item]:
        return chain(reversed(self._new), self._context.iter_reversed())

    def _build_list(self) -> list[Item]:
        if self._list is None:
            self._list = [*self._context.list_model_items(), *self._new]
        return self._list


class UnstoredResponse(NamedTuple):
    """The id of a response, and the context that ends with it."""

    id: str
    context: Context
    size: int


class SocketMemory:
    """The newest unstored response of each lane, in about ``max_bytes``, until the connection is closed.

    Stored responses are in the database and not here. Above the size limit the response of the least
    recently used lane is dropped first, the newest response never.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._lanes: OrderedDict[str, UnstoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def find(self, id: str) -> Context | None:
        """Return the context of a response of any lane, or None."""
        for response in self._lanes.values():
            if response.id == id:
                return response.context
        return None

    def store(self, lane: str, id: str, context: Context | None) -> None:
        """Store a response instead of the lane's previous one; one without a context is in the database."""
        self.forget(lane)
        if context is None:
            return
        response = UnstoredResponse(id, context, context.total_size())
        self._lanes[lane] = response
        self._size += response.size
        while self._size > self._max_bytes and len(self._lanes) > 1:
            self.forget(next(iter(self._lanes)))

    def forget(self, lane: str, id: str | None = None) -> None:
        """Delete the response of a lane; with an id, only if it is that response."""
        response = self._lanes.get(lane)
        if response is not None and id in (None, response.id):
            del self._lanes[lane]
            self._size -= response.size

    def clear(self) -> None:
        """Delete all responses."""
        self._lanes.clear()
        self._size = 0


class LaneMemory(NamedTuple):
    """The unstored responses of a connection, for a request on one lane."""

    memory: SocketMemory
    lane: str


@dataclass(slots=True)
class _CacheEntry:
    context: Context
    parent: int | None
    children: int = 0


PART_OVERHEAD_BYTES = 500
"""The measured memory of a part in addition to its items."""
ITEM_OVERHEAD_BYTES = 1000
"""The measured memory of an item in addition to its text."""


class ContextCache:
    """Recent contexts by the number of their node, in about ``max_bytes`` of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0
        """The approximate size of the cached contexts."""
        self._entries: dict[int, _CacheEntry] = {}
        self._leaves: OrderedDict[int, None] = OrderedDict()

    def get(self, node: int) -> Context | None:
        """Return a context and mark it as recently used."""
        entry = self._entries.get(node)
        if entry is None:
            return None
        if node in self._leaves:
            self._leaves.move_to_end(node)
        return entry.context

    def put(self, node: int, parent: int | None, context: Context) -> None:
        """Cache a context, unless its parent was evicted: the size of its ancestors must be counted."""
        if node in self._entries:
            return
        if context.parent is EMPTY_CONTEXT:
            parent = None
        if parent is not None:
            above = self._entries.get(parent)
            if above is None:
                return
            above.children += 1
            self._leaves.pop(parent, None)
        self._entries[node] = _CacheEntry(context, parent)
        self._leaves[node] = None
        self.used_bytes += context.size
        while self.used_bytes > self._max_bytes and self._leaves:
            self._evict(next(iter(self._leaves)))

    def discard(self, node: int) -> None:
        """Evict a context whose content was deleted, if it is a leaf; other contexts cannot be requested."""
        if node in self._leaves:
            self._evict(node)

    def clear(self) -> None:
        """Evict all contexts."""
        self._entries.clear()
        self._leaves.clear()
        self.used_bytes = 0

    def _evict(self, node: int) -> None:
        entry = self._entries.pop(node)
        self._leaves.pop(node, None)
        self.used_bytes -= entry.context.size
        if entry.parent is None:
            return
        above = self._entries[entry.parent]
        above.children -= 1
        if not above.children:
            self._leaves[entry.parent] = None
            self._leaves.move_to_end(entry.parent, last=False)


_visible_parts: ContextVar[int | None] = ContextVar("visible parts of the history", default=None)


def truncate_history(context: Context) -> Context:
    """Return the part of a context that is visible with fault injection."""
    parts = _visible_parts.get()
    if parts is None:
        return context
    return context.last_parts(parts)


@contextmanager
def limit_history(parts: int | None) -> Generator[None]:
    """Make only the last parts of any history visible within this block; None for all."""
    token = _visible_parts.set(parts)
    try:
        yield
    finally:
        _visible_parts.reset(token)
