"""Bounded waits for conditions that another thread or task makes true, and functions that wait for the test."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

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


GIVE_UP = 60.0
"""Seconds after which a function that stops the loop, which the test needs, goes on so that the test fails."""


class SlowCall:
    """A function that takes as long as the test lets it, wherever it is called."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.was_stopped = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.started.set()
        self.was_stopped = self.may_end.wait(GIVE_UP) and self.was_stopped
        return self._function(*args, **options)
