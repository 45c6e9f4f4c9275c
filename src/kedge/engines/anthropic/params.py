"""Tools and common parameters, as the Messages API of Anthropic puts them."""

from collections.abc import Mapping
from typing import Any

from kedge.engines.translating import Members, Rule, Table, by_type, inside, named, only, without
from kedge.errors import UnsupportedParameter

MAX_TOKENS = 16_384
"""The limit of an answer that gives none: this API wants one. All models since Claude 4 allow it."""

STATEFUL = "this API has no memory: leave it out"
NO_SAMPLING = (
    "the API's newest version has no sampling: leave it out, or ask for an older version with "
    "default_headers={'anthropic-version': '2023-06-01'}"
)
SAMPLING_UNTIL = "2026-10-21"
"""The version of the API that no longer takes sampling parameters."""


def tool(definition: Mapping[str, Any]) -> Members:
    """A function of the Responses API; a tool in this API's own shape goes as it is."""
    match definition.get("type"):
        case "function":
            told = without(definition, "type", "parameters", "strict")
            told["input_schema"] = definition.get("parameters") or {"type": "object"}
            return {**told, "strict": True} if definition.get("strict") else told
        case "custom" if "input_schema" not in definition:
            name = definition.get("name")
            raise UnsupportedParameter(f"the free-form tool {name!r}", "make it a function")
        case _:
            return dict(definition)


def _choice(kind: str) -> Rule:
    return lambda _: {"tool_choice": {"type": kind}}


def _chosen(choice: Mapping[str, Any]) -> Members:
    return {"tool_choice": {"type": "tool", "name": choice.get("name")}}


def _parallel(allowed: Any) -> Members:
    return {} if allowed else {"tool_choice": {"disable_parallel_tool_use": True}}


def _format(form: Mapping[str, Any]) -> Members:
    told = {"type": "json_schema", "schema": form.get("schema")}
    return {"output_config": {"format": told}}


def _effort(effort: Any) -> Members:
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    told = "low" if effort == "minimal" else effort
    return {"output_config": {"effort": told}, "thinking": {"type": "adaptive"}}


def _budget(tokens: Any) -> Members:
    return {"thinking": {"type": "enabled", "budget_tokens": tokens}}


def _metadata(given: Any) -> Members:
    unsaid = sorted(set(given) - {"user_id"})
    if unsaid:
        raise UnsupportedParameter(f"metadata.{unsaid[0]}", "only user_id is taken: leave it out")
    return {"metadata": dict(given)}


def _stop(stop: Any) -> Members:
    return {"stop_sequences": [stop] if isinstance(stop, str) else list(stop)}


_NO_JSON = "give a schema: {'type': 'json_schema', 'schema': …}"
_CHOICES: Table = {
    "auto": _choice("auto"),
    "none": _choice("none"),
    "required": _choice("any"),
    "function": _chosen,
    "any": named("tool_choice"),
    "tool": named("tool_choice"),
}
_FORMATS: Table = {
    "text": lambda _: {},
    "json_schema": _format,
    "json_object": only("text.format 'json_object'", _NO_JSON),
}
_REASONING: Table = {
    "effort": _effort,
    "budget_tokens": _budget,
    "max_tokens": _budget,
    "summary": lambda _: {"thinking": {"display": "summarized"}},
}
TABLE: Table = {
    "max_output_tokens": named("max_tokens"),
    "tool_choice": by_type("tool_choice", _CHOICES),
    "parallel_tool_calls": _parallel,
    "text": inside(
        "text",
        {
            "format": by_type("text.format", _FORMATS),
            "verbosity": only("text.verbosity", "say it in a system block", "medium"),
        },
    ),
    "reasoning": inside("reasoning", _REASONING),
    "stop": _stop,
    "metadata": _metadata,
    "user": lambda user: {"metadata": {"user_id": user}},
    "safety_identifier": lambda user: {"metadata": {"user_id": user}},
    "instructions": only("instructions", "put a system block in front of the Turn"),
    "truncation": only("truncation", "compact the Turn instead", "disabled"),
    "background": only("background", STATEFUL, False),
    "store": only("store", STATEFUL, False),
    "include": only("include", STATEFUL, [], ()),
    "previous_response_id": only("previous_response_id", STATEFUL),
    "conversation": only("conversation", STATEFUL),
    "prompt": only("prompt", STATEFUL),
    "max_tool_calls": only("max_tool_calls", "limit the rounds of the middleware tools"),
    "top_logprobs": only("top_logprobs", "leave it out", 0),
}
"""How each parameter is put."""
SAMPLING: Table = {
    name: only(name, NO_SAMPLING, 1, 1.0) for name in ("temperature", "top_p", "top_k")
}
"""Parameters that only older versions of the API take."""


def fitted(body: Members) -> Members:
    """The body with what its parts ask of each other."""
    choice: Members = {"type": "auto", **(body.get("tool_choice") or {})}
    thinking: Members = {"type": "adaptive", **(body.get("thinking") or {})}
    budget = thinking.get("budget_tokens")
    limit = MAX_TOKENS + (budget if isinstance(budget, int) else 0)
    fit: Members = {"max_tokens": body.get("max_tokens") or limit}
    if "tool_choice" in body:
        idle = not body.get("tools") and choice["type"] in ("auto", "none")
        fit["tool_choice"] = None if idle else choice  # which the API refuses without tools
    if "thinking" in body:
        if budget is not None:
            thinking["type"] = "enabled"
        if thinking["type"] == "disabled":
            thinking.pop("display", None)
        fit["thinking"] = thinking
    return {**body, **fit}
