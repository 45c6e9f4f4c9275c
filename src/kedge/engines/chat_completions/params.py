"""Tools and common parameters, as the Chat Completions API puts them."""

from collections.abc import Mapping
from typing import Any

from kedge.engines.translating import Members, Table, by_type, inside, named, only, without
from kedge.errors import UnsupportedParameter

STATEFUL = "this API has no memory: leave it out"


def tool(definition: Mapping[str, Any]) -> Members:
    """A tool of the Responses API; one in this API's own shape goes as it is."""
    match definition.get("type"):
        case "function" if "function" not in definition:
            told = without(definition, "type")
            if not told.get("strict"):
                told.pop("strict", None)
            return {"type": "function", "function": told}
        case "custom" if "custom" not in definition:
            return {"type": "custom", "custom": _custom(without(definition, "type"))}
        case _:
            return dict(definition)


def _custom(told: Members) -> Members:
    form: Members = told.get("format") or {}
    if form.get("type") == "grammar" and "grammar" not in form:
        return {**told, "format": {"type": "grammar", "grammar": without(form, "type")}}
    return told


def _named_tool(choice: Mapping[str, Any]) -> Members:
    """A tool that is chosen by name, in the shape of either API."""
    kind = choice["type"]
    return dict(choice) if kind in choice else {"type": kind, kind: {"name": choice.get("name")}}


def _allowed(choice: Mapping[str, Any]) -> Members:
    if "allowed_tools" in choice:
        return {"tool_choice": dict(choice)}
    tools = [_named_tool(each) for each in choice.get("tools", ())]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def _json_schema(form: Mapping[str, Any]) -> Members:
    schema = {"type": "json_schema", "json_schema": without(form, "type")}
    return {"response_format": schema}


def _top_logprobs(count: Any) -> Members:
    return {"logprobs": True, "top_logprobs": count}


def _store(store: Any) -> Members:
    return {"store": True} if store else {}


_CHOICES: Table = {
    "auto": named("tool_choice"),
    "none": named("tool_choice"),
    "required": named("tool_choice"),
    "function": lambda choice: {"tool_choice": _named_tool(choice)},
    "custom": lambda choice: {"tool_choice": _named_tool(choice)},
    "allowed_tools": _allowed,
}
_FORMATS: Table = {
    "text": lambda _: {},
    "json_object": lambda _: {"response_format": {"type": "json_object"}},
    "json_schema": _json_schema,
}


def table(max_tokens: str) -> Table:
    """How each parameter is put; ``max_tokens`` is what this server calls that one."""
    return {
        "max_output_tokens": named(max_tokens),
        "tool_choice": by_type("tool_choice", _CHOICES),
        "text": inside(
            "text",
            {"format": by_type("text.format", _FORMATS), "verbosity": named("verbosity")},
        ),
        "reasoning": inside(
            "reasoning",
            {"effort": named("reasoning_effort"), "summary": only("reasoning.summary", NO_SUMMARY)},
        ),
        "top_logprobs": _top_logprobs,
        "store": _store,
        "instructions": only("instructions", "put a system block in front of the Turn"),
        "truncation": only("truncation", "compact the Turn instead", "disabled"),
        "background": only("background", STATEFUL, False),
        "include": only("include", STATEFUL, [], ()),
        "previous_response_id": only("previous_response_id", STATEFUL),
        "conversation": only("conversation", STATEFUL),
        "prompt": only("prompt", STATEFUL),
        "context_management": only("context_management", "compact the Turn instead", []),
        "max_tool_calls": only("max_tool_calls", "limit the rounds of the middleware tools"),
    }


NO_SUMMARY = "this API has no summaries of reasoning: leave it out"


def check_count(params: Mapping[str, Any]) -> None:
    """Refuse to ask for several answers: a Turn goes on with one."""
    if params.get("n") not in (None, 1):
        raise UnsupportedParameter("n", "a Turn goes on with one answer: send it several times")
