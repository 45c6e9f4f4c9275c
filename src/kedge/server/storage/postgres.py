"""The server's database on PostgreSQL, for any number of servers, and their claims on it.

Foreign keys prevent the deletion of a node that another server continues, and deletions are run one at a time.

A statement is a round trip, during which the event loop must not wait. So all statements of requests are
run in one thread, in the order in which they were submitted: a server reads its own writes, and a response
is settled after its last event was stored.

Every server has a row with the time at which its lease expires, by the clock of the database, and renews
it. Its responses in progress and locked conversations have its name. So one statement renews all claims
of a server, and when it crashes they all expire at the same time. Another server then fails its responses,
whose clients lost their connection, and continues its background responses.

A server that was only slow may still be generating. This is harmless: only its owner can finish a
response, and a conversation is only moved from the node at which it was read.
"""

import contextvars
import logging
import threading
import time
from asyncio import get_running_loop, shield
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

from kedge._internal.json_text import encode
from kedge.errors import CannotServe, StoreBusy, StoreError
from kedge.server.object_forms import QUEUED_FIELDS, RESTARTED_MESSAGE, build_failed_fields
from kedge.server.sse import FRAME_END
from kedge.server.storage.database import (
    MAX_FAILED,
    ServerDatabase,
    may_succeed_later,
    upgrade_schema,
)
from kedge.store.database.postgres import NOW, POSTGRESQL, PostgresDatabase, PostgresTransaction
from kedge.store.database.responses import use_practice_tables
from kedge.store.database.transactions import Values

if TYPE_CHECKING:
    from kedge.server.settings import Settings

T = TypeVar("T")

log = logging.getLogger("kedge.server")

MAX_ATTEMPTS = 5
"""The maximum number of servers that try to generate a background response, which may make them crash."""

_UNFINISHED = "status IN ('in_progress', 'queued')"
_IS_LOST = (
    f"{_UNFINISHED} AND NOT EXISTS (SELECT 1 FROM kedge_server_replicas r "
    f"WHERE r.id = kedge_server_nodes.owner AND r.alive_until > {NOW})"
)
_RENEW = f"""
INSERT INTO kedge_server_replicas (id, alive_until) VALUES (?, {NOW} + ?)
ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until RETURNING {NOW}
"""
_CLAIM = f"""
UPDATE kedge_server_nodes SET owner = ?, status = 'queued', result_fields = ?, attempts = attempts + 1
WHERE id IN (
    SELECT id FROM kedge_server_nodes WHERE {_IS_LOST} AND background AND attempts < {MAX_ATTEMPTS} AND expires_at > ?
    ORDER BY id LIMIT ? FOR UPDATE SKIP LOCKED
) RETURNING id, key, parent, conversation, namespace, input, request, request_fields
"""
_FAIL = f"""
UPDATE kedge_server_nodes SET status = 'failed', result_fields = ? WHERE id IN (
    SELECT id FROM kedge_server_nodes WHERE {_IS_LOST}
    AND NOT (background AND attempts < {MAX_ATTEMPTS} AND expires_at > ?) FOR UPDATE SKIP LOCKED
)
"""
_ADD_EVENTS = f"""
INSERT INTO kedge_server_events (node, first, last, created_at, frames)
SELECT ?, ?, ?, {NOW}, ? WHERE EXISTS (SELECT 1 FROM kedge_server_nodes WHERE id = ? AND owner = ? AND {_UNFINISHED})
"""
_READ_EVENTS = """
SELECT n.status, e.first, e.frames FROM kedge_server_nodes n
LEFT JOIN kedge_server_events e ON e.node = n.id AND e.last >= ? WHERE n.id = ? ORDER BY e.first
"""
_DELETE_EVENTS = f"""
DELETE FROM kedge_server_events e WHERE created_at < {NOW} - ?
AND NOT EXISTS (SELECT 1 FROM kedge_server_nodes WHERE id = e.node AND {_UNFINISHED})
"""
_QUEUED_JSON = encode(QUEUED_FIELDS)
PURGE_LOCK = 5461730
"""The number of the advisory lock of deletions of expired responses."""
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock(?, hashtext(current_schema()))"
_LOCK_CONVERSATION = f"""
UPDATE kedge_server_conversations c SET locked_by = ? WHERE id = ? AND coalesce(node, 0) = ? AND (
    locked_by IS NULL OR (
        NOT EXISTS (SELECT 1 FROM kedge_server_replicas WHERE id = c.locked_by AND alive_until > {NOW})
        AND NOT EXISTS (
            SELECT 1 FROM kedge_server_nodes WHERE conversation = c.id AND background
            AND {_UNFINISHED}
        )
    )
)
"""


@dataclass(frozen=True, slots=True)
class ClaimedResponse:
    """A background response that another server did not finish, with the data to generate it."""

    node: int
    key: str
    parent: int | None
    conversation: str | None
    namespace: str
    input: bytes
    body: bytes
    request_json: bytes


