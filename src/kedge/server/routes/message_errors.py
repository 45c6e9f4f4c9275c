"""Errors with the messages and the format of Anthropic's API.

The validators are shared with the other endpoints and raise errors with OpenAI's messages. Here each of
them gets Anthropic's message, which starts with the path, written with dots. An error without a message
of this API retains OpenAI's.
"""

import re
from collections.abc import Mapping
from typing import Any

from kedge.server import errors
from kedge.server.errors import ApiError, ErrorTemplate

VERSION_MISSING = ErrorTemplate("anthropic-version: header is required")
VERSION_UNKNOWN = ErrorTemplate('anthropic-version: "{version}" is not a valid version')
NO_MESSAGES = ErrorTemplate("messages: at least one message is required")
FIRST_NOT_USER = ErrorTemplate('messages: first message must use the "user" role')
EMPTY_MESSAGE = ErrorTemplate(
    "messages.{index}: all messages must have non-empty content except for the optional final "
    "assistant message"
)
EMPTY_TEXT = ErrorTemplate("messages: text content blocks must be non-empty")
PREFILL_UNSUPPORTED = ErrorTemplate(
    "This model does not support assistant message prefill. The conversation must end with a user "
    "message."
)
CALLS_UNANSWERED = ErrorTemplate(
    "messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
    "{ids}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
)
RESULT_WITHOUT_CALL = ErrorTemplate(
    "messages.{index}.content.{part}: unexpected `tool_use_id` found in `tool_result` blocks: {id}. "
    "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
)
DUPLICATE_RESULT = ErrorTemplate(
    "messages.{index}.content.{part}: each tool_use must have a single result. Found multiple "
    "`tool_result` blocks with id: {id}"
)
DUPLICATE_CALL = ErrorTemplate("messages.{index}.content.{part}: `tool_use` ids must be unique")
BLOCK_NOT_ALLOWED = ErrorTemplate(
    "messages.{index}.content.{part}: `{type}` blocks are not permitted within {role} messages"
)
INVALID_SIGNATURE = ErrorTemplate(
    "messages.{index}.content.{part}: Invalid `signature` in `thinking` block"
)
INVALID_REDACTED_DATA = ErrorTemplate(
    "messages.{index}.content.{part}: Invalid `data` in `redacted_thinking` block"
)
THINKING_MISSING = ErrorTemplate(
    "messages.{index}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
    "`{type}`. When `thinking` is enabled, a final `assistant` message must start with a thinking "
    "block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). We recommend you "
    "include thinking blocks from previous turns. To avoid this requirement, disable `thinking`."
)
BUDGET_TOO_LARGE = ErrorTemplate("`max_tokens` must be greater than `thinking.budget_tokens`.")
THINKING_WITH_FORCED_TOOL = ErrorTemplate(
    "Thinking may not be enabled when tool_choice forces tool use."
)
CHOICE_WITHOUT_TOOLS = ErrorTemplate(
    "tool_choice: `tool_choice` may only be specified while providing `tools`."
)
THREAD_UNSUPPORTED = ErrorTemplate(
    "thread: this server holds no Threads. Send the full conversation without `thread`.",
    code="thread_unsupported_request",
)
TOO_MANY_BREAKPOINTS = ErrorTemplate(
    "A maximum of 4 blocks with cache_control may be provided. Found {count}."
)
BREAKPOINT_ORDER = ErrorTemplate(
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that "
    "blocks are processed in the following order: `tools`, `system`, `messages`."
)
BLANK_STOP_SEQUENCE = ErrorTemplate(
    "stop_sequences: each stop sequence must contain non-whitespace"
)
DUPLICATE_TOOL = ErrorTemplate("tools: Tool names must be unique.")

# Not from the hosted API: this error concerns the model, not the request.
ARGUMENTS_NOT_OBJECT = ErrorTemplate(
    "The model called {name} with arguments that are no JSON object, which this API cannot express.",
    status=502,
)


