"""What only Chat Completions says when it refuses: how messages and parameters fit together."""

from kedge.server.errors import Situation

TOOL_WITHOUT_CALLS = Situation(
    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
    "'tool_calls'.",
    param="messages.[{index}].role",
)
CALLS_UNANSWERED = Situation(
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
    "'tool_call_id'. The following tool_call_ids did not have response messages: {ids}",
    param="messages.[{index}].role",
)
CALL_UNKNOWN = Situation(
    "Invalid parameter: 'tool_call_id' of '{id}' not found in 'tool_calls' of previous message.",
    param="messages.[{index}].tool_call_id",
)
CONTENT_NULL = Situation(
    "Invalid value for 'content': expected a string, got null.", param="messages.[{index}].content"
)
ONLY_WITH_TOOLS = Situation("'{name}' is only allowed when 'tools' are specified.", param="{name}")
ONLY_WHEN_STREAMING = Situation(
    "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
    param="stream_options",
)
JSON_NOT_MENTIONED = Situation(
    "'messages' must contain the word 'json' in some form, to use 'response_format' of type "
    "'json_object'.",
    param="messages",
)
TWO_LIMITS = Situation(
    "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
    param="max_tokens",
    code="invalid_parameter_combination",
)
TOO_LONG = Situation(
    "This model's maximum context length is {window} tokens. However, your messages resulted in "
    "more than that. Please reduce the length of the messages.",
    param="messages",
    code="context_length_exceeded",
)

# Ours: what the hosted API can do and this server cannot.
ONE_CHOICE = Situation(
    "This server writes one choice for each request. Leave 'n' out, or ask {n} times.",
    param="n",
    code="unsupported_parameter",
)
NO_AUDIO = Situation(
    "This server answers in text only. Leave 'audio' out of 'modalities'.",
    param="modalities",
    code="unsupported_parameter",
)
FUNCTION_CALLED = Situation(
    "This server knows calls only as 'tool_calls'. Send them as that, with tool messages behind.",
    param="messages.[{index}].function_call",
    code="unsupported_parameter",
)
