"""Index of stored responses by the content they remember.

The key is the scope (endpoint and account) and the digest of everything the response's context holds. A
lookup takes the digests of all prefixes of a request at once. The index is a cache: an entry that is
missing costs one full send.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kedge.planning import AnchorRecord

MAX_ENTRIES = 100_000
"""How many responses an in-memory index retains before the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class IndexedResponse:
    """A stored response, and what a later request needs to know about it.

    Attributes:
        record: The digest of the remembered content, and whether the response may be used.
        reasoning_ids: The ids of the reasoning items in its output. A client that replays them must not
            send them again on top of this response.
    """

    record: AnchorRecord
    reasoning_ids: frozenset[str] = frozenset()


class AnchorIndex(Protocol):
    """Where stored responses are looked up by content."""

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        ...

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        ...

    def add(self, entry: IndexedResponse) -> None:
        """Add a response; one with the same scope and id is replaced."""
        ...

    def mark_lost(self, scope: str, response_id: str) -> None:
        """Do not use this response again: the server no longer has it."""
        ...


class MemoryIndex:
    """An index in this process, bounded in entries; the oldest are dropped first.

    Args:
        max_entries: How many responses to retain.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._by_id: OrderedDict[tuple[str, str], IndexedResponse] = OrderedDict()
        self._by_digest: dict[tuple[str, str], tuple[str, str]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        with self._lock:
            keys = [self._by_digest.get((scope, digest)) for digest in digests]
            return [self._by_id[key] for key in keys if key in self._by_id]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return self._by_id.get((scope, response_id))

    def add(self, entry: IndexedResponse) -> None:
        """Add a response; one with the same scope and id is replaced."""
        record = entry.record
        key = (record.scope, record.response_id)
        with self._lock:
            if key in self._by_id:
                self._drop(key)
            self._by_id[key] = entry
            self._by_digest[record.scope, record.digest] = key
            while len(self._by_id) > self._max_entries:
                self._drop(next(iter(self._by_id)))

    def mark_lost(self, scope: str, response_id: str) -> None:
        """Do not use this response again: the server no longer has it."""
        with self._lock:
            entry = self._by_id.get((scope, response_id))
            if entry is not None:
                lost = replace(entry.record, status="lost")
                self._by_id[scope, response_id] = replace(entry, record=lost)

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._by_id.pop(key)
        digest = (entry.record.scope, entry.record.digest)
        if self._by_digest.get(digest) == key:
            del self._by_digest[digest]
