"""The errors of the API: every message with its parameter, code and HTTP status, as data.

An ``ErrorTemplate`` is one kind of error. A call with its values returns the ``ApiError`` to raise:

    raise PREVIOUS_RESPONSE_NOT_FOUND(id="resp_x")

Messages are quoted verbatim from the hosted API where one has been observed. The others are in the last
group and are listed in ``docs/server.md``.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kedge._internal.json_text import encode, escape_surrogates


class ApiError(Exception):
    """The error of a rejected request.

    An error that was created from a template has that ``template`` and its ``values``, because another
    API reports the same error with another message.

    Args:
        message: The message.
        status: The HTTP status of the response.
        type: The ``type`` in the response body; by default the usual type of the status.
        param: The invalid parameter, if there is one.
        code: The ``code`` in the response body.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = escape_surrogates(message)
        self.status = status
        self.type = type or _get_error_type(status)
        self.param = None if param is None else escape_surrogates(param)
        self.code = code
        self.headers = dict(headers or {})
        self.template: ErrorTemplate | None = None
        self.values: Mapping[str, str] = {}

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def _get_error_type(status: int) -> str:
    """Return the type of most errors with this HTTP status."""
    if status == 429:
        return "requests"
    return "server_error" if status >= 500 else "invalid_request_error"


def encode_error_event(
    error: Mapping[str, Any], stream_id: str | None = None, **members: object
) -> bytes:
    """Encode an error as an event of a WebSocket: unlike in a stream, it is a member of the event."""
    event: dict[str, object] = {"type": "error", **members}
    if stream_id is not None:
        event["stream_id"] = stream_id
    event["error"] = error
    return encode(event)


class ErrorTemplate(Struct, frozen=True):
    """One kind of error; ``message`` and ``param`` are format strings."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    type: str | None = None

    def __call__(self, **values: object) -> ApiError:
        """Return the error for these values."""
        truncated = {name: _truncate_value(value) for name, value in values.items()}
        error = ApiError(
            self.message.format_map(truncated),
            status=self.status,
            type=self.type,
            param=None if self.param is None else self.param.format_map(truncated),
            code=self.code,
        )
        error.template = self
        error.values = truncated
        return error


MAX_ECHO_CHARS = 1000
"""The maximum length of a client's value in an error message."""


def _truncate_value(value: object) -> str:
    text = str(value)
    if len(text) <= MAX_ECHO_CHARS:
        return text
    return text[:MAX_ECHO_CHARS] + "…"


def _path_error(message: str, code: str) -> ErrorTemplate:
    """Return the template of an error of the parameter at ``path``."""
    return ErrorTemplate(message, "{path}", code)


def _length_errors(kind: str, article: str) -> tuple[ErrorTemplate, ErrorTemplate]:
    """Return the templates of the errors of a string or an array at ``path`` that is empty or too long."""
    one = f"{article} {kind}"
    empty = f"empty {kind}. Expected {one} with minimum length {{least}}, but got an empty {kind} instead."
    too_long = (
        f"{kind} too long. Expected {one} with maximum length {{most}}, "
        f"but got {one} with length {{length}} instead."
    )
    return (
        _path_error(f"Invalid '{{path}}': {empty}", f"empty_{kind}"),
        _path_error(f"Invalid '{{path}}': {too_long}", f"{kind}_above_max_length"),
    )


def _range_error(problem: str, bound: str) -> ErrorTemplate:
    """Return the template of an error of the number at ``path``, which is out of its range."""
    code = problem.replace(" ", "_").replace("minimum", "min").replace("maximum", "max")
    return _path_error(
        f"Invalid '{{path}}': {problem}. Expected a value {bound}, but got {{value}} instead.", code
    )


