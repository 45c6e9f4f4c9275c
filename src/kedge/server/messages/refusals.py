"""What only Anthropic's API says when it refuses: how messages, tools and thoughts fit together."""

from kedge.server.errors import Situation

VERSION_MISSING = Situation("anthropic-version: header is required")
VERSION_UNKNOWN = Situation('anthropic-version: "{version}" is not a valid version')
NO_MESSAGES = Situation("messages: at least one message is required")
FIRST_NOT_USER = Situation('messages: first message must use the "user" role')
EMPTY_MESSAGE = Situation(
    "messages.{index}: all messages must have non-empty content except for the optional final "
    "assistant message"
)
EMPTY_TEXT = Situation("messages: text content blocks must be non-empty")
PREFILL = Situation(
    "This model does not support assistant message prefill. The conversation must end with a user "
    "message."
)
CALLS_UNANSWERED = Situation(
    "messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
    "{ids}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
)
RESULT_WITHOUT_CALL = Situation(
    "messages.{index}.content.{part}: unexpected `tool_use_id` found in `tool_result` blocks: {id}. "
    "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
)
TWO_RESULTS = Situation(
    "messages.{index}.content.{part}: each tool_use must have a single result. Found multiple "
    "`tool_result` blocks with id: {id}"
)
SAME_CALL_TWICE = Situation("messages.{index}.content.{part}: `tool_use` ids must be unique")
WRONG_PLACE = Situation(
    "messages.{index}.content.{part}: `{type}` blocks are not permitted within {role} messages"
)
SIGNATURE_REFUSED = Situation(
    "messages.{index}.content.{part}: Invalid `signature` in `thinking` block"
)
DATA_REFUSED = Situation(
    "messages.{index}.content.{part}: Invalid `data` in `redacted_thinking` block"
)
THOUGHT_MISSING = Situation(
    "messages.{index}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
    "`{type}`. When `thinking` is enabled, a final `assistant` message must start with a thinking "
    "block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). We recommend you "
    "include thinking blocks from previous turns. To avoid this requirement, disable `thinking`."
)
BUDGET_TOO_LARGE = Situation("`max_tokens` must be greater than `thinking.budget_tokens`.")
FORCED_THINKING = Situation("Thinking may not be enabled when tool_choice forces tool use.")
CHOICE_WITHOUT_TOOLS = Situation(
    "tool_choice: `tool_choice` may only be specified while providing `tools`."
)
SAME_TOOL_TWICE = Situation("tools: Tool names must be unique.")

# Ours: said of a model, not of a request.
ARGUMENTS_NOT_OBJECT = Situation(
    "The model called {name} with arguments that are no JSON object, which this API cannot express.",
    status=502,
    type="server_error",
)
