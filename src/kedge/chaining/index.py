"""Anchor indexes for programs, in memory or in a Kedge store, with the evidence about the programs' servers.

The index in a store has a table of its own, `response_index`: the responses of programs belong to no conversation, so
they have no row in `responses`.

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
from kedge.planning.anchor_index import MAX_ENTRIES, IndexedResponse, MemoryAnchorIndex, is_reissued
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

_decode_entry = msgspec.json.Decoder(IndexedResponse).decode


class MemoryIndex(MemoryAnchorIndex):
    """An index in the memory of this process.

    Args:
        max_entries: The maximum number of responses; the oldest are dropped first.
    """

    is_blocking = False
    """Whether calls wait for a disk or a network; asynchronous clients use worker threads for them."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        super().__init__(max_entries)
        self._evidence = BoundedDict[str, Mapping[str, Any]](max_entries)
        self._evidence_lock = threading.Lock()
        self.hash_key = secrets.token_bytes(32)
        """The key with which credentials are hashed into scopes, the same for all users of the index."""

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence about the memory of a server; see `kedge.evidence.server_evidence`."""
        return self._evidence.get(key)

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, and replace the previous evidence."""
        with self._evidence_lock:
            self._evidence[key] = form


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
        """Return the responses of this scope whose context has one of these digests."""
        texts = self._read(lambda tx: response_index.find_entries(tx, scope, digests)) or ()
        return [entry for text in texts if (entry := _decode(text)) is not None]

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        return _decode(self._read(lambda tx: response_index.select_entry(tx, scope, response_id)))

    def add(self, scope: str, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        text = msgspec.json.encode(entry).decode()
        is_pruned = self._is_prune_due
        self._added += 1

        def work(tx: Tx) -> str | None:
            older = response_index.put_entry(
                tx, scope, record.response_id, record.digest, text, record.created_at
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
        """Do not find these responses again: the server no longer has them."""
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


ResponseIndex = MemoryIndex | StoreIndex
"""An anchor index for programs, which also has the evidence about their servers and the key of their scopes."""


def _decode(text: str | None) -> IndexedResponse | None:
    if text is None:
        return None
    with suppress(ValueError):  # an entry that another version wrote
        return _decode_entry(text)
    return None
