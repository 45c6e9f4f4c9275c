"""Errors in the words and the shape of Anthropic's API.

The shapes of requests are shared with the other endpoints and refuse in OpenAI's words. Here every
such situation is said again as Anthropic says it: the place first, spelt with dots. What has no
words of its own keeps those it has.
"""

import re
from collections.abc import Mapping
from typing import Any

from kedge.server import errors
from kedge.server.errors import ApiError, Situation

WORDS: Mapping[Situation, str] = {
    errors.MISSING: "{path}: Field required",
    errors.UNKNOWN: "{path}: Extra inputs are not permitted",
    errors.UNKNOWN_WITH_SUGGESTION: "{path}: Extra inputs are not permitted",
    errors.WRONG_TYPE: "{path}: Input should be {expected}",
    errors.WRONG_VALUE: "{path}: Input should be {supported}",
    errors.INTEGER_TOO_SMALL: "{path}: Input should be greater than or equal to {least}",
    errors.INTEGER_TOO_LARGE: "{path}: Input should be less than or equal to {most}",
    errors.DECIMAL_TOO_SMALL: "{path}: Input should be greater than or equal to {least}",
    errors.DECIMAL_TOO_LARGE: "{path}: Input should be less than or equal to {most}",
    errors.STRING_EMPTY: "{path}: String should have at least {least} character",
    errors.STRING_TOO_SHORT: "{path}: String should have at least {least} characters",
    errors.STRING_TOO_LONG: "{path}: String should have at most {most} characters",
    errors.STRING_OFF_PATTERN: "{path}: String should match pattern '{pattern}'",
    errors.ARRAY_EMPTY: "{path}: List should have at least {least} item after validation, not 0",
    errors.ARRAY_TOO_LONG: (
        "{path}: List should have at most {most} items after validation, not {length}"
    ),
    errors.MODEL_NOT_FOUND: "model: {model}",
    errors.MODEL_UNKNOWN: "model: {model}",
    errors.TOOL_NOT_OFFERED: "Tool '{choice}' not found in provided tools",
    errors.KEY_MISSING: "x-api-key header is required",
    errors.KEY_REFUSED: "invalid x-api-key",
    errors.CONTEXT_TOO_LONG: "prompt is too long",
    errors.NOT_JSON: "The request body is not valid JSON",
    errors.BODY_NOT_OBJECT: "The request body must be a JSON object",
    errors.SERVER_FAILED: "Internal server error",
    errors.OVERLOADED: "Overloaded",
    errors.RATE_LIMITED: "This request would exceed your rate limit. Try again in {seconds}s.",
    errors.UNKNOWN_ROUTE: "Not Found",
    errors.WRONG_METHOD: "Method Not Allowed",
}

STATUSES: Mapping[Situation, int] = {errors.MODEL_NOT_FOUND: 404, errors.OVERLOADED: 529}
"""Situations that this API answers with another status."""

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_INDEX = re.compile(r"\[(\d+)\]")


def status_of(error: ApiError) -> int:
    """Say with which status this API answers."""
    return error.status if error.situation is None else STATUSES.get(error.situation, error.status)


def type_of(status: int) -> str:
    """Name the type of an error by its status."""
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def body_of(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Write an error as this API does."""
    shown = {"type": type_of(status_of(error)), "message": _message(error)}
    return {"type": "error", "error": shown, "request_id": request_id}


def _message(error: ApiError) -> str:
    words = WORDS.get(error.situation) if error.situation is not None else None
    if words is None:
        return error.message
    values = {name: _readable(name, value) for name, value in error.values.items()}
    return ApiError(words.format_map(values)).message


def _readable(name: str, value: str) -> str:
    if name == "path":
        return _INDEX.sub(r".\1", value)
    if name == "expected":
        return re.sub(r"^an? ", "a valid ", value).replace("valid array of", "valid list of")
    if name == "supported":
        *rest, last = value.replace(", and ", " and ").rsplit(" and ", 1)
        return f"{rest[0]} or {last}" if rest else last
    return value