class ReplicaClaims:
    """The claims of one server, and the handling of claims that other servers have lost.

    Args:
        database: The database.
        owner: The name of this server.
        lease_seconds: Seconds after which its claims expire unless they are renewed.
    """

    def __init__(
        self, database: "PostgresServerDatabase", owner: str, lease_seconds: float
    ) -> None:
        self._database = database
        self._execute = database.execute
        self._owner = owner
        self.lease_seconds = lease_seconds

    def renew(self) -> None:
        """Renew all claims of this server, and set its clock to the time of the database."""
        row = self._execute(_RENEW, (self._owner, self.lease_seconds)).fetchone()
        if row is not None:
            self._database.set_clock(row[0])
        self._database.resubmit()

    def give_up(self) -> None:
        """Release all claims, so that another server continues at once."""
        self._execute("DELETE FROM kedge_server_replicas WHERE id = ?", (self._owner,))

    def is_lost(self, node: int) -> bool:
        """Return whether a response is unfinished and its server is gone."""
        row = self._execute(
            f"SELECT 1 FROM kedge_server_nodes WHERE id = ? AND {_IS_LOST}", (node,)
        ).fetchone()
        return row is not None

    def claim(self, limit: int) -> list[ClaimedResponse]:
        """Claim background responses of servers that are gone, with the locks of their conversations."""

        def claim() -> list[ClaimedResponse]:
            values = (self._owner, _QUEUED_JSON, self._database.clock(), limit)
            claimed = [ClaimedResponse(*row) for row in self._execute(_CLAIM, values).fetchall()]
            for response in claimed:
                if response.conversation is not None:
                    self._execute(
                        "UPDATE kedge_server_conversations SET locked_by = ? WHERE id = ?",
                        (self._owner, response.conversation),
                    )
            return claimed

        if limit <= 0:
            return []
        return self._database.transact(claim)

    def fail_lost(self) -> None:
        """Fail the responses of servers that are gone, unless they can be continued."""
        fields = build_failed_fields("failed", RESTARTED_MESSAGE)
        self._execute(_FAIL, (encode(fields), self._database.clock()))

    def delete_old(self, event_seconds: float) -> None:
        """Delete the events of responses that ended long ago, and the rows of servers that are gone."""
        self._execute(_DELETE_EVENTS, (event_seconds,))
        self._execute(
            f"DELETE FROM kedge_server_replicas WHERE alive_until < {NOW} - ?",
            (10 * self.lease_seconds,),
        )

    def find_lost(self, nodes: Collection[int]) -> set[int]:
        """Return the responses that this server no longer owns or that another server cancelled."""
        rows = self._execute(
            f"SELECT id FROM kedge_server_nodes WHERE id = ANY(?) AND owner = ? AND {_UNFINISHED}",
            (list(nodes), self._owner),
        ).fetchall()
        return set(nodes) - {node for (node,) in rows}

    def add_events(self, node: int, first: int, frames: list[bytes]) -> None:
        """Store the frames of consecutive events of a response that this server generates."""
        last = first + len(frames) - 1
        self._execute(_ADD_EVENTS, (node, first, last, b"".join(frames), node, self._owner))

    def count_events(self, node: int) -> int:
        """Return the number of the first event that is not stored."""
        row = self._execute(
            "SELECT coalesce(max(last) + 1, 0) FROM kedge_server_events WHERE node = ?", (node,)
        ).fetchone()
        return row[0]

    def read_events(self, node: int, start: int) -> tuple[str, list[bytes]] | None:
        """Return the status of a response, and its frames from the event ``start`` on, or None if it was deleted."""
        rows = self._execute(_READ_EVENTS, (start, node)).fetchall()
        if not rows or rows[0][0] is None:
            return None
        status = rows[0][0]
        frames: list[bytes] = []
        for _, first, batch in rows:
            if batch is not None:
                batch_frames = [frame + FRAME_END for frame in batch.split(FRAME_END)[:-1]]
                frames += batch_frames[max(start - first, 0) :]
        return status, frames


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
        self._local_clock = settings.clock
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

    async def check_health(self) -> None:
        """Raise a `StoreError` unless the database answers within a few seconds."""
        await self.pool.check_health()

    def clock(self) -> float:
        """Return the time of the database."""
        now = time.monotonic() + self._clock_offset
        if self._local_clock is not time.time:
            now += self._local_clock() - time.time()
        return now

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
        if getattr(self._current, "transaction", None) is not None:
            return work()

        def run(tx: PostgresTransaction) -> T:
            self._current.transaction = tx
            try:
                return work()
            finally:
                self._current.transaction = None

        return self.pool.run_write(run)

    @property
    def is_free(self) -> bool:
        """False: each statement is a round trip."""
        return False

    async def run(self, work: Callable[..., T], *args: Any, is_long: bool = False) -> T:
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

    def submit(self, work: Callable[..., object], *args: Any, is_long: bool = False) -> None:
        """Schedule a function in the thread of the database; after an outage it is called again."""

        def call() -> None:
            try:
                work(*args)
            except StoreError as error:
                log.warning("a change could not be stored: %s", error)
                if may_succeed_later(error):
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
            (is_locked,) = self.execute(_TRY_LOCK, (PURGE_LOCK,)).fetchone()
            if not is_locked:
                return 0
            return work()

        return self.transact(purge)

    def close(self) -> None:
        """Finish the submitted functions, release all claims, and close the connections."""
        self._thread.shutdown()
        if self.claims is not None:
            with suppress(StoreError):  # the claims expire anyway
                self.claims.give_up()
        self.pool.close()
