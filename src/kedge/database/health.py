"""Health of a service: whether its databases answer."""

import asyncio
import logging
from collections.abc import Callable

from kedge.errors import StoreError

log = logging.getLogger("kedge")


class HealthCheck:
    """Checks of databases; requests that arrive during a check share its result.

    So any number of requests occupies one thread for each database.

    Args:
        check: Raises a `StoreError` if the database does not answer; may block its thread.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._checks = [check]
        self._running: asyncio.Task[bool] | None = None

    def add(self, check: Callable[[], None]) -> None:
        """Also run this check."""
        self._checks.append(check)

    async def run(self) -> bool:
        """Return whether every database answers; the errors of the others are logged."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_all())
        return await asyncio.shield(self._running)

    async def _run_all(self) -> bool:
        return all(await asyncio.gather(*map(_run_check, self._checks)))


async def _run_check(check: Callable[[], None]) -> bool:
    try:
        await asyncio.to_thread(check)
    except StoreError as error:
        log.warning("the health check failed: %s", error)
        return False
    return True
