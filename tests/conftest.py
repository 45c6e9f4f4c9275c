"""Settings for every test: Hypothesis has no deadline, and no connection may leave this machine.

A slow machine must not fail a test. Only the tests of ``tests/live`` may reach a provider, if enabled.
The examples are the same in every run, so that a failure is caused by a change;
``HYPOTHESIS_PROFILE=random`` uses other examples, ``thorough`` a hundred times as many. See CONTRIBUTING.md.
"""

import asyncio
import fcntl
import gc
import inspect
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from kedge.testing import forbid_network
from strategies import BASE_EXAMPLES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from xdist.remote import Producer

    from kedge.store import Store
    from kedge.testing import TestServer
    from postgresql import PostgresServer, ReusableStore

# Without the phase "explain", whose tracer doubles the time of every example.
PHASES = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile(
    "kedge",
    deadline=None,
    derandomize=True,
    phases=PHASES,
    max_examples=BASE_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],  # which fails on a busy machine
)
settings.register_profile("random", deadline=None)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=100 * BASE_EXAMPLES,
    suppress_health_check=list(HealthCheck),
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kedge")
settings.load_profile(PROFILE)
if PROFILE == "kedge":
    # Hypothesis would parse every loaded module of the project for constants to try: ten seconds in every
    # worker, and examples that depend on the tests which the worker has collected.
    setattr(providers, "is_local_module_file", lambda path: False)  # noqa: B010 - not exported

if not os.environ.get("KEDGE_LIVE"):
    # Each client would otherwise load all certificates of the system, which takes longer than most tests.
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "certificate.pem")
    os.environ.pop("SSL_CERT_DIR", None)

# Each worker would compile all tests, and each of the hundreds of processes that they start would compile Kedge.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop(
        "COVERAGE_PROCESS_CONFIG", None
    )  # processes started by a worker are not measured

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and the commands under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare every process that runs tests, not one that only distributes them."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _hide_own_files(config)
        _prepare_clients()


def _hide_own_files(config: pytest.Config) -> None:
    """Make commands use empty folders, and not the configuration and the store of whoever runs the tests."""
    folder = tempfile.TemporaryDirectory(prefix="kedge-tests-")
    config.add_cleanup(folder.cleanup)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        os.environ[name] = folder.name


def _prepare_clients() -> None:
    import httpx2
    import openai

    from kedge.engines import http_client

    # The default of 5 seconds, for a connection or for a complete request, is short for a busy machine.
    for timeout in (
        openai.DEFAULT_TIMEOUT,
        inspect.signature(httpx2.Client).parameters["timeout"].default,
    ):
        vars(timeout).update(connect=300.0, read=300.0, write=300.0, pool=300.0)
    http_client.DEFAULT_TIMEOUTS = http_client.Timeouts(300.0, 300.0)

    # A client that a test does not close fails every time, not only when its socket is collected first.
    del openai._base_client.SyncHttpxClientWrapper.__del__


# Tests that start processes and browsers. They run first, so that no worker runs them alone at the end.
SLOW_NAMES = {
    "test_docs.py",
    "batch",
    "web",
    "cli",
    "conversation",
    "workflows",
    "store",
    "examples",
    "mcp_tools",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the slow packages and files to the front, first the tests in the browser, which one worker runs."""
    items.sort(key=_rank_item)


def _rank_item(item: pytest.Item) -> int:
    names = re.split("/|::", item.nodeid)
    return 0 if "browser" in names else 1 if SLOW_NAMES.intersection(names) else 2


# Files that need the browser, a package that is slow to import, or the parsed source. They run in one worker, which
# loads it once.
SHARED_RESOURCES = {
    "tests/web/browser/": "browser",
    "tests/server/engine_models/test_engine_model.py": "anthropic",
    "tests/engines/test_sdk_client.py": "anthropic",
    "tests/server/routes/messages/test_endpoint.py": "anthropic",
    "tests/server/test_sdk_objects.py": "anthropic",
    "tests/server/test_sdk_schema.py": "anthropic",
    "tests/server/test_unknown_parameters.py": "anthropic",
    "tests/test_optional_packages.py": "source",
    "tests/test_private_names.py": "source",
    "tests/test_repository.py": "source",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> object:
    """With ``--dist loadfile``, distribute the files that share a resource like one file."""
    from xdist.scheduler import LoadFileScheduling

    class ResourceScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (name for path, name in SHARED_RESOURCES.items() if nodeid.startswith(path))
            return next(shared, super()._split_scope(nodeid))

    if config.getoption("dist") != "loadfile":
        return None
    return ResourceScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Disable garbage collection during collection, and exclude imported objects from later ones."""
    gc.disable()
    try:
        with _collect_in_turn(session.config):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _collect_in_turn(config: pytest.Config) -> Iterator[None]:
    """While the tests are not compiled, let one worker at a time collect them, so that only the first compiles."""
    folder = Path(__file__).parent / "__pycache__"
    if not hasattr(config, "workerinput") or any(folder.glob("test_*.pyc")):
        yield
        return
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Save the coverage of a worker, because xdist ends it after ten seconds even if it has not exited."""
    measurement = coverage.Coverage.current()
    if measurement is not None and "PYTEST_XDIST_WORKER" in os.environ:
        measurement.stop()
        measurement.save()


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Forbid network connections, unless the live tests are enabled."""
    if os.environ.get("KEDGE_LIVE"):
        yield
        return
    with forbid_network():
        yield


@pytest.fixture
def server() -> Iterator["TestServer"]:
    """Yield a strict server that only this test uses; a package may have another one."""
    from kedge.testing import serve

    with serve() as running:
        yield running


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of an empty store, which tests copy because creating the tables takes longer."""
    from postgresql import create_store

    path = tmp_path_factory.mktemp("template") / "store.db"
    asyncio.run(create_store(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """Return the address of an empty store in a file."""
    shutil.copy(sqlite_template, tmp_path / "store.db")
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture(scope="module")
def own_server() -> Iterator["PostgresServer"]:
    """Yield a PostgreSQL server that the tests of a module may stop, if they start it again, or freeze."""
    from postgresql import run_server

    with run_server() as started:
        yield started


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Yield the URL of a PostgreSQL database, which is started on first use."""
    from postgresql import provide_server_url

    with provide_server_url() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_store(postgres_url: str) -> Iterator["ReusableStore"]:
    """Yield a store on PostgreSQL that tests use one after another."""
    from postgresql import ReusableStore

    store = ReusableStore(postgres_url)
    yield store
    store.drop()


@pytest.fixture
def empty_schema(postgres_url: str) -> Iterator[str]:
    """Yield the address of an empty schema in a PostgreSQL database."""
    from postgresql import create_schema

    with create_schema(postgres_url) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def lasting_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of an empty store that can be opened several times."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_url")
        return
    with request.getfixturevalue("postgres_store").borrow() as url:
        yield url


@pytest.fixture
def store_url(lasting_url: str) -> str:
    """Return the address of the store of a test; a package may have another one."""
    return lasting_url


@pytest.fixture
async def store(store_url: str) -> "AsyncIterator[Store]":
    """Yield an empty store."""
    from kedge.store import open_store

    async with open_store(store_url) as opened:
        yield opened
