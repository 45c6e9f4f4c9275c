"""The embedded server of the practice model, and the store in which it stores responses.

Without a store its memory ends with the process. The commands use the store of their conversations, so that a
later process can continue from the same responses, as with a hosted provider. Several processes may use one store
at the same time. What is deleted in the store is deleted in these responses as well. The server is imported when it
is started, because programs with other models do not need it.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import Struct

from kedge.config import store_file
from kedge.errors import CannotServe, StoreError
from kedge.server.storage.database import IN_MEMORY
from kedge.store.open import MEMORY_URLS, open_current_database, resolve_address

if TYPE_CHECKING:
    from kedge.server.state import ServerState
    from kedge.server.uvicorn_server import ServerThread

MAX_MEMORY_BYTES = 64_000_000
"""The size of the stored responses above which the oldest are deleted."""
PURGE_SECONDS = 60.0

_logger = logging.getLogger("kedge.providers")


class _Memory(Struct, frozen=True):
    """The address of the store, and the function that reports if it cannot be used."""

    address: str = IN_MEMORY
    report: Callable[[str], None] = _logger.warning


_lock = threading.Lock()
_memory = _Memory()
_servers: dict[str, "ServerThread"] = {}
"""The running servers, by the addresses of their stores."""


def get_embedded_server() -> "ServerThread":
    """Return the embedded server of this process, and start it when it is first needed."""
    with _lock:
        address = _memory.address
        if address not in _servers:
            _servers[address] = _start_server(_memory)
        return _servers[address]


def _start_server(memory: _Memory) -> "ServerThread":
    from kedge.server.settings import Settings
    from kedge.server.uvicorn_server import ServerThread

    settings = Settings()
    try:
        if memory.address != IN_MEMORY:
            open_current_database(memory.address).close()  # creates the tables
            stored = replace(
                settings,
                db=str(store_file(memory.address) or memory.address),
                in_store=True,
                max_db_bytes=MAX_MEMORY_BYTES,
                purge_every=PURGE_SECONDS,
            )
            server = ServerThread(stored)
        else:
            server = ServerThread(settings)
    except (CannotServe, StoreError) as error:
        memory.report(
            f"the practice model remembers this conversation only while this process runs: {error}"
        )
        server = ServerThread(settings)
    server.start()
    atexit.register(server.stop)
    return server


@contextmanager
def store_practice_memory(
    address: str | os.PathLike[str], report: Callable[[str], None] = _logger.warning
) -> Generator[None]:
    """Store the responses of the practice model in a store, for engines connected within this block.

    Args:
        address: The address of the store or the path of its file; with one in memory, the server has its own memory.
        report: Called with a sentence if the store cannot be used; the memory then ends with the process.
    """
    global _memory  # noqa: PLW0603 - the embedded server serves the process
    url = resolve_address(address)
    if url in MEMORY_URLS:
        url = IN_MEMORY
    previous = _memory
    _memory = _Memory(url, report)
    try:
        yield
    finally:
        _memory = previous
        if url != IN_MEMORY and url in _servers:
            server = _servers.pop(url)
            atexit.unregister(server.stop)
            server.stop()


def find_missing_responses(ids: Collection[str]) -> set[str]:
    """Return the ids of responses that the practice model has not stored."""

    def find(state: "ServerState") -> set[str]:
        return {response_id for response_id in ids if state.responses.find(response_id) is None}

    return get_embedded_server().call(find)
