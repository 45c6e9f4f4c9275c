"""Build the ``response`` object of the API, in two parts.

The request fields echo the settings of the request, with defaults for omitted ones; nothing is inherited
from the previous response. They never change, so they are encoded once. The result fields (status, usage,
error…) describe how the response ended. The output items are encoded separately.
"""

from collections.abc import Mapping
from typing import Any

from kedge.server.errors import INTERNAL_ERROR, ApiError
from kedge.server.models import ModelUsage
from kedge.server.prompt_cache import MIN_CACHED_TOKENS

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
"""Parameters and their values if they are omitted or null."""

SERVICE_TIERS = {"auto": "default", "fast": "priority"}
"""Tiers that are echoed under another name."""

IN_PROGRESS_FIELDS: Mapping[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "usage": None,
}
"""The result fields of a response in progress."""

QUEUED_FIELDS: Mapping[str, Any] = {**IN_PROGRESS_FIELDS, "status": "queued"}
"""The result fields of a queued response."""

UNFINISHED_STATUSES = frozenset({"queued", "in_progress"})
"""Statuses of a response that has not ended."""


def build_request_fields(id: str, created_at: int, body: Body, *, store: bool) -> dict[str, Any]:
    """Build the request fields."""
    tier: str = body.get("service_tier") or "auto"
    conversation = body.get("conversation")
    resource: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "model": body["model"],
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "store": store,
        "metadata": body.get("metadata") or {},
        "text": _build_text(body.get("text") or {}),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "service_tier": SERVICE_TIERS.get(tier, tier),
        "tools": [_fill_tool_defaults(tool) for tool in body.get("tools") or ()],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **DEFAULTS,
    }
    for name in DEFAULTS.keys() & body.keys():
        if body[name] is not None:
            resource[name] = body[name]
    return resource


def build_finished_fields(
    *, reason: str | None, now: int, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the result fields of a completed response or, with a ``reason``, of an incomplete one."""
    return {
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else now,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "usage": usage,
    }


STOPPED_MESSAGE = "The server was stopped before this response was finished."
RESTARTED_MESSAGE = "The server was restarted before this response was finished."
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The code of a failed response by the HTTP status of its error; otherwise ``server_error``."""


def build_failed_fields(status: str, cause: ApiError | str | None = None) -> dict[str, Any]:
    """Build the result fields of a response that ``failed`` or was ``cancelled``.

    Args:
        status: One of these two.
        cause: The error of the model, or a message; by default an internal error.
    """
    reported = cause if isinstance(cause, ApiError) else INTERNAL_ERROR()
    message = cause if isinstance(cause, str) else reported.message
    error = {"code": FAILURE_CODES.get(reported.status, "server_error"), "message": message}
    return {**IN_PROGRESS_FIELDS, "status": status, "error": error if status == "failed" else None}


def build_usage(usage: ModelUsage) -> dict[str, Any]:
    """Build the ``usage`` object."""
    written = usage.input - usage.cached if usage.input >= MIN_CACHED_TOKENS else 0
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }


def join_response(request_json: bytes, result_json: bytes, output: bytes) -> bytes:
    """Join the encoded parts of a response, which are stored separately."""
    return b'%b,%b,"output":%b}' % (request_json[:-1], result_json[1:-1], output)


def _build_text(text: Body) -> dict[str, Any]:
    form: Body = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, "strict": False, **form}
    return {**text, "verbosity": text.get("verbosity") or "medium", "format": form}


def _fill_tool_defaults(tool: Body) -> Body:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": True, **tool}
