"""A real server and a real client for every test of the engines."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kedge.engines import ResponsesEngine
from kedge.providers import connect
from kedge.testing import TestServer, serve

OpenEngine = Callable[..., ResponsesEngine]


@pytest.fixture
def server() -> Iterator[TestServer]:
    """A strict local server of its own."""
    with serve() as running:
        yield running


@pytest.fixture
async def engine(server: TestServer) -> AsyncIterator[ResponsesEngine]:
    """An engine for that server, with default settings."""
    async with open_engine(server) as made:
        yield made


@asynccontextmanager
async def open_engine(server: TestServer, **settings: Any) -> AsyncIterator[ResponsesEngine]:
    """An engine for a server, closed at the end."""
    # The client's own limit for a connection, 5 seconds, is short for a busy machine.
    settings = {"max_retries": 0, "timeout": 300} | settings
    made = connect(f"responses:{server.base_url}#practice", **settings)
    assert isinstance(made, ResponsesEngine)
    async with made:
        yield made
