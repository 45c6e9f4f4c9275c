"""Fixtures for a store, servers with a script, and engines."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kedge import connect
from kedge.engines import Engine
from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.testing import TestServer, serve

StartServer = Callable[..., TestServer]
Connect = Callable[..., Engine]


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    """Return the address of an empty store."""
    return sqlite_url


@pytest.fixture
def scripted() -> Iterator[StartServer]:
    """Yield a function that starts servers whose practice model follows a script."""
    with ExitStack() as stack:

        def start(*answers: dict[str, Any]) -> TestServer:
            script = Script.from_data({"answers": list(answers)})
            return stack.enter_context(serve(model=PracticeModel(script)))

        yield start


@pytest.fixture
async def connected() -> AsyncIterator[Connect]:
    """Yield a function that creates engines for servers, and close them afterwards."""
    engines: list[Engine] = []

    def make(server: TestServer, **settings: Any) -> Engine:
        model = f"responses:{server.base_url}#practice"
        settings.setdefault("max_retries", 0)
        engines.append(connect(model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.aclose()
