"""Fixtures for engines and conversations."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engines.conftest import open_engine
from kedge import Conversation, connect
from kedge.engines import Engine, ResponsesEngine
from kedge.store import Store
from kedge.testing import TestServer

Connect = Callable[..., Engine]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
async def connected(kedge_server: TestServer) -> AsyncIterator[Connect]:
    """Yield a function that creates engines for the test server, and close them afterwards."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        model = f"responses:{kedge_server.base_url}#practice"
        settings.setdefault("max_retries", 0)
        engines.append(connect(model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.aclose()


@pytest.fixture
async def conversation(store: Store, connected: Connect) -> Conversation:
    """Return a new conversation."""
    return await Conversation.create(connected(), store=store)


@pytest.fixture
async def engine(server: TestServer) -> AsyncIterator[ResponsesEngine]:
    """Yield an engine that uses conversation objects, on the server of this test."""
    async with open_engine(server, mode="conversation") as opened:
        yield opened
