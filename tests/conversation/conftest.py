"""Fixtures for engines and conversations, and builders of conversations with a history."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from engines.conftest import open_engine
from kedge import Conversation, connect
from kedge.engines import Engine, ResponsesEngine
from kedge.store import Node, Store
from kedge.testing import TestServer

Connect = Callable[..., Engine]
BuildConversation = Callable[..., Awaitable[Conversation]]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
async def connected(kedge_server: TestServer) -> AsyncIterator[Connect]:
    """Yield a function that creates engines for the test server, and close them afterwards."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        model = f"responses:{kedge_server.base_url}#practice"
        settings.setdefault("max_retries", 0)
        engines.append(connect(model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.aclose()


@pytest.fixture
async def conversation(store: Store, connected: Connect) -> Conversation:
    """Return a new conversation."""
    return await Conversation.create(connected(), store=store)


@pytest.fixture
def conversation_with(store: Store, connected: Connect) -> BuildConversation:
    """Return a function that creates a conversation and sends these messages in it."""

    async def build(*messages: str, **settings: Any) -> Conversation:
        built = await Conversation.create(connected(), store=store, **settings)
        for message in messages:
            await built.send(message)
        return built

    return build


@pytest.fixture
def reopen(store: Store, connected: Connect) -> BuildConversation:
    """Return a function that opens a conversation again with another engine, as another process does."""

    async def build(opened: Conversation, **settings: Any) -> Conversation:
        return await Conversation.open(connected(), store=store, id=opened.id, **settings)

    return build


def assert_sent(server: TestServer, *, blocks: int, anchor: str | None = "") -> None:
    """Check the last request: the number of its blocks, and the response that it continues."""
    body = server.requests[-1].body
    assert len(body["input"]) == blocks
    assert body.get("previous_response_id", "") == anchor


async def export_nodes(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the nodes of a conversation with their telemetry, as they are exported."""
    lines = map(json.loads, (await conversation.export()).splitlines())
    return [line for line in lines if "node" in line]


def list_kinds(nodes: Iterable[Node]) -> list[str]:
    """Return the kinds of nodes."""
    return [node.kind for node in nodes]


@pytest.fixture
async def engine(server: TestServer) -> AsyncIterator[ResponsesEngine]:
    """Yield an engine that uses conversation objects, on the server of this test."""
    async with open_engine(server, mode="conversation") as opened:
        yield opened
