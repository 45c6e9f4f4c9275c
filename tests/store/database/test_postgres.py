"""Limits for every wait for PostgreSQL, and the causes after which a transaction is run again."""

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from kedge.errors import CannotOpenStore, StoreBusy, StoreUnreachable
from kedge.server.settings import Settings
from kedge.store import open_store
from kedge.store.database.connections import _Permits
from kedge.store.database.postgres import MAX_ATTEMPTS, PostgresDatabase, PostgresTransaction
from kedge.store.database.transactions import HealthCheck, Tx
from kedge.web.app import PageSettings, open_page_server
from postgresql import (
    PASSWORD,
    PostgresServer,
    create_schema,
    freeze,
    freeze_server,
    list_client_pids,
    terminate_clients,
)

Pool = PostgresDatabase
TIMEOUT = 300.0


@pytest.fixture
def pool(own_server: PostgresServer) -> Iterator[Pool]:
    """Yield a pool on a server with an empty table ``t``, without short limits."""
    with psycopg.connect(own_server.url) as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t (number INTEGER PRIMARY KEY)")
    made: Pool = PostgresDatabase(own_server.url, wait_seconds=TIMEOUT, statement_seconds=TIMEOUT)
    made.run_read(lambda tx: tx.rows("SELECT 1"))
    yield made
    made.close()


@contextmanager
def limit(pool: Pool, wait_seconds: float = 0.1, statement_seconds: float = 0.1) -> Iterator[None]:
    """Set short limits for the transactions of a pool."""
    pool.wait_seconds, pool.statement_seconds = wait_seconds, statement_seconds
    yield
    pool.wait_seconds = pool.statement_seconds = TIMEOUT


def count_rows(url: str) -> int:
    """Return the number of rows of the table ``t``."""
    with psycopg.connect(url) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM t").fetchall()
        return count


def insert(number: int) -> Callable[[PostgresTransaction], int]:
    """Return the work of a transaction that inserts a row."""
    return lambda tx: tx.run("INSERT INTO t (number) VALUES (?)", (number,))


def insert_alone(number: int) -> Callable[[PostgresTransaction], int]:
    """Return the same work as a single statement without a transaction around it."""

    def work(tx: PostgresTransaction) -> int:
        tx.single_statement = True
        return tx.run_alone(b"INSERT INTO t (number) VALUES (%s)", (number,)).rowcount

    return work


@contextmanager
def occupy(pool: Pool, count: int) -> Iterator[None]:
    """Use this many connections of a pool at the same time."""
    barrier, done = threading.Barrier(count + 1), threading.Event()

    def work(tx: Tx) -> None:
        tx.rows("SELECT 1")
        barrier.wait(TIMEOUT)
        done.wait(TIMEOUT)

    with ThreadPoolExecutor(count) as threads:
        working = [threads.submit(pool.run_read, work) for _ in range(count)]
        barrier.wait(TIMEOUT)
        try:
            yield
        finally:
            done.set()
        for each in working:
            each.result(TIMEOUT)


def open_idle(pool: Pool, count: int) -> None:
    """Open this many connections of a pool."""
    with occupy(pool, count):
        pass


def test_the_wait_for_a_lock_is_limited(own_server: PostgresServer, pool: Pool) -> None:
    """Behind another session's lock, a read and any write raise `StoreBusy` after ``wait_seconds``."""
    calls: list[Callable[[], object]] = [
        lambda: pool.run_write(insert(1)),
        lambda: pool.run_write(insert_alone(2)),
        lambda: pool.run_read(lambda tx: tx.rows("SELECT * FROM t")),
    ]
    with psycopg.connect(own_server.url) as other, limit(pool, statement_seconds=TIMEOUT):
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        for call in calls:
            with pytest.raises(StoreBusy, match="held a lock for too long") as exc_info:
                call()
            assert exc_info.value.retryable
    assert count_rows(own_server.url) == 0
    assert [call() for call in calls] == [1, 1, [(1,), (2,)]]


