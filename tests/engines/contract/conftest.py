"""Every engine on one strict local server, through its provider's own client, on a real socket.

The contract is that of ``kedge.engines.Engine``: the same Turn in, the same Turn out, whoever answers.
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
    """One server for a module."""
    with serve() as made:
        yield made


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    """The server, without what an earlier test did to it."""
    yield running
    running.faults.clear()
    running.requests.clear()


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    """Which engine."""
    return request.param


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for a module, because a client costs more than what most tests ask of it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def engines(running: TestServer) -> AsyncIterator[dict[str, Engine]]:
    """An engine of each kind, with default settings."""
    made = {name: open_engine(running, name) for name in ENGINES}
    yield made
    for engine in made.values():
        await engine.aclose()


@pytest.fixture
def engine(engines: dict[str, Engine], name: str, server: TestServer) -> Engine:
    """An engine with default settings, on a server that was asked nothing yet."""
    assert server.requests == []
    return engines[name]


def open_engine(server: TestServer, name: str, **settings: Any) -> Engine:
    """An engine of this kind, with any settings."""
    model, own = ENGINES[name](server)
    # The client's own limit for a connection, 5 seconds, is short for a busy machine.
    return connect(model, **{"max_retries": 0, "timeout": 300, **own, **settings})
