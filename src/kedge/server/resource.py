"""The response resource: every key of it, built from what was asked.

A request's settings are echoed as they were sent; what was left out shows its default. Nothing is
inherited from the previous response.
"""

from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]

DEFAULTS: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""What a request may set, and what it means to leave it out or to send null."""

SERVICE_TIERS = {"auto": "default", "fast": "priority"}
"""Tiers that are echoed by another name."""


def head(id: str, created_at: int, body: Body, *, store: bool) -> dict[str, Any]:
    """Build the resource of a response that has just begun, without its output."""
    resource: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body["model"],
        "conversation": _conversation(body.get("conversation")),
        "store": store,
        "metadata": body.get("metadata") or {},
        "text": _text(body.get("text") or {}),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "service_tier": _tier(body.get("service_tier") or "auto"),
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "usage": None,
    }
    for name, default in DEFAULTS.items():
        value = body.get(name)
        resource[name] = default if value is None else value
    return resource


def finished(
    begun: Mapping[str, Any], *, status: str, reason: str | None, now: int, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Turn the resource of a begun response into that of a completed or incomplete one."""
    return {
        **begun,
        "status": status,
        "completed_at": now if status == "completed" else None,
        "incomplete_details": reason and {"reason": reason},
        "usage": usage,
    }


def failed(begun: Mapping[str, Any], status: str, code: str, message: str) -> dict[str, Any]:
    """Turn the resource of a begun response into that of one that came to nothing."""
    error = {"code": code, "message": message} if status == "failed" else None
    return {**begun, "status": status, "error": error}


def usage(*, input: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    """Count a response: what went in, what of it was remembered, what came out."""
    written = input - cached if input >= LEAST_CACHED else 0
    return {
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": input + output,
    }


LEAST_CACHED = 1024
"""Prompts shorter than this are not cached by the hosted API; we count likewise."""


def _conversation(value: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {"id": value if isinstance(value, str) else value["id"]}


def _text(text: Body) -> dict[str, Any]:
    form: Mapping[str, Any] = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, "strict": False, **form}
    return {"verbosity": "medium", **text, "format": form}


def _tier(tier: str) -> str:
    return SERVICE_TIERS.get(tier, tier)


def _tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": True, **tool}
