"""Indexes of stored responses by the content of their context, in memory or in a Kedge store.

The key is the scope (endpoint and account) and the digest of the complete context of the response. A
lookup is made with the digests of all prefixes of a request. The index is a cache: an entry that is
missing costs one full send.

A store is shared by the processes that use it. It may be a SQLite file, for the processes of one machine, or a
PostgreSQL database, for several machines. It contains digests and response ids, but no content and no keys. While the
database does not answer, nothing is found or recorded, and requests are sent as written.

A response is written before its last bytes are passed on, so the next request finds it in any process, also
after this process was killed. On SQLite this is done in the calling thread, without a worker thread and
without waiting for the disk: after a power failure the newest entries may be missing, which costs one full
send each.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

from kedge._internal.arguments import check_positive_int
from kedge._internal.bounded_dict import BoundedDict
from kedge.errors import StoreBusy, StoreError
from kedge.observe import get_logger
from kedge.planning import AnchorRecord
from kedge.store import Store, response_index
from kedge.store.database.transactions import Tx
from kedge.store.open import StoreAddress, open_current_database, resolve_address

log = get_logger("kedge.chaining")

T = TypeVar("T")
_Method = Literal["read_inline", "write_inline", "write_sync"]

WAIT_SECONDS = 2.0
"""The maximum time that a store opened for the index waits for a lock or a connection, and for a statement."""
RETRY_SECONDS = 5.0
"""The time for which a database is not used after it failed."""
_PRUNE_EVERY = 256
MAX_ENTRIES = 100_000
"""The maximum number of responses in an in-memory index; the oldest are dropped first."""


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


_decode_entry = msgspec.json.Decoder(IndexedResponse).decode


class MemoryIndex:
    """An index in the memory of this process.

    Args:
        max_entries: The maximum number of responses; the oldest are dropped first.
    """

    is_blocking = False
    """Whether calls wait for a disk or a network; asynchronous clients use worker threads for them."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        check_positive_int("max_entries", max_entries)
        self._by_id = BoundedDict[tuple[str, str], IndexedResponse](max_entries)
        self._by_digest = BoundedDict[tuple[str, str], IndexedResponse](max_entries)
        """The newest response with each digest, also after it was lost or replaced."""
        self._evidence = BoundedDict[str, Mapping[str, Any]](max_entries)
        self.hash_key = secrets.token_bytes(32)
        """The key with which credentials are hashed into scopes, the same for all users of the index."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        entries = (self._by_digest.get((scope, digest)) for digest in digests)
        return [
            entry
            for entry in entries
            if entry and self.get(scope, entry.record.response_id) is entry
        ]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return self._by_id.get((scope, response_id))

    def add(self, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        with self._lock:
            older = self.get(record.scope, record.response_id)
            self._by_id[record.scope, record.response_id] = entry
            self._by_digest[record.scope, record.digest] = entry
        return is_reissued(older, entry)

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not use these responses again: the server no longer has them."""
        with self._lock:
            for response_id in response_ids:
                self._by_id.pop((scope, response_id), None)

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence about the memory of a server; see `kedge.evidence.server_evidence`."""
        return self._evidence.get(key)

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, and replace the previous evidence."""
        with self._lock:
            self._evidence[key] = form


def is_reissued(older: IndexedResponse | None, entry: IndexedResponse) -> bool:
    """Return whether a server has issued the id of a response before, for other content."""
    if older is None or older.record.status != "completed":
        return False
    return older.record.digest != entry.record.digest


class StoreIndex:
    """An index in a Kedge store.

    Args:
        store: A file, the address of a store as for `kedge.open_store`, or an open store.
        max_entries: The maximum number of responses; the oldest are dropped first.

    Raises:
        CannotOpenStore: The address or the password is wrong, or the database is not a store.
        StoreUnreachable: The database server does not answer.
    """

    def __init__(self, store: Store | StoreAddress, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = check_positive_int("max_entries", max_entries)
        self._added = 0
        self._retry_at = 0.0
        self._inline_at = 0.0
        self._is_owner = not isinstance(store, Store)
        if isinstance(store, Store):
            self._database = store.database
        else:
            url = resolve_address(store)
            self._database = open_current_database(url, WAIT_SECONDS, WAIT_SECONDS)
        self.hash_key = self._database.write_sync(response_index.get_scope_key)
        """The key with which credentials are hashed into scopes, the same for every process."""

    @property
    def is_blocking(self) -> bool:
        """Whether calls wait. On SQLite they only do during another write, and when old entries are pruned."""
        return self._is_prune_due or not self._runs_inline

    @property
    def _is_prune_due(self) -> bool:
        return self._added % _PRUNE_EVERY == 0

    @property
    def _runs_inline(self) -> bool:
        return self._database.can_run_inline and time.monotonic() >= self._inline_at

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        texts = self._read(lambda tx: response_index.find_entries(tx, scope, digests)) or ()
        return [entry for text in texts if (entry := _decode(text)) is not None]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return _decode(self._read(lambda tx: response_index.select_entry(tx, scope, response_id)))

    def add(self, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        text = msgspec.json.encode(entry).decode()
        is_pruned = self._is_prune_due
        self._added += 1

        def work(tx: Tx) -> str | None:
            older = response_index.put_entry(
                tx, record.scope, record.response_id, record.digest, text, record.created_at
            )
            if is_pruned:
                response_index.prune_entries(tx, self._max_entries)
            return older

        if is_pruned:
            older = self._run("write_sync", work)  # this thread also writes the journal back
        else:
            older = self._write(work)
        return is_reissued(_decode(older), entry)

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not use these responses again: the server no longer has them."""
        self._write(lambda tx: response_index.delete_entries(tx, scope, response_ids))

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence about the memory of a server."""
        return self._read(lambda tx: response_index.select_evidence(tx, key))

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, and replace the previous evidence."""
        self._write(lambda tx: response_index.put_evidence(tx, key, form))

    def close(self) -> None:
        """Close the database, unless an open store was passed."""
        if self._is_owner:
            self._database.close()

    def _read(self, work: Callable[[Tx], T]) -> T | None:
        return self._run("read_inline", work)

    def _write(self, work: Callable[[Tx], T]) -> T | None:
        """Run a transaction in this thread if that is possible, otherwise in the writer thread."""
        if self._runs_inline:
            return self._run("write_inline", work)
        return self._run("write_sync", work)

    def _run(self, method: _Method, work: Callable[[Tx], T]) -> T | None:
        """Run a transaction, or return None if the database does not answer."""
        now = time.monotonic()
        if now < self._retry_at:
            return None
        try:
            return getattr(self._database, method)(work)
        except StoreError as error:
            if isinstance(error, StoreBusy) and method == "write_inline":
                # Another process is writing for a long time; threads can wait for it, an event loop cannot.
                self._inline_at = now + RETRY_SECONDS
                return None
            log.warning("the index is not used for %g s: %s", RETRY_SECONDS, error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return None


AnchorIndex = MemoryIndex | StoreIndex
"""An index: stored responses by content, and the evidence about their servers."""


def _decode(text: str | None) -> IndexedResponse | None:
    if text is None:
        return None
    with suppress(ValueError):  # an entry that another version wrote
        return _decode_entry(text)
    return None
