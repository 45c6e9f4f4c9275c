"""The embedded server of the practice model, and the file in which it stores responses.

Without a file its memory ends with the process. The commands use a file next to their store, so that a later
process can continue from the same responses, as with a hosted provider. Several processes may use one file
at the same time. The server is imported when it is started, because programs with other models do not need it.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anyio import to_thread

from kedge.errors import CannotServe
from kedge.server.storage.database import IN_MEMORY
from kedge.store import Store
from kedge.store.responses import select_response_ids

if TYPE_CHECKING:
    from kedge.server.settings import Settings
    from kedge.server.state import ServerState
    from kedge.server.uvicorn_server import ServerThread

MAX_MEMORY_BYTES = 64_000_000
"""The size of a file above which the oldest responses are deleted."""
PURGE_SECONDS = 60.0

_logger = logging.getLogger("kedge.providers")


def _log_problem(problem: str) -> None:
    _logger.warning(problem)


@dataclass(frozen=True, slots=True)
class _Memory:
    """The file in which responses are stored, and the function that reports if it cannot be used."""

    file: str = IN_MEMORY
    report: Callable[[str], None] = _log_problem


_lock = threading.Lock()
_memory = _Memory()
_servers: dict[str, "ServerThread"] = {}
"""The running servers, by their files."""


def get_embedded_server() -> "ServerThread":
    """Return the embedded server of this process, and start it when it is first needed."""
    with _lock:
        file = _memory.file
        if file not in _servers:
            _servers[file] = _start_server(_memory)
        return _servers[file]


def _start_server(memory: _Memory) -> "ServerThread":
    from kedge.server.settings import Settings
    from kedge.server.uvicorn_server import ServerThread

    try:
        server = ServerThread(_file_settings(memory.file))
    except CannotServe as error:
        memory.report(
            f"the practice model remembers this conversation only while this process runs: {error}"
        )
        server = ServerThread(Settings())
    server.start()
    atexit.register(server.stop)
    return server


def _file_settings(file: str) -> "Settings":
    from kedge.server.settings import Settings

    if file == IN_MEMORY:
        return Settings()
    return Settings(db=file, shared=True, max_db_bytes=MAX_MEMORY_BYTES, purge_every=PURGE_SECONDS)


@contextmanager
def store_practice_memory(
    file: Path | None, report: Callable[[str], None] = _log_problem
) -> Generator[None]:
    """Store the responses of the practice model in a file, for engines connected within this block.

    Args:
        file: The file, or None for memory.
        report: Called with a sentence if the file cannot be used; the memory then ends with the process.
    """
    global _memory  # the embedded server serves the process
    previous, _memory = _memory, _Memory(str(file) if file else IN_MEMORY, report)
    try:
        yield
    finally:
        file_name, _memory = _memory.file, previous
        server = None if file_name == IN_MEMORY else _servers.pop(file_name, None)
        if server is not None:
            atexit.unregister(server.stop)
            server.stop()


def find_missing_responses(ids: Collection[str]) -> set[str]:
    """Return the ids of responses that the practice model has not stored."""

    def find(state: "ServerState") -> set[str]:
        return {response_id for response_id in ids if state.responses.find(response_id) is None}

    return get_embedded_server().call(find)


async def erase_deleted(store: Store) -> None:
    """Erase the practice model's responses of conversations that are no longer in the store.

    This applies to the file of `store_practice_memory`, which is used with this store only. Responses that
    were interrupted, and are therefore not in the store, are erased as well.

    Args:
        store: The store, after the deletion.

    Raises:
        CannotServe: If the file cannot be opened.
    """
    if _memory.file == IN_MEMORY:
        return
    file, retention = Path(_memory.file), _file_settings(_memory.file).retention
    since = store.clock() - retention
    # Of all namespaces: the file is shared by the users of a store.
    retained = frozenset(await store.database.read(lambda tx: select_response_ids(tx, since)))
    await to_thread.run_sync(erase_practice_memory, file, retained)


def erase_practice_memory(file: Path, retained: Collection[str]) -> None:
    """Erase every response in a file except some, and the conversation objects without a response.

    Args:
        file: The file; it need not exist.
        retained: The ids of the responses to retain.

    Raises:
        CannotServe: If the file cannot be opened.
    """
    if not file.exists():
        return
    from kedge.server.state import ServerState

    state = ServerState(_file_settings(str(file)))
    try:
        state.responses.delete_others(retained)
        while state.conversations.delete_unused():
            pass
    finally:
        state.close()
