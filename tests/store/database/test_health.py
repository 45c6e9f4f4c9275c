"""Health checks of databases."""

import asyncio
import threading

import anyio

from kedge.store.database.transactions import HealthCheck
from server.waiting import TIMEOUT, wait_until_async


async def test_requests_share_a_check() -> None:
    """Requests during a check wait for its result; they do not occupy more threads."""
    started, may_end, calls = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        calls.append(1)
        started.set()
        assert may_end.wait(TIMEOUT)

    async def check() -> None:
        await asyncio.to_thread(wait)

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