def test_a_slow_statement_is_canceled(pool: Pool) -> None:
    """A statement may run for ``statement_seconds``, unless the transaction allows long ones."""
    with limit(pool), pytest.raises(StoreBusy, match="which took too long"):
        pool.run_write(lambda tx: tx.rows("SELECT pg_sleep(300)"))

    def work(tx: PostgresTransaction) -> str:
        tx.allow_long_statements()
        return tx.rows("SHOW statement_timeout")[0][0]

    assert pool.run_write(work) == "0"
    assert pool.run_write(lambda tx: tx.rows("SHOW statement_timeout"))[0][0] != "0"


def test_limits_do_not_outlive_a_transaction(own_server: PostgresServer, pool: Pool) -> None:
    """Neither limits nor prepared statements are left in a session, which PgBouncer gives to others."""
    for number in range(10):
        pool.run_write(insert(2 * number))
        pool.run_write(insert_alone(2 * number + 1))
    connection = pool._pool.acquire(0.0)
    try:
        for name in ("lock_timeout", "statement_timeout"):
            assert connection.execute(f"SHOW {name}".encode()).fetchall() == [("0",)]
        query = "SELECT count(*) FROM pg_prepared_statements"
        assert connection.execute(query).fetchall() == [(0,)]
    finally:
        pool._pool.release(connection)
    assert count_rows(own_server.url) == 20


@pytest.mark.parametrize("work", [insert(1), insert_alone(1)], ids=["transaction", "alone"])
def test_a_frozen_server_process_does_not_block(
    own_server: PostgresServer, pool: Pool, work: Any
) -> None:
    """A connection that does not answer is closed; the next transaction uses another one."""
    open_idle(pool, 3)
    with freeze(list_client_pids(own_server.url)):
        with limit(pool), pytest.raises(StoreUnreachable):
            pool.run_write(work)
        # The other idle connections are frozen too, but were closed with the first one.
        assert pool.run_write(insert(2)) == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_an_unconfirmed_commit_is_not_run_again(
    own_server: PostgresServer, pool: Pool, frozen: bool
) -> None:
    """A commit without an answer may have happened, so the error is not retryable."""
    runs: list[int] = []
    with ExitStack() as stack:

        def work(tx: PostgresTransaction) -> None:
            runs.append(tx.run("INSERT INTO t (number) VALUES (1)"))
            if frozen:
                stack.enter_context(freeze(list_client_pids(own_server.url)))
            else:
                terminate_clients(own_server.url)

        if frozen:
            stack.enter_context(limit(pool))
        with pytest.raises(StoreUnreachable, match="check whether it was written") as exc_info:
            pool.run_write(work)
    assert not exc_info.value.retryable
    assert runs == [1]


