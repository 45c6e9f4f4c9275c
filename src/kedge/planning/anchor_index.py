"""Find stored responses by their content: the protocol of an anchor index, and its implementation in memory.

A response is looked up by the digest of its complete context. A request looks up the digests of all of its prefixes,
the longest first, and `kedge.planning.selection` decides which of the responses found may be continued. An index is a
cache: an entry that is missing costs one full send.

| who looks up | index |
|---|---|
| `kedge.chain` and `kedge proxy` | `kedge.chaining.MemoryIndex`, or `kedge.chaining.StoreIndex` in a database |
| an engine as a model of the server | `MemoryAnchorIndex` |
| a conversation | `Store.find_anchors`, which reads the records of its responses; it is awaited |
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from kedge._internal.arguments import check_positive_int
from kedge._internal.bounded_dict import BoundedDict
from kedge.planning.anchors import AnchorRecord, anchor_sort_key
from kedge.planning.digests import PrefixIndex

MAX_ENTRIES = 100_000
"""The maximum number of responses in an index by default; the oldest are dropped first."""
MAX_PREFIXES = 1_000
"""The maximum number of prefixes of a request that are looked up, the longest first."""
LOOKUP_SIZES = (1, 8, MAX_PREFIXES - 9)
"""The sizes of these lookups: a request that replays its history mostly continues its last response."""


class IndexedResponse(msgspec.Struct, frozen=True):
    """A stored response, with the data that later requests need.

    Attributes:
        record: The digest of its context, and whether the response may be used.
        reasoning_ids: The ids of the reasoning items in its output. They must not be sent again in a
            request that is chained on this response.
        members: The members of the model's output in its context that a replay may lack, but must not
            contradict: the position, the name and a hash of the value of each.
    """

    record: AnchorRecord
    reasoning_ids: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()


class AnchorIndex(Protocol):
    """Stored responses by scope and content. The scope separates servers, accounts and, if qualified, namespaces."""

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose context has one of these digests, in any order."""
        ...

    def add(self, scope: str, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        ...

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not find these responses again: the server no longer has them."""
        ...


class MemoryAnchorIndex:
    """An anchor index in the memory of this process.

    Args:
        max_entries: The maximum number of responses of all scopes; the oldest are dropped first.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        check_positive_int("max_entries", max_entries)
        self._by_id = BoundedDict[tuple[str, str], IndexedResponse](max_entries)
        self._by_digest = BoundedDict[tuple[str, str], IndexedResponse](max_entries)
        """The newest response with each digest, also after it was lost or replaced."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose context has one of these digests."""
        entries = (self._by_digest.get((scope, digest)) for digest in digests)
        return [
            entry
            for entry in entries
            if entry and self.get(scope, entry.record.response_id) is entry
        ]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return self._by_id.get((scope, response_id))

    def add(self, scope: str, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        with self._lock:
            older = self.get(scope, record.response_id)
            self._by_id[scope, record.response_id] = entry
            self._by_digest[scope, record.digest] = entry
        return is_reissued(older, entry)

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not find these responses again: the server no longer has them."""
        with self._lock:
            for response_id in response_ids:
                self._by_id.pop((scope, response_id), None)


def is_reissued(older: IndexedResponse | None, entry: IndexedResponse) -> bool:
    """Return whether a server has issued the id of a response before, for other content."""
    if older is None or older.record.status != "completed":
        return False
    return older.record.digest != entry.record.digest


def qualify_scope(namespace: str, scope: str) -> str:
    """Return a scope with its namespace, which contains no line break; in the default namespace, the scope itself."""
    if not namespace:
        return scope
    return f"{namespace}\n{scope}"


def iter_prefix_digests(
    prefixes: PrefixIndex,
    *,
    longest: int | None = None,
    can_end: Callable[[int], bool] | None = None,
) -> Iterator[str]:
    """Yield the digests of the prefixes of a sequence of blocks, the longest first.

    Args:
        prefixes: The digests of the blocks.
        longest: The number of covered blocks of the longest prefix; all of them by default.
        can_end: Whether the context of a response may end at a position; by default it may end anywhere.
    """
    if longest is None:
        longest = prefixes.covered
    for count in range(longest, 0, -1):
        if can_end is None or can_end(prefixes.end_position(count)):
            yield prefixes.digest(count)


def iter_candidates(
    index: AnchorIndex, scope: str, digests: Iterator[str]
) -> Iterator[IndexedResponse]:
    """Yield the known responses whose context may be a prefix of a request: the longest first, then the newest.

    Args:
        index: The index of the responses.
        scope: The scope of the request, as it was given to the index.
        digests: The digests of the prefixes, the longest first; of these, `MAX_PREFIXES` are looked up.
    """
    for size in LOOKUP_SIZES:
        batch = list(islice(digests, size))
        if not batch:
            return
        entries = index.find(scope, batch)
        entries.sort(key=lambda entry: anchor_sort_key(entry.record), reverse=True)
        yield from entries
