"""Tests of the number of nested generators of an event, each of which costs time per chunk."""

import sys
from inspect import CO_ASYNC_GENERATOR

import pytest

from kedge.conversation import Conversation
from kedge.engines import Events, Request
from kedge.events import TextDelta
from kedge.middleware import repair, tools, with_middleware
from kedge.store import open_store
from kedge.turns import Turn, assistant, user
from middleware.scripted_engine import ScriptedEngine

MAX_ENGINE_DEPTH = 1
MAX_CONVERSATION_DEPTH = 9


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def count_generators() -> int:
    """Return the number of async generators that are running, from here outward."""
    count, frame = 0, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        count += bool(frame.f_code.co_flags & CO_ASYNC_GENERATOR)
    return count


class MeasuringEngine(ScriptedEngine):
    """Records the number of generators around its own."""

    depth = 0

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the answer."""
        async for event in super().events(turn, request):
            if isinstance(event, TextDelta):
                self.depth = count_generators() - 1
            yield event


async def test_a_middleware_adds_one_generator_besides_its_own() -> None:
    """A middleware that changes nothing after the engine adds no generator, another one adds one to its own."""
    depths: list[int] = []
    for stack in [], [repair()], [repair(), repair()], [repair(), repair(), tools(add)]:
        engine = MeasuringEngine([assistant("hello")])
        async with with_middleware(engine, *stack).stream(Turn([user("hi")])) as stream:
            await stream.finish()
        depths.append(engine.depth)
    assert depths == [0, 1, 1, 3]


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_conversation_with_a_tool_passes_few_generators(key: str) -> None:
    """A conversation with a tool has at most nine generators, including those of an engine."""
    engine = MeasuringEngine([assistant("hello")])
    async with open_store("sqlite://:memory:") as store:
        conversation = await Conversation.create(engine, store=store, tools=[add])
        await conversation.send("hi", key=key)
    assert 0 < engine.depth <= MAX_CONVERSATION_DEPTH - MAX_ENGINE_DEPTH
