"""Items of a conversation, and the parameters of the endpoints in the order in which the live API checks them.

The types of items are those that the live API lists, members those of the openai package. An item without a type is a
message or, if it has only an id, a reference to another item. Item ids are optional if a replay may omit them; they are
required if they are the only key that connects two items.

The order of parameters matters: of two wrong ones the first one is reported. It follows the observed order (moderation,
include; input before the rest; tools, metadata, text, temperature, top_p, …, stream, stream_options, background, …,
truncation, instructions, store, service_tier, top_logprobs, context_management). Null is accepted wherever the openai
package or the Open Responses specification allows it.
"""

from collections.abc import Mapping
from typing import Any, cast

from kedge.server.schema.calls import CALL_TYPES, ITEM_ID, STATUS
from kedge.server.schema.content import (
    INPUT_CONTENT,
    INPUT_PART,
    OUTPUT_CONTENT,
    REASONING_PART,
    STRING,
    SUMMARY_PART,
    TEXT,
)
from kedge.server.schema.tools import (
    ANY_OBJECT,
    BOOLEAN,
    NAME,
    REASONING_EFFORTS,
    TOOL_CHOICE,
    TOOLS,
)
from kedge.server.schema.validators import (
    Array,
    Identifier,
    Integer,
    JsonPath,
    Map,
    Members,
    NonNull,
    Null,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
    Validator,
)

INPUT_MESSAGE: Members = {
    "type": STRING,
    "id?": Identifier(prefix="msg"),
    "content!": INPUT_CONTENT,
    "status?": STATUS,
}
ASSISTANT_MESSAGE = INPUT_MESSAGE | {
    "content!": OUTPUT_CONTENT,
    "phase?": StringEnum("commentary", "final_answer"),
}
MESSAGE = TaggedUnion(
    {
        "assistant": ASSISTANT_MESSAGE,
        "system": INPUT_MESSAGE,
        "developer": INPUT_MESSAGE,
        "user": INPUT_MESSAGE,
    },
    tag="role",
    error_on_object=True,
)
ITEM_REFERENCE = Object({"type?": STRING, "id!": Identifier()})

JSON_SCHEMA_FORMAT: Members = {
    "name!": NAME,
    "schema!": ANY_OBJECT,
    "description": STRING,
    "strict?": BOOLEAN,
}
TEXT_FORMAT = TaggedUnion({"json_object": {}, "text": {}, "json_schema": JSON_SCHEMA_FORMAT})

OTHER_TYPES: Mapping[str, Validator | Members] = {
    "message": MESSAGE,
    "item_reference": ITEM_REFERENCE,
    # The live API sends a status with reasoning items and rejects it as input.
    "reasoning": {
        "status~": Null(),
        "id?": Identifier(prefix="rs"),
        "summary!": Array(SUMMARY_PART),
        "content?": Array(REASONING_PART),
        "encrypted_content?": STRING,
    },
    "compaction": {"id?": Identifier(prefix="cmp"), "encrypted_content!": STRING},
    "compaction_trigger": {"id?": ITEM_ID},
    "additional_tools": {"id?": ITEM_ID, "role!": StringEnum("developer"), "tools!": TOOLS},
    "configuration_update": {
        "id?": ITEM_ID,
        "reasoning": {"effort?": StringEnum(*REASONING_EFFORTS)},
        "text": {"format!": TaggedUnion({"text": {}, "json_schema": JSON_SCHEMA_FORMAT})},
    },
}
SDK_MEMBERS: Members = {"created_by~": STRING}
ITEM_TYPES: Mapping[str, Validator | Members] = {
    name: table | SDK_MEMBERS if isinstance(table, dict) else table
    for name, table in sorted({**CALL_TYPES, **OTHER_TYPES}.items())
}
"""Every item type, in the order of the live API's own list."""


class InputItem(TaggedUnion):
    """An item of the type that it names; without a type, a message or a reference."""

    def check(self, value: Any, path: JsonPath) -> None:
        """Find the item's type and check its members."""
        if type(value) is dict:
            item = cast("dict[str, Any]", value)
            if item.get("type") is None:
                is_reference = "id" in item and item.keys() <= {"type", "id"}
                return (ITEM_REFERENCE if is_reference else MESSAGE).check(item, path)
        return TaggedUnion.check(self, value, path)


ITEM = InputItem(
    ITEM_TYPES,
    error_on_object=True,
    # In the openai package, but not in the live API's list.
    unlisted=("configuration_update",),
    expected="an input item",
)
ITEMS = Array(ITEM, of="input items")