# The format of a request.
MISSING_PARAMETER = _path_error(
    "Missing required parameter: '{path}'.", "missing_required_parameter"
)
UNKNOWN_PARAMETER = _path_error("Unknown parameter: '{path}'.", "unknown_parameter")
UNKNOWN_WITH_SUGGESTION = _path_error(
    "Unknown parameter: '{path}'. Did you mean {suggestion}?", "unknown_parameter"
)
MOVED_PARAMETER = ErrorTemplate(
    "Unsupported parameter: '{path}'. In the Responses API, this parameter has moved to '{to}'. "
    "Try again with the new parameter. See the API documentation for more information: "
    "https://platform.openai.com/docs/api-reference/responses/create.",
    code="unsupported_parameter",
)
INVALID_TYPE = _path_error(
    "Invalid type for '{path}': expected {expected}, but got {got} instead.", "invalid_type"
)
INVALID_VALUE = _path_error(
    "Invalid value: '{value}'. Supported values are: {supported}.", "invalid_value"
)
INTEGER_TOO_SMALL = _range_error("integer below minimum value", ">= {least}")
INTEGER_TOO_LARGE = _range_error("integer above maximum value", "<= {most}")
DECIMAL_TOO_SMALL = _range_error("decimal below minimum value", ">= {least}")
DECIMAL_TOO_LARGE = _range_error("decimal above maximum value", "<= {most}")
STRING_EMPTY, STRING_TOO_LONG = _length_errors("string", "a")
STRING_PATTERN_MISMATCH = _path_error(
    "Invalid '{path}': string does not match pattern. Expected a string that matches the "
    "pattern '{pattern}'.",
    "invalid_value",
)
ARRAY_EMPTY, ARRAY_TOO_LONG = _length_errors("array", "an")
OBJECT_TOO_LARGE = _path_error(
    "Invalid '{path}': too many properties. Expected an object with at most {most} properties, "
    "but got an object with {length} properties instead.",
    "object_above_max_properties",
)
INVALID_ID_PREFIX = _path_error(
    "Invalid '{path}': '{value}'. Expected an ID that begins with '{prefix}'.", "invalid_value"
)
INVALID_ID_CHARACTERS = _path_error(
    "Invalid '{path}': '{value}'. Expected an ID that contains letters, numbers, underscores, "
    "or dashes, but this value contained additional characters.",
    "invalid_value",
)
CONTEXT_MANAGEMENT_UNSUPPORTED = ErrorTemplate(
    "Unsupported context_management type: '{type}'.", param="context_management"
)

