"""Tests against hosted APIs: set KEDGE_LIVE to model strings, such as "openai:gpt-5.1-mini", to run them.

The key comes from the provider's usual variable. These tests cost a little money and are skipped
otherwise; no other test may connect to another host.
"""

import os

import pytest

from kedge.engines import Engine, ResponsesEngine
from kedge.events.run import Healed
from kedge.middleware import tools, with_middleware
from kedge.providers import connect
from kedge.turns import AssistantBlock, ToolResultBlock, Turn, user

MODELS = os.environ.get("KEDGE_LIVE", "").split()
STATELESS = ("chat:", "ollama:", "anthropic:")
CHAINED = [model for model in MODELS if not model.startswith(STATELESS)]

pytestmark = pytest.mark.skipif(not MODELS, reason="set KEDGE_LIVE to model strings to run these")


@pytest.fixture(params=MODELS or ["none"])
async def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Return an engine for each of the models, with or without stored responses."""
    return connect(request.param)


@pytest.fixture(params=CHAINED or ["none"])
async def engine(request: pytest.FixtureRequest) -> ResponsesEngine:
    """Return an engine for each of the models whose server stores responses."""
    if not CHAINED:
        pytest.skip("none of the models in KEDGE_LIVE has a server that remembers")
    opened = connect(request.param)
    assert isinstance(opened, ResponsesEngine)
    return opened


async def test_ten_chained_requests(engine: ResponsesEngine) -> None:
    """Each request but the first sends one block, and the last answer uses the first message."""
    turn = Turn([user("Remember the word heron. Answer with OK.")])
    async with engine:
        turn = await engine.run(turn)
        for number in range(8):
            next_turn = turn.append(user(f"Answer with the number {number}."))
            assert engine.plan(next_turn).delta_blocks == 1
            turn = await engine.run(next_turn)
        turn = await engine.run(turn.append(user("Which word did I ask you to remember?")))
        assert (await engine.verify(turn)).agrees is not False
    answer = turn.blocks[-1]
    assert isinstance(answer, AssistantBlock)
    assert "heron" in answer.text.lower()


async def test_a_tool_loop(any_engine: Engine) -> None:
    """The model calls a tool, and its result is sent with the id of the call."""

    def secret_number() -> int:
        """Tell the secret number."""
        return 4711

    async with any_engine:
        with_tools = with_middleware(any_engine, tools(secret_number))
        turn = await with_tools.run(Turn([user("Call secret_number and tell me the number.")]))
    assert any(isinstance(block, ToolResultBlock) for block in turn.blocks)
    assert "4711" in str(turn.blocks[-1])


async def test_expiry_by_deletion(engine: ResponsesEngine) -> None:
    """A request after its anchor was deleted is healed by sending it in full."""
    async with engine:
        turn = await engine.run(Turn([user("Remember the word heron. Answer with OK.")]))
        deleted = turn.blocks[-1].response_id
        await engine.transport.request_json("delete", f"/responses/{deleted}")
        async with engine.stream(turn.append(user("Which word?"))) as stream:
            events = [event async for event in stream]
    assert any(isinstance(event, Healed) for event in events)
    assert "heron" in str(stream.turn.blocks[-1]).lower()
