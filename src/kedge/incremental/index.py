"""Index of stored responses by the content of their context.

The key is the scope (endpoint and account) and the digest of the complete context of the response. A
lookup is made with the digests of all prefixes of a request. The index is a cache: an entry that is
missing costs one full send.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kedge.planning import AnchorRecord
from kedge.security.bounded_dict import BoundedDict

MAX_ENTRIES = 100_000
"""The maximum number of responses in an in-memory index; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class IndexedResponse:
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
    """Protocol of indexes: stored responses by content, and the evidence about their servers."""

    @property
    def is_blocking(self) -> bool:
        """Whether calls wait for a disk or a network; asynchronous clients use worker threads for them."""
        ...

    @property
    def hash_key(self) -> bytes:
        """The key with which credentials are hashed into scopes, the same for all users of the index."""
        ...

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        ...

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        ...

    def add(self, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        ...

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not use these responses again: the server no longer has them."""
        ...

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence about the memory of a server; see `kedge.memory.evidence`."""
        ...

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, and replace the previous evidence."""
        ...


class MemoryIndex:
    """An index in the memory of this process.

    Args:
        max_entries: The maximum number of responses; the oldest are dropped first.
    """

    is_blocking = False

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._by_id: OrderedDict[tuple[str, str], IndexedResponse] = OrderedDict()
        self._by_digest: dict[tuple[str, str], tuple[str, str]] = {}
        self._evidence = BoundedDict[str, Mapping[str, Any]](max_entries)
        self._hash_key = secrets.token_bytes(32)
        self._lock = threading.Lock()

    @property
    def hash_key(self) -> bytes:
        """The key with which credentials are hashed into scopes."""
        return self._hash_key

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        with self._lock:
            keys = [self._by_digest.get((scope, digest)) for digest in digests]
            return [self._by_id[key] for key in keys if key is not None]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return self._by_id.get((scope, response_id))

    def add(self, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        key = (record.scope, record.response_id)
        with self._lock:
            older = self._by_id.get(key)
            if older is not None:
                self._drop(key)
            self._by_id[key] = entry
            self._by_digest[record.scope, record.digest] = key
            while len(self._by_id) > self._max_entries:
                self._drop(next(iter(self._by_id)))
        return is_reissued(older, entry)

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not use these responses again: the server no longer has them."""
        with self._lock:
            for response_id in response_ids:
                if (scope, response_id) in self._by_id:
                    self._drop((scope, response_id))

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence about the memory of a server."""
        return self._evidence.get(key)

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, and replace the previous evidence."""
        with self._lock:
            self._evidence[key] = form

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._by_id.pop(key)
        digest = (entry.record.scope, entry.record.digest)
        if self._by_digest.get(digest) == key:
            del self._by_digest[digest]


def is_reissued(older: IndexedResponse | None, entry: IndexedResponse) -> bool:
    """Return whether a server has issued the id of a response before, for other content."""
    if older is None or older.record.status != "completed":
        return False
    return older.record.digest != entry.record.digest
