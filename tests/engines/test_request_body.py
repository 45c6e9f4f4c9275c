"""Test the options and tools of a request: rejected before sending, read-only, and encoded once."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.conftest import open_engine
from engines.runs import Link, request_bodies
from for_each import for_each
from kedge._internal.event_loops import await_value
from kedge.engines import Request
from kedge.engines.params import KNOWN_PARAMS, PLANNED_PARAMS
from kedge.engines.request_body import encode_body
from kedge.errors import InvalidSetting, InvalidTurn, ResendTooLong, UnsupportedParameter
from kedge.evidence.tokens import hash_settings
from kedge.middleware import repair, system_prompt, with_middleware
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.tools import tool
from kedge.tools.definitions import to_definition
from kedge.turns import Turn, user

TURN = Turn([user("Hello")])


@pytest.mark.parametrize("name", sorted(PLANNED_PARAMS))
@pytest.mark.parametrize("extra", [False, True])
async def test_member_set_by_the_plan_is_rejected(link: Link, name: str, extra: bool) -> None:
    """The error names the alternative, and nothing is sent."""
    options: dict[str, Any] = {"extra_body": {name: "x"}} if extra else {name: "x"}
    with pytest.raises(UnsupportedParameter, match="the plan decides") as exc_info:
        await link.engine.run(TURN, **options)
    assert PLANNED_PARAMS[name] in str(exc_info.value)
    assert link.bodies == []


VALUES: dict[str, Any] = {
    "background": True,
    "cache_control": {"type": "ephemeral"},
    "context_management": [{"type": "compaction", "compact_threshold": 10_000}],
    "frequency_penalty": 0.5,
    "include": [],
    "logit_bias": {"1": 1},
    "logprobs": True,
    "max_tool_calls": 1,
    "metadata": {"user_id": "ada"},
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "output_config": {"effort": "low"},
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "seed": 1,
    "service_tier": "auto",
    "stop_sequences": ["end"],
    "store": True,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "thinking": {"type": "disabled"},
    "tool_choice": "auto",
    "top_k": 1,
    "top_logprobs": 1,
    "top_p": 0.5,
    "truncation": "auto",
    "verbosity": "low",
}
"""A value of each parameter; of the others, 1 is one or its text is."""


@pytest.mark.parametrize("kind", ["responses", "chat", "anthropic"])
async def test_suggested_parameters_are_accepted(server: TestServer, kind: str) -> None:
    """A parameter that is suggested for a misspelled one is accepted by the server of this API."""
    address: dict[str, Any] = (
        {"base_url": server.url, "api_key": "k"} if kind == "anthropic" else {}
    )
    model = "anthropic:practice" if address else f"{kind}:{server.base_url}#practice"
    suggested = set[str]()
    async with connect(model, max_retries=0, **address) as engine:
        for name in KNOWN_PARAMS:
            for wrong in (f"{name}_", name[1:], f"max_{name}"):
                misspelled: dict[str, Any] = {wrong: 1}
                with pytest.raises(UnsupportedParameter) as exc_info:
                    engine.plan(TURN, **misspelled)
                hint = str(exc_info.value).partition("did you mean")[2].partition("?")[0]
                suggested |= set(re.findall(r"\w+", hint)) & KNOWN_PARAMS
        for name in sorted(suggested - {"prompt"}):  # the server has no stored prompt
            value = VALUES.get(name, 1000 if name.startswith("max_") else "1")
            if (kind, name) == ("anthropic", "context_management"):
                value = {"edits": []}
            option: dict[str, Any] = {name: value}
            await engine.run(TURN, streaming=True, **option)
    assert len(suggested) > 15


@pytest.mark.parametrize("model", ["responses", "chat"])
async def test_a_misspelled_option_is_rejected_with_a_suggestion(
    server: TestServer, model: str
) -> None:
    """A misspelled option is rejected before anything is sent, also for a stateless API."""
    engine = connect(f"{model}:{server.base_url}#practice")
    misspelled: dict[str, Any] = {"modle": "x"}
    with pytest.raises(UnsupportedParameter, match="did you mean 'mode' or 'model'"):
        await engine.run(TURN, **misspelled)
    with pytest.raises(UnsupportedParameter, match="did you mean 'temperature'"):
        connect(f"{model}:{server.base_url}#practice", params={"temprature": 1})
    assert not server.requests


@pytest.mark.parametrize("model", ["responses", "chat"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": math.nan}, {"metadata": {"at": object()}}, {"metadata": {"a": "\ud800"}}],
)
async def test_option_that_is_not_json_is_rejected(
    server: TestServer, model: str, options: dict[str, Any]
) -> None:
    """An option that cannot be encoded raises an error that names it, and nothing is sent."""
    async with connect(f"{model}:{server.base_url}#practice") as engine:
        with pytest.raises(InvalidSetting, match=f"^{next(iter(options))} cannot be sent as JSON"):
            await engine.run(TURN, **options)
    assert not server.requests


async def test_extra_body_members_are_sent_unchanged(server: TestServer) -> None:
    """The `extra_body` members of the engine and of the request are merged."""
    async with open_engine(
        server, params={"extra_body": {"user": "a", "safety_identifier": "s"}}
    ) as engine:
        await engine.run(TURN, extra_body={"user": "b"}, metadata={"k": "v"})
    body = request_bodies(server)[-1]
    assert (body["user"], body["metadata"]) == ("b", {"k": "v"})
    assert "extra_body" not in body


async def test_resend_limit_is_an_option_and_not_a_body_member(link: Link) -> None:
    """The option limits healing and is not sent to the link.server."""
    turn = await link.send("One")
    link.server.forget()
    with pytest.raises(ResendTooLong):
        await link.send("Two", turn=turn, resend_limit=1)
    assert "resend_limit" not in link.bodies[-1]


async def test_wrong_numbers_are_rejected_before_a_request(link: Link) -> None:
    """A number that is needed only after a loss or a wrong answer is checked at the start."""
    for name, value in [("resend_limit", "9"), ("resend_limit", 2e5), ("output_retries", None)]:
        with pytest.raises(InvalidSetting, match=f"{name} must be an integer of at least 0"):
            await link.send("One", **{name: value})
    options: list[tuple[dict[str, Any], str]] = [
        ({"candidates": 5}, "candidates must be a list of AnchorRecord, not int"),
        ({"tap": 5}, "tap must be a function that is not async, not 5"),
        ({"tap": link.send}, "tap must be a function that is not async, not <bound method"),
    ]
    for wrong, problem in options:
        with pytest.raises(InvalidSetting, match=problem):
            await link.send("One", **wrong)
    assert not link.server.requests


async def test_constructed_request_cannot_override_the_plan(link: Link) -> None:
    """The parameters of a `Request` object are checked before anything is sent."""
    request = Request(params={"previous_response_id": "resp_x"})
    with pytest.raises(UnsupportedParameter, match="previous_response_id"):
        await anext(link.engine.events(TURN, request))
    assert not link.server.requests


@pytest.mark.parametrize(
    "model", ["practice", "openai:gpt-5.1", "anthropic:claude-opus-5-5", "chat:http://x/v1#m"]
)
async def test_an_unknown_mode_is_rejected(model: str) -> None:
    """A typing error in `stateless` must not send a request that the server stores."""
    mode: Any = "stateles"
    with pytest.raises(InvalidSetting, match="mode must be one of chained, stateless"):
        connect(model, api_key="k", mode=mode)
    engine = connect(model, api_key="k")
    with pytest.raises(InvalidSetting, match="mode must be one of chained, stateless"):
        await engine.run(TURN, mode=mode)


@pytest.mark.parametrize("given", ["Hello", [user("Hello")], None])
async def test_argument_that_is_not_a_turn_is_rejected(given: Any) -> None:
    """The error says how to make a Turn; it was an `AttributeError`."""
    async with connect("practice") as engine:
        with pytest.raises(InvalidTurn, match=r"sends a Turn, not (str|list|NoneType); write Turn"):
            await engine.run(given)
        with pytest.raises(InvalidTurn, match="sends a Turn"):
            engine.sync.stream(given)
        stack = with_middleware(engine, repair(), system_prompt("Be brief."))
        for call in (engine.plan, stack.plan, engine.probe_and_plan, engine.poll, engine.cancel):
            with pytest.raises(InvalidTurn, match="sends a Turn"):
                await await_value(call(given))


@for_each(
    "settings",
    [
        {"retention": -5},
        {"retention": float("nan")},
        {"max_depth": 0},
        {"max_depth": True},
        {"transport": "websockets"},
        {"connections": 0, "transport": "websocket"},
        {"lanes": 0, "transport": "websocket"},
    ],
)
def test_invalid_engine_setting_is_rejected(settings: Any) -> None:
    """Such settings would disable chaining, retain responses forever, or wait forever for a connection."""
    with pytest.raises(InvalidSetting, match=next(iter(settings))):
        connect("openai:gpt-5.1", api_key="k", **settings)


COMPACT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)
objects = st.dictionaries(texts, values, max_size=4)


def make_definition() -> dict[str, Any]:
    return {"type": "function", "name": "add", "parameters": {"required": ["a"], "properties": {}}}


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


@given(st.lists(objects, max_size=3), objects)
def test_the_body_and_its_hash_do_not_change(tools: list[Any], settings: dict[str, Any]) -> None:
    """Cached forms give the bytes of ``json.dumps``, and the fingerprints of stored token counts."""
    request = Request(tools=tuple(tools))
    for _ in range(2):  # the second time from the cached forms
        body = {"model": "m", "stream": True, **settings, "tools": list(request.tools)}
        plain = {**body, "tools": tools}
        assert encode_body(body) == json.dumps(plain, **COMPACT).encode()
        relevant = {
            name: plain[name] for name in sorted(plain) if name not in ("stream", "input", "store")
        }
        assert hash_settings(body) == hash_settings(relevant)


def test_later_changes_of_the_caller_have_no_effect() -> None:
    """A request copies definitions and parameters."""
    definition, params = make_definition(), {"reasoning": {"effort": "low"}}
    request = Request(tools=(definition,), params=params)
    definition["parameters"]["required"].append("b")
    params["reasoning"]["effort"] = "high"
    assert request.tools == (make_definition(),)
    assert request.params == {"reasoning": {"effort": "low"}}


def test_a_definition_that_is_not_json_is_rejected() -> None:
    """A cycle is reported at once, another object in a definition when it is encoded."""
    definition = make_definition()
    definition["parameters"]["properties"]["a"] = definition
    with pytest.raises(InvalidSetting, match="tools cannot be sent as JSON"):
        to_definition(definition)
    other = to_definition({**make_definition(), "x": object()})
    with pytest.raises(InvalidSetting, match="tools cannot be sent as JSON"):
        encode_body({"tools": [other]})
