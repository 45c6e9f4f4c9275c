"""The names of OpenTelemetry's conventions for generative AI that Kedge uses, as our own constants.

The conventions are still in development and their Python package moves names about; these are those of
version 1.41, written down once. Nothing in here imports OpenTelemetry.
"""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
ERROR_TYPE = "error.type"

# Content: only where somebody asked for it.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

# Our own: what the conventions have no word for.
MODE = "kedge.mode"
ANCHOR = "kedge.anchor.id"
DELTA_BLOCKS = "kedge.delta.blocks"
FULL_BLOCKS = "kedge.full.blocks"
DELTA_BYTES = "kedge.delta.bytes"
FULL_BYTES = "kedge.full.bytes"
FALLBACK = "kedge.fallback.reason"
HEALED = "kedge.healed.reason"
OUTCOME = "kedge.tool.outcome"

INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that switches content on."""
CAPTURING = frozenset({"true", "1", "span_only", "span_and_event"})
"""The values of it, in lower case, that ask for content in spans."""

PROVIDERS = {"xai": "x_ai", "azure": "azure.ai.openai"}
"""What the conventions call a provider, where Kedge calls it otherwise."""
