"""Fixtures that run every engine against one strict local server, through its provider's own client.

The contract is that of ``kedge.engines.Engine``: the same Turn in, the same Turn out, for every provider.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from kedge.engines import Engine
from kedge.providers import connect
from kedge.testing import TestServer, serve

ENGINES: dict[str, Callable[[TestServer], tuple[str, dict[str, Any]]]] = {
    "responses": lambda server: (f"responses:{server.base_url}#practice", {}),
    "responses, stateless": lambda server: (
        f"responses:{server.base_url}#practice",
        {"mode": "stateless"},
    ),
    "responses, by socket": lambda server: (
        f"responses:{server.base_url}#practice",
        {"transport": "websocket"},
    ),
    "chat": lambda server: (f"chat:{server.base_url}#practice", {}),
    "anthropic": lambda server: (
        "anthropic:practice",
        {"base_url": server.base_url, "api_key": "sk-any"},
    ),
}
STATELESS = ("chat", "anthropic")


@pytest.fixture(scope="module")
def running() -> Iterator[TestServer]:
    """Yield one server for a module."""
    with serve() as made:
        yield made


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    """Yield the server, and clear its faults and requests after the test."""
    yield running
    running.faults.clear()
    running.requests.clear()


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of the engine."""
    return request.param


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Use one event loop per module, because creating a client costs more than most tests."""
    return "asyncio"


@pytest.fixture(scope="module")
async def engines(running: TestServer) -> AsyncIterator[dict[str, Engine]]:
    """Yield an engine of each kind, with default settings."""
    opened = {name: open_engine(running, name) for name in ENGINES}
    yield opened
    for engine in opened.values():
        await engine.aclose()


@pytest.fixture
def engine(engines: dict[str, Engine], name: str, server: TestServer) -> Engine:
    """Return an engine with default settings, on a server that has received no requests yet."""
    assert server.requests == []
    return engines[name]


def open_engine(server: TestServer, name: str, **settings: Any) -> Engine:
    """Create an engine of this kind with these settings."""
    model, options = ENGINES[name](server)
    # The client's default connection timeout of 5 seconds is too short for a busy machine.
    settings = {"max_retries": 0, "timeout": 300, **options, **settings}
    return connect(model, **settings)
