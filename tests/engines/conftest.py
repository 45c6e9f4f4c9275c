"""Fixtures for the tests of the engines: a real server and a real client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.runs import Link
from kedge.engines import ResponsesEngine
from kedge.providers import connect
from kedge.testing import TestServer


@pytest.fixture
async def engine(server: TestServer) -> AsyncIterator[ResponsesEngine]:
    """Yield an engine for that server, with default settings."""
    async with open_engine(server) as opened_engine:
        yield opened_engine


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of the engine of ``link``; a module may have others."""
    return {}


@pytest.fixture
async def link(server: TestServer, settings: dict[str, Any]) -> AsyncIterator[Link]:
    """Yield an engine with these settings, and its server."""
    async with open_link(server, **settings) as opened:
        yield opened


@asynccontextmanager
async def open_link(server: TestServer, **settings: Any) -> AsyncIterator[Link]:
    """Yield an engine with these settings, and its server."""
    async with open_engine(server, **settings) as opened_engine:
        yield Link(opened_engine, server)


@asynccontextmanager
async def open_engine(server: TestServer, **settings: Any) -> AsyncIterator[ResponsesEngine]:
    """Yield an engine for a server, and close it at the end."""
    # The client's default connection timeout of 5 seconds is too short for a busy machine.
    settings = {"max_retries": 0, "timeout": 300} | settings
    opened_engine = connect(f"responses:{server.base_url}#practice", **settings)
    assert isinstance(opened_engine, ResponsesEngine)
    async with opened_engine:
        yield opened_engine
