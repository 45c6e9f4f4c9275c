"""What the server remembers up to a point, as a shared, immutable tree.

A ``Context`` is its parent's context plus the items that one request added. The sums that every
turn needs (how many tokens, which calls are open) are kept along the way, so the next turn of a
chain costs what the turn itself brings, however long the chain is; forks share their past.

``ContextCache`` keeps recent contexts in memory, bounded by the bytes that they take. A cached
context keeps its ancestors, so only a *tip* (a context without cached children) can be dropped;
its parent then becomes the next tip to go. The cache only ever saves reading the database.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kedge.server.coherence import START, Coherence
from kedge.server.wire import Item


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One point of a chain: everything up to and including ``items``.

    ``seen`` is what a model sees in the place of ``items``: the same, except that a compaction is
    read out. ``tokens`` and ``coherence`` tell of the whole context, ``size`` of this part alone.
    """

    parent: "Context | None"
    items: tuple[Item, ...]
    seen: tuple[Item, ...]
    tokens: int
    coherence: Coherence
    size: int

    @property
    def own_tokens(self) -> int:
        """The tokens of this part alone."""
        return self.tokens - (self.parent.tokens if self.parent else 0)

    def whole(self) -> list[Item]:
        """List every item, oldest first."""
        return list(chain.from_iterable(part.items for part in self._parts()))

    def as_seen(self) -> list[Item]:
        """List every item as a model sees it, oldest first."""
        return list(chain.from_iterable(part.seen for part in self._parts()))

    def whole_size(self) -> int:
        """About how many bytes the whole context takes."""
        return sum(part.size for part in self._parts())

    def last_parts(self, number: int) -> "Context":
        """Cut all but the last ``number`` parts off: what a forgetful server would hold."""
        context = NOTHING
        for part in self._parts()[-number:] if number else []:
            context = grown(context, part.items, part.seen, part.own_tokens, size=0)
        return context

    def _parts(self) -> "list[Context]":
        parts: list[Context] = []
        part: Context | None = self
        while part is not None:
            parts.append(part)
            part = part.parent
        parts.reverse()
        return parts


NOTHING = Context(None, (), (), 0, START, 0)
"""The context before anything was said."""


def grown(
    parent: Context, items: Sequence[Item], seen: Sequence[Item], tokens: int, size: int
) -> Context:
    """Add one part to a context; ``tokens`` and ``size``, its length as JSON, are its own."""
    own = tuple(items)
    return Context(
        parent=parent,
        items=own,
        seen=own if seen is items else tuple(seen),
        tokens=parent.tokens + tokens,
        coherence=parent.coherence.extend(own),
        size=size + PART_BYTES + ITEM_BYTES * len(own),
    )


@dataclass(slots=True)
class _Entry:
    context: Context
    parent: int | None
    children: int = 0


PART_BYTES, ITEM_BYTES = 500, 1000
"""What a part and an item take in memory beside their text, measured."""


class ContextCache:
    """Recent contexts by the number of their node, in about ``most_bytes`` of memory."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._tips: OrderedDict[int, None] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """How much memory is held right now, about."""
        return self._bytes

    def get(self, node: int) -> Context | None:
        """Find a context, and remember that it was wanted."""
        entry = self._entries.get(node)
        if entry is None:
            return None
        if node in self._tips:
            self._tips.move_to_end(node)
        return entry.context

    def put(self, node: int, parent: int | None, context: Context) -> None:
        """Keep a context, unless its parent has been dropped: what is held must be counted."""
        if node in self._entries:
            return
        if parent is not None:
            above = self._entries.get(parent)
            if above is None:
                return
            above.children += 1
            self._tips.pop(parent, None)
        self._entries[node] = _Entry(context, parent)
        self._tips[node] = None
        self._bytes += context.size
        while self._bytes > self._most and self._tips:
            self._drop(next(iter(self._tips)))

    def forget(self, node: int) -> None:
        """Drop a context whose content was deleted, if it is a tip; it cannot be asked for."""
        if node in self._tips:
            self._drop(node)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._tips.clear()
        self._bytes = 0

    def _drop(self, node: int) -> None:
        entry = self._entries.pop(node)
        self._tips.pop(node, None)
        self._bytes -= entry.context.size
        if entry.parent is None:
            return
        above = self._entries[entry.parent]
        above.children -= 1
        if not above.children:
            self._tips[entry.parent] = None
            self._tips.move_to_end(entry.parent, last=False)
