"""Test the placement of cache breakpoints, and the detection of changes that prevent caching."""

import logging
from typing import Any

import pytest
from msgspec import structs

from engines.fake_server import RecordingServer, connect_to, json_response
from for_each import for_each
from kedge.engines import request_log
from kedge.engines.prompt_cache import (
    LIFETIMES,
    count_prompt,
    find_host_rules,
    mark_chat_messages,
    place_breakpoints,
)
from kedge.engines.request_log import PromptMonitor
from kedge.events import Outcome
from kedge.observe.metrics import samples
from kedge.planning import CachePlan, CacheRules, TokenCounts, plan_request, record_response
from kedge.planning.cache_plan import PromptHead
from kedge.providers import connect
from kedge.turns import Turn, assistant, reasoning, system, user
from kedge.wire.anthropic_renderer import render_messages
from kedge.wire.chat_renderer import render_messages as render_chat

LONG = "word " * 2000
RULES = CacheRules(minimum=1024, step=1, lifetime=300)
MARK = {"type": "ephemeral"}


def conversation(*texts: str) -> Turn:
    blocks = [(user if n % 2 == 0 else assistant)(text) for n, text in enumerate(texts)]
    return Turn([system("Be brief."), *blocks])


def build_body(turn: Turn, **members: Any) -> dict[str, Any]:
    plan = plan_request(turn, scope="anthropic", mode="stateless", now=0)
    body: dict[str, Any] = {"messages": render_messages(plan, "anthropic"), **members}
    if plan.instructions:
        body["system"] = plan.instructions
    return body


def place(turn: Turn, body: dict[str, Any], lifetime: Any = "5m") -> dict[str, Any]:
    plan = plan_request(turn, scope="anthropic", mode="stateless", now=0)
    place_breakpoints(body, plan, structs.replace(RULES, lifetime=LIFETIMES[lifetime]))
    return body


def list_marks(body: dict[str, Any]) -> list[tuple[str, int, Any]]:
    """Return the positions of the breakpoints, in the order of the prompt."""
    sections: list[tuple[str, Any]] = [("tools", body.get("tools") or [])]
    sections.append(("system", body["system"] if isinstance(body.get("system"), list) else []))
    sections += [(f"message {n}", m["content"]) for n, m in enumerate(body["messages"])]
    return [
        (name, index, block["cache_control"])
        for name, blocks in sections
        for index, block in enumerate(blocks)
        if isinstance(block, dict) and "cache_control" in block
    ]


def tool(name: str, **members: Any) -> dict[str, Any]:
    return {"name": name, "description": LONG, "input_schema": {"type": "object"}, **members}


def test_four_breakpoints_are_placed() -> None:
    """Breakpoints are at the tools, the system text, and the ends of this and the previous request."""
    turn = conversation("One", "1", "Two", "2", "Three")
    body = place(turn, build_body(turn, tools=[tool("f"), tool("g")]))
    assert list_marks(body) == [
        ("tools", 1, MARK),
        ("system", 0, MARK),
        ("message 2", 0, MARK),
        ("message 4", 0, MARK),
    ]