# Objects that a request refers to.
PREVIOUS_RESPONSE_NOT_FOUND = ErrorTemplate(
    "Previous response with id '{id}' not found.",
    param="previous_response_id",
    code="previous_response_not_found",
)
ZERO_DATA_RETENTION = ErrorTemplate(
    "Previous response cannot be used for this organization due to Zero Data Retention.",
    param="previous_response_id",
    code="unsupported_parameter",
)
MUTUALLY_EXCLUSIVE = ErrorTemplate(
    "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'pre..._id' or "
    "'conversation'.",
    code="mutually_exclusive_parameters",
)
INPUT_REQUIRED = ErrorTemplate(
    "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be provided.",
    code="missing_required_parameter",
)
FORMAT_NOT_SUPPORTED = ErrorTemplate(
    "Invalid parameter: '{param}' of type 'json_schema' is not supported with this model.",
    param="{param}",
)
INVALID_FUNCTION_SCHEMA = ErrorTemplate(
    "Invalid schema for function '{name}': {problem}",
    param="{path}",
    code="invalid_function_parameters",
)
INVALID_FORMAT_SCHEMA = ErrorTemplate(
    "Invalid schema for response_format '{name}': {problem}",
    param="text.format.schema",
    code="invalid_json_schema",
)
JSON_NOT_MENTIONED = ErrorTemplate(
    "Response input messages must contain the word 'json' in some form to use 'text.format' of "
    "type 'json_object'.",
    param="input",
)
CONVERSATION_NOT_FOUND = ErrorTemplate("Conversation with id '{id}' not found.", status=404)
CONVERSATION_LOCKED = ErrorTemplate(
    "Another process is currently operating on this conversation. Please retry in a few seconds.",
    param="conversation",
    code="conversation_locked",
)
PROMPT_NOT_FOUND = ErrorTemplate("Prompt with id '{id}' not found.", status=404)
RESPONSE_NOT_FOUND = ErrorTemplate("Response with id '{id}' not found.", status=404)
ITEM_NOT_FOUND = ErrorTemplate(
    "Item with id '{id}' not found. Items are not persisted when `store` is set to false. "
    "Try again with `store` set to true, or remove this item from your input.",
    param="input",
    status=404,
)
MODEL_NOT_FOUND = ErrorTemplate(
    "The requested model '{model}' does not exist.", param="model", code="model_not_found"
)
MODEL_NOT_ACCESSIBLE = ErrorTemplate(
    "The model '{model}' does not exist or you do not have access to it.",
    param="model",
    code="model_not_found",
    status=404,
)
TOOLS_MISSING = ErrorTemplate(
    "Tool choice 'required' must be specified with 'tools' parameter.", param="tool_choice"
)
TOOL_NOT_OFFERED = ErrorTemplate(
    "Tool choice '{choice}' not found in 'tools' parameter.", param="tool_choice"
)
CANNOT_CANCEL_SYNCHRONOUS = ErrorTemplate("Cannot cancel a synchronous response.")
CANNOT_CANCEL_FINISHED = ErrorTemplate("Cannot cancel a {status} response.", param="response_id")
CANNOT_DELETE_IN_FLIGHT = ErrorTemplate("Cannot delete an in-flight response.")
NOT_IN_BACKGROUND = ErrorTemplate(
    "This response cannot be streamed because it was not created with background=true.",
    param="stream",
)

# Relations between the items of a request.
NO_TOOL_OUTPUT = ErrorTemplate("No tool output found for {call} {call_id}.", param="input")
NO_TOOL_CALL = ErrorTemplate(
    "No tool call found for {output} with call_id {call_id}.{hint}", param="input"
)
REASONING_WITHOUT_ITEM = ErrorTemplate(
    "Item '{id}' of type 'reasoning' was provided without its required following item.",
    param="input",
)
REASONING_MISSING = ErrorTemplate(
    "Item '{id}' of type '{type}' was provided without its required 'reasoning' item: "
    "'{reasoning}'.",
    param="input",
)
DUPLICATE_ITEM = ErrorTemplate(
    "Duplicate item found with id {id}. Remove duplicate items from your input and try again.",
    param="input",
)
INVALID_ENCRYPTED_CONTENT = ErrorTemplate(
    "The encrypted content {content} could not be verified. "
    "Reason: Encrypted content could not be decrypted or parsed.",
    code="invalid_encrypted_content",
)
CONTEXT_TOO_LONG = ErrorTemplate(
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    param="input",
    code="context_length_exceeded",
)

# The WebSocket connection.
INVALID_STREAM_ID = ErrorTemplate(
    "The 'stream_id' field must be a non-empty string with at most 256 characters and may only "
    "contain letters, numbers, underscores, hyphens, and periods.",
    param="stream_id",
    code="invalid_stream_id",
)
TOO_MANY_LANES = ErrorTemplate(
    "This WebSocket connection has reached its maximum number of distinct stream IDs ({most}). "
    "Reuse an existing stream_id or open a new WebSocket connection.",
    param="stream_id",
    code="websocket_stream_limit_reached",
)
CONNECTION_EXPIRED = ErrorTemplate(
    "Responses websocket connection limit reached ({minutes} minutes). Create a new websocket "
    "connection to continue.",
    code="websocket_connection_limit_reached",
)

