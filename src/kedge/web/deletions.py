"""Deletions that can be undone for some time.

A conversation is hidden from lists at once and deleted when its time is over, or when the server shuts
down. If the server is killed before, the conversation is listed again: a deletion is not repeated unasked.
"""

import asyncio
from contextlib import suppress

from kedge.errors import CannotServe, StoreError
from kedge.providers.practice_memory import erase_deleted
from kedge.store import ConversationRow, Store


class DeletionQueue:
    """The conversations that are about to be deleted."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closing = asyncio.Event()

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the conversations that are hidden."""
        return tuple(self._tasks)

    def schedule(self, store: Store, row: ConversationRow, seconds: float) -> None:
        """Delete a conversation after some seconds, unless this is undone."""
        if row.id not in self._tasks:
            self._tasks[row.id] = asyncio.create_task(self._delete(store, row, seconds))

    def undo(self, name: str) -> bool:
        """Keep a conversation that is about to be deleted; return whether it was in time."""
        task = self._tasks.pop(name, None)
        return task is not None and task.cancel()

    async def aclose(self) -> None:
        """Delete what is to be deleted now."""
        self._is_closing.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _delete(self, store: Store, row: ConversationRow, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_closing.wait()
        with suppress(StoreError, CannotServe):  # another process may have deleted it
            await store.delete(row)
            await erase_deleted(store)
        self._tasks.pop(row.id, None)
