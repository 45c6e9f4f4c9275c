"""Connections to PostgreSQL: a pool of them, each with a limit for the time that the server may take to answer.

A server can stop answering without closing a connection: its process was stopped, or the network drops
packets. Timers of the server do not help then, and neither do timers of TCP if the other kernel still
acknowledges. So the client itself limits each wait, and closes the connection at its end.
"""

import math
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import psycopg

from kedge.store.database.postgres import MARGIN_SECONDS
from kedge.store.database.transactions import inherited

PAUSE_SECONDS = 0.2
"""The time between two attempts to connect to a server that was reachable before."""
MAX_TIMEOUT = 2**31 - 1
"""The maximum timeout of PostgreSQL, in milliseconds."""
_PERMANENT_ERRORS = ("password authentication failed", "no password supplied", "does not exist")
"""Parts of server messages about errors that a retry cannot resolve."""


def is_permanent(error: psycopg.Error) -> bool:
    """Return whether trying to connect again is useless after an error."""
    return any(part in str(error) for part in _PERMANENT_ERRORS)


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in time, and the connection was closed."""


class ConnectionsBusy(psycopg.OperationalError):
    """Every connection was in use until the end of the wait."""


class PostgresConnection(psycopg.Connection[Any]):
    """A connection whose waits for the server are limited."""

    _wait_until = 0.0
    _statement_seconds = math.inf

    def limit(self, wait_until: float, statement_seconds: float) -> None:
        """Set the time until which statements may wait for locks, and how long each may run besides that."""
        self._wait_until = wait_until
        self._statement_seconds = statement_seconds

    def allow_long_statements(self) -> None:
        """Remove the limit for the duration of statements."""
        self._statement_seconds = math.inf

    def build_limits(self) -> bytes:
        """Return the statements that set the limits of the server for one transaction."""
        remaining = max(0.001, self._wait_until - time.monotonic())
        lock = min(math.ceil(remaining * 1_000), MAX_TIMEOUT)
        total = (remaining + self._statement_seconds) * 1_000
        statement = 0 if total > MAX_TIMEOUT else math.ceil(total)
        return b"SET LOCAL lock_timeout = %d; SET LOCAL statement_timeout = %d" % (lock, statement)

    def open_client_cursor(self) -> "psycopg.ClientCursor[Any]":
        """Return a cursor that inserts values into its statements itself."""
        return psycopg.ClientCursor(self)

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for the answer to a statement; close the connection if there is none in time."""
        start = max(time.monotonic(), self._wait_until)
        deadline = start + self._statement_seconds + MARGIN_SECONDS
        try:
            return super().wait(_limit(gen, deadline), *args, **options)
        except NoAnswer:
            self.close()
            raise


def _limit(steps: Any, deadline: float) -> Generator[Any, Any, Any]:
    """Run the steps of a driver's operation, each of which waits for the socket, until a time.

    The driver resumes an operation at each interval, with 0 if the socket is not ready.
    """
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise NoAnswer("the server did not answer in time")
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


class _Permits:
    """A semaphore that serves its callers in order: a caller that comes later cannot overtake one that waits."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    def acquire(self, wait_until: float) -> bool:
        """Wait for a permit until a time; return whether the caller has one."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(min(max(0.0, wait_until - time.monotonic()), threading.TIMEOUT_MAX)):
            return True
        with self._lock:
            if not turn.is_set():
                self._waiting.remove(turn)
            return turn.is_set()

    def release(self) -> None:
        """Pass a permit on to the first caller that waits."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1


class PostgresConnections:
    """At most ``limit`` connections, opened when they are needed and reused.

    Args:
        url: The address of the database.
        limit: The maximum number of connections.
    """

    def __init__(self, url: str, limit: int) -> None:
        self._url = url
        self._limit = limit
        self._connect_error: psycopg.Error | None = None
        self._was_connected = False
        self._is_closed = False
        self._permits = _Permits(limit)
        self._idle: deque[PostgresConnection] = deque()
        # For a pool that is not closed.
        self._close_idle = weakref.finalize(self, _close_all, self._idle)

    def restart(self) -> None:
        """Begin without connections, in a forked process."""
        self._close_idle.detach()
        inherited.append(self._idle)
        self._permits = _Permits(self._limit)
        self._idle = deque()
        self._close_idle = weakref.finalize(self, _close_all, self._idle)

    def acquire(self, wait_until: float) -> PostgresConnection:
        """Return a connection that the server has not closed.

        Raises:
            ConnectionsBusy: All of them are in use until the end of the wait.
            psycopg.Error: No connection can be opened.
        """
        if not self._permits.acquire(wait_until):
            raise self._connect_error or ConnectionsBusy("every connection was busy")
        try:
            return self._find_idle() or self._connect(wait_until)
        except BaseException:
            self._permits.release()
            raise

    def release(self, connection: PostgresConnection) -> None:
        """Return a connection. If it broke, the idle ones may be broken too, and are closed."""
        if self._is_closed:
            connection.close()
        if connection.closed:
            _close_all(self._idle)
        else:
            self._idle.append(connection)
        self._permits.release()

    def close(self) -> None:
        """Close the connections; those in use are closed when they are released."""
        self._is_closed = True
        _close_all(self._idle)

    def _find_idle(self) -> PostgresConnection | None:
        """Return the connection that was used last, after closing those that the server has closed."""
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if not _has_input(connection.fileno()):
                    return connection
                connection.close()  # an idle connection has input only if the server closes it
        return None

    def _connect(self, wait_until: float) -> PostgresConnection:
        """Open a connection; if there was one before, wait for a server that is being restarted."""
        while True:
            seconds = max(2.0, wait_until - time.monotonic())
            try:
                connection = PostgresConnection.connect(
                    self._url,
                    autocommit=True,  # a transaction is begun by the first statement that needs it
                    prepare_threshold=None,  # with PgBouncer, the next transaction has another session
                    connect_timeout=math.ceil(min(seconds, MAX_TIMEOUT)),
                    application_name="kedge",
                )
            except psycopg.Error as error:
                self._connect_error = error
                pause = min(PAUSE_SECONDS, wait_until - time.monotonic())
                if not self._was_connected or is_permanent(error) or pause <= 0:
                    raise
                time.sleep(pause)
            else:
                self._connect_error = None
                self._was_connected = True
                return connection


def _close_all(connections: deque[PostgresConnection]) -> None:
    with suppress(IndexError):
        while True:
            connections.pop().close()


def _has_input(fileno: int) -> bool:
    """Return whether there is something to read; ``select`` is limited to small numbers of files."""
    if not hasattr(select, "poll"):
        return bool(select.select([fileno], [], [], 0)[0])
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))
