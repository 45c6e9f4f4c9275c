"""Deletion of conversations, which can be undone for a time.

The conversation is hidden from lists at once. The time at which it is deleted is in the store, by the clock of the
database, so that any server on the store deletes it then, also if the server that scheduled it was stopped or killed.
A deletion that fails is tried again. If a server on SQLite shuts down, it deletes what it has scheduled at once,
because there may be no other server.
"""

import asyncio
from contextlib import suppress

from kedge.engines.responses import delete_unused_objects
from kedge.errors import StoreError
from kedge.observe import get_logger
from kedge.server.request_log import log_failure
from kedge.store import ConversationRow, Store
from kedge.web.models import ModelSelector

log = get_logger("kedge.server")

POLL_SECONDS = 30.0
RETRY_SECONDS = 2.0

Scheduled = tuple[Store, ConversationRow]


class DeletionQueue:
    """Deletes conversations when their time for undo is over.

    Args:
        poll_seconds: Seconds after which a server looks for deletions that others have scheduled.
        retry_seconds: Seconds after which a deletion that failed is tried again.
    """

    def __init__(
        self, poll_seconds: float = POLL_SECONDS, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._poll_seconds = poll_seconds
        self._retry_seconds = retry_seconds
        self._store: Store | None = None
        self._models: ModelSelector | None = None
        self._own: dict[int, Scheduled] = {}
        """What this server has scheduled, by the number of the conversation."""
        self._changed = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def resume(self, store: Store, models: ModelSelector | None = None) -> None:
        """From now on, also delete conversations that other servers have scheduled, and conversation objects."""
        self._store = store
        self._models = models
        self._wake()

    async def schedule(self, store: Store, row: ConversationRow, seconds: float) -> None:
        """Delete a conversation after some seconds, unless this is undone."""
        if row.delete_at is not None:
            return
        delete_at = await store.database_time() + seconds
        scheduled_row = await store.schedule_delete(row, delete_at)
        self._own[row.number] = (store, scheduled_row)
        self._wake()

    async def undo(self, store: Store, name: str) -> ConversationRow:
        """Retain a conversation that is about to be deleted.

        Raises:
            NotInStore: It is deleted already.
        """
        row = await store.schedule_delete(name, None)
        self._own.pop(row.number, None)
        return row

    async def aclose(self) -> None:
        """Stop; on SQLite, delete now what this server has scheduled."""
        self._is_closing = True
        if self._task is not None:
            self._changed.set()
            await self._task
        for store, row in list(self._own.values()):
            if store.database.dialect.name == "sqlite":
                await self._delete(store, row)

    def _wake(self) -> None:
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._is_closing:
            self._changed.clear()
            pause = await self._delete_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def _delete_due(self) -> float:
        """Delete what is due, and return the seconds until this is to be done again."""
        try:
            scheduled = await self._list_scheduled()
            pauses = [await self._delete_if_due(store, row) for store, row in scheduled]
        except StoreError as error:
            log.warning("scheduled deletions could not be read, which is tried again: %s", error)
            return self._retry_seconds
        except Exception as error:  # noqa: BLE001 - a task has no caller
            log_failure("internal error of the scheduled deletions", error)
            return self._poll_seconds
        return min(pauses, default=self._poll_seconds)

    async def _list_scheduled(self) -> list[Scheduled]:
        if self._store is None:
            return list(self._own.values())
        names = await self._store.namespaces(scheduled=True)
        stores = [self._store, *map(self._store.use_namespace, names)]
        return [(store, row) for store in stores for row in await store.list_scheduled()]

    async def _delete_if_due(self, store: Store, row: ConversationRow) -> float:
        """Delete a conversation if its time is over, and return the seconds until the next attempt."""
        remaining = (row.delete_at or 0.0) - await store.database_time()
        if remaining > 0:
            return min(remaining, self._poll_seconds)
        is_done = await self._delete(store, row)
        return self._poll_seconds if is_done else self._retry_seconds

    async def _delete(self, store: Store, row: ConversationRow) -> bool:
        """Delete a conversation, unless that was undone; return whether there is nothing more to do."""
        try:
            is_deleted = await store.delete_scheduled(row)
        except StoreError as error:
            log.warning("a scheduled deletion failed and is tried again: %s", error)
            return False
        self._own.pop(row.number, None)
        if is_deleted:
            with suppress(StoreError):  # the next deletion tries it again
                await self._delete_objects(store)
        return True

    async def _delete_objects(self, store: Store) -> None:
        """Delete unused conversation objects; the engines of the administrator do not see those of users."""
        if self._models is None or store.namespace or self._is_closing:
            return
        for engine in self._models.engines:
            await delete_unused_objects(engine, store)
