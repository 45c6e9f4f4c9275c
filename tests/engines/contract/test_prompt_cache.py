"""Test that every engine predicts the cached tokens that the server then reports."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from engines.contract.conftest import open_engine
from kedge.engines import Engine
from kedge.events import Usage
from kedge.planning import RequestPlan, get_state
from kedge.testing import TestServer
from kedge.turns import Turn, system, user

LONG = "word " * 3000
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "description": "Rolls.", "parameters": {"type": "object"}}
    for name in ("roll", "draw")
]


async def send(engine: Engine, turn: Turn, **options: Any) -> tuple[Turn, RequestPlan, Usage]:
    """Run a Turn; return it with the plan and the usage of its request."""
    async with engine.stream(turn, streaming=False, **options) as stream:
        finished = await stream.finish()
    assert stream.plan
    return finished, stream.plan, stream.usage


def predicted(plan: RequestPlan) -> int:
    assert plan.cache
    return plan.cache.cached_tokens


async def test_prediction_and_count_agree(server: TestServer, name: str) -> None:
    """The prediction is correct for every request of a conversation, and after an edit in it."""
    async with open_engine(server, name, prompt_cache=True) as engine:
        turn = Turn([system("Be brief."), user(f"{name}. Remember this: {LONG}")])
        turn, plan, usage = await send(engine, turn, tools=TOOLS)
        assert predicted(plan) == usage.cached_tokens == 0
        for line in ("One?", "Two?", "Three?"):
            turn, plan, usage = await send(engine, turn.append(user(line)), tools=TOOLS)
            assert predicted(plan) == usage.cached_tokens > 2900
            assert plan.cache
            assert abs(plan.cache.input_tokens - usage.input_tokens) < 100
        edited = turn.edit(turn.blocks[3].id, user("One, edited?")).append(user("Four?"))
        turn, plan, usage = await send(engine, edited, tools=TOOLS)
        assert usage.cached_tokens > 2900
        assert 0 <= usage.cached_tokens - predicted(plan) <= 128


async def test_edit_at_the_start_invalidates_the_cache(server: TestServer, name: str) -> None:
    """The plan reports that the cache is lost, and how many tokens that costs."""
    async with open_engine(server, name, prompt_cache=True) as engine:
        turn, _, before = await send(engine, Turn([user(f"{name} {LONG}")]))
        edited = turn.edit(turn.blocks[0].id, user(f"{name}! {LONG}")).append(user("Next?"))
        _, plan, usage = await send(engine, edited)
        assert predicted(plan) == usage.cached_tokens == 0
        assert plan.cache
        assert plan.cache.reason == "edited"
        assert 0 <= before.input_tokens - plan.cache.lost_tokens < 128
        assert "The history changed from block 0 on: about " in plan.explain()


async def test_changed_settings_are_predicted_and_reported(server: TestServer, name: str) -> None:
    """Tools in another order and a clock in the instructions miss the cache, and are named."""
    async with open_engine(server, name, prompt_cache=True) as engine:
        start = [system("It is 2026-11-16 12:00."), user(f"Hints, {name}: {LONG}")]
        turn, _, _ = await send(engine, Turn(start), tools=TOOLS)
        later = turn.edit(turn.blocks[0].id, system("It is 2026-11-16 12:01."))
        later = later.append(user("Next?"))
        plan = engine.plan(later, tools=TOOLS[::-1])
        assert plan.cache
        assert plan.cache.hints == ("tool_order", "clock")
        assert plan.cache.reason == "settings"
        assert "Prevents prompt caching: the tools are the same in another" in plan.explain()
        _, plan, usage = await send(engine, later, tools=TOOLS[::-1])
        assert predicted(plan) == usage.cached_tokens == 0


async def test_expired_cache_is_not_predicted(server: TestServer, name: str) -> None:
    """After the lifetime of the provider's cache, no cached tokens are predicted."""
    now = [1_000_000.0]
    async with open_engine(server, name, prompt_cache=True, clock=lambda: now[0]) as engine:
        turn, _, _ = await send(engine, Turn([user(f"{LONG} {name}")]))
        now[0] += 3600
        plan = engine.plan(turn.append(user("Next?")))
        assert plan.cache
        assert plan.cache.reason == "expired"
        assert "the last request is too long ago" in plan.explain()


async def test_caching_can_be_switched_off(server: TestServer, name: str) -> None:
    """With ``prompt_cache=False`` nothing about caching is sent, predicted or recorded."""
    async with open_engine(server, name, prompt_cache=False) as engine:
        turn, plan, _ = await send(engine, Turn([system(LONG), user(LONG)]))
        assert plan.cache is None
        assert "cache" not in str(server.requests[-1].body)
        if name in ("chat", "anthropic"):
            assert get_state(turn).anchors[-1].counted is None


SECRET_TURN = Turn([user("The secret word is fjord.")])


@pytest.fixture
async def caching(server: TestServer) -> AsyncIterator[Engine]:
    """Yield an engine that sends cache keys."""
    async with open_engine(server, "responses", prompt_cache=True) as engine:
        yield engine


def get_cache_key(engine: Engine, turn: Turn) -> str:
    """Return the cache key of a plan."""
    plan = engine.plan(turn)
    assert plan.cache
    assert plan.cache.key
    return plan.cache.key


async def test_cache_key_is_stable_within_a_conversation(
    server: TestServer, caching: Engine
) -> None:
    """The key is the same for a rebuilt Turn, a fork, and after edits behind the first block."""
    turn, _, _ = await send(caching, SECRET_TURN)
    body: Any = server.requests[-1].body
    rebuilt = Turn([user("The secret word is fjord."), *turn.blocks[1:], user("And now?")])
    edited = rebuilt.remove(rebuilt.blocks[1].id)
    instructed = Turn([system("Be brief."), *rebuilt.blocks])
    for each in (rebuilt, edited, instructed):
        assert get_cache_key(caching, each) == body["prompt_cache_key"]


async def test_cache_keys_of_two_conversations_differ(caching: Engine) -> None:
    """The key depends on the first message, of which it says nothing."""
    key = get_cache_key(caching, SECRET_TURN)
    assert key != get_cache_key(caching, Turn([user("Another start")]))
    assert "fjord" not in key
    assert len(key) <= 64


async def test_cache_key_of_the_caller_is_sent(server: TestServer, caching: Engine) -> None:
    """A key among the parameters replaces that of the conversation."""
    await send(caching, SECRET_TURN, prompt_cache_key="mine")
    body: Any = server.requests[-1].body
    assert body["prompt_cache_key"] == "mine"


async def test_cache_key_of_chat_completions(server: TestServer) -> None:
    """The key is a parameter of that API as well."""
    async with open_engine(server, "chat", prompt_cache=True) as chat:
        await send(chat, SECRET_TURN)
    body: Any = server.requests[-1].body
    assert body["prompt_cache_key"].startswith("kedge-")
