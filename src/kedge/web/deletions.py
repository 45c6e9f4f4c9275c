"""Deletions that can be undone for some time.

A conversation is hidden from lists at once and deleted when its time is over, or when the server shuts
down. The time is in the store, so a server that was killed completes the deletion when it is started again.
"""

import asyncio
from contextlib import suppress

from kedge.errors import CannotServe, StoreError
from kedge.providers.practice_memory import erase_deleted
from kedge.store import ConversationRow, Store


class DeletionQueue:
    """The conversations that are about to be deleted by this process."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_closing = asyncio.Event()

    async def resume(self, store: Store) -> None:
        """Continue the deletions that a server left in the store when it was killed."""
        for name in ("", *await store.namespaces()):
            owner = store.use_namespace(name) if name else store
            for row in await owner.list_scheduled():
                self._start(owner, row)

    async def schedule(self, store: Store, row: ConversationRow, seconds: float) -> None:
        """Delete a conversation after some seconds, unless this is undone."""
        if row.delete_at is None:
            self._start(store, await store.schedule_delete(row, store.clock() + seconds))

    async def undo(self, store: Store, name: str) -> ConversationRow:
        """Retain a conversation that is about to be deleted.

        Raises:
            NotInStore: It is deleted already.
        """
        row = await store.schedule_delete(name, None)
        if task := self._tasks.pop(row.number, None):
            task.cancel()
        return row

    async def aclose(self) -> None:
        """Delete what is to be deleted now."""
        self._is_closing.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, store: Store, row: ConversationRow) -> None:
        self._tasks[row.number] = asyncio.create_task(self._delete(store, row))

    async def _delete(self, store: Store, row: ConversationRow) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout((row.delete_at or 0.0) - store.clock()):
                await self._is_closing.wait()
        with suppress(StoreError, CannotServe):  # it remains scheduled; the next start deletes it
            if await store.delete_scheduled(row):
                await erase_deleted(store)
        self._tasks.pop(row.number, None)