MESSAGE_TEMPLATES: Mapping[ErrorTemplate | None, str] = {
    errors.MISSING_PARAMETER: "{path}: Field required",
    errors.UNKNOWN_PARAMETER: "{path}: Extra inputs are not permitted",
    errors.UNKNOWN_WITH_SUGGESTION: "{path}: Extra inputs are not permitted",
    errors.INVALID_TYPE: "{path}: Input should be {expected}",
    errors.INVALID_VALUE: "{path}: Input should be {supported}",
    errors.INTEGER_TOO_SMALL: "{path}: Input should be greater than or equal to {least}",
    errors.INTEGER_TOO_LARGE: "{path}: Input should be less than or equal to {most}",
    errors.DECIMAL_TOO_SMALL: "{path}: Input should be greater than or equal to {least}",
    errors.DECIMAL_TOO_LARGE: "{path}: Input should be less than or equal to {most}",
    errors.STRING_EMPTY: "{path}: String should have at least {least} character",
    errors.STRING_TOO_LONG: "{path}: String should have at most {most} characters",
    errors.STRING_PATTERN_MISMATCH: "{path}: String should match pattern '{pattern}'",
    errors.ARRAY_EMPTY: "{path}: List should have at least {least} item after validation, not 0",
    errors.ARRAY_TOO_LONG: (
        "{path}: List should have at most {most} items after validation, not {length}"
    ),
    errors.MODEL_NOT_FOUND: "model: {model}",
    errors.MODEL_NOT_ACCESSIBLE: "model: {model}",
    errors.TOOL_NOT_OFFERED: "Tool '{choice}' not found in provided tools",
    errors.API_KEY_MISSING: "x-api-key header is required",
    errors.API_KEY_INVALID: "invalid x-api-key",
    errors.CONTEXT_TOO_LONG: "prompt is too long",
    errors.INVALID_JSON: "The request body is not valid JSON",
    errors.BODY_NOT_OBJECT: "The request body must be a JSON object",
    errors.INTERNAL_ERROR: "Internal server error",
    errors.OVERLOADED: "Overloaded",
    errors.RATE_LIMITED: "This request would exceed your rate limit. Try again in {seconds}s.",
    errors.TOKENS_LIMITED: "This request would exceed your rate limit. Try again in {seconds}s.",
    errors.UNKNOWN_ROUTE: "Not Found",
    errors.METHOD_NOT_ALLOWED: "Method Not Allowed",
}

STATUS_OVERRIDES: Mapping[ErrorTemplate | None, int] = {
    errors.MODEL_NOT_FOUND: 404,
    errors.OVERLOADED: 529,
}
"""Errors that have another status in this API."""

ERROR_TYPES: Mapping[int, str] = {
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

_INDEX_PATTERN = re.compile(r"\[(\d+)\]")


def error_status(error: ApiError) -> int:
    """Return the status of an error in this API."""
    return STATUS_OVERRIDES.get(error.template, error.status)


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Build the body of an error."""
    details: dict[str, Any] = {
        "type": _find_error_type(error_status(error)),
        "message": _format_message(error),
    }
    if error.template is THREAD_UNSUPPORTED:
        details["details"] = {"error_code": error.code}
    return {"type": "error", "error": details, "request_id": request_id}


def _find_error_type(status: int) -> str:
    if status in ERROR_TYPES:
        return ERROR_TYPES[status]
    if status < 500:
        return "invalid_request_error"
    return "api_error"


def _format_message(error: ApiError) -> str:
    template = MESSAGE_TEMPLATES.get(error.template)
    if template is None:
        return error.message
    values = {name: _format_value(name, value) for name, value in error.values.items()}
    return ApiError(template.format_map(values)).message


def _format_value(name: str, value: str) -> str:
    if name == "path":
        return _INDEX_PATTERN.sub(r".\1", value)
    if name == "expected":
        return re.sub(r"^an? ", "a valid ", value).replace("valid array of", "valid list of")
    if name == "supported":
        return " or ".join(value.replace(", and ", " and ").rsplit(" and ", 1))
    return value