# HTTP: the format of bodies, routes, access and failures.
INVALID_JSON = ErrorTemplate(
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using "
    "your HTTP library correctly. The OpenAI API expects a JSON payload, but what was sent was "
    "not valid JSON. If you have trouble figuring out how to fix this, please contact us through "
    "our help center at help.openai.com.)"
)
UNSUPPORTED_CONTENT_TYPE = ErrorTemplate(
    "Unsupported content type: '{got}'. This API method only accepts 'application/json' requests, "
    "but you specified the header 'Content-Type: {got}'. Please try again with a supported "
    "content type.",
    code="unsupported_content_type",
)
UNKNOWN_ROUTE = ErrorTemplate("Invalid URL ({method} {path})", status=404)
DOUBLED_ROUTE = ErrorTemplate(
    "Invalid URL ({method} {path}). (HINT: The path has {part} twice; is the base URL of your client correct?)",
    status=404,
)
METHOD_NOT_ALLOWED = ErrorTemplate(
    "Not allowed to {method} on {path}. (HINT: Perhaps you meant to use a different HTTP method?)",
    status=405,
    code="method_not_supported",
)
API_KEY_MISSING = ErrorTemplate(
    "You didn't provide an API key. You need to provide your API key in an Authorization header "
    "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
    status=401,
)
API_KEY_INVALID = ErrorTemplate("Incorrect API key provided.", status=401, code="invalid_api_key")
RATE_LIMITED = ErrorTemplate(
    "Rate limit reached for requests. Please try again in {seconds}s.",
    status=429,
    code="rate_limit_exceeded",
)
TOKENS_LIMITED = ErrorTemplate(
    "Rate limit reached for tokens. Please try again in {seconds}s.",
    status=429,
    type="tokens",
    code="rate_limit_exceeded",
)
OVERLOADED = ErrorTemplate(
    "The server is currently overloaded with other requests. Sorry about that! You can retry your "
    "request, or contact us through our help center at help.openai.com if the error persists.",
    status=503,
    code="server_is_overloaded",
)
INTERNAL_ERROR = ErrorTemplate(
    "The server had an error while processing your request. Sorry about that!",
    status=500,
)

