"""The parameters of the endpoints in the order in which the live API checks them.

The order of parameters matters: of two wrong ones the first one is reported. It follows the observed order (moderation,
include; input before the rest; tools, metadata, text, temperature, top_p, …, stream, stream_options, background, …,
truncation, instructions, store, service_tier, top_logprobs, context_management). Null is accepted wherever the openai
package or the Open Responses specification allows it.
"""

from collections.abc import Mapping
from typing import cast

from kedge.server.schema.items import INPUT_PART, ITEM, ITEMS, NAME, TEXT, TOOL_CHOICE, TOOLS
from kedge.server.schema.tables import BOOLEAN, STRING, Rules
from kedge.server.schema.validators import (
    Array,
    Identifier,
    Integer,
    Map,
    Members,
    NonNull,
    Number,
    Object,
    String,
    StringEnum,
    TypeUnion,
    Validator,
)

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
CONVERSATION = TypeUnion(
    "one of a string or object",
    string=Identifier(max_length=256),
    record=Object({"id!": Identifier(max_length=256)}),
)
SUMMARY = StringEnum("concise", "detailed", "auto")
PENALTY = Number(minimum=-2, maximum=2)
SHARED_TYPES: Mapping[str, Validator | Members] = {
    "*.metadata": Map(
        String(max_length=512), max_properties=16, max_key_length=64, expected="a metadata object"
    ),
    "*.temperature": Number(minimum=0, maximum=2),
    "*.top_p": Number(minimum=0, maximum=1),
    "*.presence_penalty": PENALTY,
    "*.frequency_penalty": PENALTY,
    "*.stream": BOOLEAN,
    "*.safety_identifier": String(max_length=128),
    "*.service_tier": StringEnum(
        "auto", "default", "fast", "flex", "priority", unlisted=("scale", "ultrafast")
    ),
    "*.top_logprobs": Integer(minimum=0, maximum=20),
}
"""The parameters that Chat Completions have as well."""

CREATE_RESPONSE = Rules(
    # The penalties are in the Open Responses specification, though not in the openai package.
    order={
        "create": (
            "moderation include model! input! previous_response_id conversation prompt tools? "
            "tool_choice? metadata text? temperature top_p presence_penalty? frequency_penalty? "
            "parallel_tool_calls stream? stream_options background max_output_tokens max_tool_calls "
            "reasoning user? safety_identifier prompt_cache_options? prompt_cache_key "
            "prompt_cache_retention truncation instructions store service_tier top_logprobs "
            "context_management image access_programs"
        ),
        "*.text": "format?",
        "*.text.format": "json_object text json_schema",
        "*.reasoning": "effort summary generate_summary context mode",
    },
    types={
        **SHARED_TYPES,
        "*.model": NonNull(STRING),
        "*.input": NonNull(INPUT),
        "*.previous_response_id": Identifier(max_length=256),
        "*.conversation": CONVERSATION,
        "*.prompt.variables": Map(
            TypeUnion("one of a string or object", string=STRING, record=INPUT_PART)
        ),
        "*.tools": TOOLS,
        "*.tool_choice": TOOL_CHOICE,
        "*.text.format.json_schema.name": NAME,
        "*.max_output_tokens": Integer(minimum=16),
        "*.max_tool_calls": Integer(minimum=1),
        "*.reasoning.summary": SUMMARY,
        "*.reasoning.generate_summary": SUMMARY,  # its former name
        "*.context_management": Array(
            {"type!": STRING, "compact_threshold?": Integer(minimum=1000)}, min_length=1
        ),
    },
).build("responses", "parameters")["create"]
"""``POST /v1/responses``."""
INCLUDE_VALUE = cast("Array", CREATE_RESPONSE["include?"]).item
INCLUDE = CREATE_RESPONSE["include?"] = Array(INCLUDE_VALUE, of=INCLUDE_VALUE.expected)

SOCKET_CREATE: Members = {**CREATE_RESPONSE, "generate?": BOOLEAN}
"""``response.create`` on a WebSocket, without its type and its stream id."""


def select_parameters(*names: str) -> Members:
    """Return parameters of ``POST /v1/responses`` in this order."""
    return {name: CREATE_RESPONSE[name] for name in names}


INPUT_TOKENS: Members = {
    "model?": STRING,
    "input?": INPUT,
    **select_parameters(
        "previous_response_id?",
        "conversation?",
        "tools?",
        "tool_choice?",
        "text?",
        "parallel_tool_calls?",
        "reasoning?",
        "truncation?",
        "instructions?",
    ),
    "personality": String(max_length=64),
}
"""``POST /v1/responses/input_tokens``."""

COMPACT_RESPONSE: Members = {
    "model!?": STRING,
    "input?": INPUT,
    **select_parameters(
        "previous_response_id?",
        "instructions?",
        "prompt_cache_options?",
        "prompt_cache_key?",
        "prompt_cache_retention?",
        "service_tier?",
        "image",
    ),
}
"""``POST /v1/responses/compact``."""

NEW_ITEMS = Array(ITEM, of="input items", max_length=MAX_ITEMS_PER_REQUEST)

CONVERSATION_CREATE: Members = {"items?": NEW_ITEMS, **select_parameters("metadata?")}
"""``POST /v1/conversations``."""

CONVERSATION_UPDATE: Members = {"metadata!?": CREATE_RESPONSE["metadata?"]}
"""``POST /v1/conversations/{id}``."""

CONVERSATION_ITEMS: Members = {"items!": NEW_ITEMS, "include?": INCLUDE}
"""``POST /v1/conversations/{id}/items``."""