def test_prefixes_below_the_minimum_get_no_breakpoint() -> None:
    """A prefix that the provider would ignore is not marked, and the body is unchanged."""
    turn = conversation("One", "1", "Two")
    body = build_body(turn, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert list_marks(place(turn, body)) == []
    assert body["system"] == "Be brief."
    long = conversation("One", "1", LONG)
    assert list_marks(place(long, build_body(long))) == [("message 2", 0, MARK)]


def test_breakpoints_of_the_caller_count() -> None:
    """There are at most four breakpoints in total, and those of the caller are unchanged."""
    turn = conversation(LONG, "1", "Two", "2", "Three")
    own = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = place(turn, build_body(turn, tools=[tool("f", **own), tool("g", **own), tool("h")]))
    marks = list_marks(body)
    assert len(marks) == 4
    assert marks[:2] == [("tools", 0, own["cache_control"]), ("tools", 1, own["cache_control"])]
    assert [mark[0] for mark in marks[2:]] == ["system", "message 4"]
    full = place(turn, build_body(turn, tools=[tool(name, **own) for name in "abcd"]))
    assert len(list_marks(full)) == 4
    one = place(turn, build_body(turn, cache_control=MARK))
    assert list_marks(one) == []


def test_lifetimes_are_in_order() -> None:
    """A longer lifetime never comes after a shorter one, whatever the caller marked."""
    turn = conversation(LONG, "1", "Two")
    hour = {"type": "ephemeral", "ttl": "1h"}
    assert {mark[2].get("ttl") for mark in list_marks(place(turn, build_body(turn), "1h"))} == {
        "1h"
    }
    short_first = place(turn, build_body(turn, tools=[tool("f", cache_control=MARK)]), "1h")
    assert [mark[2] for mark in list_marks(short_first)] == [MARK] * 4
    late = build_body(turn, tools=[tool("f")])
    late["messages"][-1]["content"][-1]["cache_control"] = hour
    assert [mark[2] for mark in list_marks(place(turn, late, "5m"))] == [hour] * 4


def test_unmarkable_blocks_are_skipped() -> None:
    """Reasoning and deferred tools cannot have a breakpoint."""
    turn = Turn([user(LONG)])
    body = build_body(turn, tools=[tool("f", defer_loading=True)])
    body["messages"][-1]["content"].append({"type": "thinking", "thinking": "Hm"})
    assert list_marks(place(turn, body)) == []


def test_chat_messages_are_marked_in_their_own_form() -> None:
    """Only marked messages become lists of parts."""
    turn = conversation("One", "1", LONG, "2", "Three").insert(0, system(LONG))
    plan = plan_request(turn, scope="chat", mode="stateless", now=0)
    body: dict[str, Any] = {"messages": render_chat(plan, "chat")}
    plain = render_chat(plan, "chat")
    mark_chat_messages(body, plan, RULES)
    marked = [n for n, m in enumerate(body["messages"]) if isinstance(m["content"], list)]
    assert marked == [0, 3, 5]
    assert body["messages"][5]["content"] == [
        {"type": "text", "text": "Three", "cache_control": MARK}
    ]
    assert body["messages"][1] == plain[1]
    planned = plan_request(Turn([user("Hi")]), scope="chat", mode="stateless", now=0)
    small: dict[str, Any] = {"messages": render_chat(planned, "chat")}
    mark_chat_messages(small, planned, RULES)
    assert small["messages"] == [{"role": "user", "content": "Hi"}]


def test_host_determines_the_form_of_caching() -> None:
    """OpenAI gets a key, OpenRouter breakpoints for the models that use them, others nothing."""
    openai: Any = connect("chat:https://api.openai.com/v1#gpt-5.1", api_key="k")
    router: Any = connect("chat:https://openrouter.ai/api/v1#anthropic/claude-opus-5", api_key="k")
    local: Any = connect("chat:http://127.0.0.1:9/v1#m")
    rules = router._cache_rules("anthropic/claude-opus-5", {})
    assert (openai.prompt_cache, router.prompt_cache, local.prompt_cache) == (True, True, False)
    assert rules.minimum == 512
    assert openai._cache_rules("m", {}) == CacheRules()
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    plan = plan_request(Turn([user(LONG)]), scope="chat", mode="stateless", now=0)
    router._request_caching(body, plan, CachePlan("key"))
    assert body["messages"][0]["content"][0]["cache_control"] == MARK
    assert connect("xai:grok-4", api_key="k").prompt_cache  # type: ignore[attr-defined]
    assert not connect("xai:grok-4", api_key="k", prompt_cache=False).prompt_cache  # type: ignore[attr-defined]


ONE_TOOL, OTHER_TOOL = {"name": "a"}, {"name": "b"}


@for_each(
    ("before", "now", "hints"),
    [
        (("m", "It is 12:00."), ("m", "It is 12:01."), ["clock"]),
        (("m", "Today: 2026-11-16"), ("m", "Today: 2026-11-17"), ["clock"]),
        (("m", "Request 17000001 of you"), ("m", "Request 17000452 of you"), ["clock"]),
        (("m", "Be brief."), ("m", "Be long."), ["instructions"]),
        (("m", "Answer in 3 lines."), ("m", "Answer in 5 lines."), ["instructions"]),
        (("m", "It is 12:00. Be kind."), ("m", "It is noon. Be kind."), ["instructions"]),
        (("m", "", ONE_TOOL, OTHER_TOOL), ("m", "", OTHER_TOOL, ONE_TOOL), ["tool_order"]),
        (("m", "", ONE_TOOL, OTHER_TOOL), ("m", "", {**ONE_TOOL}, {**OTHER_TOOL}), []),
        (("m", "", ONE_TOOL, OTHER_TOOL), ("n", "", ONE_TOOL), ["model", "tools"]),
    ],
)
def test_changes_that_prevent_caching_are_named(before: Any, now: Any, hints: list[str]) -> None:
    """A clock changes a time, a date or a long number, and nothing else; tools may change their order only."""
    (model, text, *listed), (old_model, old_text, *old_listed) = now, before
    head = PromptHead(model, text, tuple(listed))
    assert list(head.compare(PromptHead(old_model, old_text, tuple(old_listed)))) == hints


def test_hints_are_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hint is logged once per conversation, and the number of remembered conversations is bounded."""
    monkeypatch.setattr(request_log, "MAX_REMEMBERED_PROMPTS", 2)
    monitor, head = PromptMonitor(), PromptHead("m", "", ())
    hinted = CachePlan("a", hints=("clock",), lost_tokens=2000)
    with caplog.at_level(logging.WARNING, "kedge"):
        for _ in range(2):
            monitor.record(hinted, head)
    assert [record.getMessage()[:31] for record in caplog.records] == [
        "prompt caching is prevented: th"
    ]
    assert "prompt_cache_hints_total" in samples()
    for key in "bcd":
        monitor.record(CachePlan(key), head)
    assert len(monitor._prompts) == 2


def test_missing_usage_gives_no_token_counts() -> None:
    """A server that reports no tokens gives no base for a prediction."""
    outcome = Outcome(status="completed", blocks=(reasoning("x"),))
    assert count_prompt(outcome, CachePlan("k")) is None


@for_each(
    ("model", "counted", "cached"),
    [
        ("responses:https://api.deepseek.com/v1#m", 180, 128),
        ("chat:https://api.groq.com/openai/v1#m", 336, 256),
        ("chat:https://api.mistral.ai/v1#m", 255, 224),
        ("responses:https://api.x.ai/v1#m", 255, 192),
        ("chat:https://api.x.ai/v1#m", 255, 192),
        ("xai:m", 255, 192),
        ("chat:https://api.openai.com/v1#m", 336, 0),
    ],
)
def test_some_providers_cache_short_prompts(model: str, counted: int, cached: int) -> None:
    """DeepSeek, Groq, Mistral and xAI read prompts below 1,024 tokens from their caches."""
    engine: Any = connect(model, api_key="k", clock=lambda: 1.0)
    turn = Turn([user("Hi")])
    plan = engine.plan(turn)
    assert plan.cache is not None
    counts = TokenCounts(counted, 0, 5, 0, 0, plan.cache.settings)
    turn = record_response(
        turn, [assistant("Yes.")], response_id="r", plan=plan, created_at=1.0, counted=counts
    )
    predicted = engine.plan(turn.append(user("And?"))).cache
    assert predicted is not None
    assert predicted.cached_tokens == cached


async def test_a_provider_without_keys_gets_none() -> None:
    """Groq rejects an unknown member, so its requests have no key."""
    choices = [{"message": {"content": "Yes."}, "finish_reason": "stop"}]
    server = RecordingServer(json_response({"id": "c", "choices": choices}))
    for rules in ({"cache_rules": find_host_rules("api.groq.com")}, {}):
        async with connect_to(server.handle, "chat", prompt_cache=True, **rules) as engine:
            await engine.run(Turn([user("Hi")]))
    assert ["prompt_cache_key" in body for body in server.bodies] == [False, True]
    assert find_host_rules("notgroq.com") is None


def test_only_the_responses_api_of_xai_has_keys() -> None:
    """The Chat Completions API of xAI has a header in their place."""
    engines: list[Any] = [connect("xai:m", api_key="k"), connect("chat:https://api.x.ai/v1#m")]
    assert [engine.cache_rules.keyed for engine in engines] == [True, False]