MOVED_PARAMETERS: Mapping[str, str] = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Parameters of Chat Completions that the live API recognizes, and their names in this API."""

MAX_ITEMS_PER_REQUEST = 20
"""The maximum number of items that one request adds to a conversation."""

INPUT = TypeUnion("one of a string or array of input items", string=TEXT, array=ITEMS)
INCLUDE_VALUE = StringEnum(
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
INCLUDE = Array(INCLUDE_VALUE, of=INCLUDE_VALUE.expected)
METADATA = Map(
    String(max_length=512), max_properties=16, max_key_length=64, expected="a metadata object"
)
CONVERSATION = TypeUnion(
    "one of a string or object",
    string=Identifier(max_length=256),
    record=Object({"id!": Identifier(max_length=256)}),
)
PROMPT: Members = {
    "id!": STRING,
    "variables?": Map(TypeUnion("one of a string or object", string=STRING, record=INPUT_PART)),
    "version?": STRING,
}
TEXT_CONFIG = Object({"format?": TEXT_FORMAT, "verbosity?": StringEnum("low", "medium", "high")})
SUMMARY = StringEnum("concise", "detailed", "auto")
REASONING: Members = {
    "effort?": StringEnum(*REASONING_EFFORTS),
    "summary?": SUMMARY,
    "generate_summary?": SUMMARY,  # its former name
    "context?": StringEnum("auto", "current_turn", "all_turns"),
    "mode": STRING,
}
MODERATION_MODE = Object({"mode!": StringEnum("score", "block")})
MODERATION: Members = {
    "model!": STRING,
    "policy?": {"input?": MODERATION_MODE, "output?": MODERATION_MODE},
}
CACHE_OPTIONS: Members = {
    "comparison_response_id?": STRING,
    "mode": StringEnum("implicit", "explicit"),
    "prewarm": BOOLEAN,
    "ttl": StringEnum("30m", "12h"),
}
CONTEXT_MANAGEMENT = Array(
    {"type!": STRING, "compact_threshold?": Integer(minimum=1000)},
    min_length=1,
)
IMAGE_OPTIONS = Object({"context_compression": StringEnum("auto", "enabled", "disabled")})
ACCESS_PROGRAMS = Object({"cyber": StringEnum("standard", "daybreak_blue", "daybreak_red")})

MODEL = STRING
PREVIOUS_RESPONSE_ID = Identifier(max_length=256)
PENALTY = Number(minimum=-2, maximum=2)
CACHE_KEY = STRING
CACHE_RETENTION = StringEnum("in_memory", "24h")
SERVICE_TIER = StringEnum(
    "auto", "default", "fast", "flex", "priority", unlisted=("scale", "ultrafast")
)
TRUNCATION = StringEnum("auto", "disabled")

CREATE_RESPONSE: Members = {
    "moderation?": MODERATION,
    "include?": INCLUDE,
    "model!": NonNull(MODEL),
    "input!": NonNull(INPUT),
    "previous_response_id?": PREVIOUS_RESPONSE_ID,
    "conversation?": CONVERSATION,
    "prompt?": PROMPT,
    "tools?": TOOLS,
    "tool_choice?": TOOL_CHOICE,
    "metadata?": METADATA,
    "text?": TEXT_CONFIG,
    "temperature?": Number(minimum=0, maximum=2),
    "top_p?": Number(minimum=0, maximum=1),
    # In the Open Responses specification, though not in the openai package.
    "presence_penalty?": PENALTY,
    "frequency_penalty?": PENALTY,
    "parallel_tool_calls?": BOOLEAN,
    "stream?": BOOLEAN,
    "stream_options?": {"include_obfuscation": BOOLEAN},
    "background?": BOOLEAN,
    "max_output_tokens?": Integer(minimum=16),
    "max_tool_calls?": Integer(minimum=1),
    "reasoning?": REASONING,
    "user?": STRING,
    "safety_identifier?": String(max_length=128),
    "prompt_cache_options?": CACHE_OPTIONS,
    "prompt_cache_key?": CACHE_KEY,
    "prompt_cache_retention?": CACHE_RETENTION,
    "truncation?": TRUNCATION,
    "instructions?": STRING,
    "store?": BOOLEAN,
    "service_tier?": SERVICE_TIER,
    "top_logprobs?": Integer(minimum=0, maximum=20),
    "context_management?": CONTEXT_MANAGEMENT,
    "image": IMAGE_OPTIONS,
    "access_programs": ACCESS_PROGRAMS,
}
"""``POST /v1/responses``."""

SOCKET_CREATE: Members = {**CREATE_RESPONSE, "generate?": BOOLEAN}
"""``response.create`` on a WebSocket, without its type and its stream id."""

INPUT_TOKENS: Members = {
    "model?": MODEL,
    "input?": INPUT,
    "previous_response_id?": PREVIOUS_RESPONSE_ID,
    "conversation?": CONVERSATION,
    "tools?": TOOLS,
    "tool_choice?": TOOL_CHOICE,
    "text?": TEXT_CONFIG,
    "parallel_tool_calls?": BOOLEAN,
    "reasoning?": REASONING,
    "truncation?": TRUNCATION,
    "instructions?": STRING,
    "personality": String(max_length=64),
}
"""``POST /v1/responses/input_tokens``."""

COMPACT_RESPONSE: Members = {
    "model!?": MODEL,
    "input?": INPUT,
    "previous_response_id?": PREVIOUS_RESPONSE_ID,
    "instructions?": STRING,
    "prompt_cache_options?": CACHE_OPTIONS,
    "prompt_cache_key?": CACHE_KEY,
    "prompt_cache_retention?": CACHE_RETENTION,
    "service_tier?": SERVICE_TIER,
    "image": IMAGE_OPTIONS,
}
"""``POST /v1/responses/compact``."""

CONVERSATION_CREATE: Members = {
    "items?": Array(ITEMS.item, of="input items", max_length=MAX_ITEMS_PER_REQUEST),
    "metadata?": METADATA,
}
"""``POST /v1/conversations``."""

CONVERSATION_UPDATE: Members = {"metadata!?": METADATA}
"""``POST /v1/conversations/{id}``."""

CONVERSATION_ITEMS: Members = {
    "items!": Array(ITEMS.item, of="input items", max_length=MAX_ITEMS_PER_REQUEST),
    "include?": INCLUDE,
}
"""``POST /v1/conversations/{id}/items``."""
