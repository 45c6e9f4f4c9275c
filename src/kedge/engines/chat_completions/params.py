"""Convert tools and common parameters to the Chat Completions API."""

from collections.abc import Mapping
from typing import Any

from kedge.engines.param_mapping import (
    Members,
    ParamRules,
    map_by_type,
    map_members,
    omit,
    reject_unless,
    rename,
)
from kedge.errors import UnsupportedParameter

NO_SERVER_STATE = "this API has no memory: leave it out"


def map_tool(definition: Mapping[str, Any]) -> Members:
    """Convert a tool of the Responses API; one in this API's own form is sent unchanged."""
    match definition.get("type"):
        case "function" if "function" not in definition:
            function = omit(definition, "type")
            if not function.get("strict"):
                function.pop("strict", None)
            return {"type": "function", "function": function}
        case "custom" if "custom" not in definition:
            return {"type": "custom", "custom": _map_custom_tool(omit(definition, "type"))}
        case _:
            return dict(definition)


def _map_custom_tool(definition: Members) -> Members:
    form: Members = definition.get("format") or {}
    if form.get("type") == "grammar" and "grammar" not in form:
        return {**definition, "format": {"type": "grammar", "grammar": omit(form, "type")}}
    return definition


def _map_named_choice(choice: Mapping[str, Any]) -> Members:
    """Convert a tool choice by name, in the form of either API."""
    kind = choice["type"]
    return dict(choice) if kind in choice else {"type": kind, kind: {"name": choice.get("name")}}


def _map_allowed_tools(choice: Mapping[str, Any]) -> Members:
    if "allowed_tools" in choice:
        return {"tool_choice": dict(choice)}
    tools = [_map_named_choice(each) for each in choice.get("tools", ())]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def _map_json_schema(text_format: Mapping[str, Any]) -> Members:
    schema = {"type": "json_schema", "json_schema": omit(text_format, "type")}
    return {"response_format": schema}


def _map_top_logprobs(count: Any) -> Members:
    return {"logprobs": True, "top_logprobs": count}


def _map_store(store: Any) -> Members:
    return {"store": True} if store else {}


_CHOICES: ParamRules = {
    "auto": rename("tool_choice"),
    "none": rename("tool_choice"),
    "required": rename("tool_choice"),
    "function": lambda choice: {"tool_choice": _map_named_choice(choice)},
    "custom": lambda choice: {"tool_choice": _map_named_choice(choice)},
    "allowed_tools": _map_allowed_tools,
}
_FORMATS: ParamRules = {
    "text": lambda _: {},
    "json_object": lambda _: {"response_format": {"type": "json_object"}},
    "json_schema": _map_json_schema,
}


def build_param_rules(max_tokens: str) -> ParamRules:
    """Return how each parameter is converted; ``max_tokens`` is the server's name for the output limit."""
    return {
        "max_output_tokens": rename(max_tokens),
        "tool_choice": map_by_type("tool_choice", _CHOICES),
        "text": map_members(
            "text",
            {"format": map_by_type("text.format", _FORMATS), "verbosity": rename("verbosity")},
        ),
        "reasoning": map_members(
            "reasoning",
            {
                "effort": rename("reasoning_effort"),
                "summary": reject_unless("reasoning.summary", NO_SUMMARY),
            },
        ),
        "top_logprobs": _map_top_logprobs,
        "store": _map_store,
        "instructions": reject_unless("instructions", "put a system block in front of the Turn"),
        "truncation": reject_unless("truncation", "compact the Turn instead", "disabled"),
        "background": reject_unless("background", NO_SERVER_STATE, False),
        "include": reject_unless("include", NO_SERVER_STATE, [], ()),
        "previous_response_id": reject_unless("previous_response_id", NO_SERVER_STATE),
        "conversation": reject_unless("conversation", NO_SERVER_STATE),
        "prompt": reject_unless("prompt", NO_SERVER_STATE),
        "context_management": reject_unless("context_management", "compact the Turn instead", []),
        "max_tool_calls": reject_unless(
            "max_tool_calls", "limit the rounds of the middleware tools"
        ),
    }


NO_SUMMARY = "this API has no summaries of reasoning: leave it out"


def check_choice_count(params: Mapping[str, Any]) -> None:
    """Reject a request for several answers: a Turn continues with one."""
    if params.get("n") not in (None, 1):
        raise UnsupportedParameter("n", "a Turn goes on with one answer: send it several times")