def test_terminated_idle_connections_cost_no_wait(
    own_server: PostgresServer, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead idle connections are replaced at once: without a pause, and within a wait of no time at all."""
    open_idle(pool, 4)
    assert terminate_clients(own_server.url) == 4
    monkeypatch.setattr("time.sleep", forbid_pause)
    with limit(pool, wait_seconds=0.0, statement_seconds=TIMEOUT):
        assert pool.run_write(insert(1)) == 1


def forbid_pause(_: float) -> None:
    """Fail the test."""
    raise AssertionError("no pause is needed")


def test_a_disconnect_after_a_conflict_is_retried(own_server: PostgresServer, pool: Pool) -> None:
    """Each cause has its own number of attempts: an expected conflict does not use up those of another."""
    runs: list[bool] = []

    def work(tx: PostgresTransaction) -> int:
        runs.append(tx.is_retry)
        if len(runs) == 1:
            tx.run("INSERT INTO t (number) VALUES (7), (7)")
        if len(runs) <= MAX_ATTEMPTS["disconnect"]:
            tx.rows("SELECT 1")
            terminate_clients(own_server.url)
        return tx.run("INSERT INTO t (number) VALUES (1)")

    assert pool.run_write(work) == 1
    assert runs == [False, True, True, True]


def test_repeated_disconnects_end(own_server: PostgresServer, pool: Pool) -> None:
    """A statement that always ends its connection is not repeated forever."""
    runs: list[bool] = []

    def work(tx: PostgresTransaction) -> None:
        runs.append(tx.is_retry)
        tx.rows("SELECT 1")
        terminate_clients(own_server.url)
        tx.rows("SELECT 1")

    with pytest.raises(StoreUnreachable):
        pool.run_write(work)
    assert runs == [False] * MAX_ATTEMPTS["disconnect"]


def test_the_error_says_busy_or_dead(own_server: PostgresServer, pool: Pool) -> None:
    """If all connections are in use, the error is `StoreBusy`; if none can be opened, `StoreUnreachable`."""
    with occupy(pool, 4), limit(pool, 0.0), pytest.raises(StoreBusy, match="connection was busy"):
        pool.run_read(lambda tx: tx.rows("SELECT 1"))
    own_server.stop()
    try:
        with limit(pool, 0.0), pytest.raises(StoreUnreachable, match="is it running") as exc_info:
            pool.run_read(lambda tx: tx.rows("SELECT 1"))
    finally:
        own_server.start()
    assert exc_info.value.retryable
    assert PASSWORD not in str(exc_info.value)


async def test_a_wrong_password_is_not_in_the_error(own_server: PostgresServer) -> None:
    """Wrong credentials and an unknown database raise an error that is not retryable and has no password."""
    addresses = {
        "password": own_server.url.replace(PASSWORD, "letmein"),
        "database is wrong": own_server.url.replace("/postgres", "/nothing"),
    }
    for message, address in addresses.items():
        with pytest.raises(CannotOpenStore, match=message) as exc_info:
            await open_store(address)
        assert not exc_info.value.retryable
        for password in (PASSWORD, "letmein"):
            assert password not in str(exc_info.value)


def test_a_restarted_server_is_awaited(own_server: PostgresServer, pool: Pool) -> None:
    """While the server is restarted, a transaction waits for it instead of failing."""
    own_server.stop()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.run_write, insert(1))
        own_server.start()
        assert waiting.result(TIMEOUT) == 1


def test_connections_are_passed_on_in_order() -> None:
    """A caller that comes later does not overtake one that waits for a connection."""
    permits, order = _Permits(1), list[int]()
    assert permits.acquire(0.0)

    def take(number: int) -> None:
        assert permits.acquire(math.inf)
        order.append(number)
        permits.release()

    with ThreadPoolExecutor(8) as threads:
        for number in range(8):
            threads.submit(take, number)
            while len(permits._waiting) <= number:
                time.sleep(0)
        assert not permits.acquire(0.0)
        permits.release()
    assert order == [*range(8)]


def test_connecting_to_a_frozen_server_is_limited(own_server: PostgresServer, pool: Pool) -> None:
    """A server that accepts connections and does not answer is unreachable after the wait."""
    terminate_clients(own_server.url)
    with freeze([own_server.pid]), limit(pool), pytest.raises(StoreUnreachable):
        pool.run_write(insert(2))


def test_a_pool_that_is_not_closed_closes_its_connections(own_server: PostgresServer) -> None:
    """No connection stays open after its pool was garbage-collected."""
    pool: Pool = PostgresDatabase(own_server.url)
    pool.run_read(lambda tx: tx.rows("SELECT 1"))
    (connection,) = pool._pool._idle
    del pool
    gc.collect()
    assert connection.closed


async def test_health_includes_the_store_of_the_page(own_server: PostgresServer) -> None:
    """A server with a page is not healthy while the store of the page does not answer."""
    with create_schema(own_server.url) as url:
        page = PageSettings(url)
        async with open_page_server(Settings(), page, "http://127.0.0.1:1") as server:
            health: HealthCheck = server.config.app.state.health  # pyright: ignore[reportFunctionMemberAccess,reportAttributeAccessIssue] - it is our app
            assert await health.run()
            with freeze_server(own_server):
                assert not await health.run()
            assert await health.run()