# Messages of the local server: the hosted API has no published message for these.
PREVIOUS_RESPONSE_UNFINISHED = ErrorTemplate(
    "Previous response with id '{id}' is {status}. Only a finished response can be continued: "
    "continue from an earlier response, or send the complete conversation as input.",
    param="previous_response_id",
    code="previous_response_not_completed",
)
COMPACTION_TRIGGER_NOT_LAST = _path_error(
    "Invalid '{path}': a compaction_trigger must be the last input item.", "invalid_value"
)
BODY_NOT_OBJECT = ErrorTemplate(
    "Invalid type for the request body: expected an object, but got {got} instead.",
    code="invalid_type",
)
CONVERSATION_ZERO_DATA_RETENTION = ErrorTemplate(
    "Conversations cannot be used for this organization due to Zero Data Retention.",
    param="conversation",
    code="unsupported_parameter",
)
BACKGROUND_ON_SOCKET = ErrorTemplate(
    "'background' is not supported over WebSocket. Omit it, or create the response with POST "
    "/v1/responses.",
    param="background",
    code="unsupported_parameter",
)
WEBSOCKET_QUEUE_FULL = ErrorTemplate(
    "Too many requests are queued on this WebSocket connection. Wait for responses, or open "
    "another connection.",
    status=429,
    code="websocket_queue_full",
)
SERVER_STOPPING = ErrorTemplate(
    "The server is shutting down. Open a new WebSocket connection in a moment.",
    status=503,
    code="server_stopping",
)
ORIGIN_NOT_ALLOWED = ErrorTemplate(
    "Requests from web pages of another origin are not allowed.",
    status=403,
    code="origin_not_allowed",
)
TOKEN_SCOPE_MISSING = ErrorTemplate(
    "This API key has insufficient permissions for this operation. Missing scopes: {scope}.",
    status=403,
    code="insufficient_permissions",
)
BACKGROUND_UNSTORED = ErrorTemplate(
    "A background response must be stored. Omit 'background', or set 'store' to true.",
    param="background",
    code="unsupported_parameter",
)
ENCRYPTION_MISSING = ErrorTemplate(
    "This server cannot encrypt or decrypt anything: {reason}",
    param="{param}",
    code="encryption_unavailable",
)
SCHEMA_TOO_COMPLEX = ErrorTemplate(
    "Invalid JSON schema: a value for it {problem}. Simplify the schemas of the request.",
    code="schema_too_complex",
)
BACKGROUND_QUEUE_FULL = ErrorTemplate(
    "Too many background responses are queued. Please try again in a moment.",
    status=429,
    code="rate_limit_exceeded",
)
HISTORY_DELETED = ErrorTemplate(
    "The previous response was deleted while this response was generated. Send the complete "
    "conversation as input.",
    param="previous_response_id",
    code="previous_response_not_found",
)
RESPONSE_LOST = ErrorTemplate(
    "This response was deleted, or this server was too slow to renew its claim on it. Please try "
    "again in a moment.",
    status=503,
    code="response_lost",
)
IDEMPOTENCY_KEY_REUSED = ErrorTemplate(
    "The Idempotency-Key of this request belongs to a request with another body. Use a new key.",
    code="idempotency_key_reused",
)
IDEMPOTENCY_KEY_TOO_LONG = ErrorTemplate(
    "The Idempotency-Key of this request is longer than {most} characters.",
    code="idempotency_key_too_long",
)
IDEMPOTENCY_KEY_IN_USE = ErrorTemplate(
    "A request with this Idempotency-Key is being answered. Please try again in a moment.",
    status=409,
    code="idempotency_key_in_use",
)
DATABASE_UNAVAILABLE = ErrorTemplate(
    "The database of the server is not available: {problem}.",
    status=503,
    code="database_unavailable",
)
CONVERSATION_ITEM_NOT_FOUND = ErrorTemplate(
    "Item with id '{id}' not found in conversation '{conversation}'.", status=404
)
CURSOR_NOT_FOUND = ErrorTemplate(
    "Invalid 'after': there is no item with id '{id}' in this list.",
    param="after",
    code="invalid_value",
)
STREAM_NOT_AVAILABLE = ErrorTemplate(
    "This response cannot be streamed from that event: it was not created with stream=true, or "
    "its events are no longer stored. Omit 'stream' to retrieve it.",
    param="stream",
    code="stream_not_kept",
)
HOST_NOT_ALLOWED = ErrorTemplate(
    "This host name is not allowed. Use 127.0.0.1 or localhost.",
    status=403,
    code="host_not_allowed",
)
HEADERS_TOO_LARGE = ErrorTemplate(
    "The headers of the request are larger than {most} bytes.",
    status=431,
    code="request_headers_too_large",
)
UNSUPPORTED_CONTENT_ENCODING = ErrorTemplate(
    "The request body has the content encoding '{got}', which is not supported. Send it uncompressed, "
    "without a Content-Encoding header.",
    status=415,
    code="unsupported_content_encoding",
)
REQUEST_TIMEOUT = ErrorTemplate(
    "The request body did not arrive within {seconds} seconds.",
    status=408,
    code="request_timeout",
)
BODY_TOO_LARGE = ErrorTemplate(
    "The request body is larger than {most} bytes. Send a smaller request, or start the server "
    "with a larger --max-body-mb.",
    status=413,
    code="request_too_large",
)
TOO_MANY_VALUES = ErrorTemplate(
    "The request body has more than {most} JSON values. A request may have at most {items} items, and a list in "
    "them as many elements.",
    code="too_many_values",
)
NESTING_TOO_DEEP = _path_error(
    "Invalid '{path}': nested too deeply. Expected at most {most} levels.", "object_above_max_depth"
)
INVALID_NUMBER = _path_error("Invalid '{path}': {value} is not a JSON number.", "invalid_value")
LONE_SURROGATE = _path_error(
    "Invalid '{path}': string contains a lone surrogate, which is not a character.", "invalid_value"
)
