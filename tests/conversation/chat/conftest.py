"""Fixtures for a real server and Chats connected to it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kedge.conversation import Chat
from kedge.engines import Engine
from kedge.providers import connect
from kedge.testing import TestServer

OpenChat = Callable[..., Chat]


@pytest.fixture
async def open_chat(server: TestServer) -> AsyncIterator[OpenChat]:
    """Yield a function that creates independent Chats connected to the server."""
    chats: list[Chat] = []

    def make(engine: Engine | str | None = None, **settings: Any) -> Chat:
        opened_engine = connect(f"responses:{server.base_url}#practice", max_retries=0)
        chats.append(Chat(engine or opened_engine, **settings))
        return chats[-1]

    yield make
    for chat in chats:
        await chat.engine.aclose()


def item_texts(items: Any) -> list[str]:
    """Return the texts of items, oldest first."""
    texts: list[str] = []
    for item in items or ():
        content = item.get("content") or item.get("output") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        texts += [part for part in parts if part]
    return texts
