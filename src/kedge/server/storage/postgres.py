"""The server's database on PostgreSQL, for any number of servers.

Foreign keys prevent the deletion of a node that another server continues, and deletions are run one at a time.

A statement is a round trip, during which the event loop must not wait. So all statements of requests are
run in one thread, in the order in which they were submitted: a server reads its own writes, and a response
is settled after its last event was stored.
"""

import contextvars
import logging
import threading
import time
from asyncio import get_running_loop, shield
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.database.postgres import (
    NOW,
    POSTGRESQL,
    PostgresDatabase,
    PostgresTransaction,
)
from kedge.database.responses import use_practice_tables
from kedge.database.transactions import Values
from kedge.errors import CannotServe, StoreBusy, StoreError
from kedge.server.storage.claims import ReplicaClaims
from kedge.server.storage.database import ServerDatabase, upgrade_schema

if TYPE_CHECKING:
    from kedge.server.settings import Settings

T = TypeVar("T")

log = logging.getLogger("kedge.server")

MAX_FAILED = 10_000
"""The number of functions that are called again after an outage."""
PURGE_LOCK = 5461730
"""The number of the advisory lock of deletions of expired responses."""
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock(?, hashtext(current_schema()))"
_LOCK_CONVERSATION = """
UPDATE kedge_server_conversations c SET locked_by = ? WHERE id = ? AND coalesce(node, 0) = ? AND (
    locked_by IS NULL OR (
        NOT EXISTS (SELECT 1 FROM kedge_server_replicas WHERE id = c.locked_by AND alive_until > {now})
        AND NOT EXISTS (
            SELECT 1 FROM kedge_server_nodes WHERE conversation = c.id AND background
            AND status IN ('in_progress', 'queued')
        )
    )
)
""".replace("{now}", NOW)


class PostgresServerDatabase(ServerDatabase):
    """A PostgreSQL database that any number of servers share.

    Args:
        settings: The settings of the server. Of its clock only the difference from the time of this machine is used,
            which a test may change. It is added to the time of the database.

    Raises:
        CannotServe: If the database cannot be opened, or was written by another version.
    """

    dialect = POSTGRESQL

    def __init__(self, settings: "Settings") -> None:
        limits = settings.limits
        self.owner = token_hex(8)
        self.in_store = settings.in_store
        self._convert = use_practice_tables if settings.in_store else str
        self._given_clock = settings.clock
        self._clock_offset = 0.0
        self._current = threading.local()
        self._thread = ThreadPoolExecutor(1, "kedge-responses")
        self._failed: deque[Callable[[], None]] = deque(maxlen=MAX_FAILED)
        try:
            self.pool = PostgresDatabase(
                settings.db,
                wait_seconds=limits.database_seconds,
                statement_seconds=limits.database_seconds,
            )
            self.check = self.pool.check
            try:
                if not self.in_store:
                    self.pool.run_write(lambda tx: upgrade_schema(tx, "the database"))
                self.claims = ReplicaClaims(self, self.owner, limits.lease_seconds)
                self.claims.renew()
            except BaseException:
                self.pool.close()
                raise
        except StoreError as error:
            raise CannotServe(f"the database cannot be opened: {error}") from error

    def clock(self) -> float:
        """Return the time of the database."""
        now = time.monotonic() + self._clock_offset
        return now if self._given_clock is time.time else now + self._given_clock() - time.time()

    def set_clock(self, now: float) -> None:
        """Set the clock to the time that the database has just returned."""
        self._clock_offset = now - time.monotonic()

    def execute(self, sql: str, values: Values = ()) -> Any:
        """Run a statement, in the transaction of this thread if there is one."""
        tx: PostgresTransaction | None = getattr(self._current, "transaction", None)
        if tx is not None:
            return tx.query(self._convert(sql), values)
        return self.pool.run_write(lambda tx: tx.query(self._convert(sql), values, alone=True))

    def transact(self, work: Callable[[], T]) -> T:
        """Run the statements of a function as one transaction. After a conflict it is run again."""

        def run(tx: PostgresTransaction) -> T:
            self._current.transaction = tx
            try:
                return work()
            finally:
                self._current.transaction = None

        return work() if getattr(self._current, "transaction", None) else self.pool.run_write(run)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread of the database, after all functions that were submitted before.

        It is called even if the caller is cancelled, so that it releases its locks, but not after it waited
        too long for its turn: if each operation waits for a database that does not answer, the queue
        would grow and every request would wait longer.

        Raises:
            StoreBusy: The functions before it took too long.
        """
        context = contextvars.copy_context()
        latest = time.monotonic() + self.pool.wait_seconds

        def call() -> T:
            if time.monotonic() > latest:
                raise StoreBusy("the database did not answer earlier requests in time; try again")
            return context.run(work, *args)

        return await shield(get_running_loop().run_in_executor(self._thread, call))

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Schedule a function in the thread of the database; after an outage it is called again."""

        def call() -> None:
            try:
                work(*args)
            except StoreError as error:
                log.warning("a change could not be stored: %s", error)
                if error.retryable:
                    self._failed.append(call)

        self._thread.submit(call)

    def resubmit(self) -> None:
        """Schedule the functions that failed before; the database answers again."""
        with suppress(IndexError):
            while True:
                self._thread.submit(self._failed.popleft())

    def lock_conversation(self, id: str, node: int | None) -> bool:
        """Lock a conversation for this server; the lock of a server that is gone is ignored.

        If a background response in the conversation is waiting for another server to continue it, the
        lock belongs to that response.
        """
        return bool(self.execute(_LOCK_CONVERSATION, (self.owner, id, node or 0)).rowcount)

    def unlock_conversation(self, id: str) -> None:
        """Release the lock of a conversation."""
        self.execute(
            "UPDATE kedge_server_conversations SET locked_by = NULL WHERE id = ? AND locked_by = ?",
            (id, self.owner),
        )

    def run_purge(self, work: Callable[[], int]) -> int:
        """Run a deletion of expired responses, unless another server is running one."""

        def purge() -> int:
            row = self.execute(_TRY_LOCK, (PURGE_LOCK,)).fetchone()
            return work() if row and row[0] else 0

        return self.transact(purge)

    def close(self) -> None:
        """Finish the submitted functions, release all claims, and close the connections."""
        self._thread.shutdown()
        if self.claims is not None:
            with suppress(StoreError):  # the claims expire anyway
                self.claims.give_up()
        self.pool.close()
