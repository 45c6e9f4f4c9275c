"""Health checks of databases."""

import threading
from collections.abc import Iterator

import anyio
import pytest

from kedge.database.transactions import HealthCheck
from kedge.server.settings import Settings
from kedge.web.app import PageSettings, open_page_server
from postgresql import PostgresServer, create_schema, freeze, list_client_pids
from server.waiting import TIMEOUT, wait_until_async


@pytest.fixture
def url(own_server: PostgresServer) -> Iterator[str]:
    """Yield the address of an empty schema."""
    with create_schema(own_server.url) as schema:
        yield schema


async def test_requests_share_a_check() -> None:
    """Requests during a check wait for its result; they do not occupy more threads."""
    started, may_end, calls = threading.Event(), threading.Event(), list[int]()

    def check() -> None:
        calls.append(1)
        started.set()
        assert may_end.wait(TIMEOUT)

    health, results = HealthCheck(check), list[bool]()

    async def request() -> None:
        results.append(await health.run())

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(request)
        await wait_until_async(started.is_set)
        may_end.set()
    assert results == [True] * 20
    assert calls == [1]


async def test_the_store_of_the_page_is_checked(own_server: PostgresServer, url: str) -> None:
    """A server with a page is not healthy while the store of the page does not answer."""
    page = PageSettings(url)
    async with open_page_server(Settings(), page, "http://127.0.0.1:1") as server:
        health: HealthCheck = server.config.app.state.health  # pyright: ignore[reportFunctionMemberAccess,reportAttributeAccessIssue] - it is our app
        assert await health.run()
        with freeze([own_server.pid, *list_client_pids(own_server.url)]):
            assert not await health.run()
        assert await health.run()
