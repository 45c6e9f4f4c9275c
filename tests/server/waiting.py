"""Bounded waits for conditions that another thread or task makes true."""

import asyncio
import time
from collections.abc import Callable

TIMEOUT = 300.0
"""Seconds after which a test counts as hanging; far more than a busy machine needs."""

POLL_SECONDS = 0.002


def wait_until(condition: Callable[[], object]) -> None:
    """Block the thread until a condition holds."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(POLL_SECONDS)


async def wait_until_async(condition: Callable[[], object]) -> None:
    """Wait in a coroutine until a condition holds."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(POLL_SECONDS)
